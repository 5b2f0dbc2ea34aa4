"""
The janitor: a thread that ends what is due, every second and whenever something expires, as long as it is needed. It
settles actions of which nobody has seen the end, too.

It holds no state. Any number may run against one database; they take turns by an advisory lock, so when the
one that works is killed, another one does the next pass.
"""

import threading
from contextlib import suppress
from datetime import datetime
from time import monotonic
from typing import Any, Self

import psycopg
import structlog

from sqlguard.errors import DatabaseUnavailable, SqlguardError
from sqlguard.postgres import lock_room
from sqlguard.postgres.connect import connect
from sqlguard.postgres.reconcile import Reconciler
from sqlguard.postgres.sweep import SweepReport as SweepReport
from sqlguard.postgres.sweep import make_room, next_due
from sqlguard.postgres.sweep import sweep as sweep

log = structlog.get_logger()
#: Due tasks end within two seconds: nothing is waited for but their own moment, and those that were opened meanwhile
#: are seen a second later at the latest.
INTERVAL = 1.0
#: Actions without an end are looked for so many seconds apart.
_SETTLE_EVERY = 10.0
#: Between attempts to reach a database that is away; the servers' own walls hold meanwhile (VALID UNTIL, expiry).
_LONGEST_WAIT = 10.0


class Janitor:
    """Sweeps from `start` to `stop`; must be stopped by who started it."""

    def __init__(self, dsn: str, interval: float = INTERVAL, reconciler: Reconciler | None = None) -> None:
        self._dsn = dsn
        self._reconciler = reconciler or Reconciler()
        self._settle_at = 0.0
        self._interval = interval
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is not None:
            raise RuntimeError("the janitor is running")
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="sqlguard-janitor", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """Finish the pass that is going on and end. Safe to repeat."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout)
            self._thread = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        wait = self._interval
        while not self._stopping.is_set():
            try:
                with connect(self._dsn, alone=True) as conn:
                    wait = self._interval
                    self._sweep_until_broken(conn)
            except (DatabaseUnavailable, psycopg.Error) as fault:
                log.warning("janitor waits for the database", error=str(fault).strip())
            except Exception:
                # A janitor that has died ends nothing any more: whatever it was, it goes on.
                log.exception("janitor failed")
            self._stopping.wait(wait)
            wait = min(wait * 2, _LONGEST_WAIT)

    def _sweep_until_broken(self, conn: psycopg.Connection[Any]) -> None:
        lock_room.keep(conn)
        while not self._stopping.is_set():
            wait = self._interval
            try:
                _report(sweep(conn, database_time(conn)))
                self._settle(conn)
                wait = _until(next_due(conn), self._interval)
            except psycopg.errors.OutOfMemory:
                lock_room.give_back(conn)
                with suppress(psycopg.errors.OutOfMemory):  # tried again at the next pass
                    _report(make_room(conn))
                    lock_room.keep(conn)
            except SqlguardError as fault:
                log.warning("janitor can't work", error=fault.message, hint=fault.hint)
            self._stopping.wait(wait)

    def _settle(self, conn: psycopg.Connection[Any]) -> None:
        if monotonic() < self._settle_at:
            return
        settled = self._reconciler.run(conn)
        self._settle_at = monotonic() + min(_SETTLE_EVERY, 10 * self._interval)
        if settled:
            log.info("reconciled", actions=len(settled))


def _until(due: float | None, interval: float) -> float:
    # The moment itself, and then a little: a timer may be early by less than that.
    return interval if due is None else min(interval, due + 0.001)


def database_time(conn: psycopg.Connection[Any]) -> datetime:
    """Return what time it is for the server: leases are given and judged by its clock alone."""
    row = conn.execute("SELECT clock_timestamp()").fetchone()
    assert row is not None  # noqa: S101 (a SELECT without FROM has one row)
    found: datetime = row[0]
    return found


def _report(done: SweepReport) -> None:
    if done.idle:
        return
    with suppress(ValueError):  # the log's stream may be closed at the interpreter's end
        log.info(
            "janitor",
            ended=list(done.ended),
            leases=list(done.leases),
            changed=list(done.changed),
            orphans=list(done.orphans),
        )
        for problem in done.problems:
            log.warning("janitor could not remove", problem=problem)
