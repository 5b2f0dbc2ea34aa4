"""
Every function that a real server has is in the reviewed lists: a new PostgreSQL release fails here first.

Runs on the versions that `--pg` names, and on servers of other versions that SQLGUARD_FUNCTION_DSNS
names, one per line.
"""

import os
from collections.abc import Iterator

import psycopg
import pytest
from servers import Database

from sqlguard.functions import FunctionEffect, classify_cast, classify_operator, classify_setting, data

MISSING = """
SELECT n.nspname, p.proname,
       coalesce((SELECT array_agg(format_type(t, NULL) ORDER BY o)
                 FROM unnest(p.proargtypes) WITH ORDINALITY a(t, o)), '{}')
FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
WHERE n.nspname IN ('pg_catalog', 'information_schema')
  AND NOT EXISTS (SELECT FROM pg_depend d
                  WHERE d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e')
"""


@pytest.fixture
def conn(database: Database) -> Iterator[psycopg.Connection]:
    with database.connect() as connection:
        yield connection


def connections() -> list[str]:
    return [line for line in os.environ.get("SQLGUARD_FUNCTION_DSNS", "").splitlines() if line.strip()]


def unknown_functions(conn: psycopg.Connection) -> list[str]:
    return [
        f"{schema}.{name}({','.join(args)})"
        for schema, name, args in conn.execute(MISSING)
        if tuple(args) not in {e.args for e in data.builtins().get((schema, name), ())}
    ]


def test_knows_every_function(conn: psycopg.Connection) -> None:
    assert unknown_functions(conn) == []


def test_knows_every_function_of_named_servers() -> None:
    for dsn in connections():
        with psycopg.connect(dsn) as connection:
            assert unknown_functions(connection) == []


def test_knows_every_operator_and_they_are_harmless(conn: psycopg.Connection) -> None:
    rows = conn.execute(
        "SELECT oprname, CASE WHEN oprleft = 0 THEN '' ELSE format_type(oprleft, NULL) END,"
        " format_type(oprright, NULL) FROM pg_operator WHERE oprnamespace = 'pg_catalog'::regnamespace"
    ).fetchall()
    assert len(rows) > 700
    for name, left, right in rows:
        assert (left, right) in data.operators()[name]
        assert classify_operator(name, left, right).effect is FunctionEffect.HARMLESS


def test_knows_every_cast_and_they_are_harmless(conn: psycopg.Connection) -> None:
    rows = conn.execute(
        "SELECT format_type(castsource, NULL), format_type(casttarget, NULL) FROM pg_cast WHERE oid < 16384"
    ).fetchall()
    for source, target in rows:
        assert source in data.casts()[target]
        assert classify_cast(source, target).effect is FunctionEffect.HARMLESS


def test_knows_every_type_a_column_may_have(conn: psycopg.Connection) -> None:
    names = conn.execute(
        "SELECT format_type(oid, NULL) FROM pg_type WHERE typnamespace = 'pg_catalog'::regnamespace"
        " AND typtype IN ('b', 'r', 'm') AND typelem = 0"
    ).fetchall()
    assert [
        name for (name,) in names if classify_cast(None, name).effect is not FunctionEffect.HARMLESS
    ] == []


def test_settings_that_an_ordinary_role_may_not_see_are_infrastructure(conn: psycopg.Connection) -> None:
    with conn.transaction(force_rollback=True):
        conn.execute("CREATE ROLE sg_ordinary")
        every = {name for (name,) in conn.execute("SELECT name FROM pg_settings")}
        conn.execute("SET LOCAL ROLE sg_ordinary")
        hidden = every - {name for (name,) in conn.execute("SELECT name FROM pg_settings")}
    assert "data_directory" in hidden
    for name in hidden:
        assert classify_setting(name).effect is FunctionEffect.INFRASTRUCTURE


def test_no_volatile_function_is_harmless_without_a_reason(conn: psycopg.Connection) -> None:
    names = conn.execute(
        "SELECT DISTINCT proname FROM pg_proc"
        " WHERE provolatile = 'v' AND pronamespace = 'pg_catalog'::regnamespace"
    ).fetchall()
    for (name,) in names:
        for entry in data.builtins().get(("pg_catalog", name), ()):
            assert (
                entry.volatility != "v"
                or entry.judged.effect is not FunctionEffect.HARMLESS
                or entry.judged.reason
            )


def test_knows_every_system_relation(conn: psycopg.Connection) -> None:
    rows = conn.execute(
        "SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname IN ('pg_catalog', 'information_schema')"
        " AND c.relkind IN ('r', 'v') AND c.oid < 16384"
    ).fetchall()
    assert [row for row in rows if tuple(row) not in data.relations()] == []
