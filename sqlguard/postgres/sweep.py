"""
One pass of the janitor: end what is due, finish what a crash left, find what does not belong.

The one idea: all that is to be done is read from the tables and the role catalog, never remembered; so a
janitor may be killed at any moment, and the next pass of any other does the rest.

What is due comes first, and again whenever the other checks have taken a moment: they may be slow on a busy
server, and the end of a task must not wait for them.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import psycopg

from sqlguard.errors import SqlguardError
from sqlguard.lease import OPENING_PATIENCE, ROLE_PREFIX
from sqlguard.postgres import lease_end, leases, lock_room, prepared
from sqlguard.postgres.connect import OWN_LOCKS
from sqlguard.postgres.tasks import end_task

Connection = psycopg.Connection[Any]
#: The two halves of the advisory lock that one janitor per database holds.
LOCK = (OWN_LOCKS, 2)

#: A task that is over, or whose opening stopped half way, or whose end did.
_DUE_TASKS = """
SELECT t.id, CASE WHEN t.state = 'opening' THEN 'was never opened' ELSE 'expired' END
FROM sqlguard.task t
WHERE t.state <> 'ended'
  AND (t.expires_at <= %(now)s OR t.state = 'ending' OR (t.state = 'opening' AND t.opened_at <= %(lost)s))
  AND NOT EXISTS (SELECT FROM sqlguard.lease l WHERE l.task_id = t.id AND l.retry_at > %(now)s)
ORDER BY t.expires_at, t.id
"""
#: A lease of a task that goes on, or one that could not be removed when its task ended.
_DUE_LEASES = """
SELECT l.role::text
FROM sqlguard.lease l JOIN sqlguard.task t ON t.id = l.task_id
WHERE l.state <> 'ended'
  AND (l.state = 'ending' OR t.state = 'ended' OR l.expires_at <= %(now)s
       OR (l.state = 'creating' AND l.created_at <= %(lost)s))
  AND coalesce(l.retry_at <= %(now)s, true)
ORDER BY l.expires_at, l.role
"""
#: A session can change its own role's settings and password. The password is only for superusers to see.
_CHANGED_SETTINGS = """
SELECT DISTINCT l.task_id, l.role::text, 'its settings were changed by itself'
FROM sqlguard.lease l JOIN pg_roles r ON r.rolname = l.role
LEFT JOIN pg_db_role_setting s ON s.setrole = r.oid
WHERE l.state = 'live' AND (coalesce(s.setdatabase, 0) <> 0 OR s.setconfig IS DISTINCT FROM l.settings)
"""
_CHANGED_VERIFIER = """
SELECT l.task_id, l.role::text, 'its password was changed by itself'
FROM sqlguard.lease l JOIN pg_authid r ON r.rolname = l.role
WHERE l.state = 'live' AND r.rolpassword IS DISTINCT FROM coalesce(l.verifier, r.rolpassword)
"""
#: Advisory locks are anyone's to take, and with one of ours a task could keep its own end waiting, and every undo.
_SQUATTERS = """
SELECT DISTINCT l.task_id, l.role::text, 'it holds a lock of the operator''s'
FROM pg_locks k JOIN pg_stat_activity a ON a.pid = k.pid JOIN sqlguard.lease l ON l.role = a.usename
WHERE k.locktype = 'advisory' AND k.objsubid = 2 AND k.classid::bigint = %s
  AND k.database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND l.state <> 'ended'
