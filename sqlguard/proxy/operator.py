"""
What the proxy asks of PostgreSQL as the operator: logins, the catalog, the journal.

psycopg is synchronous here on purpose: these calls run in threads of their own, so that a slow catalog query
or a slow disk never holds up the event loop. Intents are committed in groups: whatever has queued up while
the last commit was under way goes into the next one, so eight busy agents cost about as many commits as one.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg
import structlog

from sqlguard.catalog import Catalog
from sqlguard.errors import DatabaseUnavailable, NotConfigured, SqlguardError
from sqlguard.gate import Gate
from sqlguard.journal import Intent
from sqlguard.policy.context import Context
from sqlguard.postgres import journal
from sqlguard.postgres.catalog_reader import catalog_version, read_catalog
from sqlguard.postgres.connect import connect
from sqlguard.postgres.control import Login, read_login
from sqlguard.proxy.portals import Prepared

log = structlog.get_logger()
#: Intents in one commit: bounds the transaction, far above what eight clients can queue in one fsync.
_GROUP = 256
#: Bounds of what is remembered of messages that pass.
_PASSING_ENTRIES, _PASSING_BYTES = 4096, 8192
Waiter = asyncio.Future[int]
T = TypeVar("T")


#: A connection is opened again at most once per question: whoever asks can't wait for long.
_ATTEMPTS = 2


class JournalUnavailable(SqlguardError):
    """Raised for a write whose intent could not be written down; nothing of it has run."""

    sqlstate = "58030"
    default_hint = "nothing was changed; send it again later"


class Passing(dict[bytes, Prepared | None]):
    """
    Query and Parse messages that were found to pass as they are, for all sessions of a gate.

    A Parse comes with what it prepares. The oldest go first.
    """

    def remember(self, message: bytes, prepared: Prepared | None = None) -> None:
        if len(message) <= _PASSING_BYTES:
            self[message] = prepared
            if len(self) > _PASSING_ENTRIES:
                del self[next(iter(self))]


@dataclass(frozen=True, slots=True)
class _Event:
    action: int
    kind: str
    detail: Mapping[str, Any]


class Operator:
    """One per proxy process. `start` must have returned before the proxy accepts clients."""

    def __init__(self, dsn: str, *, catalog_check_seconds: float = 1.0) -> None:
        self._dsn = dsn
        self._check_seconds = catalog_check_seconds
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="sqlguard-operator")
        self._local = threading.local()
        self._connections: list[psycopg.Connection[Any]] = []
        self._queue: queue.SimpleQueue[tuple[Intent, Waiter] | _Event | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="sqlguard-journal", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="sqlguard-catalog", daemon=True)
        self._stopped = threading.Event()
        self._gates: dict[tuple[str, int], tuple[Gate, Passing]] = {}
        self.catalog = Catalog()
        self.database = ""

    def start(self) -> None:
        """Connect and read the catalog; raises DatabaseUnavailable or NotConfigured."""
        with connect(self._dsn) as conn:
            if conn.execute("SELECT to_regclass('sqlguard.task')").fetchone() == (None,):
                raise NotConfigured(
                    "the database has no schema `sqlguard` yet", hint="run `sqlguard migrate` as the operator"
                )
            self.catalog = read_catalog(conn)
            self.database = conn.info.dbname
        self._writer.start()
        self._watcher.start()

    def stop(self) -> None:
        """Write what is queued, then close everything. Safe to repeat."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._queue.put(None)
        if self._writer.is_alive():
            self._writer.join(timeout=10)
        self._threads.shutdown(wait=True)
        if self._watcher.is_alive():
            self._watcher.join(timeout=10)
        for conn in self._connections:
            conn.close()

    async def login(self, role: str) -> Login | None:
        """Return what is known of *role*; raises DatabaseUnavailable when PostgreSQL can't be asked."""
        return await self._ask(lambda conn: read_login(conn, role))

    def gate(self, login: Login) -> tuple[Gate, Passing]:
        """
        Return the gate for a login's policy version on the newest catalog, and what is known to pass it.

        Sessions share both.
        """
        key = (login.policy.name, login.task.policy_version)
        found = self._gates.get(key)
        if found is None or found[0].context.catalog is not self.catalog:
            found = Gate(Context(self.catalog, login.policy, None)), Passing()
            self._gates[key] = found
        return found

    async def intent(self, intent: Intent) -> int:
        """Commit one intent, in a group with those of other sessions, and return its action id."""
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._queue.put((intent, waiter))
        return await waiter

    def note(self, intent: Intent) -> None:
        """Have a refusal written soon; nothing waits for it, because nothing runs."""
        waiter: Waiter = asyncio.get_running_loop().create_future()
        waiter.add_done_callback(lambda w: w.exception())
        self._queue.put((intent, waiter))

    def event(self, action: int, kind: str, detail: Mapping[str, Any]) -> None:
        """Have an event written soon; the row changes are the evidence if it is lost (reconciliation)."""
        self._queue.put(_Event(action, kind, detail))

    async def _ask(self, question: Callable[[psycopg.Connection[Any]], T]) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._answer, question)

    def _answer(self, question: Callable[[psycopg.Connection[Any]], T]) -> T:
        fault: psycopg.Error | None = None
        for _ in range(_ATTEMPTS):
            conn = getattr(self._local, "connection", None)
            if conn is None or conn.closed:
                conn = connect(self._dsn)
                self._local.connection = conn
                self._connections.append(conn)
            try:
                return question(conn)
            except (psycopg.OperationalError, psycopg.InterfaceError) as broken:
                fault = broken
                conn.close()
                self._connections.remove(conn)
            except psycopg.Error as refused:
                fault = refused
                break
        raise DatabaseUnavailable(f"PostgreSQL does not answer: {fault}")

    def _watch(self) -> None:
        """Notice changes of the catalog; an unreachable server is asked again until it answers."""
        conn: psycopg.Connection[Any] | None = None
        while not self._stopped.wait(self._check_seconds):
            try:
                if conn is None or conn.closed:
                    conn = connect(self._dsn)
                if catalog_version(conn) != self.catalog.version:
                    self.catalog = read_catalog(conn)
                    log.info("catalog read", version=self.catalog.version, tables=len(self.catalog.tables))
            except (psycopg.Error, SqlguardError) as fault:
                log.warning("catalog not read", error=str(fault))
                if conn is not None:
                    conn.close()
                    conn = None
        if conn is not None:
            conn.close()

    def _write(self) -> None:
        conn: psycopg.Connection[Any] | None = None
        while True:
            group = self._next_group()
            conn = self._write_group(
                conn,
                [item for item in group if isinstance(item, tuple)],
                [item for item in group if isinstance(item, _Event)],
            )
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
                    conn = connect(self._dsn)
                _write_events(conn, events)  # they belong to actions of earlier groups
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
        with suppress(queue.Empty):
            while len(group) < _GROUP and group[-1] is not None:
                group.append(self._queue.get_nowait())
        return group


def _write_events(conn: psycopg.Connection[Any], events: list[_Event]) -> None:
    """Write each event; raises psycopg's errors when the connection is broken, and only then."""
    for event in events:
        try:
            journal.record_event(conn, event.action, event.kind, event.detail)
        except (psycopg.Error, SqlguardError) as fault:
            if conn.closed:
                raise
            log.warning("event not written", action=event.action, kind=event.kind, error=str(fault))


def _write_intents(conn: psycopg.Connection[Any], intents: list[tuple[Intent, Waiter]]) -> None:
    """Commit intents together, or where one is refused each by itself; raises as `_write_events` does."""
    if not intents:
        return
    try:
        ids = journal.record_intents(conn, [intent for intent, _ in intents])
    except (psycopg.Error, SqlguardError):
        if conn.closed:
            raise
    else:
        for (_, waiter), action in zip(intents, ids, strict=True):
            _done(waiter, action)
        return
    # One bad intent (an ended task) must not take the others' with it.
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
