"""
What came into the schema after the guard: partitions, children and foreign keys without walls of their own.

An agent with its own login, straight on PostgreSQL, looks for rows that nothing keeps.
"""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from servers import Database, fresh_database

from sqlguard.embedded import EmbeddedServer
from sqlguard.policy import parse_policy
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.migrate import migrate
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.postgres.tasks import OpenedTask, open_task
from sqlguard.postgres.undo import undo

SHOP = """
CREATE TABLE parts (id integer, region text, note text, PRIMARY KEY (id, region)) PARTITION BY LIST (region);
CREATE TABLE parts_eu PARTITION OF parts FOR VALUES IN ('eu');
CREATE TABLE bins (id integer, region text, note text, PRIMARY KEY (id, region)) PARTITION BY LIST (region);
CREATE TABLE bins_eu PARTITION OF bins FOR VALUES IN ('eu');
CREATE TABLE top (id integer PRIMARY KEY, code integer UNIQUE, note text);
CREATE TABLE soft (id integer PRIMARY KEY, code integer UNIQUE, note text);
CREATE TABLE par (id integer PRIMARY KEY, note text);
CREATE TABLE old (id integer PRIMARY KEY, note text);
CREATE TABLE old_kid (extra text) INHERITS (old);
INSERT INTO top SELECT n, n, 'x' FROM generate_series(1, 20) n;
INSERT INTO soft SELECT n, n, 'x' FROM generate_series(1, 20) n;
INSERT INTO par SELECT n, 'x' FROM generate_series(1, 20) n;
INSERT INTO old SELECT n, 'x' FROM generate_series(1, 20) n;
"""
POLICY = """
name = "late"
[defaults]
max_rows = 10
max_share = 1.0
[tables."public.*"]
select = true
insert = true
update = true
delete = "journal"
[tables."public.parts*"]
delete = "soft"
[tables."public.soft"]
delete = "soft"
"""


class World:
    def __init__(self, database: Database) -> None:
        self.database = database
        migrate(database.owner_dsn)
        self.owner = database.connect(database.owner_dsn)
        self.owner.execute(SHOP)
        guard_tables(self.owner, ["parts", "soft"], "soft")
        guard_tables(self.owner, ["bins", "top", "par", "old"], "journal")
        self.apply()

    def apply(self) -> tuple[str, ...]:
        return apply_policy(self.owner, parse_policy(POLICY, "policy")).warnings

    def agent(self) -> tuple[OpenedTask, psycopg.Connection[Any]]:
        task = open_task(self.owner, agent="mallory", policy="late")
        conn = self.database.connect(self.database.dsn_for(task.role, task.password))
        conn.execute("SET default_transaction_read_only = off")
        return task, conn

    def rows(self, text: str) -> list[tuple[Any, ...]]:
        return self.owner.execute(text.encode()).fetchall()


@pytest.fixture
def world(server: EmbeddedServer) -> Iterator[World]:
    with fresh_database(server) as database:
        yield World(database)


def refused(agent: psycopg.Connection[Any], text: str) -> str | None:
    with pytest.raises(psycopg.Error) as caught:
        agent.execute(text.encode())
    return caught.value.sqlstate


def test_a_partition_that_came_after_the_guard_is_no_way_round_it(world: World) -> None:
    """Granted by a pattern, it would show deleted rows, and keep nothing of what is written to it by its own name."""
    for table in ("parts", "bins"):
        world.owner.execute(f"CREATE TABLE {table}_us PARTITION OF {table} FOR VALUES IN ('us')".encode())
        world.owner.execute(f"INSERT INTO {table} SELECT n, 'us', 'x' FROM generate_series(1, 20) n".encode())
    world.owner.execute("UPDATE parts SET deleted_at = now(), deleted_by_agent = 'x' WHERE id = 1")
    assert len([w for w in world.apply() if "came after its parent was guarded" in w]) == 2
    _, agent = world.agent()
    assert refused(agent, "SELECT FROM parts_us") == "42501"
    assert agent.execute("SELECT count(*) FROM bins_us").fetchone() == (20,)
    assert refused(agent, "UPDATE parts_us SET note = 'gone'") == "42501"
    assert refused(agent, "DELETE FROM bins_us WHERE id = 1") == "42501"
    assert refused(agent, "INSERT INTO bins_us VALUES (99, 'us')") == "42501"
    agent.execute("DELETE FROM bins WHERE id = 1 AND region = 'us'")
    for table, mode in (("parts", "soft"), ("bins", "journal")):
        guard_tables(world.owner, [table], mode)
    world.apply()
    task, agent = world.agent()
    assert agent.execute("SELECT count(*) FROM parts_us").fetchone() == (19,)
    agent.execute("DELETE FROM bins_us WHERE id = 2")
    undo(world.owner, task=task.task.id)
    assert world.rows("SELECT count(*) FROM bins_us WHERE id = 2") == [(1,)]


