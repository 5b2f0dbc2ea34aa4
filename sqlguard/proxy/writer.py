"""
The journal's writer: commits what sessions want written, in groups.

Whatever has queued up while the last commit was under way goes into the next one, so eight busy agents cost about
as many commits as one. What must be on disk before a write runs is its intent alone: ends do not wait for the disk.
Nor does an intent wait for them: a few of them follow it, while the server is busy with what the intent was about.

A group is one call on a connection that the event loop itself reads: a thread in between took longer than the
server does. What goes wrong there, and the opening of connections, is left to a thread.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from time import monotonic
from typing import Any

import psycopg
import structlog
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGresult

from sqlguard.errors import SqlguardError
from sqlguard.journal import Intent
from sqlguard.postgres import journal
from sqlguard.postgres.connect import connect
from sqlguard.proxy.metrics import Metrics

log = structlog.get_logger()
#: Intents in one commit: bounds the transaction, far above what eight clients can queue in one fsync.
_GROUP = 256
#: Seconds that ends wait for an intent to follow: who writes again at once would have to wait for them first.
_ENDS_WAIT = 0.01
#: So many ends come along with an intent: to write them by themselves then takes longer.
_ENDS_ALONG = 8
#: A connection is opened again at most once per group: whoever waits can't wait for long.
_ATTEMPTS = 2
#: Seconds after which a group's connection is looked at unasked: libuv does not tell of a socket that was reset.
_LOOK_AGAIN = 0.5
#: Seconds that are given to what is queued when the proxy stops.
_LAST_WAIT = 10
_PREPARED = b"sqlguard_group"
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


_Wanted = tuple[Intent, Waiter]
_Item = _Wanted | _Event


class Writer:
    """Used in one event loop, until `stop`."""

    def __init__(self, dsn: str, metrics: Metrics) -> None:
        self._dsn = dsn
        self._metrics = metrics
        self._intents: deque[_Wanted] = deque()
        self._ends: deque[_Event] = deque()
        #: An intent has gone before the ends: the next group has them.
        self._has_passed_ends = False
        self._conn: psycopg.Connection[Any] | None = None
        #: One thread: what it does while the loop ends is done before the last of it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sqlguard-journal")
        #: What is being written, by the loop or by a thread: the connection is whose turn it is.
        self._group: list[_Item] = []
        self._result: PGresult | None = None
        #: The socket that the loop watches; libpq forgets it when the connection breaks.
        self._socket: int | None = None
        self._timer: asyncio.Handle | None = None
        self._looker: asyncio.Handle | None = None
        #: The timer is that of this turn of the loop: whoever comes next must not put it off.
        self._is_next = False
        #: Since when a group is being written, None: nothing is.
        self._since: float | None = None

    def stop(self) -> None:
        """Write what is queued, and end; the loop must have ended."""
        wait([self._thread.submit(self._finish)], timeout=_LAST_WAIT)
        self._thread.shutdown(wait=False)

    def intent(self, intent: Intent) -> Waiter:
        """Queue an intent; the result is its action id once it is committed."""
        loop = asyncio.get_running_loop()
        waiter: Waiter = loop.create_future()
        self._intents.append((intent, waiter))
        if not self._group and not self._is_next:
            # At the end of this turn of the loop: who has sent something in it as well comes along.
            self._at(loop.call_soon(self._next))
            self._is_next = True
        return waiter

    def event(self, action: int, kind: str, detail: Mapping[str, Any]) -> None:
        self._ends.append(_Event(action, kind, detail))
        self._wait_for_intents()

    @property
    def waiting(self) -> int:
        return len(self._intents) + len(self._ends)

    @property
    def lag(self) -> float:
        """Return for how many seconds the group has been written that is being written."""
        since = self._since
        return 0.0 if since is None else monotonic() - since

    # --- in the loop

    def _at(self, timer: asyncio.Handle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def _wait_for_intents(self) -> None:
        if not self._group and self._timer is None:
            self._at(asyncio.get_running_loop().call_later(_ENDS_WAIT, self._next))

    def _next(self) -> None:
        """Begin the next group."""
        self._at(None)
        self._is_next = False
        self._group = self._take()
        if not self._group:
            return
        self._since = monotonic()
        try:
            is_sent = self._send()
        except psycopg.Error:
            is_sent = False
        if not is_sent:
            self._leave_to_a_thread()

    def _take(self) -> list[_Item]:
        """Return what the next group has: intents first, because somebody waits for them."""
        intents, ends = self._intents, self._ends
        group: list[_Item] = [intents.popleft() for _ in range(min(_GROUP, len(intents)))]
        self._has_passed_ends = bool(group and ends and not self._has_passed_ends and len(ends) < _ENDS_ALONG)
        if not self._has_passed_ends:
            group += [ends.popleft() for _ in range(min(_GROUP, len(ends)))]
        return group

    def _send(self) -> bool:
        """Send the group; False if there is no connection for it. Raises psycopg.Error."""
        if self._conn is None or self._conn.closed:
            return False
        intents, events = _parted(self._group)
        values = journal.group_values([intent for intent, _ in intents], _ends(events))
        self._conn.pgconn.send_query_prepared(_PREPARED, values)
        if self._socket is None:
            self._socket = self._conn.fileno()
            asyncio.get_running_loop().add_reader(self._socket, self._readable)
        if self._conn.pgconn.flush():
            asyncio.get_running_loop().add_writer(self._socket, self._writable)
        if self._looker is None:
            self._looker = asyncio.get_running_loop().call_later(_LOOK_AGAIN, self._look)
        return True

    def _look(self) -> None:
        """Find out about a server that is gone, as long as something waits for it."""
        self._looker = None
        if self._group and self._socket is not None:
            self._readable()
        if self._group and self._socket is not None:
            self._looker = asyncio.get_running_loop().call_later(_LOOK_AGAIN, self._look)

    def _writable(self) -> None:
        assert self._conn is not None and self._socket is not None  # noqa: S101, PT018 (it is watched)
        try:
            if not self._conn.pgconn.flush():
                asyncio.get_running_loop().remove_writer(self._socket)
        except psycopg.Error:
            self._leave_to_a_thread()

    def _readable(self) -> None:
        assert self._conn is not None  # noqa: S101 (it is watched)
        pgconn = self._conn.pgconn
        try:
            pgconn.consume_input()
            while self._group and not pgconn.is_busy():
                result = pgconn.get_result()
                if result is None:
                    self._answered()
                    return
                self._result = result
        except psycopg.Error:
            self._leave_to_a_thread()

    def _answered(self) -> None:
        """Tell who waits for the group, and begin the next one."""
        result, self._result = self._result, None
        if result is None or result.status != ExecStatus.TUPLES_OK:
            # Something in it was refused, and nothing of it was written.
            self._leave_to_a_thread()
            return
        intents, _ = _parted(self._group)
        for (_, waiter), action in zip(intents, journal.group_ids(result.get_value(0, 0)), strict=True):
            _resolve(waiter, action, None)
        self._written()

    def _written(self) -> None:
        if self._since is not None:
            self._metrics.journal.observe(monotonic() - self._since)
        self._since, self._group = None, []
        if self._intents or self._has_passed_ends:
            self._next()
        elif self._ends:
            self._wait_for_intents()

    def _leave_to_a_thread(self) -> None:
        """Have the group written with all patience, and the connection opened again if it has to be."""
        loop = asyncio.get_running_loop()
        if self._socket is not None:
            loop.remove_reader(self._socket)
            loop.remove_writer(self._socket)
        self._socket = self._result = None
        if self._group:
            loop.run_in_executor(self._thread, self._write_group).add_done_callback(lambda _: self._written())
        elif self._conn is not None:
            self._conn.close()

    # --- in a thread

    def _finish(self) -> None:
        if self._group and self._conn is not None:
            with suppress(psycopg.Error):
                # What is under way is answered; nobody is left to be told.
                _wait_for_answer(self._conn)
        while self.waiting:
            self._group = self._take()
            self._write_group()
        if self._conn is not None:
            self._conn.close()

    def _write_group(self) -> None:
        """
        Commit the group.

        What was broken off is written once more: if its commit got through after all, there is an intent twice
        of which one never came to anything, as after a crash.
        """
        intents, events = _parted(self._group)
        fault: Exception | None = None
        for _ in range(_ATTEMPTS):
            try:
                conn = self._connection()
                if not _write_together(conn, intents, events):
                    _write_events(conn, events)
                    events = []
                    _write_intents(conn, intents)
            except (psycopg.Error, SqlguardError) as broken:
                fault = broken
                if self._conn is not None:
                    self._conn.close()
            else:
                return
        log.warning("journal not written", error=str(fault), intents=len(intents), events=len(events))
        for _, waiter in intents:
            _fail(waiter, _unavailable(fault))

    def _connection(self) -> psycopg.Connection[Any]:
        if self._conn is None or self._conn.closed:
            self._conn = connect(self._dsn, alone=True)
            self._conn.pgconn.prepare(_PREPARED, journal.GROUP)
        return self._conn


def _wait_for_answer(conn: psycopg.Connection[Any]) -> None:
    """
    Wait until what was sent is answered, or close the connection when it isn't in time.

    libpq's own waiting would keep all other threads from running for as long.
    """
    until = monotonic() + _LAST_WAIT / 2
    with DefaultSelector() as selector:
        selector.register(conn.fileno(), EVENT_READ)
        while (rest := until - monotonic()) > 0:
            selector.modify(conn.fileno(), EVENT_READ | EVENT_WRITE if conn.pgconn.flush() else EVENT_READ)
            if not conn.pgconn.is_busy():
                if conn.pgconn.get_result() is None:
                    return
            elif selector.select(rest):
                conn.pgconn.consume_input()
    conn.close()


def _parted(group: list[_Item]) -> tuple[list[tuple[Intent, Waiter]], list[_Event]]:
    return [item for item in group if isinstance(item, tuple)], [
        item for item in group if isinstance(item, _Event)
    ]


def _ends(events: list[_Event]) -> list[tuple[int, str, Mapping[str, Any]]]:
    return [(e.action, e.kind, e.detail) for e in events]


def _write_together(
    conn: psycopg.Connection[Any], intents: list[tuple[Intent, Waiter]], events: list[_Event]
) -> bool:
    """Commit all of a group at once; False if something in it was refused, and nothing of it was written."""
    if not intents and not events:
        return True
    try:
        ids = journal.record_group(conn, [intent for intent, _ in intents], _ends(events))
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
    _tell(waiter, action, None)


def _fail(waiter: Waiter, fault: Exception) -> None:
    _tell(waiter, None, fault)


def _tell(waiter: Waiter, action: int | None, fault: Exception | None) -> None:
    with suppress(RuntimeError):  # the loop has ended: nobody waits any more
        waiter.get_loop().call_soon_threadsafe(_resolve, waiter, action, fault)


def _resolve(waiter: Waiter, action: int | None, fault: Exception | None) -> None:
    if waiter.done():
        return
    if fault is not None:
        waiter.set_exception(fault)
    elif action is not None:
        waiter.set_result(action)
