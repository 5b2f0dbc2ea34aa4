"""
Views over soft tables: `security_invoker` lends them their reader's eyes, so that row-level security holds below them.

Their readers then need rights of their own on the tables below; so this is done only where the operator asks for it.
Which views were changed is kept in the register, for `unguard`.
"""

from collections.abc import Iterable
from typing import Any

import psycopg
from psycopg import sql

from sqlguard.postgres.walls_facts import Facts, Relation
from sqlguard.postgres.walls_run import Runner

#: The reason code of the pre-flight; accepted, the gate lets agents read such views.
CODE = "view_shows_deleted_rows"
# Views in views as well: below one that reads as its owner, all are read as that owner.
_OWNER_RIGHTS = """
WITH RECURSIVE shows AS (
    SELECT w.ev_class AS view, d.refobjid AS base FROM pg_catalog.pg_rewrite w
    JOIN pg_catalog.pg_depend d ON d.classid = 'pg_catalog.pg_rewrite'::regclass AND d.objid = w.oid
        AND d.refclassid = 'pg_catalog.pg_class'::regclass AND d.refobjid <> w.ev_class
    WHERE w.rulename = '_RETURN'),
reaches AS (
    SELECT s.view FROM shows s WHERE s.base = ANY (%s::oid[])
    UNION SELECT s.view FROM reaches r JOIN shows s ON s.base = r.view)
SELECT n.nspname, c.relname FROM reaches r JOIN pg_catalog.pg_class c ON c.oid = r.view
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind = 'v' AND NOT coalesce(c.reloptions, '{}') && ARRAY['security_invoker=true', 'security_invoker=on',
                                                                  'security_invoker=1', 'security_invoker=yes']
ORDER BY 1, 2
"""


def owner_views(conn: psycopg.Connection[Any], facts: Facts, root: Relation) -> list[list[str]]:
    """Return the views over *root*, and over those, that read with their owner's rights: schema and name."""
    oids = [relation.oid for relation in facts.tree(root)]
    return [list(row) for row in conn.execute(_OWNER_RIGHTS, [oids]).fetchall()]


def mend(runner: Runner, facts: Facts, root: Relation) -> list[list[str]]:
    """Make the views over *root* read with their reader's rights; return those that had to be changed."""
    found = owner_views(runner.conn, facts, root)
    runner.run(
        [
            sql.SQL("ALTER VIEW {} SET (security_invoker = true)").format(sql.Identifier(*name))
            for name in found
        ]
    )
    return found


def put_back(runner: Runner, options: dict[str, Any]) -> None:
    """Give the views that `mend` changed their owner's rights again."""
    for name in options.get("views", ()):
        if exists(runner.conn, name):
            runner.run([sql.SQL("ALTER VIEW {} RESET (security_invoker)").format(sql.Identifier(*name))])


def exists(conn: psycopg.Connection[Any], name: Iterable[str]) -> bool:
    schema, view = name
    row = conn.execute(
        "SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = %s AND c.relname = %s AND c.relkind = 'v'",
        [schema, view],
    ).fetchone()
    return row is not None


def kept_options(was: dict[str, Any], accept: Iterable[str], mended: list[list[str]]) -> dict[str, Any]:
    """Return what the register keeps about views: what is accepted, and which were changed."""
    kept: dict[str, Any] = {}
    if CODE in accept or CODE in was.get("accept", ()):
        kept["accept"] = [CODE]
    if views := sorted(map(list, {tuple(v) for v in [*was.get("views", ()), *mended]})):
        kept["views"] = views
    return kept
