"""
The journal's writer: a thread that commits what sessions want written, in groups.

Whatever has queued up while the last commit was under way goes into the next one, so eight busy agents cost about
as many commits as one. What must be on disk before a write runs is its intent alone: ends go along with the next
intents, or, when none comes soon, without waiting for the disk.
"""

import asyncio
import queue
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

import psycopg
import structlog

from sqlguard.errors import SqlguardError
from sqlguard.journal import Intent
from sqlguard.postgres import journal
from sqlguard.postgres.connect import connect
from sqlguard.proxy.metrics import Metrics

log = structlog.get_logger()
#: Intents in one commit: bounds the transaction, far above what eight clients can queue in one fsync.
_GROUP = 256
#: Seconds that ends wait for an intent to go along with: who writes again at once would have to wait for them first.
_ENDS_WAIT = 0.01
#: A connection is opened again at most once per group: whoever waits can't wait for long.
_ATTEMPTS = 2
Waiter = asyncio.Future[int]


class JournalUnavailable(SqlguardError):
    """Raised for a write whose intent could not be written down; nothing of it has run."""

    sqlstate = "58030"
    default_hint = "nothing was changed; send it again later"


@dataclass(frozen=True, slots=True)
class _Event:
    action: int
    kind: str
    detail: Mapping[str, Any]


class Writer:
    """Writes from `start` to `stop`."""

    def __init__(self, dsn: str, metrics: Metrics) -> None:
        self._dsn = dsn
        self._metrics = metrics
        self._queue: queue.SimpleQueue[tuple[Intent, Waiter] | _Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="sqlguard-journal", daemon=True)
        #: Since when a group is being written, None: nothing is.
        self._since: float | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Write what is queued, and end."""
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def intent(self, intent: Intent) -> Waiter:
        """Queue an intent; the result is its action id once it is committed."""
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._queue.put((intent, waiter))
        return waiter

    def event(self, action: int, kind: str, detail: Mapping[str, Any]) -> None:
        self._queue.put(_Event(action, kind, detail))

    @property
    def waiting(self) -> int:
        return self._queue.qsize()

    @property
    def lag(self) -> float:
        """Return for how many seconds the group has been written that is being written."""
        since = self._since
        return 0.0 if since is None else monotonic() - since

    def _write(self) -> None:
        conn: psycopg.Connection[Any] | None = None
        while True:
            group = self._next_group()
            self._since = began = monotonic()
            conn = self._write_group(
                conn,
                [item for item in group if isinstance(item, tuple)],
                [item for item in group if isinstance(item, _Event)],
            )
            self._since = None
            self._metrics.journal.observe(monotonic() - began)
            if None in group:
                break
        if conn is not None:
            conn.close()

    def _write_group(
        self,
        conn: psycopg.Connection[Any] | None,
        intents: list[tuple[Intent, Waiter]],
        events: list[_Event],
    ) -> psycopg.Connection[Any] | None:
        """
        Commit a group and return the connection for the next one.

        What was broken off is written once more: if its commit got through after all, there is an intent twice
        of which one never came to anything, as after a crash.
        """
        fault: Exception | None = None
        for _ in range(_ATTEMPTS):
            try:
                if conn is None or conn.closed:
                    conn = connect(self._dsn, alone=True)
                if not _write_together(conn, intents, events):
                    _write_events(conn, events)
                    events = []
                    _write_intents(conn, intents)
            except (psycopg.Error, SqlguardError) as broken:
                fault = broken
                if conn is not None:
                    conn.close()
                    conn = None
            else:
                return conn
        log.warning("journal not written", error=str(fault), intents=len(intents), events=len(events))
        for _, waiter in intents:
            _fail(waiter, _unavailable(fault))
        return conn

    def _next_group(self) -> list[tuple[Intent, Waiter] | _Event | None]:
        group = [self._queue.get()]
        deadline = monotonic() + _ENDS_WAIT
        with suppress(queue.Empty):
            while len(group) < _GROUP and isinstance(group[-1], _Event):
                group.append(self._queue.get(timeout=max(0.0, deadline - monotonic())))
            while len(group) < _GROUP and group[-1] is not None:
                group.append(self._queue.get_nowait())
        return group


def _write_together(
    conn: psycopg.Connection[Any], intents: list[tuple[Intent, Waiter]], events: list[_Event]
) -> bool:
    """Commit all of a group at once; False if something in it was refused, and nothing of it was written."""
    if not intents and not events:
        return True
    try:
        ends = [(e.action, e.kind, e.detail) for e in events]
        ids = journal.record_group(conn, [intent for intent, _ in intents], ends)
    except (psycopg.Error, SqlguardError):
        if conn.closed:
            raise
        return False
    for (_, waiter), action in zip(intents, ids, strict=True):
        _done(waiter, action)
    return True


def _write_events(conn: psycopg.Connection[Any], events: list[_Event]) -> None:
    """Write each event by itself; raises psycopg's errors when the connection is broken, and only then."""
    for event in events:
        try:
            journal.record_event(conn, event.action, event.kind, event.detail)
        except (psycopg.Error, SqlguardError) as fault:
            if conn.closed:
                raise
            log.warning("event not written", action=event.action, kind=event.kind, error=str(fault))


def _write_intents(conn: psycopg.Connection[Any], intents: list[tuple[Intent, Waiter]]) -> None:
    """Commit intents one by one: a bad one (of an ended task) must not take the others with it."""
    for intent, waiter in intents:
        try:
            _done(waiter, journal.record_intent(conn, intent))
        except SqlguardError as fault:
            _fail(waiter, fault)
        except psycopg.Error as fault:
            if conn.closed:
                raise
            _fail(waiter, _unavailable(fault))


def _unavailable(fault: Exception | None) -> JournalUnavailable:
    return JournalUnavailable(f"the journal can't be written: {str(fault).strip()}")


def _done(waiter: Waiter, action: int) -> None:
    waiter.get_loop().call_soon_threadsafe(_resolve, waiter, action, None)


def _fail(waiter: Waiter, fault: Exception) -> None:
    waiter.get_loop().call_soon_threadsafe(_resolve, waiter, None, fault)


def _resolve(waiter: Waiter, action: int | None, fault: Exception | None) -> None:
    if waiter.done():
        return
    if fault is not None:
        waiter.set_exception(fault)
    elif action is not None:
        waiter.set_result(action)
