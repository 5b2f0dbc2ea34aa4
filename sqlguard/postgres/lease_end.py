"""End one lease step by step, each of which may have been done before; see `leases` for why in this order."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg

from sqlguard.lease import RETRY_AFTER
from sqlguard.postgres import leases, prepared

Connection = psycopg.Connection[Any]
#: A door that is still open is tried at once.
_AT_ONCE = timedelta()


@dataclass(frozen=True, slots=True)
class LeaseEnd:
    """`closed`: the role has no rights and no sessions, whether or not it could be removed."""

    closed: bool
    problems: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def end(conn: Connection, role: str) -> LeaseEnd:
    """
    End the lease *role*. Safe to repeat, and for two at the same time; what failed is kept in its `problem`.

    Must be given a connection in autocommit: each step is committed before the next.
    """
    try:
        problems = _close(conn, role)
    except psycopg.Error as fault:
        return _noted(conn, role, LeaseEnd(closed=False, problems=(leases.said(role, fault),)))
    if problems is None:
        return LeaseEnd(closed=True)
    try:
        removal = _remove(conn, role)
    except psycopg.Error as fault:
        problem = leases.said(role, fault)
        return _noted(conn, role, LeaseEnd(closed=not problems, problems=(*problems, problem)))
    # A role that is gone has no rights, whatever could not be revoked before.
    closed = removal.gone or not problems
    found = LeaseEnd(closed, (() if removal.gone else problems) + removal.problems, removal.kept)
    return _noted(conn, role, found) if found.problems else found


def _close(conn: Connection, role: str) -> tuple[str, ...] | None:
    """Return what could not be done, None when the lease has ended already."""
    with conn.transaction():
        if not _lock(conn, role):
            return None
        conn.execute("UPDATE sqlguard.lease SET state = 'ending' WHERE role = %s", [role])
        problems = leases.close_role(conn, role)
    return (*problems, *shut_out(conn, role))


def shut_out(conn: Connection, role: str) -> list[str]:
    """End the sessions of a role and let it make no other; return what could not be done."""
    oid = leases.role_oid(conn, role)
    if oid is None:
        return []
    problems = leases.terminate_sessions(conn, role, oid)
    # Before anything that could wait for the locks that they hold.
    problems += prepared.roll_back(conn, role)
    with conn.transaction():
        # One at a time: PostgreSQL does not wait for who changes the same role, it fails.
        conn.execute("SELECT FROM sqlguard.lease WHERE role = %s FOR UPDATE", [role])
        if leases.role_oid(conn, role) is None:
            return problems
        problems += leases.bar_role(conn, role)
    # Who has come in meanwhile, and what they have left.
    problems += leases.terminate_sessions(conn, role, oid)
    return problems + prepared.roll_back(conn, role)


@dataclass(frozen=True, slots=True)
class _Removed:
    gone: bool
    problems: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def _remove(conn: Connection, role: str) -> _Removed:
    with conn.transaction():
        if not _lock(conn, role):
            return _Removed(gone=True)
        oid = leases.role_oid(conn, role)
        removal = leases.remove_role(conn, role, oid) if oid is not None else leases.Removal()
        if removal.problems:
            return _Removed(gone=False, problems=removal.problems, kept=removal.kept)
        conn.execute(
            "UPDATE sqlguard.lease SET state = 'ended', ended_at = clock_timestamp(), verifier = NULL,"
            " problem = NULL, retry_at = NULL WHERE role = %s",
            [role],
        )
    return _Removed(gone=True, kept=removal.kept)


def _lock(conn: Connection, role: str) -> bool:
    """Keep a second one who ends this lease waiting; false when it has ended."""
    row = conn.execute("SELECT state FROM sqlguard.lease WHERE role = %s FOR UPDATE", [role]).fetchone()
    return row is not None and row[0] != "ended"


def _noted(conn: Connection, role: str, found: LeaseEnd) -> LeaseEnd:
    conn.execute(
        "UPDATE sqlguard.lease SET problem = %s, retry_at = clock_timestamp() + %s WHERE role = %s",
        ["\n".join(found.problems), RETRY_AFTER if found.closed else _AT_ONCE, role],
    )
    return found
