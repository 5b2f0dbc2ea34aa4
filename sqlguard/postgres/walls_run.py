"""
Runs DDL on tables that others are using: short transactions that give up a lock quickly and try again.

A statement that waits for ACCESS EXCLUSIVE makes every reader wait behind it; so it waits a moment only
(`lock_timeout`), steps aside, and comes back. Building an index CONCURRENTLY blocks nobody and may wait.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg
from psycopg import sql

from sqlguard.errors import GuardError
from sqlguard.postgres.connect import OWN_LOCKS

T = TypeVar("T")
#: Milliseconds that a statement waits for a lock before it steps aside.
LOCK_TIMEOUT_MS = 300
#: Two guards of one database would drop each other's half-made triggers.
LOCK = (OWN_LOCKS, 6)
BUSY = (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected)


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs on a connection in autocommit mode; `budget` is how many seconds one step may keep trying."""

    conn: psycopg.Connection[Any]
    lock_timeout_ms: int = LOCK_TIMEOUT_MS
    budget: float = 120.0

    def __post_init__(self) -> None:
        if not self.conn.autocommit:
            raise GuardError(
                "guarding needs a connection in autocommit mode: each step is a transaction of its own"
            )

    def run(self, statements: Sequence[sql.Composed]) -> None:
        """Run *statements* in one transaction; try again while their locks are taken by others."""
        if not statements:
            return

        def once() -> None:
            with self.conn.transaction():
                self.conn.execute(
                    sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(self.lock_timeout_ms))
                )
                for statement in statements:
                    self.conn.execute(statement)

        again_while_busy(once, self.budget)

    def run_concurrently(self, statement: sql.Composed) -> None:
        """Run a … CONCURRENTLY *statement*; it waits for others as long as it has to."""

        def once() -> None:
            self.conn.execute("SET lock_timeout = 0")
            try:
                self.conn.execute(statement)
            finally:
                self.conn.execute("RESET lock_timeout")

        again_while_busy(once, self.budget)


def again_while_busy(once: Callable[[], T], budget: float = 120.0) -> T:
    """Return what *once* does; it is done anew while its locks are taken by others, for *budget* seconds."""
    deadline = time.monotonic() + budget
    pause = 0.1
    while True:
        try:
            return once()
        except BUSY as fault:
            if time.monotonic() + pause > deadline:
                raise GuardError(
                    f"a lock was not to be had for {budget:.0f} s: {str(fault).splitlines()[0]}",
                    hint="look for long transactions in pg_stat_activity, then do it again: what is done is kept",
                ) from None
            # Two that met should not meet again.
            time.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311 - jitter, not a secret
            pause = min(pause * 2, 2.0)


@contextmanager
def one_at_a_time(conn: psycopg.Connection[Any]) -> Iterator[None]:
    """Hold the advisory lock of guarding; the session's, because the steps are transactions of their own."""
    conn.execute("SELECT pg_advisory_lock(%s, %s)", LOCK)
    try:
        yield
    finally:
        if not conn.closed:
            conn.execute("SELECT pg_advisory_unlock(%s, %s)", LOCK)
