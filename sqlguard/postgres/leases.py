"""
Login roles of tasks: made in one transaction, ended in three steps that can each be repeated.

Theory of operation. A row in `sqlguard.lease` is committed before its role exists and stays until the role is
gone, so whatever is left by a crash can be found. Ending first takes the rights (`close_role`: membership
revoked; an open session's next statement fails), then terminates the sessions, takes the log-in (`bar_role`),
and then removes the role with what it has (`remove_role`: owned things are given to KEEPER, never dropped).
PostgreSQL 16 and later let a role with CREATEROLE manage the roles that it made, but not terminate their
sessions or take what they own; for that it makes itself a member, after the role has lost its rights, so
that no policy for agents ever applies to the operator.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg import sql

Connection = psycopg.Connection[Any]
#: Since this version a membership says whether it inherits and whether it allows SET ROLE.
_GRANT_OPTIONS = 160000
#: Milliseconds that a session may take to end.
_TERMINATION_PATIENCE = 3000
#: Milliseconds to wait for a role that no session of its own can be changing any more.
_LOCK_PATIENCE = 500
#: Gets what agents have made. It has no rights, and so has the code in it: autovacuum runs that of an index with those
#: of the table's owner, and no REVOKE keeps it from what a type brings along.
KEEPER = "sqlguard_kept"

_DEPENDENCIES = """
SELECT d.dbid = (SELECT oid FROM pg_database WHERE datname = current_database()) OR d.dbid = 0,
       coalesce(b.datname, ''), count(*)
FROM pg_shdepend d LEFT JOIN pg_database b ON b.oid = d.dbid
WHERE d.refclassid = 'pg_authid'::regclass AND d.refobjid = %s AND d.classid <> 'pg_auth_members'::regclass
GROUP BY 1, 2
"""
_OWNED = """
SELECT pg_describe_object(d.classid, d.objid, 0) FROM pg_shdepend d
WHERE d.refclassid = 'pg_authid'::regclass AND d.refobjid = %s AND d.deptype = 'o'
  AND d.dbid = (SELECT oid FROM pg_database WHERE datname = current_database())
"""

_WITH_OWNERS_RIGHTS = """
SELECT format('ALTER ROUTINE %%s SECURITY INVOKER', p.oid::regprocedure) FROM pg_proc p
WHERE p.proowner = %s AND p.prosecdef
UNION ALL
SELECT format('ALTER VIEW %%s SET (security_invoker = true)', c.oid::regclass) FROM pg_class c
WHERE c.relowner = %s AND c.relkind = 'v'
"""


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """What a lease's role is made with; `verifier` is its password as PostgreSQL keeps it."""

    role: str
    group: str
    verifier: str
    valid_until: datetime
    connections: int
    settings: tuple[tuple[str, tuple[str, ...]], ...]


def has_grant_options(conn: Connection) -> bool:
    """Say whether GRANT of a role takes WITH INHERIT and SET."""
    return conn.info.server_version >= _GRANT_OPTIONS


def create_role(conn: Connection, spec: RoleSpec) -> None:
    """Make the login role of a lease. Must be called within a transaction."""
    role, group = sql.Identifier(spec.role), sql.Identifier(spec.group)
    modern = has_grant_options(conn)
    create = sql.SQL(
        "CREATE ROLE {} LOGIN INHERIT NOCREATEDB NOCREATEROLE NOREPLICATION"
        " CONNECTION LIMIT {} PASSWORD {} VALID UNTIL {}"
    ).format(
        role, sql.Literal(spec.connections), sql.Literal(spec.verifier), sql.Literal(str(spec.valid_until))
    )
    parts = (
        [create, sql.SQL("GRANT {} TO {} WITH INHERIT TRUE, SET FALSE").format(group, role)]
        if modern
        else [create + sql.SQL(" IN ROLE {}").format(group)]
    )
    parts += [
        sql.SQL("ALTER ROLE {} SET {} TO {}").format(
            role, sql.Identifier(name), sql.SQL(", ").join(map(sql.Literal, values))
        )
        for name, values in spec.settings
    ]
    # One message: the round trips would cost more than the work.
    conn.execute(sql.SQL("; ").join(parts))


