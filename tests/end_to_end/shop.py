"""A guarded shop with a proxy in front: what the end-to-end tests share."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.resources import files
from pathlib import Path
from typing import Any

import psycopg
from servers import Database

from sqlguard.dsn import url
from sqlguard.policy.model import duration
from sqlguard.ports import free_port
from sqlguard.postgres.tasks import end_task, open_task
from sqlguard.postgres.undo import undo

SHOP = files("sqlguard.demo").joinpath("shop.sql").read_text(encoding="utf-8")
TABLES = ["customers", "staff", "products", "orders", "items"]
POLICY = """
name = "support"

[defaults]
max_rows = 100
on_excess = "refuse"

[tables."public.*"]
select = true
insert = true
delete = "soft"

[tables."public.customers"]
update = ["name", "city"]

[tables."public.orders"]
update = ["status", "note", "total"]

[tables."public.items"]
update = ["quantity"]
"""


def sqlguard(*words: str, dsn: str, cwd: Path, status: int = 0) -> Any:
    """Run the command line as a script would, and read its JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "sqlguard", *words, "--json"],
        env={**os.environ, "SQLGUARD_DSN": dsn},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == status, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout) if done.stdout.strip() else None


@dataclass
class Task:
    id: str
    role: str
    dsn: str
    direct_dsn: str

    def connect(self, *, direct: bool = False, **options: Any) -> psycopg.Connection[Any]:
        return psycopg.connect(self.direct_dsn if direct else self.dsn, **{"autocommit": True, **options})


@dataclass
class World:
    """A database with a proxy; `dsn` is the operator's."""

    database: Database
    dsn: str
    folder: Path
    port: int = 0
    owner: psycopg.Connection[Any] = field(init=False)
    #: The proxy, while it serves.
    process: "subprocess.Popen[bytes]" = field(init=False)

    def __post_init__(self) -> None:
        self.owner = self.database.connect(self.dsn)

    def run(self, *words: str, status: int = 0) -> Any:
        return sqlguard(*words, dsn=self.dsn, cwd=self.folder, status=status)

    def task(self, policy: str = "support", ttl: str = "300s", **params: str) -> Task:
        """Open a task, in-process: the command is tested for itself and takes seconds to start."""
        length = duration(ttl)
        assert isinstance(length, timedelta)
        made = open_task(self.owner, agent="tester", policy=policy, ttl=length, params=params)
        login = {
            "host": "127.0.0.1",
            "user": made.role,
            "password": made.password,
            "dbname": self.database.name,
        }
        return Task(
            made.task.id,
            made.role,
            url(port=self.port, **login),
            url(port=self.database.server.port, **login),
        )

    def end(self, task: Task) -> None:
        """Take back what the task did and end it."""
        undo(self.owner, task=task.id)
        end_task(self.owner, task.id, "test done")

    def policy(self, text: str, name: str = "support") -> None:
        path = self.folder / f"{name}.toml"
        path.write_text(text, encoding="utf-8")
        self.run("policy", "apply", str(path))

    def value(self, sql: str) -> Any:
        row = self.owner.execute(sql).fetchone()
        return row[0] if row else None

    def dump(self, *tables: str) -> dict[str, str]:
        """Every row of the tables as COPY writes them, in key order."""
        found = {}
        for table in tables:
            with self.owner.cursor().copy(
                f"COPY (SELECT * FROM {table} t ORDER BY t::text) TO STDOUT"
            ) as copy:
                found[table] = b"".join(bytes(chunk) for chunk in copy).decode()
        return found

    @contextmanager
    def serve(self, *flags: str) -> Iterator["World"]:
        """Run `sqlguard serve` for this world."""
        self.port = free_port()
        log = self.folder / "proxy.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "sqlguard", "serve", "--listen", f"127.0.0.1:{self.port}", *flags],
                env={**os.environ, "SQLGUARD_DSN": self.dsn},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            self.process = process
            wait_for_line(log, "listening", process)
            yield self
        finally:
            process.terminate()
            process.wait(timeout=20)


def wait_for_line(log: Path, word: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if word in log.read_text(encoding="utf-8", errors="replace"):
            return
        assert process.poll() is None, log.read_text(encoding="utf-8", errors="replace")
        time.sleep(0.05)
    raise AssertionError(log.read_text(encoding="utf-8", errors="replace"))


@contextmanager
def shop_world(database: Database, folder: Path, *flags: str) -> Iterator[World]:
    """A shop with all its tables guarded as soft, its policy applied, its proxy running."""
    world = World(database, database.owner_dsn, folder)
    world.owner.execute(SHOP)
    world.run("migrate")
    world.run("guard", *TABLES, "--mode", "soft")
    world.policy(POLICY)
    with world.serve(*flags):
        yield world
