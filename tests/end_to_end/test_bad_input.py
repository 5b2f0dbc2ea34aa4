"""Clients that speak rubbish, servers that die, journals that can't be written: who is hurt, and who is not."""

import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from end_to_end.inprocess import proxy
from end_to_end.raw import Raw, bind, kinds, raw
from end_to_end.wired import Agent, Wired, wired_shop
from psycopg import sql
from servers import OWNER, OWNER_PASSWORD, SETTINGS, Database, create

from sqlguard.dsn import url
from sqlguard.embedded import EmbeddedServer
from sqlguard.ports import free_port
from sqlguard.wire.messages import ErrorResponse, Execute, Parse, Query, StartupMessage, Sync


def serve(dsn: str, *flags: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "sqlguard", "serve", *flags],
        env={**os.environ, "SQLGUARD_DSN": dsn},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_serve_without_postgresql(wired_world: Wired) -> None:
    dead = url(host="127.0.0.1", port=free_port(), user="owner", password="x", dbname="shop")
    done = serve(dead, "--listen", f"127.0.0.1:{free_port()}")
    assert done.returncode != 0
    assert "can't connect to PostgreSQL" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_serve_with_a_wrong_password(wired_world: Wired) -> None:
    wrong = wired_world.database.dsn_for(OWNER, "not the password")
    done = serve(wrong, "--listen", f"127.0.0.1:{free_port()}")
    assert done.returncode != 0
    assert "password authentication failed" in done.stdout + done.stderr
    assert "not the password" not in done.stdout + done.stderr


def test_serve_on_a_port_that_is_taken(wired_world: Wired) -> None:
    done = serve(wired_world.database.owner_dsn, "--listen", f"127.0.0.1:{wired_world.proxy.port}")
    assert done.returncode != 0
    assert "can't listen on" in done.stdout + done.stderr


def test_serve_a_database_that_was_not_migrated(wired_world: Wired) -> None:
    done = serve(wired_world.database.server.dsn("postgres"), "--listen", f"127.0.0.1:{free_port()}")
    assert done.returncode != 0
    assert "sqlguard migrate" in done.stdout + done.stderr


# --- clients


@pytest.fixture
def bystander(agent: Agent) -> Iterator[None]:
    """Another session, which must notice nothing."""
    with agent.connect() as conn:
        assert conn.execute("SELECT 1").fetchone() == (1,)
        yield
        assert conn.execute("SELECT count(*) FROM staff").fetchone() == (8,)


def ended(client: Raw) -> list[bytes]:
    """The SQLSTATEs that the client is told before the connection ends."""
    found = [m.get(b"C") or b"" for m in client.rest() if isinstance(m, ErrorResponse)]
    client.close()
    return found


@pytest.mark.parametrize(
    "rubbish",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\0" * 64,
        b"\xff" * 64,
        struct.pack(">I", 2_000_000_000) + b"x" * 100,
        struct.pack(">II", 8, 80877103) + struct.pack(">II", 8, 80877103),
        struct.pack(">II", 9, 3 << 16) + b"x",
        struct.pack(">II", 17, 3 << 16) + b"user\0x\0y\0",
        struct.pack(">II", 8, 2 << 16),
    ],
)
def test_rubbish_at_the_start(agent: Agent, bystander: None, rubbish: bytes) -> None:
    client = Raw(agent.host, agent.port)
    client.send(rubbish)
    data = b""
    while chunk := client.socket.recv(4096):
        data += chunk
    client.close()
    assert b"08P01" in data


@pytest.mark.parametrize(
    "message",
    [
        b"Q" + struct.pack(">I", 2_000_000_000),
        b"Q" + struct.pack(">I", 3),
        b"Q" + struct.pack(">I", 8) + b"SELE",
        b"~" + struct.pack(">I", 4),
        b"B" + struct.pack(">I", 6) + b"x\0",
        b"P" + struct.pack(">I", 5) + b"x",
        b"E" + struct.pack(">I", 5) + b"x",
        b"p" + struct.pack(">I", 5) + b"\0",
    ],
)
def test_rubbish_in_a_session(agent: Agent, bystander: None, message: bytes) -> None:
    with raw(agent) as client:
        client.send(message)
        assert ended(client) == [b"08P01"]


