"""A replica that is late, gone or in the way of its own replay: the client gets the right answer all the same."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from end_to_end.replica_world import ENDLESS, MAY_READ_THERE, SERIES, World, replica_world
from end_to_end.standby import CONFLICTS, standby
from end_to_end.wired import Agent, wired_shop
from psycopg import sql
from servers import OWNER, OWNER_PASSWORD, fresh_database

from sqlguard.embedded import EmbeddedServer
from sqlguard.errors import DatabaseUnavailable, NotConfigured
from sqlguard.policy import parse_policy
from sqlguard.postgres.connect import connect
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.postgres.replica import check_replica


@pytest.fixture(scope="module")
def world(server: EmbeddedServer) -> Iterator[World]:
    with replica_world(server, CONFLICTS, replica_max_lag=1.0, idle_release=0.0) as made:
        yield made


@pytest.fixture
def agent(world: World) -> Iterator[Agent]:
    with world.wired.visiting() as visitor:
        yield visitor


def test_a_paused_replica_is_not_read_at(world: World, agent: Agent) -> None:
    owner = world.wired.owner
    with agent.connect() as conn:
        world.settle(conn)
        world.standby.pause()
        try:
            owner.execute(sql.SQL("INSERT INTO plain (id, t) VALUES (900001, 'new')"))
            # Of others' writes nobody knows: they show within the bound.
            time.sleep(1.5)
            with world.went("lagging"):
                assert conn.execute("SELECT t FROM plain WHERE id = 900001").fetchone() == ("new",)
            conn.execute("UPDATE plain SET t = 'own' WHERE id = 900001")
            assert conn.execute("SELECT t FROM plain WHERE id = 900001").fetchone() == ("own",)
        finally:
            world.standby.go_on()
        assert world.settle(conn, "SELECT t FROM plain WHERE id = 900001") == ("own",)


def test_an_idle_primary_is_not_taken_for_a_late_replica(world: World, agent: Agent) -> None:
    with agent.connect() as conn:
        world.settle(conn)
        time.sleep(3)
        world.settle(conn)


def test_a_table_that_is_not_there_yet(world: World, agent: Agent) -> None:
    owner = world.wired.owner
    with agent.connect() as conn:
        world.settle(conn)
        world.standby.pause()
        try:
            owner.execute(sql.SQL("ALTER TABLE plain ADD COLUMN later integer DEFAULT 7"))
            world.wired.proxy.operator.look_again()
            time.sleep(0.5)
            found = conn.execute("SELECT DISTINCT coalesce(later, 7) FROM plain").fetchall()
            assert found in ([], [(7,)])
        finally:
            world.standby.go_on()


def test_what_a_view_does_that_a_standby_refuses(world: World, agent: Agent) -> None:
    owner = world.wired.owner
    owner.execute(sql.SQL("CREATE UNLOGGED TABLE fleeting (id integer)"))
    owner.execute(sql.SQL("INSERT INTO fleeting VALUES (1)"))
    apply_policy(owner, parse_policy(MAY_READ_THERE, "wired.toml"))
    world.wired.proxy.operator.look_again()
    time.sleep(0.5)
    try:
        with world.wired.visiting() as other, other.connect() as conn:
            world.settle(conn)
            with world.went("failed there"):
                assert conn.execute("SELECT id FROM fleeting").fetchone() == (1,)
            with world.went("failed lately"):
                assert conn.execute("SELECT id FROM fleeting").fetchone() == (1,)
            assert world.settle(conn) == (1,)
    finally:
        owner.execute(sql.SQL("DROP TABLE fleeting"))


def test_a_conflict_with_the_replay(world: World, agent: Agent) -> None:
    """The replica cancels the read because it must replay what removes its rows: it is run again, at the primary."""
    owner = world.wired.owner
    with agent.connect() as conn:
        world.settle(conn)
        # A second or more, on any server, with a lock on `plain`.
        lists = ", ".join(f"(VALUES {SERIES}) {name} (x)" for name in "abcdefg")
        text = f"SELECT count(*), max(n) FROM {lists}, (SELECT count(*) AS n FROM plain WHERE id < 0) s"
        found: list[object] = []
        reading = threading.Thread(target=lambda: found.append(conn.execute(text.encode()).fetchone()))
        before = world.reads
        reading.start()
        world.until(lambda: world.at_work(agent) == 1, "the read is not at the replica")
        # An ACCESS EXCLUSIVE lock on a table that it reads has to be replayed.
        owner.execute(sql.SQL("BEGIN; LOCK TABLE plain IN ACCESS EXCLUSIVE MODE; COMMIT"))
        reading.join(timeout=60)
        assert not reading.is_alive()
        assert found == [(10_000_000, 0)]
        assert (world.reads - before)["failed there"] == 1, world.reads - before


def test_a_replica_that_is_killed(server: EmbeddedServer) -> None:
    with fresh_database(server) as database, standby(server) as made:
        dsn = made.server.dsn(database.name, OWNER, OWNER_PASSWORD)
        with wired_shop(database, replica=dsn) as wired:
            apply_policy(wired.owner, parse_policy(MAY_READ_THERE, "wired.toml"))
            world = World(wired, made)
            with wired.visiting() as agent, agent.connect() as conn:
                world.settle(conn)
                stop = threading.Event()
                faults: list[Exception] = []
                rounds = [0]

                def work() -> None:
                    while not stop.is_set():
                        try:
                            rounds[0] += 1
                            assert conn.execute("SELECT %s::integer", [rounds[0]]).fetchone() == (rounds[0],)
                        except Exception as fault:
                            faults.append(fault)
                            return

                worker = threading.Thread(target=work)
                worker.start()
                time.sleep(0.5)
                pid = int(Path(made.server.data_dir, "postmaster.pid").read_text(encoding="utf-8").split()[0])
                os.kill(pid, signal.SIGQUIT)
                time.sleep(1.0)
                stop.set()
                worker.join(timeout=30)
                assert not worker.is_alive()
                assert not faults
                before = world.reads["gone"]

                def is_gone() -> bool:
                    assert conn.execute("SELECT 1").fetchone() == (1,)
                    return world.reads["gone"] > before

                world.until(is_gone, "it is not noticed")


def test_a_replica_that_says_nothing(world: World, agent: Agent) -> None:
    with agent.connect() as conn:
        world.settle(conn)
        with stopped(world), world.went("lost"):
            # Whoever is there is waited for, for a few seconds.
            assert conn.execute("SELECT 1").fetchone() == (1,)
            with world.went("lagging"):
                assert conn.execute("SELECT 2").fetchone() == (2,)
        world.settle(conn)


@contextmanager
def stopped(world: World) -> Iterator[None]:
    """Stop all processes of the standby, as a machine that hangs does."""
    data = world.standby.server.data_dir
    parent = int((data / "postmaster.pid").read_text(encoding="utf-8").split()[0])
    children = Path(f"/proc/{parent}/task/{parent}/children")
    if not children.exists():
        pytest.skip("this system does not tell the children of a process")
    everyone = [parent, *map(int, children.read_text(encoding="ascii").split())]
    for pid in everyone:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in everyone:
            os.kill(pid, signal.SIGCONT)


def test_a_backend_that_is_ended_there(world: World, agent: Agent) -> None:
    with agent.connect() as conn:
        world.settle(conn)
        faults: list[Exception] = []

        def read() -> None:
            try:
                conn.execute("SET statement_timeout = '2s'")
                conn.execute(ENDLESS)
            except Exception as fault:
                faults.append(fault)

        world.settle(conn)
        reading = threading.Thread(target=read)
        reading.start()
        time.sleep(0.3)
        end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = "
        world.standby.execute(f"{end}'{agent.task.role}'")
        reading.join(timeout=30)
        # At the primary it runs into its time-out; the session is whole.
        assert isinstance(faults[0], psycopg.errors.QueryCanceled)
        conn.execute("RESET statement_timeout")
        assert conn.execute("SELECT 1").fetchone() == (1,)
        world.settle(conn)


def test_ended_in_the_middle_of_the_rows(world: World, agent: Agent) -> None:
    rows = "SELECT a.id, repeat('x', 1000) FROM items a, items b, items c, items d LIMIT 49000"
    with agent.connect() as conn:
        world.settle(conn)
        cursor = conn.cursor()
        with pytest.raises(psycopg.Error) as caught:
            for number, _ in enumerate(cursor.stream(rows)):
                if number == 10:
                    end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = "
                    world.standby.execute(f"{end}'{agent.task.role}'")
        assert caught.value.sqlstate == "57P01" or conn.closed
        if not conn.closed:
            assert conn.execute("SELECT 1").fetchone() == (1,)


def test_what_is_no_replica_is_told(world: World, server: EmbeddedServer) -> None:
    name = world.database.name
    with connect(world.database.owner_dsn) as primary:
        check_replica(primary, world.standby.server.dsn(name, OWNER, OWNER_PASSWORD))
        with pytest.raises(NotConfigured, match="not in recovery"):
            check_replica(primary, world.database.owner_dsn)
        with pytest.raises(NotConfigured, match="to the database `postgres`"):
            check_replica(primary, world.standby.server.dsn("postgres", OWNER, OWNER_PASSWORD))
        with pytest.raises(DatabaseUnavailable):
            check_replica(primary, "postgresql://nobody@127.0.0.1:1/x")
