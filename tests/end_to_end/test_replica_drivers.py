"""Drivers whose reads go to a replica, and how many connections that takes."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

import asyncpg
import psycopg
import pytest
import sqlalchemy
from end_to_end.replica_world import World, replica_world
from end_to_end.wired import Agent
from servers import OWNER, OWNER_PASSWORD
from sqlalchemy.ext.asyncio import create_async_engine
from typer.testing import CliRunner

from sqlguard.cli import app
from sqlguard.embedded import EmbeddedServer

DELAY = 0.5
PLACES = 4


@pytest.fixture(scope="module")
def world(server: EmbeddedServer) -> Iterator[World]:
    with replica_world(server, replica_max_lag=60.0, idle_release=DELAY, max_backends=PLACES) as made:
        yield made


@pytest.fixture
def agent(world: World) -> Iterator[Agent]:
    with world.wired.visiting() as visitor:
        yield visitor


# Without its cache it sends each statement in two pieces, and waits in between: those stay at the primary.
@pytest.mark.parametrize("cached", [100, 0])
def test_asyncpg(world: World, agent: Agent, cached: int) -> None:
    async def work() -> None:
        conn = await asyncpg.connect(**agent.keywords, statement_cache_size=cached)
        try:
            went = 0
            for number in range(200):
                before = world.reads["replica"]
                found = await conn.fetchval("SELECT $1::int4 + id FROM customers WHERE id = 1", number)
                assert found == number + 1
                went += world.reads["replica"] - before
                if went > 20:
                    break
                await asyncio.sleep(0.02 if cached else 0.001)
            assert went > 20 if cached else went == 0, world.reads
            await conn.execute("INSERT INTO plain (id, t) VALUES ($1, 'a')", 700_000 + cached)
            assert await conn.fetchval("SELECT t FROM plain WHERE id = $1", 700_000 + cached) == "a"
            async with conn.transaction():
                await conn.execute("UPDATE plain SET t = 'b' WHERE id = $1", 700_000 + cached)
            assert await conn.fetchval("SELECT t FROM plain WHERE id = $1", 700_000 + cached) == "b"
        finally:
            await conn.close()

    asyncio.run(work())


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_sqlalchemy(world: World, agent: Agent, driver: str) -> None:
    if driver == "asyncpg":
        asyncio.run(_sqlalchemy_async(world, agent))
        return
    engine = sqlalchemy.create_engine(
        agent.dsn.replace("postgresql://", "postgresql+psycopg://"), isolation_level="AUTOCOMMIT"
    )
    try:
        with engine.connect() as conn:
            read = sqlalchemy.text("SELECT name FROM customers WHERE id = :id")

            def there() -> bool:
                before = world.reads["replica"]
                assert conn.execute(read, {"id": 1}).scalar() is not None
                return world.reads["replica"] > before

            world.until(there, "nothing goes to the replica")
            conn.execute(sqlalchemy.text("INSERT INTO plain (id, t) VALUES (710000, 'a')"))
            assert conn.execute(sqlalchemy.text("SELECT t FROM plain WHERE id = 710000")).scalar() == "a"
    finally:
        engine.dispose()


async def _sqlalchemy_async(world: World, agent: Agent) -> None:
    engine = create_async_engine(
        agent.dsn.replace("postgresql://", "postgresql+asyncpg://"), isolation_level="AUTOCOMMIT"
    )
    try:
        async with engine.connect() as conn:
            read = sqlalchemy.text("SELECT name FROM customers WHERE id = :id")
            for _ in range(200):
                before = world.reads["replica"]
                assert (await conn.execute(read, {"id": 1})).scalar() is not None
                if world.reads["replica"] > before:
                    break
                await asyncio.sleep(0.02)
            else:
                raise AssertionError("nothing goes to the replica")
    finally:
        await engine.dispose()


def test_psycopg_prepares_by_itself(world: World, agent: Agent) -> None:
    with agent.connect() as conn:
        world.settle(conn)
        with world.went("replica", 15):
            for number in range(30):
                found = conn.execute("SELECT id + %s FROM customers WHERE id = 1", [number]).fetchone()
                assert found == (number + 1,)


def test_an_idle_connection_is_given_back(world: World, agent: Agent) -> None:
    with agent.connect() as conn:
        world.settle(conn)
        assert world.backends(agent) == 1
        world.until(lambda: world.backends(agent) == 0, "it stays at the replica")
        world.settle(conn)
        assert conn.execute("SELECT 3").fetchone() == (3,)


def test_no_more_than_there_is_room_for(world: World) -> None:
    with ExitStack() as stack:
        agents = [stack.enter_context(world.wired.visiting()) for _ in range(2 * PLACES)]
        conns: list[psycopg.Connection] = []
        most = 0
        for agent in agents:
            conns.append(stack.enter_context(agent.connect()))
            world.settle(conns[-1])
            most = max(most, sum(map(world.backends, agents)))
        for number, conn in enumerate(conns * 3):
            assert conn.execute("SELECT %s::integer", [number]).fetchone() == (number,)
            most = max(most, sum(map(world.backends, agents)))
        assert 1 <= most <= PLACES


def test_metrics_say_where_reads_went(world: World, agent: Agent) -> None:
    with agent.connect() as conn:
        world.settle(conn)
        text = world.wired.proxy.operator.metrics.text().decode()
    for line in (
        'sqlguard_replica_reads_total{way="replica"}',
        "sqlguard_replica_backends",
        "sqlguard_replica_lag_seconds",
    ):
        assert line in text


def test_serve_checks_the_replica(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQLGUARD_DSN", world.database.owner_dsn)
    there = world.standby.server.dsn(world.database.name, OWNER, OWNER_PASSWORD)
    done = CliRunner().invoke(app, ["serve", "--check", "--replica", there])
    assert done.exit_code == 0, done.output
    monkeypatch.setenv("SQLGUARD_REPLICA", world.database.owner_dsn)
    done = CliRunner().invoke(app, ["serve", "--check"])
    assert done.exit_code != 0
