"""
A replica of the guarded database: whether it is one, and how far it has got.

How far is told by positions in the write-ahead log. Every now and then the primary is asked where its log ends, and the
time is noted before it is asked; as soon as the replica has replayed up to there, it has all that had been committed at
that time. So nothing has to be written to measure an idle primary, and no clock but this process's counts.
"""

import threading
from collections import deque
from time import monotonic
from typing import Any

import psycopg
import structlog
from psycopg.conninfo import make_conninfo

from sqlguard.errors import NotConfigured, SqlguardError
from sqlguard.postgres.connect import connect, parsed

log = structlog.get_logger()
#: Seconds between looks while somebody reads at the replica, while nobody does, and after one that failed.
_BUSY, _IDLE, _AGAIN = 0.05, 1.0, 0.5
#: Seconds that the end waits for a look that is under way.
_LEAVE = 2.0
#: Somebody does, if it was asked for within so many seconds.
_LATELY = 2.0
#: Marks that are kept; of more, every second one goes.
_MARKS = 1024
#: How long a server may say nothing, unless the connection string says otherwise.
_PATIENCE = {
    "connect_timeout": "5",
    "tcp_user_timeout": "5000",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
}
_WHO = "SELECT system_identifier, pg_catalog.pg_is_in_recovery() FROM pg_catalog.pg_control_system()"
_ENDS = """
    SELECT pg_catalog.pg_wal_lsn_diff(pg_catalog.pg_current_wal_flush_lsn(), '0/0')::pg_catalog.int8,
           pg_catalog.pg_wal_lsn_diff(pg_catalog.pg_current_wal_insert_lsn(), '0/0')::pg_catalog.int8,
           pg_catalog.current_setting('wal_block_size')::pg_catalog.int8,
           (SELECT timeline_id FROM pg_catalog.pg_control_checkpoint())
"""
_REPLAYED = """
    SELECT pg_catalog.pg_is_in_recovery(),
           pg_catalog.pg_wal_lsn_diff(pg_catalog.pg_last_wal_replay_lsn(), '0/0')::pg_catalog.int8,
           (SELECT timeline_id FROM pg_catalog.pg_control_checkpoint())
"""
#: Bytes at the beginning of a page and of a segment: where the next record would be put, no record has ended.
_PAGE_HEADERS = (24, 40)


def check_replica(primary: psycopg.Connection[Any], dsn: str) -> None:
    """Raises NotConfigured, DatabaseUnavailable when *dsn* is not a replica of *primary* that can be read at."""
    with connect(_bounded(dsn), alone=True) as conn:
        _check(primary, conn)


def _check(primary: psycopg.Connection[Any], replica: psycopg.Connection[Any]) -> None:
    ours, theirs = (conn.execute(_WHO).fetchone() or (None, False) for conn in (primary, replica))
    if ours[0] != theirs[0]:
        raise NotConfigured(
            "the replica is not one of this database's server: its system identifier is another one",
            hint="give --replica a streaming standby of the server in --dsn",
        )
    if not theirs[1]:
        raise NotConfigured(
            "the replica is not in recovery: it takes writes of its own",
            hint="give --replica a streaming standby; after a fail-over, of the new primary",
        )
    if primary.info.dbname != replica.info.dbname:
        raise NotConfigured(
            f"the replica's connection is to the database `{replica.info.dbname}`",
            hint=f"give --replica the database `{primary.info.dbname}`",
        )
    if replica.execute("SELECT pg_catalog.to_regclass('sqlguard.task')").fetchone() == (None,):
        raise NotConfigured(
            "the replica has no schema `sqlguard` yet", hint="wait until it has caught up with the primary"
        )


def _bounded(dsn: str) -> str:
    """Return *dsn* so that a server that says nothing is noticed soon."""
    given = parsed(dsn)
    return make_conninfo(dsn, **{name: value for name, value in _PATIENCE.items() if name not in given})


class Marks:
    """Times and where the log ended then; `as_of` is the newest time whose end has been reached."""

    def __init__(self) -> None:
        self.as_of = float("-inf")
        self._marks: deque[tuple[float, int]] = deque()

    def mark(self, at: float, end: int) -> None:
        self._marks.append((at, end))
        if len(self._marks) > _MARKS:
            self._marks = deque(list(self._marks)[::2])

    def reached(self, end: int) -> None:
        while self._marks and self._marks[0][1] <= end:
            self.as_of = self._marks.popleft()[0]


class Follower:
    """
    Watches a replica from a thread of its own.

    `settled` says up to when the replica has all that was committed on disk, `acknowledged` up to when it has also what
    was acknowledged without waiting for the disk (`synchronous_commit = off`); both by `time.monotonic`.
    """

    def __init__(self, primary: str, replica: str, max_lag: float) -> None:
        self._dsns = primary, _bounded(replica)
        self._busy, self._idle = min(_BUSY, max_lag / 4), min(_IDLE, max_lag / 2)
        self.settled, self.acknowledged = Marks(), Marks()
        #: It answers as a replica of this primary.
        self.is_there = False
        self.answered_at = float("-inf")
        #: When somebody wanted to read there.
        self.wanted_at = float("-inf")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sqlguard-replica", daemon=True)
        self._problem: str | None = None
        self._connections: list[psycopg.Connection[Any]] = []

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Safe to repeat; a look that is under way is waited for a moment only."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_LEAVE)

    def _run(self) -> None:
        while True:
            wait = self._busy if monotonic() - self.wanted_at < _LATELY else self._idle
            try:
                self._look()
            except (psycopg.Error, SqlguardError) as fault:
                self._failed(str(fault).strip())
                wait = _AGAIN
            if self._stopped.wait(wait):
                break
        self._close()

    def _look(self) -> None:
        if not self._connections:
            for dsn in self._dsns:
                self._connections.append(connect(dsn, alone=True))
            _check(*self._connections)
        primary, replica = self._connections
        at = monotonic()
        flushed, inserted, block, ours = _row(primary, _ENDS)
        if inserted % block in _PAGE_HEADERS:
            inserted -= inserted % block
        self.settled.mark(at, flushed)
        self.acknowledged.mark(at, inserted)
        in_recovery, replayed, theirs = _row(replica, _REPLAYED)
        if not in_recovery:
            raise NotConfigured("the replica is not in recovery any more")
        if ours != theirs:
            # Positions on different timelines can't be compared.
            raise NotConfigured(
                "the replica has no checkpoint yet of the timeline that the primary is on",
                hint="let it follow the new primary; it is read at again after its next restartpoint",
            )
        if replayed is not None:
            self.settled.reached(replayed)
            self.acknowledged.reached(replayed)
        self.answered_at = monotonic()
        if not self.is_there:
            self.is_there, self._problem = True, None
            log.info("reading at the replica")

    def _failed(self, problem: str) -> None:
        self.is_there = False
        self._close()
        if problem != self._problem:
            self._problem = problem
            log.warning("not reading at the replica", error=problem)

    def _close(self) -> None:
        while self._connections:
            self._connections.pop().close()


def _row(conn: psycopg.Connection[Any], question: str) -> tuple[Any, ...]:
    row: tuple[Any, ...] | None = conn.execute(question.encode()).fetchone()
    assert row is not None  # noqa: S101 (a SELECT without FROM has a row)
    return row
