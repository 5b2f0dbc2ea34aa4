"""
How long guarding makes others wait: a writer and a reader go on beside it, on a table of two million rows.

What is measured are waits for locks, as pg_locks tells them, not the statements' own time; and a statement that would
wait for more than the goal is cancelled by its lock_timeout and counts as missed.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg

from benchmarks.measure import Goal, Result
from benchmarks.options import Options
from benchmarks.world import World, world
from sqlguard.embedded import EmbeddedServer
from sqlguard.postgres.guard_table import guard_tables, unguard_tables
from sqlguard.postgres.migrate import migrate

ROWS = 2_000_000
#: Seconds that a statement may be made to wait.
LONGEST = 1.0
TABLES = """
CREATE SCHEMA app;
CREATE TABLE app.parent (id integer PRIMARY KEY, name text NOT NULL);
INSERT INTO app.parent SELECT n, 'name ' || n FROM generate_series(1, 1000) n;
CREATE TABLE app.big (
    id integer PRIMARY KEY,
    parent integer NOT NULL REFERENCES app.parent ON DELETE CASCADE,
    code text NOT NULL,
    note text,
    CONSTRAINT big_code UNIQUE (code)
);
INSERT INTO app.big SELECT n, 1 + n % 1000, 'code ' || n, rpad('note', 60, '.') FROM generate_series(1, {rows}) n;
CREATE UNIQUE INDEX big_note ON app.big (lower(code), parent);
VACUUM ANALYZE app.big, app.parent;
"""
_WAITING = """
SELECT coalesce(max(extract(epoch FROM clock_timestamp() - waitstart)), 0) FROM pg_locks
WHERE NOT granted AND waitstart IS NOT NULL AND pid = ANY (%s)
"""


@dataclass
class Others:
    """The sessions beside, and the longest that one of them had to wait for a lock."""

    dsn: str
    rows: int
    longest: float = 0.0
    statements: int = 0
    failed: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _pids: list[int] = field(default_factory=list)

    def beside(self, work: Callable[[], object]) -> float:
        """Run *work*; return the seconds that it took."""
        threads = [threading.Thread(target=t) for t in (self._write, self._read, self._watch)]
        for thread in threads:
            thread.start()
        started = time.monotonic()
        try:
            work()
        finally:
            seconds = time.monotonic() - started
            self._stop.set()
            for thread in threads:
                thread.join()
        return seconds

    def _write(self) -> None:
        """Short transactions of an application: a row of each table changed, one added, one looked at."""

        def once(conn: psycopg.Connection[Any], number: int) -> None:
            with conn.transaction():
                conn.execute("UPDATE app.big SET note = %s WHERE id = %s", [str(number), number])
                conn.execute(
                    "UPDATE app.parent SET name = %s WHERE id = %s", [str(number), 1 + number % 1000]
                )
                conn.execute(
                    "INSERT INTO app.big (id, parent, code) VALUES (%s, 1, %s)",
                    [self.rows + self.statements, f"new {self.statements}"],
                )

        self._loop(once)

    def _read(self) -> None:
        def once(conn: psycopg.Connection[Any], number: int) -> None:
            conn.execute("SELECT note FROM app.big WHERE id = %s", [number]).fetchall()
            conn.execute("SELECT id FROM app.big WHERE code = %s", [f"code {number}"]).fetchall()

        self._loop(once)

    def _loop(self, once: Callable[[psycopg.Connection[Any], int], None]) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            self._pids.append(conn.info.backend_pid)
            conn.execute(f"SET lock_timeout = '{LONGEST * 1000:.0f}ms'")
            while not self._stop.is_set():
                self.statements += 1
                try:
                    once(conn, random.randrange(1, self.rows))
                except psycopg.errors.LockNotAvailable as fault:
                    self.failed.append(str(fault))
                    self.longest = max(self.longest, LONGEST)
                time.sleep(0.002)

    def _watch(self) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            while not self._stop.is_set():
                row = conn.execute(_WAITING, [self._pids]).fetchone()
                self.longest = max(self.longest, float(row[0]) if row else 0.0)
                time.sleep(0.01)


def run(server: EmbeddedServer, options: Options) -> Iterator[Result]:
    del options
    with world(server) as made:
        yield from measure(made, ROWS)


def measure(made: World, rows: int) -> Iterator[Result]:
    """Guard and unguard a table of *rows* rows in both modes, and yield the longest wait of each step."""
    migrate(made.dsn)
    for statement in TABLES.format(rows=rows).split(";\n"):
        made.owner.execute(statement.strip() or "SELECT")
    for case, work in (
        ("guard as soft", lambda: guard_tables(made.owner, ["app.big", "app.parent"], "soft")),
        ("guard again", lambda: guard_tables(made.owner, ["app.big", "app.parent"], "soft")),
        ("soft to journal", lambda: guard_tables(made.owner, ["app.big", "app.parent"], "journal")),
        ("journal to soft", lambda: guard_tables(made.owner, ["app.big", "app.parent"], "soft")),
        ("unguard", lambda: unguard_tables(made.owner, ["app.big", "app.parent"])),
        ("guard as journal", lambda: guard_tables(made.owner, ["app.big", "app.parent"], "journal")),
        ("unguard, journal", lambda: unguard_tables(made.owner, ["app.big", "app.parent"])),
    ):
        made.owner.execute(f"DELETE FROM app.big WHERE id >= {rows} AND code LIKE 'new %'")
        others = Others(made.dsn, rows)
        seconds = others.beside(work)
        yield Result(
            benchmark="locks",
            case=f"{case}, {rows:,} rows, {seconds:.0f} s",
            against="a second",
            ratio=others.longest / LONGEST,
            low=others.longest / LONGEST,
            high=others.longest / LONGEST,
            ours=others.longest,
            base=LONGEST,
            rounds=others.statements,
            # A statement that gave up has waited for all of it.
            goal=Goal(0.99),
        )