UNION
SELECT l.task_id, l.role::text, 'it left a prepared transaction, whose locks need no session'
FROM pg_prepared_xacts x JOIN sqlguard.lease l ON l.role = x.owner
WHERE l.state <> 'ended'
"""
#: A session may set its own time-outs to nothing. So whoever is no task's session waits for one no longer than its
#: policy lets a statement run or a transaction idle; and for a lock on a whole table, which no write needs, a moment.
_BLOCKERS = """
SELECT DISTINCT l.task_id, l.role::text, 'it kept others waiting for its locks'
FROM pg_locks w CROSS JOIN LATERAL unnest(pg_blocking_pids(w.pid)) b (pid)
JOIN pg_stat_activity a ON a.pid = b.pid JOIN sqlguard.lease l ON l.role = a.usename
WHERE NOT w.granted AND w.waitstart < clock_timestamp() - interval '1 second' AND l.state <> 'ended'
  AND NOT EXISTS (SELECT FROM pg_stat_activity o JOIN sqlguard.lease x ON x.role = o.usename WHERE o.pid = w.pid)
  AND w.waitstart < clock_timestamp() - CASE WHEN EXISTS (
      SELECT FROM pg_locks k
      WHERE k.pid = b.pid AND k.locktype = 'relation' AND k.database = w.database AND k.relation = w.relation
        AND k.mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock'))
    THEN interval '2 seconds'
    ELSE (SELECT max(split_part(s, '=', 2)::interval) FROM unnest(l.settings) s
          WHERE s ~ '^(statement|idle_in_transaction_session)_timeout=') END
"""
#: When the next one is due, as seconds from now; what is due already is for the pass that is going on.
_NEXT_DUE = """
SELECT extract(epoch FROM least(
    (SELECT min(t.expires_at) FROM sqlguard.task t WHERE t.state <> 'ended' AND t.expires_at > c.now),
    (SELECT min(l.expires_at) FROM sqlguard.lease l WHERE l.state <> 'ended' AND l.expires_at > c.now)) - c.now)::float8
FROM (SELECT clock_timestamp() AS now) c
"""
_MAY_SEE_PASSWORDS = "SELECT has_column_privilege('pg_authid', 'rolpassword', 'SELECT')"
#: Seconds after which a pass looks again for what is due.
_LOOK_AGAIN = 0.2
#: Written down by proxies for `sqlguard doctor`.
_GONE_SESSIONS = """
DELETE FROM sqlguard.door_session d
WHERE d.joined_at < clock_timestamp() - interval '1 minute'
  AND NOT EXISTS (SELECT FROM pg_stat_activity a WHERE a.pid = d.pid)
"""
#: Counts of tasks that are over; one that a session still keeps locked is removed the next time.
_GONE_RATES = """
DELETE FROM sqlguard.statement_rate r
WHERE r.task_id IN (
    SELECT s.task_id FROM sqlguard.statement_rate s
    WHERE NOT EXISTS (SELECT FROM sqlguard.task t WHERE t.id = s.task_id AND t.state <> 'ended')
    FOR UPDATE OF s SKIP LOCKED)
"""
#: Ours beyond doubt: named like a lease and let into a group of this database by who may do that.
_ORPHANS = """
SELECT r.rolname::text
FROM pg_roles r
WHERE r.rolname LIKE %(prefix)s
  AND EXISTS (SELECT FROM pg_auth_members m JOIN pg_roles g ON g.oid = m.roleid
              JOIN sqlguard.policy p ON p.group_role = g.rolname WHERE m.member = r.oid)
  AND NOT EXISTS (SELECT FROM sqlguard.lease l WHERE l.role = r.rolname AND l.state <> 'ended')
"""
#: Groups own nothing, unless a member has become one (possible before PostgreSQL 16) and made something. Default rights
#: are of no use to who makes nothing, and can't be given away.
_OWNING_GROUPS = """
SELECT DISTINCT g.rolname::text FROM pg_shdepend d JOIN pg_roles g ON g.oid = d.refobjid
WHERE d.refclassid = 'pg_authid'::regclass AND d.deptype = 'o' AND d.classid <> 'pg_default_acl'::regclass
  AND d.dbid = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND (g.rolname = 'sqlguard_agent' OR EXISTS (SELECT FROM sqlguard.policy p WHERE p.group_role = g.rolname))
"""


#: A partition of the row changes is a week; retention drops whole ones.
_HOUSEWORK = (
    "SELECT sqlguard.add_up_spent()",
    _GONE_SESSIONS,
    _GONE_RATES,
    "SELECT sqlguard.begin_period('7 days')",
)


@dataclass(frozen=True, slots=True)
class SweepReport:
    """`ended`: tasks; `leases`: single ones; `changed`: tasks that were ended for what they did, early."""

    busy: bool = False
    ended: tuple[str, ...] = ()
    leases: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def idle(self) -> bool:
        return not (self.ended or self.leases or self.changed or self.orphans or self.problems)


@dataclass
class _Pass:
    """What was done, and whether this janitor is the one at work (`mine`)."""

    ended: list[str] = field(default_factory=list)
    leases: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    mine: bool = False
    looked_at: float | None = None

    def report(self, *, busy: bool = False) -> SweepReport:
        return SweepReport(
            busy=busy,
            ended=tuple(self.ended),
            leases=tuple(self.leases),
            changed=tuple(self.changed),
            orphans=tuple(self.orphans),
            problems=tuple(dict.fromkeys(self.problems)),
        )


def sweep(conn: Connection, now: datetime) -> SweepReport:
    """
    Do all that is due at *now*, the database's own time. One at a time per database: `busy` when another is at it.

    Must be given a connection of the operator in autocommit. What fails is reported, and the rest goes on.
    """
    done = _Pass()
    began = time.monotonic()

    def end_due() -> None:
        since = time.monotonic()
        if done.mine and (done.looked_at is None or since - done.looked_at >= _LOOK_AGAIN):
            _end_due(conn, now + timedelta(seconds=since - began), done)
            done.looked_at = time.monotonic()

    try:
        done.mine = _take_turn(conn)
        # Before the turn is given up: whoever keeps others waiting may be what the one at work waits for.
        for look in (_end_squatters, _end_blockers, _end_many_locks):
            end_due()
            look(conn, done)
        done.mine = done.mine or _take_turn(conn)
        if not done.mine:
            return done.report(busy=True)
        for check in (_end_changed_roles, _drop_orphans, _hand_over, *map(_housework, _HOUSEWORK)):
            end_due()
            check(conn, done)
        end_due()
    finally:
        if done.mine and not conn.closed:
            conn.execute("SELECT pg_advisory_unlock(%s, %s)", LOCK)
    return done.report()


def next_due(conn: Connection) -> float | None:
    """Return in how many seconds the next task or lease expires; None when none is open."""
    row = conn.execute(_NEXT_DUE).fetchone()
    assert row is not None  # noqa: S101 (its FROM is one row)
    found: float | None = row[0]
    return found


def make_room(conn: Connection) -> SweepReport:
    """End the tasks that have filled the lock table; for a session that has given back what it kept for this."""
    done = _Pass()
    _end_lockers(conn, done, in_need=True)
    return done.report()


def _take_turn(conn: Connection) -> bool:
    return conn.execute("SELECT pg_try_advisory_lock(%s, %s)", LOCK).fetchone() == (True,)


def _housework(statement: str) -> Callable[[Connection, _Pass], None]:
    """What can be done in any other pass as well waits for no lock: it is tried again at the next one."""

    def work(conn: Connection, done: _Pass) -> None:
        try:
            with conn.transaction():
                conn.execute("SELECT set_config('lock_timeout', '200ms', true)")
                conn.execute(statement.encode())
        except psycopg.errors.LockNotAvailable as fault:
            done.problems.append(str(fault).strip())

    return work


def _end_squatters(conn: Connection, done: _Pass) -> None:
    _end_changed(conn, done, conn.execute(_SQUATTERS, LOCK[:1]).fetchall())


def _end_blockers(conn: Connection, done: _Pass) -> None:
    _end_changed(conn, done, conn.execute(_BLOCKERS).fetchall())


def _end_many_locks(conn: Connection, done: _Pass) -> None:
    _end_lockers(conn, done, in_need=False)


def _end_changed_roles(conn: Connection, done: _Pass) -> None:
    _end_changed(conn, done, _changed(conn))


def _end_lockers(conn: Connection, done: _Pass, *, in_need: bool) -> None:
    found = conn.execute(lock_room.LOCKERS, {"in_need": in_need, "many": lock_room.MANY})
    _end_changed(conn, done, found.fetchall())


def _end_due(conn: Connection, now: datetime, done: _Pass) -> None:
    due = {"now": now, "lost": now - OPENING_PATIENCE}
    for task, reason in conn.execute(_DUE_TASKS, due).fetchall():
        if _end(conn, task, reason, done):
            done.ended.append(task)
    for (role,) in conn.execute(_DUE_LEASES, due).fetchall():
        found = lease_end.end(conn, role)
        done.problems += found.problems
        if not found.problems:
            done.leases.append(role)


def _end_changed(conn: Connection, done: _Pass, found: Iterable[tuple[str, str, str]]) -> None:
    """Someone who holds a task's credential meant to keep it: the task ends, with all its leases."""
    for task, role, what in found:
        if task not in done.changed and _end(conn, task, f"`{role}`: {what}", done):
            done.changed.append(task)


def _changed(conn: Connection) -> Iterator[tuple[str, str, str]]:
    yield from conn.execute(_CHANGED_SETTINGS).fetchall()
    if conn.execute(_MAY_SEE_PASSWORDS).fetchone() == (True,):
        yield from conn.execute(_CHANGED_VERIFIER).fetchall()


def _end(conn: Connection, task: str, reason: str, done: _Pass) -> bool:
    try:
        report = end_task(conn, task, reason)
    except (SqlguardError, psycopg.Error) as fault:
        if conn.closed:
            raise
        done.problems.append(f"task `{task}`: {str(fault).strip()}")
        return False
    done.problems += report.problems
    return report.ended


def _drop_orphans(conn: Connection, done: _Pass) -> None:
    """A role whose lease is not known any more, after a restored backup for one."""
    for (role,) in conn.execute(_ORPHANS, {"prefix": ROLE_PREFIX.replace("_", r"\_") + "%"}).fetchall():
        try:
            done.problems += _drop(conn, role)
        except psycopg.Error as fault:
            if conn.closed:
                raise
            done.problems.append(leases.said(role, fault))
        else:
            done.orphans.append(role)


def _hand_over(conn: Connection, done: _Pass) -> None:
    if leases.has_grant_options(conn):
        return
    done.problems += prepared.roll_back_of_groups(conn)
    for (group,) in conn.execute(_OWNING_GROUPS).fetchall():
        try:
            with conn.transaction():
                done.problems += leases.hand_over(conn, group)
        except psycopg.Error as fault:
            if conn.closed:
                raise
            done.problems.append(leases.said(group, fault))


def _drop(conn: Connection, role: str) -> list[str]:
    """Close, terminate, remove: as for a lease, without a row to note it in."""
    with conn.transaction():
        problems = leases.close_role(conn, role)
    problems += lease_end.shut_out(conn, role)
    oid = leases.role_oid(conn, role)
    if oid is None:
        return problems
    with conn.transaction():
        return problems + list(leases.remove_role(conn, role, oid).problems)
