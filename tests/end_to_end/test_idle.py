"""Idle clients give their server connection back, and do not notice."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import asyncpg
import psycopg
import pytest
from end_to_end.raw import Raw, bind, kinds
from end_to_end.wired import Agent, Wired, wired_shop
from servers import fresh_database

from sqlguard.embedded import EmbeddedServer
from sqlguard.postgres.tasks import end_task
from sqlguard.wire.messages import BackendKeyData, Describe, Execute, Parse, Sync

DELAY = 0.3


@pytest.fixture(scope="module")
def world(server: EmbeddedServer) -> Iterator[Wired]:
    with fresh_database(server) as database, wired_shop(database, idle_release=DELAY) as made:
        yield made


@pytest.fixture
def agent(world: Wired) -> Iterator[Agent]:
    with world.visiting() as visitor:
        yield visitor


def backends(world: Wired, agent: Agent) -> int:
    return int(world.value(f"SELECT count(*) FROM pg_stat_activity WHERE usename = '{agent.task.role}'"))


def left(world: Wired, agent: Agent) -> bool:
    for _ in range(40):
        if not backends(world, agent):
            return True
        time.sleep(0.1)
    return False


def stays(world: Wired, agent: Agent) -> bool:
    time.sleep(4 * DELAY)
    return backends(world, agent) == 1


def test_it_leaves_and_comes_back(world: Wired, agent: Agent) -> None:
    with agent.connect() as conn:
        first = conn.execute("SELECT pg_backend_pid()").fetchone()
        assert left(world, agent)
        second = conn.execute("SELECT pg_backend_pid()").fetchone()
        assert first != second
        conn.execute("INSERT INTO plain (id, t) VALUES (600001, 'x')")
        assert left(world, agent)
        with conn.transaction():
            assert conn.execute("SELECT t FROM plain WHERE id = 600001").fetchone() == ("x",)
        assert left(world, agent)
        assert conn.execute("DELETE FROM plain WHERE id = 600001").statusmessage == "DELETE 1"


def test_what_it_has_set_is_set_again(world: Wired, agent: Agent) -> None:
    with agent.connect(options="-c TimeZone=Asia/Tokyo") as conn:
        conn.execute("SET application_name = 'me again'")
        conn.execute("SET datestyle = 'German'")
        conn.execute("SET statement_timeout = '7s'")
        conn.execute("RESET statement_timeout")
        with pytest.raises(ZeroDivisionError), conn.transaction():
            conn.execute("SET extra_float_digits = -3")
            raise ZeroDivisionError
        with conn.transaction():
            conn.execute("SET LOCAL datestyle = 'ISO'")
        before = shown(conn)
        assert left(world, agent)
        assert shown(conn) == before
        assert before["application_name"] == "me again"
        assert before["datestyle"].startswith("German")
        conn.execute("DISCARD ALL")
        after = shown(conn)
        assert left(world, agent)
        assert shown(conn) == after


def shown(conn: psycopg.Connection[Any]) -> dict[str, str]:
    names = (
        "application_name",
        "datestyle",
        "statement_timeout",
        "extra_float_digits",
        "timezone",
        "client_encoding",
        "transaction_read_only",
    )
    found = {}
    for name in names:
        row = conn.execute(f"SHOW {name}").fetchone()
        assert row is not None
        found[name] = row[0]
    return found


def test_prepared_statements_are_prepared_again(world: Wired, agent: Agent) -> None:
    async def run() -> None:
        conn = await asyncpg.connect(**agent.keywords)
        one = await conn.prepare("SELECT $1::int + 1")
        put = await conn.prepare("INSERT INTO plain (id, t) VALUES ($1, $2)")
        gone = await conn.prepare("DELETE FROM plain WHERE id = $1")
        assert await one.fetchval(1) == 2
        assert await asyncio.to_thread(left, world, agent)
        assert await one.fetchval(2) == 3
        await put.fetch(600002, "by a prepared one")
        assert await asyncio.to_thread(left, world, agent)
        await gone.fetch(600002)
        assert gone.get_statusmsg() == "DELETE 1"
        await conn.close()

    asyncio.run(run())


def test_the_unnamed_statement_is_too(world: Wired, agent: Agent) -> None:
    client = Raw(agent.host, agent.port)
    client.log_in(agent)
    client.send(Parse(b"", b"SELECT 41 + $1::int"), Sync())
    assert kinds(client.until_ready()) == "1Z"
    assert left(world, agent)
    client.send(bind(values=(b"1",)), Describe(is_portal=True, name=b""), Execute(b""), Sync())
    assert kinds(client.until_ready()) == "2TDCZ"
    client.close()


def test_a_statement_whose_table_has_gone_is_forgotten(world: Wired, agent: Agent) -> None:
    world.owner.execute("CREATE TABLE passing_by (id integer)")
    time.sleep(0.6)
    client = Raw(agent.host, agent.port)
    client.log_in(agent)
    client.send(Parse(b"s", b"SELECT oid FROM pg_class WHERE oid = 'passing_by'::regclass"), Sync())
    assert kinds(client.until_ready()) == "1Z"
    assert left(world, agent)
    world.owner.execute("DROP TABLE passing_by")
    client.send(bind(statement=b"s"), Execute(b""), Sync())
    assert kinds(client.until_ready())[-2:] == "EZ"
    client.send(Parse(b"t", b"SELECT 1"), bind(statement=b"t"), Execute(b""), Sync())
    assert kinds(client.until_ready()) == "12DCZ"
    client.close()


@pytest.mark.parametrize(
    "text",
    [
        "DECLARE c CURSOR WITH HOLD FOR SELECT 1",
        "CREATE TEMP TABLE mine (id integer)",
        "PREPARE p AS SELECT 1",
        "SELECT pg_advisory_lock(4711)",
        "SELECT set_config('datestyle', 'German', false)",
    ],
)
def test_with_state_it_stays(world: Wired, agent: Agent, text: str) -> None:
    with agent.connect() as conn:
        try:
            conn.execute(text.encode())
        except psycopg.DatabaseError as fault:
            assert (fault.sqlstate or "").startswith("SG")
            return
        assert stays(world, agent)


def test_in_a_transaction_it_stays(world: Wired, agent: Agent) -> None:
    with agent.connect(autocommit=False) as conn:
        conn.execute("SELECT 1")
        assert stays(world, agent)
        conn.commit()
        assert left(world, agent)


def test_its_cancel_key_leads_to_where_it_is(world: Wired, agent: Agent) -> None:
    with agent.connect() as conn:
        conn.execute("SELECT 1")
        assert left(world, agent)
        timer = threading.Timer(0.7, conn.cancel_safe)
        timer.start()
        began = time.monotonic()
        with pytest.raises(psycopg.errors.QueryCanceled):
            conn.execute("SELECT count(*) FROM generate_series(1, 90000) a, generate_series(1, 90000) b")
        assert time.monotonic() - began < 15
        timer.join()
        assert left(world, agent)
        conn.cancel_safe()  # there is nothing to cancel
        assert conn.execute("SELECT 1").fetchone() == (1,)


def test_a_task_that_has_ended_meanwhile_does_not_come_back(world: Wired) -> None:
    agent = world.agent()
    with pytest.raises(psycopg.DatabaseError) as refused, agent.connect() as conn:
        conn.execute("SELECT 1")
        assert left(world, agent)
        end_task(world.owner, agent.task.task.id, "tested")
        conn.execute("SELECT 1")
    assert refused.value.sqlstate in ("SG004", None)


def test_a_client_that_leaves_while_away(world: Wired, agent: Agent) -> None:
    before = world.proxy.sessions
    conn = agent.connect()
    assert left(world, agent)
    conn.close()
    for _ in range(50):
        if world.proxy.sessions == before:
            return
        time.sleep(0.05)
    raise AssertionError("the session is still there")


def test_more_clients_than_connections(server: EmbeddedServer) -> None:
    """A fortieth of what the benchmark does: all have been there, few are, and each is served when it speaks."""
    with fresh_database(server) as database, wired_shop(database, idle_release=0, max_backends=5) as world:
        agent = world.agent()
        clients = [agent.connect() for _ in range(50)]
        assert backends(world, agent) <= 5
        for round_ in range(2):
            for number, conn in enumerate(clients):
                assert conn.execute("SELECT %s::int", [number + round_]).fetchone() == (number + round_,)
        assert backends(world, agent) <= 5
        # All at the same time: they wait for each other.
        threads = [
            threading.Thread(target=conn.execute, args=("SELECT count(*) FROM generate_series(1, 20000)",))
            for conn in clients
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        for conn in clients:
            conn.close()


def test_keys_are_unique(world: Wired, agent: Agent) -> None:
    first, second = Raw(agent.host, agent.port), Raw(agent.host, agent.port)
    keys = [
        next(m for m in client.log_in(agent) if isinstance(m, BackendKeyData)) for client in (first, second)
    ]
    assert keys[0] != keys[1]
    first.close()
    second.close()
