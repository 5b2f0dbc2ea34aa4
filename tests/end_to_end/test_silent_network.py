"""
The network falls silent: nothing gets through, and nobody is told, as when a cable is pulled.

A relay stops forwarding wherever the tests run; but it acknowledges what it has got, so that only a network of its own
(`unshare`), from which addresses are taken away, shows what the kernel's keep-alive does.
"""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from threading import Thread

import psycopg
import pytest
from end_to_end.balancer import Balancer
from end_to_end.chaos_load import OF_THE_KIND, CopiesIn, KeyedWriter, Reader, Transactions, loaded, waited
from end_to_end.inprocess import proxy
from end_to_end.own_network import run_inside
from end_to_end.raw import kinds, raw
from end_to_end.wired import Wired, wired_shop
from psycopg.conninfo import make_conninfo
from servers import fresh_database

from sqlguard.embedded import EmbeddedServer
from sqlguard.ports import free_port
from sqlguard.postgres import connect
from sqlguard.proxy import silence, sockets
from sqlguard.wire.messages import Query

pytestmark = pytest.mark.slow

OWN = "SQLGUARD_TEST_OWN_NETWORK"
#: What clients reach the proxy at; PostgreSQL is at the other.
CLIENTS, SERVER = "127.0.0.2", "127.0.0.1"


@pytest.fixture(scope="module")
def world(server: EmbeddedServer) -> Iterator[Wired]:
    with fresh_database(server) as database, wired_shop(database) as made:
        yield made


@pytest.fixture
def server_leg(world: Wired) -> Iterator[Balancer]:
    """Between a proxy and PostgreSQL."""
    with closing(Balancer([world.database.server.port], b"", 0)) as made:
        yield made


def through(world: Wired, leg: Balancer) -> str:
    return make_conninfo(world.database.owner_dsn, port=leg.port)


def test_nothing_gets_to_postgresql_for_a_while(world: Wired, server_leg: Balancer) -> None:
    with proxy(through(world, server_leg)) as running:
        with loaded(Wired(world.database, running), (KeyedWriter, Transactions, CopiesIn, Reader)):
            for _ in range(2):
                server_leg.flows.clear()
                time.sleep(2)
                server_leg.flows.set()
                time.sleep(0.5)


def test_a_proxy_ends_while_nothing_gets_through(world: Wired, server_leg: Balancer) -> None:
    """What is being written then is not waited for without an end, and nobody else in the process is kept waiting."""
    with proxy(through(world, server_leg), shutdown_grace=0) as running:
        conn = world.agent(port=running.port).connect()
        conn.execute("INSERT INTO plain (id) VALUES (900007)")
        server_leg.flows.clear()

        def write() -> None:
            with closing(conn), suppress(psycopg.OperationalError):
                conn.execute("INSERT INTO plain (id) VALUES (900008)")

        writing = Thread(target=write)
        writing.start()
        waited(lambda: running.operator.writer.lag > 0)
    server_leg.flows.set()
    writing.join(20)
    assert not writing.is_alive()


def test_who_logs_in_while_nothing_gets_through_is_let_go(world: Wired, server_leg: Balancer) -> None:
    """The login's time is bounded; those that come later are served."""
    with proxy(through(world, server_leg), startup_timeout=2) as running:
        agent = world.agent(port=running.port)
        agent.connect().close()
        server_leg.flows.clear()
        with pytest.raises(psycopg.OperationalError) as told:
            agent.connect(connect_timeout=30)
        assert told.value.sqlstate in OF_THE_KIND
        assert "timeout expired" not in str(told.value)  # the proxy's answer, not the driver's patience
        server_leg.flows.set()
        with agent.connect() as conn:
            assert conn.execute("SELECT 1").fetchone() == (1,)


def test_a_client_of_which_nothing_comes_any_more(world: Wired) -> None:
    """It is no one else's trouble, and PostgreSQL's own time-out for transactions ends it."""
    with closing(Balancer([world.proxy.port], b"", 0)) as leg:
        agent = world.agent()
        before = world.proxy.sessions
        with closing(world.agent(port=leg.port).connect()) as conn, agent.connect() as other:
            conn.execute("BEGIN")
            conn.execute("SET LOCAL idle_in_transaction_session_timeout = '2s'")
            conn.execute("UPDATE orders SET note = 'held' WHERE id = 9")
            leg.flows.clear()
            other.execute("UPDATE orders SET note = 'free' WHERE id = 9")
            assert other.execute("SELECT note FROM orders WHERE id = 9").fetchone() == ("free",)
            waited(lambda: world.proxy.sessions == before + 1)
            leg.flows.set()


