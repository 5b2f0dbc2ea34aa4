"""
Loosening: the triggers and policies that name columns go, and agents' writes are frozen until guarding has put
them back.

Both happen in the migration's own transaction, together with the change that they make way for. A migration
that dies before the guard is renewed leaves the tables frozen: closed, not open. Works offline as well, because
all of it is one DO block.
"""

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import sql

from sqlguard.alembic.filters import BOOKKEEPING

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
            WITH RECURSIVE tree (relation) AS (
                SELECT wanted::regclass::oid
                UNION SELECT i.inhrelid FROM pg_catalog.pg_inherits i JOIN tree ON i.inhparent = tree.relation
            ), ours (class, object, kind, name, relation) AS (
                SELECT 'pg_catalog.pg_trigger'::regclass, t.oid, 'TRIGGER', t.tgname, t.tgrelid
                FROM pg_catalog.pg_trigger t JOIN pg_catalog.pg_proc p ON p.oid = t.tgfoid
                WHERE t.tgparentid = 0 AND NOT t.tgisinternal AND p.pronamespace = 'sqlguard'::regnamespace
                UNION ALL SELECT 'pg_catalog.pg_policy'::regclass, oid, 'POLICY', polname, polrelid
                FROM pg_catalog.pg_policy WHERE polname LIKE 'sqlguard\\_%'
            )
            SELECT DISTINCT ours.kind, ours.name, ours.relation::regclass AS relation
            FROM ours JOIN tree ON tree.relation = ours.relation
            JOIN pg_catalog.pg_depend d ON d.classid = ours.class AND d.objid = ours.object
                AND d.refclassid = 'pg_catalog.pg_class'::regclass AND d.refobjid = ours.relation
            JOIN pg_catalog.pg_attribute a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
                AND a.attnum > 0 AND a.attname NOT IN ({bookkeeping})
        LOOP
            EXECUTE pg_catalog.format('DROP %s %I ON %s', one.kind, one.name, one.relation);
        END LOOP;
    END LOOP;
END $sqlguard$""")
_THAW = """
    UPDATE sqlguard.freeze SET thawed_at = pg_catalog.clock_timestamp(), thawed_by = session_user
    WHERE thawed_at IS NULL AND reason = %s AND tables <@ %s::text[]"""


def statement(tables: Sequence[Sequence[str]]) -> str:
    """Return the statement that loosens the guards of *tables*, given as (schema, name) or (name,)."""
    names = [sql.Identifier(*table).as_string() for table in tables]
    bookkeeping = sql.SQL(", ").join(map(sql.Literal, BOOKKEEPING))
    return _LOOSEN.format(
        names=sql.Literal(names), reason=sql.Literal(REASON), bookkeeping=bookkeeping
    ).as_string()


def thaw(conn: psycopg.Connection[Any], tables: Sequence[str]) -> None:
    """End the freezes of loosened *tables* (`schema.name`): their guards are whole again."""
    conn.execute(_THAW, [REASON, list(tables)])
