"""What an agent with its own login leaves behind for the time after its task, and what becomes of it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from servers import Database, create, drop
from task_world import World, shop

from sqlguard.postgres.leases import KEEPER, has_grant_options
from sqlguard.postgres.sweep import sweep
from sqlguard.postgres.tasks import OpenedTask, end_task


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with shop(database) as made:
        made.apply()
        yield made


def writer(world: World, task: OpenedTask, database: Database | None = None) -> psycopg.Connection[Any]:
    where = database or world.database
    agent = where.connect(where.dsn_for(task.role, task.password))
    agent.execute("SET default_transaction_read_only = off")
    return agent


@contextmanager
def another_database(world: World) -> Iterator[Database]:
    made = Database(world.database.server, f"{world.database.name}_elsewhere")
    create(made.server, made.name)
    try:
        yield made
    finally:
        made.close()
        drop(made.server, made.name)


# By way of a type it is no function that anybody needs a right to call.
_CODE = {
    "index": "CREATE TABLE workshop.bait (x integer);"
    " CREATE INDEX ON workshop.bait (workshop.spring(x));"
    " INSERT INTO workshop.bait SELECT generate_series(1, 300)",
    "type": "CREATE FUNCTION workshop.far(a integer, b integer) RETURNS float8 LANGUAGE plpgsql IMMUTABLE"
    " AS $$ BEGIN PERFORM workshop.spring(a); RETURN a - b; END $$;"
    " CREATE TYPE workshop.span AS RANGE (SUBTYPE = integer, SUBTYPE_DIFF = workshop.far);"
    " CREATE TABLE workshop.bait (x workshop.span);"
    " INSERT INTO workshop.bait SELECT workshop.span(n, n + 5) FROM generate_series(1, 300) n",
}


@pytest.mark.parametrize("code", _CODE)
def test_autovacuum_runs_no_code_of_an_agent_s_with_the_operator_s_rights(world: World, code: str) -> None:
    """Where PUBLIC may create in a schema. ANALYZE runs what belongs to a table as the table's owner."""
    world.op.execute("CREATE SCHEMA workshop; GRANT USAGE, CREATE ON SCHEMA workshop TO PUBLIC")
    task = world.task()
    agent = writer(world, task)
    agent.execute(
        "CREATE FUNCTION workshop.wreck() RETURNS void LANGUAGE sql AS 'DELETE FROM public.secrets';"
        "CREATE FUNCTION workshop.spring(x integer) RETURNS integer LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN"
        " IF current_user <> session_user THEN PERFORM workshop.wreck(); END IF; RETURN x; END $$"
    )
    agent.execute(_CODE[code].encode())
    assert end_task(world.op, task.task.id, "over").problems == ()
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="secrets"):
        world.database.execute("ANALYZE workshop.bait")
    assert world.value("SELECT count(*) FROM secrets") == 1


def test_what_is_kept_is_the_operator_s_to_read_and_to_drop(world: World) -> None:
    world.op.execute("CREATE SCHEMA workshop; GRANT USAGE, CREATE ON SCHEMA workshop TO PUBLIC")
    task = world.task()
    writer(world, task).execute("CREATE TABLE workshop.notes AS SELECT 1 AS n")
    end_task(world.op, task.task.id, "over")
    assert world.op.execute("SELECT n FROM workshop.notes").fetchone() == (1,)
    with world.login(world.task()) as other, pytest.raises(psycopg.errors.InsufficientPrivilege):
        other.execute("SELECT n FROM workshop.notes")
    world.op.execute("DROP TABLE workshop.notes")
    assert world.value("SELECT count(*) FROM pg_auth_members WHERE member = %s::regrole", KEEPER) == 0


def test_a_transaction_that_a_group_has_prepared_is_not_committed_later(world: World) -> None:
    """Before PostgreSQL 16 a session may become its group, and what it prepares then is not its own."""
    if has_grant_options(world.op):
        return  # see test_attacks_group.py
    for end_it in (True, False):
        task = world.task()
        agent = writer(world, task)
        group = world.value("SELECT group_role FROM sqlguard.lease WHERE role = %s", task.role)
        agent.execute(f"SET ROLE {group}; ALTER DEFAULT PRIVILEGES GRANT SELECT ON TABLES TO PUBLIC".encode())
        agent.execute("BEGIN READ WRITE")
        agent.execute("UPDATE orders SET note = 'undead' WHERE id = 3")
        agent.execute("PREPARE TRANSACTION 'undead'")
        if end_it:
            end_task(world.op, task.task.id, "over")
        assert sweep(world.op, datetime.now(UTC)).problems == ()
        assert world.value("SELECT count(*) FROM pg_prepared_xacts") == 0
        assert world.value("SELECT note FROM orders WHERE id = 3") is None
        assert world.value("SELECT pg_has_role('app_owner', %s, 'MEMBER')", group) is False


def test_a_transaction_that_was_prepared_in_another_database_keeps_no_task_from_its_end(world: World) -> None:
    """It holds the lock on its own role, for which every pass of the janitor had waited for three seconds."""
    with another_database(world) as elsewhere:
        for end_it in (True, False):
            task = world.task()
            agent = writer(world, task, elsewhere)
            agent.execute("BEGIN READ WRITE")
            agent.execute("ALTER ROLE CURRENT_USER PASSWORD 'mine'")
            agent.execute("PREPARE TRANSACTION 'elsewhere'")
            began = time.monotonic()
            if end_it:
                assert end_task(world.op, task.task.id, "over").problems == ()
            assert sweep(world.op, datetime.now(UTC)).problems == ()
            assert time.monotonic() - began < 3
            assert world.state(task) == "ended"
            assert world.value("SELECT count(*) FROM pg_prepared_xacts") == 0
            assert task.role not in world.roles()
