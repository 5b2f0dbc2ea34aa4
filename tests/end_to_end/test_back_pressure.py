"""Slow readers and fast writers: nobody else waits for them, and memory stays bounded."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from end_to_end.raw import Raw, kinds, raw
from end_to_end.wired import Agent, Wired, wired_shop
from servers import fresh_database

from sqlguard.embedded import EmbeddedServer
from sqlguard.wire.messages import CommandComplete, Query, Sync

MEGABYTE = 1024 * 1024
#: 200 MB, row by row.
LARGE = b"SELECT repeat('y', 1000) FROM generate_series(1, 200000)"


def resident() -> int:
    """Memory of this process, the proxy in it included, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True)
def _linux() -> None:
    if not Path("/proc/self/statm").exists():
        pytest.skip("memory is read from /proc")


@contextmanager
def grown_by_at_most(limit: int) -> Iterator[list[int]]:
    """Look at memory all the time in between."""
    seen = [resident()]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            seen.append(resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        done.set()
        watcher.join()
    assert max(seen) - seen[0] < limit


def test_a_large_result_streams_through(agent: Agent) -> None:
    with raw(agent) as client, grown_by_at_most(40 * MEGABYTE):
        client.send(Query(LARGE))
        while not client_done(client):
            pass
        assert client.total > 200_000_000


def client_done(client: Raw) -> bool:
    """Read and throw away; say whether the result is complete."""
    data = client.socket.recv(256 * 1024)
    client.total += len(data)
    return data[-6:-1] == b"Z\0\0\0\5"


def test_a_client_that_stops_reading_stalls_nobody(agent: Agent) -> None:
    with raw(agent) as lazy, grown_by_at_most(60 * MEGABYTE):
        lazy.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        lazy.send(Query(LARGE))
        time.sleep(1.0)
        with agent.connect() as busy:
            slowest = 0.0
            for _ in range(200):
                started = time.monotonic()
                busy.execute("SELECT id FROM orders WHERE id = 5")
                slowest = max(slowest, time.monotonic() - started)
            assert slowest < 2.0
            assert busy.execute("DELETE FROM customers WHERE id = 190").statusmessage == "DELETE 1"
        while not client_done(lazy):
            pass
        assert lazy.total > 200_000_000


def test_a_client_that_asks_without_reading(agent: Agent) -> None:
    """Answers nobody takes stop the questions: the client's own socket fills up."""
    question = Query(b"SELECT repeat('z', 500)").encode() * 100
    with raw(agent) as client, grown_by_at_most(80 * MEGABYTE):
        client.socket.settimeout(2)
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 400 * MEGABYTE:
                sent += client.socket.send(question)
        with agent.connect() as other:
            assert other.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.parametrize("kind", ["sync", "write", "refused"])
def test_a_flood_of_small_messages(wired_world: Wired, agent: Agent, kind: str) -> None:
    count = {"sync": 60_000, "write": 300, "refused": 3_000}[kind]
    message = {
        "sync": Sync().encode(),
        "write": Query(b"UPDATE orders SET note = 'f' WHERE id = 110").encode(),
        "refused": Query(b"DROP TABLE orders").encode(),
    }[kind]
    with raw(agent) as client, grown_by_at_most(60 * MEGABYTE):
        client.socket.settimeout(60)
        writer = threading.Thread(target=client.socket.sendall, args=(message * count,))
        writer.start()
        for _ in range(count):
            assert kinds(client.until_ready()) in ("Z", "CZ", "EZ")
        writer.join(30)
    if kind == "write":
        assert wired_world.outcomes(agent).count("committed") == count


def test_copy_out_streams_through(agent: Agent) -> None:
    with agent.connect() as conn, grown_by_at_most(60 * MEGABYTE):
        with conn.cursor().copy(b"COPY (" + LARGE + b") TO STDOUT") as copy:
            total = sum(len(bytes(chunk)) for chunk in copy)
        assert total > 200_000_000


def test_large_parameters(agent: Agent) -> None:
    with agent.connect() as conn:
        text = "p" * (20 * MEGABYTE)
        assert conn.execute("SELECT length(%s::text)", [text]).fetchone() == (20 * MEGABYTE,)


def test_a_message_over_the_limit(server: EmbeddedServer) -> None:
    with fresh_database(server) as database, wired_shop(database, max_message_bytes=100_000) as world:
        agent = world.agent()
        with agent.connect() as conn:
            assert conn.execute("SELECT length(%s::text)", ["p" * 50_000]).fetchone() == (50_000,)
            with pytest.raises(psycopg.Error) as caught:
                conn.execute("SELECT length(%s::text)", ["p" * 200_000])
            assert caught.value.sqlstate == "08P01"
        with raw(agent) as client:
            client.send(Query(b"SELECT repeat('y', 1000) FROM generate_series(1, 1000)"))
            assert CommandComplete(b"SELECT 1000") in client.until_ready()
