"""
A task per client session: how it is opened, used by one statement at a time, cancelled, and ended.

Theory of operation. A session opens its task at its first call, in the operator's name, and ends it when the client
goes, when the server stops, or when its time is up. With a task's own DSN there is nothing to open and nothing to
end: all clients of this process work as that task. A database session is not thread-safe, so a lock lets one call in
after the other; a call runs in a worker thread, and a client that cancels makes PostgreSQL cancel the statement.
The lock is given back only when the thread is done, so the next call never finds a session in use.

A process that is killed ends nothing: the task's own time does, as the janitor of `sqlguard serve` sees to it.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import anyio
import anyio.to_thread
import psycopg
import structlog

from sqlguard.connection import PROXY_PARAMETER, GuardedConnection, connect
from sqlguard.errors import DatabaseUnavailable, NotConfigured, PolicyError, SqlguardError, TaskEnded
from sqlguard.postgres import control, tasks
from sqlguard.postgres.connect import connect as connect_to
from sqlguard.postgres.policy_store import stored_versions
from sqlguard.task import Task

T = TypeVar("T")
_log = structlog.get_logger(__name__)
_WATCH_SECONDS = 1.0
_CANCEL_AGAIN_SECONDS = 0.25


@dataclass(frozen=True)
class Door:
    """What a new session is opened with; `own_task`: the DSN is a task's own, and nothing is opened."""

    dsn: str = field(repr=False)
    policy: str | None = None
    agent: str = "mcp"
    ttl: timedelta = tasks.DEFAULT_TTL
    purpose: str | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    own_task: bool = False


def checked(door: Door) -> Door:
    """
    Return *door* as the database sees it, before any client is let in.

    Raises NotConfigured, PolicyError, DatabaseUnavailable.
    """
    with connect_to(door.dsn) as conn:
        if conn.pgconn.parameter_status(PROXY_PARAMETER):
            raise NotConfigured(
                "this DSN goes through the proxy, which guards it already",
                hint="give the task's `direct_dsn`: this server is a door of its own, on the same path",
            )
        login = control.current_login(conn)
        if login is None:
            if door.policy is None:
                raise NotConfigured(
                    "with the operator's DSN, a policy has to be named",
                    hint="say --policy NAME, or give a task's own `direct_dsn` in SQLGUARD_DSN",
                )
            if not stored_versions(conn, door.policy):
                raise PolicyError(
                    f"policy `{door.policy}` was never applied", hint="run `sqlguard policy apply FILE` first"
                )
            return door
    if door.policy not in (None, login.task.policy):
        raise NotConfigured(
            f"this DSN is that of task `{login.task.id}`, whose policy is `{login.task.policy}`",
            hint="leave --policy out, or give the operator's DSN",
        )
    return Door(door.dsn, own_task=True)