def switch_group(conn: Connection, role: str, new: str) -> list[sql.Composed]:
    """Return what gives *role* the rights of *new* and no others, felt by open sessions at once."""
    options = " WITH INHERIT TRUE, SET FALSE" if has_grant_options(conn) else ""
    grant = sql.SQL("GRANT {} TO {}" + options).format(sql.Identifier(new), sql.Identifier(role))
    return [*_revocations(conn, role), grant]


def extend_role(conn: Connection, role: str, valid_until: datetime) -> None:
    conn.execute(
        sql.SQL("ALTER ROLE {} VALID UNTIL {}").format(sql.Identifier(role), sql.Literal(str(valid_until)))
    )


def role_oid(conn: Connection, role: str) -> int | None:
    row = conn.execute("SELECT oid::bigint FROM pg_roles WHERE rolname = %s", [role]).fetchone()
    return None if row is None else int(row[0])


def close_role(conn: Connection, role: str) -> list[str]:
    """
    Take all rights of *role*; nothing happens when it is gone. Within a transaction.

    Its log-in is `bar_role`'s, once its sessions have ended: one of them may have changed its own role, and hold
    that lock for as long as it likes. Goes on past what it may not do, and returns it.
    """
    if role_oid(conn, role) is None:
        return []
    parts = _revocations(conn, role)
    if not parts:
        return []
    try:
        with conn.transaction():
            conn.execute(sql.SQL("; ").join(parts))
    except psycopg.Error:
        return [problem for text in parts if (problem := _attempt(conn, role, text)) is not None]
    return []


def bar_role(conn: Connection, role: str) -> list[str]:
    """
    Take the log-in of *role*; nothing happens when it is gone. Within a transaction.

    Waits no longer than a moment: a transaction that the role has prepared holds its lock without a session.
    """
    if role_oid(conn, role) is None:
        return []
    conn.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(f"{_LOCK_PATIENCE}ms")))
    problem = _attempt(conn, role, sql.SQL("ALTER ROLE {} NOLOGIN").format(sql.Identifier(role)))
    return [] if problem is None else [problem]


def _revocations(conn: Connection, role: str) -> list[sql.Composed]:
    """Since 16 a REVOKE takes back what one grantor gave, and only warns about the others."""
    rows = conn.execute(
        "SELECT m.roleid::regrole::text, m.grantor::regrole::text FROM pg_auth_members m"
        " JOIN pg_roles r ON r.oid = m.member WHERE r.rolname = %s",
        [role],
    ).fetchall()
    by = has_grant_options(conn)
    # regrole prints names as SQL writes them.
    return [
        sql.SQL("REVOKE {} FROM {}{}").format(
            sql.SQL(group), sql.Identifier(role), sql.SQL(f" GRANTED BY {grantor}" if by else "")
        )
        for group, grantor in rows
    ]


def _attempt(conn: Connection, role: str, text: sql.Composed) -> str | None:
    try:
        with conn.transaction():
            conn.execute(text)
    except psycopg.Error as fault:
        return said(role, fault)
    return None


def said(role: str, fault: psycopg.Error) -> str:
    return f"`{role}`: {fault.diag.message_primary or str(fault).strip()}"


def terminate_sessions(conn: Connection, role: str, oid: int) -> list[str]:
    """End every session of the role in whatever database; return what could not be ended."""
    if not _sessions(conn, oid):
        return []
    become_member(conn, role)
    # All are told first: waiting for one takes the server a tenth of a second.
    for patience in (0, _TERMINATION_PATIENCE):
        conn.execute(
            "SELECT pg_terminate_backend(pid, %s) FROM pg_stat_activity WHERE usesysid = %s", [patience, oid]
        )
    return [f"session {pid} of `{role}` has not ended" for pid in _sessions(conn, oid)]


def _sessions(conn: Connection, oid: int) -> list[int]:
    rows = conn.execute("SELECT pid FROM pg_stat_activity WHERE usesysid = %s", [oid]).fetchall()
    return [pid for (pid,) in rows]


