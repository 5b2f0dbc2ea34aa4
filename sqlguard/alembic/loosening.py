"""
Loosening: the triggers that name columns go, and agents' writes are frozen until guarding has put them back.

Both happen in the migration's own transaction, together with the change that they make way for. A migration
that dies before the guard is renewed leaves the tables frozen: closed, not open. Works offline as well, because
all of it is one DO block.
"""

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import sql

REASON = "a migration is changing the table"
_LOOSEN = sql.SQL("""\
DO $sqlguard$
DECLARE
    wanted text;
    its_name text;
    one record;
BEGIN
    FOREACH wanted IN ARRAY {names}::text[] LOOP
        SELECT pg_catalog.format('%s.%s', n.nspname, c.relname) INTO STRICT its_name
            FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
            WHERE c.oid = wanted::regclass;
        CONTINUE WHEN NOT EXISTS (SELECT FROM sqlguard.guarded_table g WHERE g.relid = wanted::regclass);
        INSERT INTO sqlguard.freeze (tables, reason) VALUES (ARRAY[its_name], {reason});
        FOR one IN
            SELECT DISTINCT t.tgname, t.tgrelid::regclass AS relation
            FROM pg_catalog.pg_trigger t
            JOIN pg_catalog.pg_proc p ON p.oid = t.tgfoid
            JOIN pg_catalog.pg_depend d ON d.classid = 'pg_catalog.pg_trigger'::regclass AND d.objid = t.oid
                AND d.refclassid = 'pg_catalog.pg_class'::regclass AND d.refobjid = t.tgrelid AND d.refobjsubid > 0
            WHERE t.tgparentid = 0 AND NOT t.tgisinternal AND p.pronamespace = 'sqlguard'::regnamespace
                AND (t.tgrelid = wanted::regclass
                     OR t.tgrelid IN (SELECT relid FROM pg_catalog.pg_partition_tree(wanted::regclass)))
        LOOP
            EXECUTE pg_catalog.format('DROP TRIGGER %I ON %s', one.tgname, one.relation);
        END LOOP;
    END LOOP;
END $sqlguard$""")
_THAW = """
    UPDATE sqlguard.freeze SET thawed_at = pg_catalog.clock_timestamp(), thawed_by = session_user
    WHERE thawed_at IS NULL AND reason = %s AND tables <@ %s::text[]"""


def statement(tables: Sequence[Sequence[str]]) -> str:
    """Return the statement that loosens the guards of *tables*, given as (schema, name) or (name,)."""
    names = [sql.Identifier(*table).as_string() for table in tables]
    return _LOOSEN.format(names=sql.Literal(names), reason=sql.Literal(REASON)).as_string()


def thaw(conn: psycopg.Connection[Any], tables: Sequence[str]) -> None:
    """End the freezes of loosened *tables* (`schema.name`): their guards are whole again."""
    conn.execute(_THAW, [REASON, list(tables)])