@pytest.mark.usefixtures("_impatient")
def test_who_only_does_not_read_is_waited_for(world: Wired) -> None:
    with proxy(world.database.owner_dsn) as running, raw(world.agent(port=running.port)) as client:
        client.send(Query(b"SELECT repeat('y', 1000) FROM generate_series(1, 30000)"))
        time.sleep(2 * silence.SECONDS)
        rows = client.until_ready()
        assert kinds(rows).count("D") == 30_000


def test_the_operators_own_connections_notice_silence(world: Wired) -> None:
    with connect.connect(make_conninfo(world.database.owner_dsn, keepalives_idle=7)) as conn:
        found = conn.info.get_parameters()
    assert (found["keepalives_idle"], found["keepalives_count"], found["tcp_user_timeout"]) == (
        "7",
        "4",
        "120000",
    )


# --- in a network of its own


def address(what: str, name: str) -> None:
    subprocess.run(["ip", "addr", what, f"{name}/32", "dev", "lo"], check=True)


@contextmanager
def gone(name: str) -> Iterator[None]:
    address("del", name)
    try:
        yield
    finally:
        address("add", name)


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three seconds in place of two minutes."""
    short = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 2))
    monkeypatch.setattr(sockets, "_KEEP_ALIVE", short)
    words = {"keepalives_idle": 1, "keepalives_interval": 1, "keepalives_count": 2, "tcp_user_timeout": 3000}
    monkeypatch.setattr(connect, "KEEP_ALIVE", words)
    monkeypatch.setattr(silence, "SECONDS", 3.0)
    monkeypatch.setattr(silence, "EVERY", 0.2)


inside = pytest.mark.skipif(OWN not in os.environ, reason="only by test_in_a_network_of_its_own")


@inside
@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("acknowledged", [True, False])
def test_a_client_that_is_gone_without_a_word(world: Wired, *, acknowledged: bool) -> None:
    """Keep-alive notices one of which nothing is awaited; one that has not acknowledged the last answer we do."""
    port = free_port()
    with proxy(world.database.owner_dsn, listen=f"{CLIENTS}:{port}") as running:
        agent = world.agent(port=port)
        agent.host = CLIENTS
        with agent.connect() as conn:
            conn.execute("BEGIN")
            conn.execute("UPDATE orders SET note = 'lost' WHERE id = 9")
            if acknowledged:
                time.sleep(0.3)
            with gone(CLIENTS):
                waited(lambda: running.sessions == 0, 30)
                there = f"SELECT count(*) FROM pg_stat_activity WHERE usename = '{agent.task.role}'"
                waited(lambda: world.value(there) == 0, 30)
            with pytest.raises(psycopg.OperationalError):
                conn.execute("COMMIT")
        with agent.connect() as conn:
            assert conn.execute("SELECT note FROM orders WHERE id = 9").fetchone() != ("lost",)


@inside
@pytest.mark.usefixtures("_impatient")
def test_a_server_that_is_gone_without_a_word(world: Wired) -> None:
    """Sessions end, the operator's own connections too; both come back with the server."""
    port = free_port()
    with proxy(world.database.owner_dsn, listen=f"{CLIENTS}:{port}") as running:
        agent = world.agent(port=port)
        agent.host = CLIENTS
        conn = agent.connect()
        conn.execute("BEGIN")
        conn.execute("UPDATE orders SET note = 'lost' WHERE id = 9")
        with gone(SERVER):
            waited(lambda: running.sessions == 0, 30)
            with pytest.raises(psycopg.OperationalError) as told:
                conn.execute("COMMIT")
            assert told.value.sqlstate in OF_THE_KIND
            with pytest.raises(psycopg.OperationalError):
                agent.connect(connect_timeout=60)
        with agent.connect() as again:
            again.execute("UPDATE orders SET note = 'back' WHERE id = 9")
            assert again.execute("SELECT note FROM orders WHERE id = 9").fetchone() == ("back",)


def test_in_a_network_of_its_own() -> None:
    words = ["ip addr del 127.0.0.1/8 dev lo"]
    words += [f"ip addr add {name}/32 dev lo" for name in (CLIENTS, SERVER)]
    assert "3 passed" in run_inside(OWN, words, __file__, "-k", "gone")
