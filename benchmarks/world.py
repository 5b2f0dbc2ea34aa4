"""
A server of our own and, for each benchmark, a database with two tables of the same rows: `guarded.t` and `bare.t`.

Sessions: the owner's (`world.owner`), and a task's own (`world.agent`), logged in straight at the server. Where
statements are so short that a commit's wait for the disk would hide what they cost, synchronous_commit is off.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any

import psycopg

from sqlguard.dsn import url
from sqlguard.embedded import EmbeddedServer
from sqlguard.embedded.binaries import require_bindir
from sqlguard.journal import Intent
from sqlguard.policy import parse_policy
from sqlguard.postgres import journal
from sqlguard.postgres.catalog_reader import read_catalog
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.migrate import migrate
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.postgres.tasks import OpenedTask, open_task

#: As a server has it by default, but for what would happen at a time of its own choosing.
SETTINGS = {
    "shared_buffers": "256MB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "1h",
    "autovacuum": "off",
    "max_connections": "200",
    "jit": "off",
}
POLICY = """
name = "bench"

[defaults]
max_rows = 10000000
max_share = 1.0
on_excess = "refuse"
statement_timeout = "10min"
max_ttl = "2h"
connections = 100
search_path = ["guarded"]
reads = { max_result_rows = 10000000 }
unscoped = "approve"

[tables."guarded.*"]
select = true
insert = true
update = true
delete = "DELETE_MODE"
"""
#: Rows of about 190 bytes; `code` gets a partial unique index where the table is guarded.
TABLE = """
CREATE TABLE {schema}.t (
    id integer PRIMARY KEY,
    customer integer NOT NULL,
    status text NOT NULL,
    note text,
    code text NOT NULL UNIQUE,
    price numeric(12, 2) NOT NULL,
    at timestamptz NOT NULL DEFAULT now()
);
INSERT INTO {schema}.t
SELECT n, n % 5000, (ARRAY['new', 'paid', 'shipped'])[1 + n % 3], rpad('note ' || n, 90, '.'), 'code ' || n,
       n % 977 * 1.5, timestamptz '2024-01-01' + n * interval '1 minute'
FROM generate_series(1, {rows}) n;
"""
#: What guarding adds to a table, for the one that nobody guards; and the index that the guide advises for both.
COLUMNS = "ALTER TABLE bare.t ADD deleted_at timestamptz, ADD deleted_by_agent text"
UNIQUE = (
    "ALTER TABLE bare.t DROP CONSTRAINT t_code_key;"
    "CREATE UNIQUE INDEX t_code_key ON bare.t (code) WHERE deleted_at IS NULL"
)
INDEX = "CREATE INDEX ON {schema}.t (customer) {where}"
_numbers = count(1)


@dataclass
class World:
    """One database; `dsn` is the owner's."""

    server: EmbeddedServer
    name: str
    owner: psycopg.Connection[Any]
    task: OpenedTask | None = None
    _open: list[psycopg.Connection[Any]] = field(default_factory=list)

    @property
    def dsn(self) -> str:
        return self.server.dsn(self.name)

    @property
    def task_dsn(self) -> str:
        """The task's own way to the server, past the proxy."""
        return self.task_dsn_at(self.server.port)

    def task_dsn_at(self, port: int) -> str:
        task = self._task()
        return url(host="127.0.0.1", port=port, user=task.role, password=task.password, dbname=self.name)

    @property
    def task_id(self) -> str:
        return self._task().task.id

    def guard(self, tables: Sequence[str], mode: str) -> None:
        """Guard *tables*, apply the policy and open a task."""
        migrate(self.dsn)
        guard_tables(self.owner, tables, mode)
        apply_policy(self.owner, parse_policy(POLICY.replace("DELETE_MODE", mode), "bench.toml"))
        self.task = open_task(self.owner, agent="bench", policy="bench", ttl=timedelta(hours=1))

    def agent(self, *, prepare: bool = False, durable: bool = False) -> psycopg.Connection[Any]:
        """Log in as the task, straight at the server, in a session that may write."""
        conn = self.connect(self.task_dsn, prepare=prepare, durable=durable)
        conn.execute("SET default_transaction_read_only = off")
        return conn

    def connect(
        self, dsn: str | None = None, *, prepare: bool = False, durable: bool = False
    ) -> psycopg.Connection[Any]:
        """Log in; commits wait for the disk where they are to be *durable*."""
        conn = psycopg.connect(dsn or self.dsn, autocommit=True, prepare_threshold=0 if prepare else None)
        if not durable:
            conn.execute("SET synchronous_commit = off")
        self._open.append(conn)
        return conn

    def action(self, text: str) -> int:
        """Journal the intent of one statement of the task."""
        task = self._task()
        return journal.record_intent(
            self.owner, Intent(task=task.task.id, role=task.role, kind="update", statement=text)
        )

    def catalog(self) -> Any:
        return read_catalog(self.owner)

    def close(self) -> None:
        for conn in (*self._open, self.owner):
            conn.close()

    def _task(self) -> OpenedTask:
        if self.task is None:
            raise RuntimeError("no task was opened")
        return self.task


@contextmanager
def serve(version: int | None) -> Iterator[EmbeddedServer]:
    with EmbeddedServer.start(require_bindir(version), settings=SETTINGS) as server:
        yield server


@contextmanager
def world(server: EmbeddedServer) -> Iterator[World]:
    """Give a new database, and drop it."""
    name = f"bench_{next(_numbers)}"
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE {name}")
        made = World(server, name, psycopg.connect(server.dsn(name), autocommit=True))
        try:
            yield made
        finally:
            made.close()
            conn.execute(f"DROP DATABASE {name} WITH (FORCE)")


@contextmanager
def twins(server: EmbeddedServer, rows: int, mode: str) -> Iterator[World]:
    """Give a database with `guarded.t` and `bare.t` of *rows* rows each."""
    with world(server) as made:
        for schema in ("guarded", "bare"):
            made.owner.execute(f"CREATE SCHEMA {schema}")
            made.owner.execute(TABLE.format(schema=schema, rows=rows))
        made.guard(["guarded.t"], mode)
        made.owner.execute(COLUMNS)
        if mode == "soft":
            # The twin has what a person would have made by hand: the unique index over live rows.
            made.owner.execute(UNIQUE)
        for schema in ("guarded", "bare"):
            where = "WHERE deleted_at IS NULL" if mode == "soft" else ""
            made.owner.execute(INDEX.format(schema=schema, where=where))
        made.owner.execute("VACUUM ANALYZE guarded.t, bare.t")
        yield made