def test_a_client_that_leaves_in_the_middle_of_a_message(
    wired_world: Wired, agent: Agent, bystander: None
) -> None:
    before = wired_world.proxy.sessions
    for part in (b"Q\0\0", b"Q\0\0\0\x20SELECT", b"", Parse(b"", b"SELECT 1").encode()[:-1]):
        with raw(agent) as client:
            client.send(part)
    with raw(agent) as client:
        client.send(
            Query(b"UPDATE orders SET note = 'x' WHERE id = 100"),
            Query(b"SELECT count(*) FROM generate_series(1, 3000) a, generate_series(1, 3000) b"),
        )
    for _ in range(200):
        if wired_world.proxy.sessions == before:
            break
        time.sleep(0.05)
    assert wired_world.proxy.sessions == before


def test_an_ended_task_and_a_wrong_password(wired_world: Wired, agent: Agent) -> None:
    with wired_world.visiting(ttl=timedelta(seconds=2)) as short:
        with short.connect() as conn:
            conn.execute("SELECT 1")
            time.sleep(2.5)
            with pytest.raises(psycopg.Error) as caught:
                for _ in range(20):
                    conn.execute("SELECT 1")
                    time.sleep(0.1)
            assert caught.value.sqlstate == "SG004"
        with pytest.raises(psycopg.OperationalError, match="task of this login has ended"):
            short.connect()
    wrong = agent.dsn.replace(agent.task.password, "wrong")
    unknown = agent.dsn.replace(agent.task.role, "nobody")
    for dsn in (wrong, unknown):
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(dsn)
    with pytest.raises(psycopg.OperationalError, match="serves the database"):
        psycopg.connect(agent.dsn.replace(f"/{agent.database}", "/postgres"))


def test_clients_that_take_their_time(wired_world: Wired, agent: Agent) -> None:
    with proxy(wired_world.database.owner_dsn, startup_timeout=0.5) as running:
        idle = socket.create_connection(("127.0.0.1", running.port), timeout=10)
        slow = socket.create_connection(("127.0.0.1", running.port), timeout=10)
        started = time.monotonic()
        for byte in StartupMessage(3 << 16, ((b"user", b"x" * 100),)).encode():
            try:
                slow.sendall(bytes([byte]))
                time.sleep(0.02)
            except OSError:
                break
        assert idle.recv(10) == b""
        assert time.monotonic() - started < 5
        for one in (idle, slow):
            one.close()


def test_too_many_clients(wired_world: Wired, agent: Agent) -> None:
    with proxy(wired_world.database.owner_dsn, max_clients=3) as running:
        guest = Agent(agent.task, agent.host, running.port, agent.database, agent.direct)
        there = [guest.connect() for _ in range(3)]
        with pytest.raises(psycopg.OperationalError, match="as many clients as it takes"):
            guest.connect()
        there.pop().close()
        time.sleep(0.2)
        with guest.connect() as conn:
            assert conn.execute("SELECT 1").fetchone() == (1,)
        for conn in there:
            assert conn.execute("SELECT 1").fetchone() == (1,)
            conn.close()


# --- the journal


def test_nothing_runs_when_the_journal_can_not_be_written(wired_world: Wired, agent: Agent) -> None:
    """The operator's sessions are killed and can't come back: the agent's own still works, and may not write."""
    database = wired_world.database
    update = "UPDATE orders SET note = 'unseen' WHERE id = 101"
    with agent.connect() as conn:
        conn.execute("SELECT 1")
        database.execute(f"ALTER ROLE {OWNER} NOLOGIN")
        try:
            database.execute(
                f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{OWNER}'"
            )
            for text, params in (
                (update, None),
                (update.replace("101", "%s"), [101]),
                (f"{update}; SELECT 1", None),
            ):
                with pytest.raises(psycopg.Error) as caught:
                    conn.execute(text, params)
                assert caught.value.sqlstate == "58030"
                assert "journal" in str(caught.value)
                assert caught.value.diag.message_hint
            with pytest.raises(psycopg.Error), conn.transaction():
                conn.execute(update)
            with pytest.raises(psycopg.Error), conn.pipeline():
                conn.execute("SELECT 1")
                conn.execute(update.replace("101", "%s"), [101])
            assert conn.execute("SELECT note FROM orders WHERE id = 101").fetchone() == (None,)
            with pytest.raises(psycopg.OperationalError):
                agent.connect()
        finally:
            database.execute(f"ALTER ROLE {OWNER} LOGIN")
            wired_world.owner = database.connect(database.owner_dsn)
        assert conn.execute(update).statusmessage == "UPDATE 1"
    assert wired_world.value("SELECT note FROM orders WHERE id = 101") == "unseen"


