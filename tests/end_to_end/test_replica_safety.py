"""What holds for a task's reads at the primary holds at the replica: its end, its limits, its rows, its cancels."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import psycopg
import pytest
from end_to_end.raw import kinds, raw
from end_to_end.replica_world import ENDLESS, MAY_READ_THERE, World, replica_world
from end_to_end.wired import Agent
from psycopg import sql

from sqlguard.embedded import EmbeddedServer
from sqlguard.policy import parse_policy
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.postgres.tasks import end_task, open_task, renew_task
from sqlguard.wire.messages import Query


@pytest.fixture(scope="module")
def world(server: EmbeddedServer) -> Iterator[World]:
    with replica_world(server, replica_max_lag=60.0) as made:
        yield made


@pytest.fixture
def agent(world: World) -> Iterator[Agent]:
    with world.wired.visiting() as visitor:
        yield visitor


class Reading:
    """An endless read at the replica, in a thread."""

    def __init__(self, world: World, agent: Agent, conn: psycopg.Connection) -> None:
        self.fault: psycopg.Error | None = None
        self._conn = conn
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        world.until(lambda: world.at_work(agent) == 1, "the read is not at the replica")

    def _read(self) -> None:
        try:
            self._conn.execute(ENDLESS)
        except psycopg.Error as fault:
            self.fault = fault

    def ended(self) -> psycopg.Error | None:
        self._thread.join(timeout=20)
        assert not self._thread.is_alive()
        return self.fault


def test_the_end_of_a_task_ends_what_it_reads_there(world: World) -> None:
    agent = world.wired.agent()
    with agent.connect() as conn:
        world.settle(conn)
        reading = Reading(world, agent, conn)
        # Even a replica that does not hear of it.
        world.standby.pause()
        try:
            end_task(world.wired.owner, agent.task.task.id, "enough")
            assert isinstance(reading.ended(), psycopg.Error)
            world.until(lambda: world.backends(agent) == 0, "it goes on at the replica")
        finally:
            world.standby.go_on()
    with pytest.raises(psycopg.OperationalError):
        agent.connect()


def test_so_does_the_end_of_its_time(world: World) -> None:
    agent = world.wired.agent(ttl=timedelta(seconds=12))
    with agent.connect() as conn:
        world.settle(conn)
        world.standby.pause()
        try:
            reading = Reading(world, agent, conn)
            fault = reading.ended()
            assert fault is not None
            world.until(lambda: world.backends(agent) == 0, "it goes on at the replica")
        finally:
            world.standby.go_on()
    end_task(world.wired.owner, agent.task.task.id, "tested")


def test_an_idle_connection_there_ends_too(world: World) -> None:
    agent = world.wired.agent()
    with agent.connect() as conn:
        world.settle(conn)
        assert world.backends(agent) == 1
        end_task(world.wired.owner, agent.task.task.id, "enough")
        world.until(lambda: world.backends(agent) == 0, "it stays at the replica")
        with pytest.raises(psycopg.Error):
            conn.execute("SELECT 1")


def test_a_client_that_leaves_is_not_read_for(world: World, agent: Agent) -> None:
    with raw(agent) as client:
        world.settle_raw(client)
        client.send(Query(ENDLESS.encode()))
        world.until(lambda: world.at_work(agent) == 1, "the read is not at the replica")
        # RST: nobody is there any more.
        client.socket.setsockopt(1, 13, b"\1\0\0\0\0\0\0\0")
    world.until(lambda: world.backends(agent) == 0, "it goes on at the replica")


def test_a_cancel_finds_the_replica(world: World, agent: Agent) -> None:
    with agent.connect() as conn:
        world.settle(conn)
        for _ in range(3):
            reading = Reading(world, agent, conn)
            conn.cancel_safe()
            assert isinstance(reading.ended(), psycopg.errors.QueryCanceled)
            assert world.at_work(agent) == 0
            with world.went("replica"):
                assert conn.execute("SELECT 1").fetchone() == (1,)


def test_a_time_out_is_not_tried_again(world: World, agent: Agent) -> None:
    with agent.connect() as conn:
        conn.execute("SET statement_timeout = '300ms'")
        world.settle(conn)
        began = time.monotonic()
        with world.went("replica"), pytest.raises(psycopg.errors.QueryCanceled):
            conn.execute(ENDLESS)
        assert time.monotonic() - began < 5
        assert conn.execute("SELECT 1").fetchone() == (1,)


def test_results_are_limited(world: World, agent: Agent) -> None:
    many = ENDLESS.replace("count(*)", "a.x")
    with agent.connect() as conn:
        world.settle(conn)
        with world.went("replica"), pytest.raises(psycopg.DatabaseError) as caught:
            conn.execute(many)
        assert caught.value.sqlstate == "SG006"
        world.until(lambda: world.at_work(agent) == 0, "it goes on")
        assert conn.execute("SELECT 1").fetchone() == (1,)
        assert world.settle(conn, "SELECT 2") == (2,)


@contextmanager
def scoped(world: World, name: str, rights: str, ttl: timedelta) -> Iterator[Agent]:
    """An agent that sees one customer alone."""
    text = MAY_READ_THERE.replace('name = "wired"', f'name = "{name}"').replace(
        '[tables."public.*"]',
        f'[tables."public.customers"]\nselect = {rights}\nrows = "id = :who"\n[tables."public.plain"]',
    )
    owner = world.wired.owner
    apply_policy(owner, parse_policy(text, f"{name}.toml"))
    task = open_task(owner, agent="tester", policy=name, ttl=ttl, params={"who": "2"})
    try:
        yield Agent(task, "127.0.0.1", world.wired.proxy.port, world.database.name, "")
    finally:
        end_task(owner, task.task.id, "tested")


def test_rows_and_columns_are_those_of_the_policy(world: World) -> None:
    with scoped(world, "narrow", '["id", "name"]', timedelta(minutes=5)) as agent:
        with agent.connect() as conn:
            world.settle(conn)
            with world.went("replica", 2):
                assert conn.execute("SELECT id FROM customers").fetchall() == [(2,)]
                assert conn.execute("SELECT id FROM customers WHERE id = 1").fetchall() == []
            with pytest.raises(psycopg.Error):
                conn.execute("SELECT email FROM customers")
        # The role at the replica is no more than here.
        direct = world.standby.server.dsn(world.database.name, agent.task.role, agent.task.password)
        with psycopg.connect(direct, autocommit=True) as conn:
            assert conn.execute("SELECT id FROM customers").fetchall() == [(2,)]
            for refused in ("SELECT email FROM customers", "SELECT * FROM orders"):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    conn.execute(refused)


def test_a_changed_catalog_is_judged_before(world: World, agent: Agent) -> None:
    owner = world.wired.owner
    with agent.connect() as conn:
        world.settle(conn)
        conn.execute("SELECT count(*) FROM staff")
        world.standby.pause()
        try:
            owner.execute(sql.SQL("ALTER TABLE staff RENAME TO staff_gone"))
            world.wired.proxy.operator.look_again()
            time.sleep(0.6)
            with pytest.raises(psycopg.errors.UndefinedTable):
                conn.execute("SELECT count(*) FROM staff")
        finally:
            world.standby.go_on()
            owner.execute(sql.SQL("ALTER TABLE staff_gone RENAME TO staff"))
            world.wired.proxy.operator.look_again()
            time.sleep(0.6)


def test_a_slow_reader_fills_no_memory(world: World, agent: Agent) -> None:
    many = b"SELECT repeat('x', 2000) FROM items a, items b, items c, items d LIMIT 45000"

    async def unsent() -> int:
        sides = world.wired.proxy.server._clients
        return max(s.transport.get_write_buffer_size() for s in sides if s.transport is not None)

    with raw(agent) as client:
        world.settle_raw(client)
        client.send(Query(many))
        time.sleep(1.5)
        assert world.wired.proxy.call(unsent) < 4 * 1024 * 1024
        with world.went("replica"):
            # What comes behind it is read on, from either server.
            client.send(Query(b"SELECT 1"), Query(b"SELECT pg_backend_pid()"))
            assert kinds(client.until_ready()) == "T" + "D" * 45_000 + "CZ"
            assert kinds(client.until_ready()) == "TDCZ"
            assert kinds(client.until_ready()) == "TDCZ"


def test_a_task_that_was_renewed_keeps_its_rows(world: World) -> None:
    with scoped(world, "renewed", "true", timedelta(seconds=14)) as agent:
        with agent.connect() as conn:
            world.settle(conn)
            world.standby.pause()
            try:
                renew_task(world.wired.owner, agent.task.task.id, timedelta(minutes=5))
                until = time.monotonic() + 16
                # The standby believes that it has ended: then a row policy would hide all rows.
                while time.monotonic() < until:
                    assert conn.execute("SELECT id FROM customers").fetchall() == [(2,)]
                    time.sleep(0.05)
            finally:
                world.standby.go_on()
            world.settle(conn)
            with world.went("replica"):
                assert conn.execute("SELECT id FROM customers").fetchall() == [(2,)]
