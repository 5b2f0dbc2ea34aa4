"""
What goes wrong around the proxy while agents write: killed backends, a server that stands still, crashes or restarts, a
client that does not read, packets that get lost. Agents are told what PostgreSQL tells, what was acknowledged is there,
and the proxy is itself again without help. The server is one of these tests' own.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import servers
from end_to_end.chaos_load import loaded, value, waited
from end_to_end.own_network import run_inside
from end_to_end.raw import raw
from end_to_end.wired import Wired, wired_shop
from servers import Servers, fresh_database

from sqlguard.embedded import EmbeddedServer
from sqlguard.wire.messages import Query

pytestmark = pytest.mark.slow

LOST = "SQLGUARD_TEST_LOST_PACKETS"


@pytest.fixture(scope="module")
def world(server: EmbeddedServer) -> Iterator[Wired]:
    own = Servers()
    before = servers.SETTINGS
    # What is acknowledged has to outlast a crash of the server's processes.
    servers.SETTINGS = {**before, "synchronous_commit": "on"}
    try:
        with fresh_database(own.get(server.version)) as database, wired_shop(database) as made:
            yield made
    finally:
        servers.SETTINGS = before
        own.stop()


def processes(world: Wired) -> list[int]:
    """The server's processes, its first one before the others."""
    first = int((world.database.server.data_dir / "postmaster.pid").read_text().split()[0])
    children = Path(f"/proc/{first}/task/{first}/children")
    if not children.exists():
        pytest.skip("the server's processes are found in /proc")
    return [first, *map(int, children.read_text().split())]


def test_backends_are_killed(world: Wired) -> None:
    with loaded(world) as writers:
        for _ in range(20):
            value(
                world,
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename LIKE 'sg\\_tk\\_%'"
                " ORDER BY random() LIMIT 1",
            )
            time.sleep(0.1)
    assert any(w.states for w in writers)


def test_the_operators_own_connections_are_killed(world: Wired) -> None:
    """Journal and control plane are gone for a moment; who writes just then hears of it, the sessions stay."""
    with loaded(world):
        for _ in range(5):
            value(
                world,
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
                " WHERE usename = 'app_owner' AND datname = current_database()",
            )
            time.sleep(0.4)
    world.owner = world.database.connect(world.database.owner_dsn)


def test_the_server_stands_still(world: Wired) -> None:
    with loaded(world):
        stopped = processes(world)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(3)
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)


def test_the_server_crashes(world: Wired) -> None:
    """A killed process has PostgreSQL end all sessions and recover."""
    with loaded(world) as writers:
        for _ in range(2):
            pid = value(world, "SELECT pid FROM pg_stat_activity WHERE usename LIKE 'sg\\_tk\\_%' LIMIT 1")
            assert isinstance(pid, int)
            os.kill(pid, signal.SIGKILL)
            time.sleep(1.5)
    assert all(w.states for w in writers)
    world.owner = world.database.connect(world.database.owner_dsn)


def test_a_client_that_does_not_read(world: Wired) -> None:
    with loaded(world) as writers, raw(world.agent()) as client:
        client.send(Query(b"SELECT repeat('y', 1000) FROM generate_series(1, 100000)"))
        before = sum(len(w.acknowledged) for w in writers)
        waited(lambda: sum(len(w.acknowledged) for w in writers) > before + 50)


@pytest.mark.skipif(LOST not in os.environ, reason="only by test_packets_are_lost")
def test_inside_a_network_of_its_own(world: Wired) -> None:
    """Runs where nobody else hears of it when the loopback interface goes down: every packet is lost then."""
    with loaded(world):
        for _ in range(3):
            for state in ("down", "up"):
                subprocess.run(["ip", "link", "set", "lo", state], check=True)
                time.sleep(0.7)


def test_packets_are_lost() -> None:
    run_inside(LOST, (), f"{__file__}::test_inside_a_network_of_its_own")