def test_the_operators_sessions_are_opened_again(wired_world: Wired, agent: Agent) -> None:
    with agent.connect() as conn:
        for number in range(3):
            wired_world.database.execute(
                f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{OWNER}' AND application_name = 'sqlguard'"
            )
            assert (
                conn.execute(f"UPDATE orders SET note = 'n{number}' WHERE id = 102").statusmessage
                == "UPDATE 1"
            )
            with agent.connect() as another:
                assert another.execute("SELECT 1").fetchone() == (1,)


# --- PostgreSQL dies


@pytest.fixture
def mortal(server: EmbeddedServer) -> Iterator[dict[str, Any]]:
    """A server of this test's own that can be stopped and started."""
    port = free_port()
    folder = Path(tempfile.mkdtemp(prefix="mortal"))
    folder.chmod(0o755)  # where root runs the tests, the server runs as somebody else
    home = folder / "data"

    def start() -> EmbeddedServer:
        return EmbeddedServer.start(server.bindir, home, port=port, settings=SETTINGS)

    running = start()
    with psycopg.connect(running.dsn(), autocommit=True) as conn:
        conn.execute(
            sql.SQL("CREATE ROLE {} LOGIN CREATEROLE PASSWORD {}").format(
                sql.Identifier(OWNER), OWNER_PASSWORD
            )
        )
    create(running, "shop")
    held = {"server": running, "start": start}
    try:
        yield held
    finally:
        held["server"].stop()
        shutil.rmtree(folder)


def test_postgresql_dies_and_comes_back(mortal: dict[str, Any]) -> None:
    with wired_shop(Database(mortal["server"], "shop")) as world:
        agent = world.agent()
        with agent.connect() as conn, agent.connect() as busy:
            conn.execute("SELECT 1")
            busy.execute("BEGIN")
            busy.execute("UPDATE orders SET note = 'lost' WHERE id = 1")
            world.database.close()
            mortal["server"].stop()
            for one in (conn, busy):
                with pytest.raises(psycopg.OperationalError):
                    one.execute("SELECT 1")
        for _ in range(2):
            with pytest.raises(psycopg.OperationalError, match="PostgreSQL"):
                agent.connect(connect_timeout=10)
        mortal["server"] = mortal["start"]()
        with agent.connect(connect_timeout=10) as conn:
            assert conn.execute("DELETE FROM customers WHERE id = 1").statusmessage == "DELETE 1"
            assert conn.execute("SELECT note FROM orders WHERE id = 1").fetchone() == (None,)
    world.database.close()


def test_answers_stay_in_order_when_bytes_trickle(agent: Agent) -> None:
    stream = b"".join(
        m.encode()
        for m in (
            Query(b"SELECT 1"),
            Parse(b"", b"DELETE FROM customers WHERE id = $1"),
            bind(values=(b"180",)),
            Execute(b""),
            Sync(),
            Query(b"DROP TABLE orders"),
            Query(b"UPDATE orders SET note = 'x' WHERE id = 103"),
        )
    )
    with raw(agent) as client:
        client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in stream:
            client.send(bytes([byte]))
        assert [kinds(client.until_ready()) for _ in range(4)] == ["TDCZ", "12CZ", "EZ", "CZ"]


def test_clients_are_told_when_the_proxy_stops(wired_world: Wired, agent: Agent) -> None:
    with proxy(wired_world.database.owner_dsn) as running:
        guest = Agent(agent.task, agent.host, running.port, agent.database, agent.direct)
        client = Raw(guest.host, guest.port)
        client.log_in(guest)
    assert ended(client) == [b"57P01"]
