"""`sqlguard serve` as a process of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
from end_to_end.wired import Agent, Wired

from sqlguard.ports import free_port


class Served:
    """A `sqlguard serve` of its own."""

    def __init__(self, world: Wired, folder: Path, *words: str, **settings: object) -> None:
        self.port = free_port()
        self.world = world
        self.log = folder / "log"
        self._stream = self.log.open("w")
        command = [sys.executable, "-m", "sqlguard", "serve", "--dsn", world.database.owner_dsn]
        command += ["--listen", f"127.0.0.1:{self.port}", *words]
        env = os.environ | {f"SQLGUARD_{name.upper()}": str(value) for name, value in settings.items()}
        self.process = subprocess.Popen(command, stderr=self._stream, cwd=folder, env=env)

    def wait(self, agent: Agent) -> None:
        for _ in range(200):
            assert self.process.poll() is None, self.log.read_text()
            with suppress(psycopg.OperationalError):
                agent.connect(connect_timeout=2).close()
                return
            time.sleep(0.1)
        raise AssertionError(self.log.read_text())

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        status = self.process.wait(timeout=30)
        self._stream.close()
        return status


@contextmanager
def served(world: Wired, folder: Path, *words: str, **settings: object) -> Iterator[tuple[Served, Agent]]:
    running = Served(world, folder, *words, **settings)
    agent = world.agent(port=running.port)
    try:
        running.wait(agent)
        yield running, agent
    finally:
        running.end()