class Session:
    """One client's task. Made for each client session, or once for all where there is one task."""

    def __init__(self, door: Door, client: str | None, limiter: anyio.CapacityLimiter) -> None:
        self._door = door
        self._client = client
        self._limiter = limiter
        self._lock = anyio.Lock()
        self._db: GuardedConnection | None = None
        self._task: str | None = None
        self._expires_at: datetime | None = None
        self._ended = False

    async def call(self, work: Callable[[GuardedConnection], T]) -> T:
        """Do *work* with the session's connection, in a thread; cancelling this cancels the statement."""
        async with self._lock:
            return await self._in_thread(lambda: self._guarded(work))

    async def close(self, reason: str = "the client's session ended") -> None:
        """End the session, and the task that was opened for it. Safe to repeat."""
        with anyio.CancelScope(shield=True):
            self._interrupt()
            async with self._lock:
                await anyio.to_thread.run_sync(self._close, reason)

    async def watch(self) -> None:
        """End the session when its task's time is up; a task that was renewed lives on."""
        if self._expires_at is None or self._ended or datetime.now(UTC) < self._expires_at:
            return
        if self._door.own_task or not await anyio.to_thread.run_sync(self._renewed):
            await self.close("its time was up")

    # In a worker thread -----------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[GuardedConnection], T]) -> T:
        db = self._ready()
        try:
            return work(db)
        except psycopg.OperationalError as fault:
            if not db.closed:
                raise
            # PostgreSQL ended the session: because the task is over, or for another reason. The next call sees.
            self._drop()
            if self._over():
                raise self._end_error() from None
            raise DatabaseUnavailable(
                "the session was ended by PostgreSQL; nothing of this statement is known to be done",
                hint="look at the rows, then send it again; an idempotency key makes that safe",
            ) from fault

    def _ready(self) -> GuardedConnection:
        if self._ended:
            raise self._end_error()
        if self._db is not None and self._db.closed:
            self._drop()
        if self._db is None:
            self._db = self._open()
            self._db.load_as_text()
        return self._db

    def _open(self) -> GuardedConnection:
        if self._door.own_task:
            db = connect(self._door.dsn)
        else:
            db = connect(self._door.dsn, task=self._task or self._open_task())
        task = db.context.task
        if task is not None:
            self._task, self._expires_at = task.id, task.expires_at
        return db

    def _open_task(self) -> str:
        with connect_to(self._door.dsn) as conn:
            opened = tasks.open_task(
                conn,
                agent=self._door.agent,
                policy=str(self._door.policy),
                ttl=self._door.ttl,
                purpose=self._door.purpose,
                params=self._door.params,
                agent_version=self._client,
            )
        self._task, self._expires_at = opened.task.id, opened.task.expires_at
        return opened.task.id

    def _drop(self) -> None:
        if self._db is not None:
            with suppress(psycopg.Error, SqlguardError):
                self._db.close()
        self._db = None

    def _close(self, reason: str) -> None:
        self._ended = True
        self._drop()
        if self._task is not None and not self._door.own_task:
            try:
                with connect_to(self._door.dsn) as conn:
                    tasks.end_task(conn, self._task, reason)
            except (psycopg.Error, SqlguardError) as fault:
                _log.warning("task not ended, its time will", task=self._task, error=str(fault))

    def _found(self) -> Task | None:
        if self._task is None or self._door.own_task:
            return None
        with connect_to(self._door.dsn) as conn:
            return tasks.find_task(conn, self._task)

    def _renewed(self) -> bool:
        try:
            found = self._found()
        except (psycopg.Error, SqlguardError):
            return False
        if found is None or not found.alive(datetime.now(UTC)):
            return False
        self._expires_at = found.expires_at
        return True

    def _over(self) -> bool:
        """Say whether the task has ended, which ends the session for good."""
        try:
            if self._door.own_task:
                connect(self._door.dsn).close()
                return False
            found = self._found()
        except (psycopg.Error, SqlguardError):
            # A task's own login that works no more is the sign that it is over.
            self._ended = self._door.own_task
            return self._ended
        self._ended = found is None or not found.alive(datetime.now(UTC))
        return self._ended

    def _end_error(self) -> TaskEnded:
        return TaskEnded(
            f"task `{self._task}` has ended",
            hint="what it did stays; ask for a new task, or start a new MCP session",
        )

    # Threads ----------------------------------------------------------------------------------------------------

    async def _in_thread(self, job: Callable[[], T]) -> T:
        done = threading.Event()

        def run() -> T:
            try:
                return job()
            finally:
                done.set()

        try:
            return await anyio.to_thread.run_sync(run, abandon_on_cancel=True, limiter=self._limiter)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._stop, done)
            raise

    def _stop(self, done: threading.Event) -> None:
        """Cancel until the thread is done: a cancel that comes before the statement has no effect."""
        while not done.is_set():
            self._interrupt()
            done.wait(_CANCEL_AGAIN_SECONDS)

    def _interrupt(self) -> None:
        if (db := self._db) is not None and self._lock.locked():
            with suppress(psycopg.Error):
                db.cancel()


class Sessions:
    """All sessions of this process."""

    def __init__(self, door: Door, most: int) -> None:
        self.door = door
        self._limiter = anyio.CapacityLimiter(most)
        self._open: set[Session] = set()

    def make(self, client: str | None) -> Session:
        session = Session(self.door, client, self._limiter)
        self._open.add(session)
        return session

    async def end(self, session: Session) -> None:
        self._open.discard(session)
        await session.close()

    async def watch(self) -> None:
        """End what is due, for as long as the server runs."""
        while True:
            await anyio.sleep(_WATCH_SECONDS)
            for session in list(self._open):
                try:
                    await session.watch()
                except Exception:  # one session's end must not keep the others alive
                    _log.exception("a session could not be ended")

    async def close(self) -> None:
        with anyio.CancelScope(shield=True):
            for session in list(self._open):
                await self.end(session)