@dataclass(frozen=True, slots=True)
class Removal:
    """`problems`: why the role is still there, empty when it is gone; `kept`: what it owned, now KEEPER's."""

    problems: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def remove_role(conn: Connection, role: str, oid: int) -> Removal:
    """Drop *role*, giving what it owns in this database to KEEPER. Must be called within a transaction."""
    kept: tuple[str, ...] = ()
    dependencies = conn.execute(_DEPENDENCIES, [oid]).fetchall()
    if any(here for here, _, _ in dependencies):
        become_member(conn, role)
        kept = tuple(row[0] for row in conn.execute(_OWNED, [oid]).fetchall())
        if kept and (problem := _give_away(conn, role, oid)) is not None:
            return Removal((problem,))
        # Before REASSIGN OWNED it would delete the agent's tables; after it only grants are left.
        conn.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(role)))
    elsewhere = tuple(_elsewhere(role, dependencies))
    prepared = tuple(_prepared(conn, role))
    if elsewhere or prepared:
        return Removal(elsewhere + prepared, kept)
    conn.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))
    return Removal(kept=kept)


def _give_away(conn: Connection, role: str, oid: int) -> str | None:
    """Give what *role* owns in this database to KEEPER; return why that was not possible."""
    try:
        with conn.transaction():
            become_member(conn, KEEPER)
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.UndefinedObject) as fault:
        return (
            f"{said(role, fault)}: what it made is `{KEEPER}`'s to keep, so let an administrator run"
            f' GRANT {KEEPER} TO "{conn.info.user}"'
        )
    _disarm(conn, oid)
    conn.execute(sql.SQL("REASSIGN OWNED BY {} TO {}").format(sql.Identifier(role), sql.Identifier(KEEPER)))
    return None


def _disarm(conn: Connection, oid: int) -> None:
    """Let code that the role owns run with the rights of who calls it, not with those of its next owner."""
    for (text,) in conn.execute(_WITH_OWNERS_RIGHTS, [oid, oid]).fetchall():
        conn.execute(sql.SQL(text))


def hand_over(conn: Connection, group: str) -> list[str]:
    """
    Give what *group* owns in this database to KEEPER; return why that was not possible. In a transaction.

    Before PostgreSQL 16 a member may become its group, and what it makes then would stay behind the task's end.
    """
    oid = role_oid(conn, group)
    if oid is None:
        return []
    become_member(conn, group)
    problem = _give_away(conn, group, oid)
    conn.execute(sql.SQL("REVOKE {} FROM CURRENT_USER").format(sql.Identifier(group)))
    return [] if problem is None else [problem]


def _elsewhere(role: str, dependencies: Iterable[tuple[bool, str, int]]) -> Iterable[str]:
    for here, database, number in dependencies:
        if not here:
            yield (
                f"`{role}` has {number} objects or rights in database `{database}`: run there"
                f' REASSIGN OWNED BY "{role}" TO CURRENT_USER; DROP OWNED BY "{role}"'
            )


def _prepared(conn: Connection, role: str) -> Iterable[str]:
    """A prepared transaction outlives its session and could still be committed."""
    for gid, database in conn.execute(
        "SELECT gid, database FROM pg_prepared_xacts WHERE owner = %s", [role]
    ).fetchall():
        yield f"`{role}` left the prepared transaction `{gid}`: run ROLLBACK PREPARED in database `{database}`"


def become_member(conn: Connection, role: str) -> None:
    """Take the rights of *role*, if the operator does not have them."""
    row = conn.execute("SELECT pg_has_role(%s, 'USAGE')", [role]).fetchone()
    if row == (True,):
        return
    options = " WITH INHERIT TRUE" if has_grant_options(conn) else ""
    grant = sql.SQL("GRANT {} TO CURRENT_USER" + options).format(sql.Identifier(role))
    try:
        conn.execute(grant)
    except psycopg.errors.InternalError_:
        # `tuple concurrently updated`: another one is at the same, and may have done it.
        conn.execute(grant)