@pytest.mark.parametrize("action", ["CASCADE", "SET NULL", "SET DEFAULT"])
def test_a_key_that_came_after_the_guard_takes_no_rows_along(world: World, action: str) -> None:
    """In journal mode the referential actions are PostgreSQL's own, and nothing keeps an unguarded table's rows."""
    task, agent = world.agent()
    agent.execute("DELETE FROM top WHERE id = 19")  # with a plan that is kept from before
    world.owner.execute(
        f"CREATE TABLE notes (id integer PRIMARY KEY, t text, top integer REFERENCES top ON DELETE {action})".encode()
    )
    world.owner.execute("INSERT INTO notes SELECT n, 'precious', n FROM generate_series(1, 10) n")
    assert refused(agent, "DELETE FROM top WHERE id = 1") == "SG002"
    guard_tables(world.owner, ["notes"], "journal")
    agent.execute("DELETE FROM top WHERE id = 1")
    assert world.rows("SELECT count(top) FROM notes") == [(9,)]
    undo(world.owner, task=task.task.id)
    assert world.rows("SELECT count(top) FROM notes") == [(10,)]


@pytest.mark.parametrize(("table", "key"), [("top", "code"), ("top", "id"), ("soft", "id")])
def test_a_key_that_came_after_the_guard_is_not_emptied_by_an_update(
    world: World, table: str, key: str
) -> None:
    """The key need not be the primary one; updates of other columns go on."""
    _, agent = world.agent()
    agent.execute(f"UPDATE {table} SET {key} = 119 WHERE id = 19".encode())
    world.owner.execute(
        f"CREATE TABLE notes (id integer PRIMARY KEY, top integer REFERENCES {table} ({key}) ON UPDATE SET NULL);"
        "INSERT INTO notes SELECT n, n FROM generate_series(1, 10) n".encode()
    )
    for text in (f"{key} = 101", f"{key} = 101, note = 'y'", f"{key} = -{key}"):
        assert refused(agent, f"UPDATE {table} SET {text} WHERE id <= 1") == "SG002"
    agent.execute(f"UPDATE {table} SET note = 'y' WHERE id = 1".encode())
    assert world.rows("SELECT count(top) FROM notes") == [(10,)]


@pytest.mark.parametrize("table", ["par", "old"])
def test_a_child_that_came_after_the_guard_loses_nothing(world: World, table: str) -> None:
    """Without walls of its own its rows are not kept at all, or as rows of the parent, without the child's columns."""
    _, agent = world.agent()
    agent.execute(f"UPDATE {table} SET note = 'y' WHERE id = 1".encode())
    world.owner.execute(
        f"CREATE TABLE kid (extra text) INHERITS ({table}); INSERT INTO kid VALUES (50, 'x', 'only here')".encode()
    )
    for text in (f"DELETE FROM {table} WHERE id = 50", f"UPDATE {table} SET note = 'z' WHERE id = 50"):
        assert refused(agent, text) == "SG002"
    assert world.rows("SELECT * FROM kid") == [(50, "x", "only here")]
    agent.execute(f"INSERT INTO {table} VALUES (51, 'x')".encode())
    guard_tables(world.owner, [table], "journal")
    task, agent = world.agent()
    agent.execute(f"DELETE FROM {table} WHERE id = 50".encode())
    undo(world.owner, task=task.task.id)
    assert world.rows("SELECT * FROM kid") == [(50, "x", "only here")]
