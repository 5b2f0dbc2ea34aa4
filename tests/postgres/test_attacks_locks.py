"""What an agent with its own login does to keep others from their work, and how long that lasts."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from servers import Database, fresh_database

from sqlguard.embedded import EmbeddedServer
from sqlguard.janitor import Janitor
from sqlguard.policy import parse_policy
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.migrate import migrate
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.postgres.sweep import sweep
from sqlguard.postgres.tasks import OpenedTask, open_task

POLICY = """
name = "short"
[defaults]
statement_timeout = "1s"
idle_in_transaction_timeout = "2s"
[tables."public.ledger"]
select = true
update = true
delete = "journal"
"""


class World:
    def __init__(self, database: Database) -> None:
        self.database = database
        migrate(database.owner_dsn)
        self.owner = database.connect(database.owner_dsn)
        self.owner.execute("CREATE TABLE ledger (id integer PRIMARY KEY, note text)")
        self.owner.execute("INSERT INTO ledger SELECT n, 'x' FROM generate_series(1, 60) n")
        guard_tables(self.owner, ["ledger"], "journal")
        apply_policy(self.owner, parse_policy(POLICY, "policy"))

    def agent_is_gone(self, task: OpenedTask) -> bool:
        try:
            row = self.owner.execute(
                "SELECT state FROM sqlguard.task WHERE id = %s", [task.task.id]
            ).fetchone()
        except psycopg.errors.OutOfMemory:
            return False
        return row == ("ended",)

    def agent(self) -> tuple[OpenedTask, psycopg.Connection[Any]]:
        task = open_task(self.owner, agent="mallory", policy="short")
        conn = self.database.connect(self.database.dsn_for(task.role, task.password))
        for setting in ("statement_timeout", "idle_in_transaction_session_timeout", "lock_timeout"):
            conn.execute(f"SET {setting} = 0".encode())
        conn.execute("BEGIN READ WRITE")
        return task, conn


@pytest.fixture
def world(server: EmbeddedServer) -> Iterator[World]:
    with fresh_database(server) as database:
        yield World(database)


@pytest.mark.parametrize(
    "held",
    [
        "LOCK TABLE ledger IN ACCESS EXCLUSIVE MODE",
        "UPDATE ledger SET note = 'mine' WHERE id = 1",
        "SELECT FROM ledger FOR UPDATE",
    ],
)
def test_nobody_waits_for_an_agent_s_locks_longer_than_its_policy_says(world: World, held: str) -> None:
    """DELETE on a whole table, which journal mode needs, is the right to lock it; time-outs are the session's to set."""
    task, agent = world.agent()
    agent.execute(held.encode())
    with Janitor(world.database.owner_dsn, interval=0.2):
        world.owner.execute("SET statement_timeout = '30s'")
        begun = time.monotonic()
        world.owner.execute("UPDATE ledger SET note = 'owner' WHERE id = 1")
        assert time.monotonic() - begun < 15
    with pytest.raises(psycopg.OperationalError):
        agent.execute("SELECT 1")
    (reason,) = world.database.execute("SELECT end_reason FROM sqlguard.task WHERE id = %s", [task.task.id])
    assert "kept others waiting" in reason[0]


def test_who_queues_for_a_table_in_front_of_others_is_ended(world: World) -> None:
    """It holds nothing, but everybody behind it waits for the reader in front of it."""
    reader = world.database.connect()
    reader.execute("BEGIN")
    reader.execute("SELECT FROM ledger")
    task, agent = world.agent()
    agent.pgconn.send_query(b"LOCK TABLE ledger IN ACCESS EXCLUSIVE MODE")
    with Janitor(world.database.owner_dsn, interval=0.2):
        time.sleep(0.5)
        world.owner.execute("SET statement_timeout = '30s'")
        assert world.owner.execute("SELECT count(*) FROM ledger").fetchone() == (60,)
    assert world.database.execute("SELECT state FROM sqlguard.task WHERE id = %s", [task.task.id]) == [
        ("ended",)
    ]


def test_a_migration_that_waits_for_an_ordinary_transaction_ends_no_task(world: World) -> None:
    _, agent = world.agent()
    agent.execute("SELECT FROM ledger")
    operator = world.database.connect()
    operator.pgconn.send_query(b"ALTER TABLE ledger ADD extra integer")
    time.sleep(0.5)
    assert sweep(world.owner, datetime.now(UTC)).changed == ()
    agent.execute("COMMIT")


def test_a_full_table_of_locks_is_emptied(world: World) -> None:
    """With it nobody writes or logs in, and the task could not be ended either."""
    task, agent = world.agent()
    agent.execute("ROLLBACK")
    with Janitor(world.database.owner_dsn, interval=3):
        time.sleep(1)
        with pytest.raises(psycopg.errors.OutOfMemory):
            for first in range(0, 1_000_000, 1000):
                agent.execute(
                    "SELECT count(pg_advisory_lock(g)) FROM generate_series(%s::integer, %s) g",
                    [first, first + 999],
                )
        # Not a lock is left, so that the janitor has what it kept for itself.
        agent.execute(
            "DO $$ BEGIN FOR i IN 1000001..1100000 LOOP PERFORM pg_advisory_lock(i); END LOOP;"
            " EXCEPTION WHEN OTHERS THEN NULL; END $$"
        )
        with pytest.raises(psycopg.errors.OutOfMemory):
            world.owner.execute("CREATE TABLE one_more (id integer PRIMARY KEY)")
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not world.agent_is_gone(task):
            time.sleep(0.2)
    world.owner.execute("CREATE TABLE one_more (id integer PRIMARY KEY)")
    with pytest.raises(psycopg.OperationalError):
        agent.execute("SELECT 1")
