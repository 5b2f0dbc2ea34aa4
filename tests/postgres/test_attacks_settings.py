"""A task's session may SET what it likes: what is kept of its changes, and every undo, must not depend on it."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from servers import Database
from task_world import World, shop

from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.tasks import open_task
from sqlguard.postgres.undo import undo

TABLES = """
CREATE TABLE loose (a integer, "B" text, r regclass, f float8, i interval, at timestamptz, m money, y bytea, x integer[]);
INSERT INTO loose SELECT n, 'x', 'orders', n / 7.0, '1 day', '2026-01-02 03:04:05.678+00', n::money, '\\x00ff', '[2:3]={1,2}'
    FROM generate_series(1, 9) n;
CREATE TABLE above (id integer PRIMARY KEY, r regclass);
CREATE TABLE below (a text) INHERITS (above);
INSERT INTO above SELECT n, 'orders' FROM generate_series(1, 9) n;
INSERT INTO below SELECT n, 'orders', 'x' FROM generate_series(11, 19) n;
"""
POLICY = """
name = "loose"
[defaults]
max_share = 1.0
[tables."public.*"]
select = true
[tables."public.loose"]
insert = true
update = true
delete = "journal"
[tables."public.above"]
update = true
delete = "journal"
"""
SETTINGS = (
    "quote_all_identifiers = on",
    "standard_conforming_strings = off",
    "extra_float_digits = -15",
    "DateStyle = 'German'",
    "IntervalStyle = 'sql_standard'",
    "TimeZone = 'Asia/Tokyo'",
    "bytea_output = 'escape'",
    "lc_monetary = 'C'",
    "array_nulls = off",
    "transform_null_equals = on",
    "search_path = ''",
    "plan_cache_mode = 'force_custom_plan'",
    "default_transaction_isolation = 'repeatable read'",
)
CHANGES = (
    "UPDATE public.loose SET a = a + 100 WHERE a < 3",
    "UPDATE public.loose SET \"B\" = 'y' WHERE a = 4",
    "UPDATE public.loose SET f = f * 3 WHERE a = 5",
    "DELETE FROM public.loose WHERE a = 6",
    "INSERT INTO public.loose (a) VALUES (7)",
    "UPDATE public.above SET id = id + 100 WHERE id IN (2, 3, 12, 13)",
    "DELETE FROM public.above WHERE id IN (4, 14)",
)


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with shop(database) as made:
        made.op.execute(TABLES)
        guard_tables(made.op, ["loose", "above"], "journal")
        made.apply(POLICY)
        yield made


def contents(conn: psycopg.Connection[Any]) -> list[Any]:
    return [
        conn.execute(f"SELECT t::text FROM {table} t ORDER BY 1".encode()).fetchall()
        for table in ("loose", "ONLY above", "below")
    ]


@pytest.mark.parametrize("setting", SETTINGS)
def test_an_undo_restores_whatever_was_set(world: World, setting: str) -> None:
    before = contents(world.op)
    task = open_task(world.op, agent="mallory", policy="loose")
    with world.database.connect(world.database.dsn_for(task.role, task.password)) as agent:
        agent.execute(f"SET {setting}".encode())
        agent.execute("BEGIN READ WRITE")
        for text in CHANGES:
            agent.execute(text.encode())
        agent.execute("COMMIT")
    assert contents(world.op) != before
    report = undo(world.op, task=task.task.id)
    assert report.conflicts == ()
    assert contents(world.op) == before


def test_a_soft_delete_does_not_depend_on_what_a_backslash_means(world: World) -> None:
    """The walls' functions are compiled in the task's session."""
    world.op.execute(
        "CREATE TABLE boss (id integer PRIMARY KEY);"
        "CREATE TABLE clerk (id integer PRIMARY KEY, boss integer REFERENCES boss DEFERRABLE);"
        "INSERT INTO boss VALUES (1), (2); INSERT INTO clerk VALUES (1, 1)"
    )
    guard_tables(world.op, ["boss", "clerk"], "soft")
    world.apply(POLICY + '[tables."public.boss"]\ndelete = "soft"\n')
    task = open_task(world.op, agent="mallory", policy="loose")
    mark = "deleted_at = statement_timestamp(), deleted_by_agent = 'mallory'"
    with world.database.connect(world.database.dsn_for(task.role, task.password)) as agent:
        agent.execute("SET standard_conforming_strings = off; SET default_transaction_read_only = off")
        agent.execute(f"UPDATE boss SET {mark} WHERE id = 2".encode())
        with pytest.raises(psycopg.errors.ForeignKeyViolation):
            agent.execute(f"UPDATE boss SET {mark} WHERE id = 1".encode())
