"""
Many idle guarded clients on one worker: the proxy's memory for each, the connections to PostgreSQL that they take
together, and whether each is served when it speaks again.
"""

import itertools
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.measure import Goal, Label, Result, compare, counted, timed
from benchmarks.options import Options
from benchmarks.world import World, twins
from sqlguard.demo.stage import proxy_process
from sqlguard.dsn import url
from sqlguard.embedded import EmbeddedServer
from sqlguard.postgres.tasks import OpenedTask, open_task

CLIENTS = 2_000
BACKENDS = 50
KILOBYTES = 40
#: As many connections as the policy lets one task have.
_PER_TASK = 100
_SETTINGS = {
    "SQLGUARD_MAX_BACKENDS": str(BACKENDS),
    "SQLGUARD_MAX_CLIENTS": "5000",
    "SQLGUARD_IDLE_RELEASE": "2",
}
_PATIENCE = 60.0
_USED = "SELECT count(*) FROM pg_stat_activity WHERE usename LIKE 'sg_tk_%'"


def run(server: EmbeddedServer, options: Options) -> Iterator[Result]:
    _allow_files(3 * CLIENTS)
    with ExitStack() as stack:
        world = stack.enter_context(twins(server, 1000, "soft"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port, pid = stack.enter_context(proxy_process(world.dsn, folder, **_SETTINGS))
        crowd = _Crowd(world, port)
        stack.callback(crowd.close)
        # What the proxy makes once, for the first clients, is not theirs.
        crowd.grow(BACKENDS)
        _wait_until_released(world)
        before = _resident(pid)
        crowd.grow(CLIENTS)
        _wait_until_released(world)
        each = (_resident(pid) - before) / (CLIENTS - BACKENDS) / 1024
        label = Label("idle", f"memory of one of {CLIENTS:,} idle clients", f"{KILOBYTES} KB", Goal(1))
        yield counted(label, each, KILOBYTES, "KB")
        most = crowd.speak()
        label = Label(
            "idle", f"connections to PostgreSQL while {CLIENTS:,} speak again", f"{BACKENDS}", Goal(1)
        )
        yield counted(label, most, BACKENDS, "")
        yield _waking(world, crowd, options)


class _Crowd:
    """Sessions of many tasks, which stay open."""

    def __init__(self, world: World, port: int) -> None:
        self._world, self._port = world, port
        self._tasks: list[OpenedTask] = []
        self.clients: list[psycopg.Connection[Any]] = []

    def grow(self, size: int) -> None:
        """Connect until there are *size* of them; each has run a statement and is idle then."""
        while len(self.clients) < size:
            if len(self.clients) == len(self._tasks) * _PER_TASK:
                task = open_task(self._world.owner, agent="bench", policy="bench", ttl=timedelta(hours=1))
                self._tasks.append(task)
            task = self._tasks[-1]
            login = {"user": task.role, "password": task.password, "dbname": self._world.name}
            conn = psycopg.connect(url(host="127.0.0.1", port=self._port, **login), autocommit=True)
            conn.execute("SELECT price FROM t WHERE id = %s", [1 + len(self.clients) % 1000]).fetchone()
            self.clients.append(conn)

    def speak(self) -> int:
        """Have each run its next statement, check the answers, and return how many connections were in use at most."""
        most = 0
        for number, conn in enumerate(self.clients):
            found = conn.execute("SELECT price, %s::int FROM t WHERE id = %s", [number, 7]).fetchone()
            assert found is not None
            assert found[1] == number
            if number % 100 == 0:
                most = max(most, _used(self._world))
        return most

    def close(self) -> None:
        for conn in self.clients:
            conn.close()


def _waking(world: World, crowd: _Crowd, options: Options) -> Result:
    """Measure the first statement of a client that has given its connection back."""
    sleeping = itertools.cycle(crowd.clients)

    def wakes() -> float:
        # They have spoken in this order, so the next one has been idle for the longest time.
        conn = next(sleeping)
        return timed(lambda: conn.execute("SELECT 1").fetchone())

    def connects() -> float:
        return timed(lambda: psycopg.connect(world.task_dsn).close())

    label = Label("idle", "first statement after a pause", "connection set-up, direct")
    return compare(label, wakes, connects, options.rounds(20))


def _used(world: World) -> int:
    row = world.owner.execute(_USED).fetchone()
    return int(row[0]) if row else 0


def _wait_until_released(world: World) -> None:
    deadline = time.monotonic() + _PATIENCE
    while _used(world) and time.monotonic() < deadline:
        time.sleep(0.2)
    if _used(world):
        raise RuntimeError("idle clients keep their connections")


def _resident(pid: int) -> int:
    """Return the bytes of memory that a process has."""
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _allow_files(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
