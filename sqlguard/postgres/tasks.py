"""
Open, renew, list and end tasks.

Must be given a connection of the operator that is in no transaction: every step commits before the next one
begins, which is what lets the janitor finish after a crash.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from sqlguard import lease as leases_model
from sqlguard.errors import NotConfigured, PolicyError, TaskEnded
from sqlguard.policy import Policy, policy_from_document
from sqlguard.postgres import lease_end, leases
from sqlguard.postgres.connect import OWN_LOCKS
from sqlguard.postgres.control import not_migrated
from sqlguard.task import Task
from sqlguard.wire.scram import Verifier

Connection = psycopg.Connection[Any]
#: The two halves of the advisory lock that keeps a policy's group alive between reading its name and using it.
POLICY_LOCK = (OWN_LOCKS, 3)
DEFAULT_TTL = timedelta(seconds=300)
_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_ID_LENGTH = 16
_SUFFIX_LENGTH = 6
_SALT_BYTES = 16

_COLUMNS = """SELECT id, agent, policy, policy_version, expires_at, state, agent_version, purpose, params,
    opened_at, ended_at, end_reason, plan_only FROM sqlguard.task"""
_TASK = f"{_COLUMNS} WHERE id = %s"
_TASKS = f"{_COLUMNS} ORDER BY opened_at DESC, id"
_LIVING = f"{_COLUMNS} WHERE state <> 'ended' ORDER BY opened_at DESC, id"
_POLICY = """
SELECT version, document, group_role, clock_timestamp(),
       ARRAY(SELECT DISTINCT ARRAY[k.key, k.value] FROM sqlguard.policy_table t, jsonb_each_text(t.scope_params) k
             WHERE t.policy = p.name AND t.version = p.version)
FROM sqlguard.policy p WHERE name = %s ORDER BY version DESC LIMIT 1
"""
_OPEN = """
WITH made AS (
    INSERT INTO sqlguard.task (id, agent, agent_version, policy, policy_version, purpose, params, opened_at,
                               expires_at, max_expires_at, plan_only)
    VALUES (%(id)s, %(agent)s, %(agent_version)s, %(policy)s, %(version)s, %(purpose)s, %(params)s, %(now)s,
            %(expires_at)s, %(latest)s, %(plan_only)s)
    RETURNING id)
INSERT INTO sqlguard.lease (role, task_id, group_role, verifier, expires_at, kind)
SELECT %(role)s, id, %(group)s, %(verifier)s, %(expires_at)s, 'task' FROM made
"""
_ADD = """
INSERT INTO sqlguard.lease (role, task_id, group_role, verifier, expires_at, kind)
SELECT %(role)s, t.id, p.group_role, %(verifier)s, t.expires_at, %(kind)s
FROM sqlguard.task t JOIN sqlguard.policy p ON p.name = t.policy AND p.version = t.policy_version
WHERE t.id = %(task)s AND t.state = 'open' AND t.expires_at > clock_timestamp()
RETURNING group_role::text, expires_at, (
    SELECT p.document FROM sqlguard.policy p JOIN sqlguard.task t ON p.name = t.policy AND p.version = t.policy_version
    WHERE t.id = task_id)
"""
_ABANDON = """
WITH lease AS (
    UPDATE sqlguard.lease SET state = 'ended', ended_at = clock_timestamp(), verifier = NULL WHERE role = %(role)s)
UPDATE sqlguard.task SET state = 'ended', ended_at = clock_timestamp(), end_reason = 'could not be opened'
WHERE id = %(task)s AND state = 'opening'
"""
_STILL_OPEN = "SELECT FROM sqlguard.task WHERE id = %s AND state = 'open' FOR SHARE"
_LIVE = """
WITH opened AS (
    UPDATE sqlguard.task t SET state = 'open'
    FROM sqlguard.lease l WHERE l.role = %(role)s AND t.id = l.task_id AND t.state = 'opening')
UPDATE sqlguard.lease l SET state = 'live',
    settings = (SELECT s.setconfig FROM pg_db_role_setting s JOIN pg_roles r ON r.oid = s.setrole
                WHERE r.rolname = %(role)s AND s.setdatabase = 0)
WHERE role = %(role)s
"""


@dataclass(frozen=True, slots=True)
class OpenedTask:
    """`password` is shown once and kept nowhere."""

    task: Task
    role: str
    password: str = field(repr=False)
    expires_at: datetime
    #: Parameters that were given and that no row scope of the policy asks for.
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EndReport:
    """`problems`: what is still there and why; `kept`: what the agent had made, now `sqlguard_kept`'s."""

    task: str
    ended: bool = True
    roles: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Group:
    policy: Policy
    role: str
    #: The parameters that the policy's row scopes ask for.
    parameters: frozenset[str] = frozenset()


def open_task(  # noqa: PLR0913 (what a task is)
    conn: Connection,
    *,
    agent: str,
    policy: str,
    ttl: timedelta = DEFAULT_TTL,
    purpose: str | None = None,
    params: Mapping[str, str] | None = None,
    agent_version: str | None = None,
    plan_only: bool = False,
) -> OpenedTask:
    """
    Open a task with a login role of its own.

    Raises PolicyError when the policy was never applied or lacks a parameter, NotConfigured when this role
    may not make roles.
    """
    if not agent.strip():
        raise NotConfigured("a task has an agent", hint="say who works, as the journal shall name it")
    password = secrets.token_urlsafe(24)
    verifier = _verifier(password)
    given = dict(params or {})
    with _steps(conn), _no_policy_change(conn):
        group, now = _latest_policy(conn, policy, given)
        latest = now + group.policy.defaults.max_ttl
        task = Task(
            id=_token(_ID_LENGTH),
            agent=agent,
            policy=policy,
            policy_version=group.policy.version,
            expires_at=_expiry(now, ttl, latest),
            agent_version=agent_version,
            purpose=purpose,
            params=given,
            opened_at=now,
            plan_only=plan_only or group.policy.defaults.plan_only,
        )
        role = leases_model.role_name(task.id)
        conn.execute(_OPEN, _values(task, latest, role, group, verifier))
        with _abandoned(conn, task.id, role), conn.transaction():
            leases.create_role(conn, _spec(role, group, verifier, task.expires_at))
            conn.execute(_LIVE, {"role": role})
    return OpenedTask(task, role, password, task.expires_at, tuple(sorted(given.keys() - group.parameters)))


def add_lease(conn: Connection, task_id: str, kind: str) -> tuple[str, str]:
    """
    Make a further login role of a living task; return its name and its password.

    Raises TaskEnded when the task is not alive.
    """
    password = secrets.token_urlsafe(24)
    verifier = _verifier(password)
    role = leases_model.role_name(task_id, _token(_SUFFIX_LENGTH))
    with _steps(conn), _no_policy_change(conn):
        row = conn.execute(
            _ADD, {"role": role, "verifier": verifier, "kind": kind, "task": task_id}
        ).fetchone()
        if row is None:
            raise TaskEnded(f"task `{task_id}` is not open")
        group_role, expires_at, document = row
        group = _Group(policy_from_document(document, f"the policy of task {task_id}"), group_role)
        with _abandoned(conn, "", role), conn.transaction():
            # Ending the task waits for this lock, and sees the lease then.
            if conn.execute(_STILL_OPEN, [task_id]).fetchone() is None:
                raise TaskEnded(f"task `{task_id}` is not open")
            leases.create_role(conn, _spec(role, group, verifier, expires_at))
            conn.execute(_LIVE, {"role": role})
    return role, password


def list_tasks(conn: Connection, *, all: bool = False) -> list[Task]:
    """Return the tasks that are not over, or all of them, newest first."""
    with _explained(), conn.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(_TASKS if all else _LIVING).fetchall()
    return [Task(**row) for row in rows]


def find_task(conn: Connection, task_id: str) -> Task:
    """Return one task. Raises NotConfigured when there is none of that id."""
    with _explained(), conn.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute(_TASK, [task_id]).fetchone()
    if row is None:
        raise NotConfigured(f"there is no task `{task_id}`", hint="see `sqlguard task list --all`")
    return Task(**row)


def renew_task(conn: Connection, task_id: str, ttl: timedelta) -> Task:
    """
    Let a living task end *ttl* from now, but not after the longest time that its policy gave it.

    Raises TaskEnded.
    """
    with _steps(conn), conn.transaction():
        row = conn.execute(
            "SELECT clock_timestamp(), max_expires_at FROM sqlguard.task"
            " WHERE id = %s AND state = 'open' AND expires_at > clock_timestamp() FOR UPDATE",
            [task_id],
        ).fetchone()
        if row is None:
            raise TaskEnded(f"task `{find_task(conn, task_id).id}` has ended and can't be renewed")
        expires_at = _expiry(row[0], ttl, row[1])
        conn.execute("UPDATE sqlguard.task SET expires_at = %s WHERE id = %s", [expires_at, task_id])
        for (role,) in conn.execute(
            "UPDATE sqlguard.lease SET expires_at = %s WHERE task_id = %s AND state = 'live' RETURNING role",
            [expires_at, task_id],
        ).fetchall():
            leases.extend_role(conn, role, leases_model.valid_until(expires_at))
    return find_task(conn, task_id)


def end_task(conn: Connection, task_id: str, reason: str) -> EndReport:
    """
    End a task: its rights, its sessions, its roles. Safe to repeat; goes on past what can't be removed.

    When it returns, no session of the task can do anything any more unless `ended` is false.
    """
    with _steps(conn):
        find_task(conn, task_id)
        conn.execute(
            "UPDATE sqlguard.task SET state = 'ending', end_reason = coalesce(end_reason, %s)"
            " WHERE id = %s AND state NOT IN ('ending', 'ended')",
            [reason, task_id],
        )
        roles = conn.execute(
            "SELECT role FROM sqlguard.lease WHERE task_id = %s AND state <> 'ended'", [task_id]
        ).fetchall()
        ends = [lease_end.end(conn, role) for (role,) in roles]
        if all(end.closed for end in ends):
            conn.execute(
                "UPDATE sqlguard.task SET state = 'ended', ended_at = clock_timestamp()"
                " WHERE id = %s AND state = 'ending'",
                [task_id],
            )
    return EndReport(
        task_id,
        all(end.closed for end in ends),
        tuple(role for (role,) in roles),
        tuple(p for end in ends for p in end.problems),
        tuple(k for end in ends for k in end.kept),
    )


def end_lease(conn: Connection, role: str) -> EndReport:
    """End one login role of a task and leave the others. Safe to repeat."""
    with _steps(conn):
        row = conn.execute("SELECT task_id FROM sqlguard.lease WHERE role = %s", [role]).fetchone()
        end = lease_end.end(conn, role)
    return EndReport(row[0] if row else "", end.closed, (role,), end.problems, end.kept)


def _latest_policy(conn: Connection, name: str, params: Mapping[str, str]) -> tuple[_Group, datetime]:
    row = conn.execute(_POLICY, [name]).fetchone()
    if row is None:
        raise PolicyError(f"policy `{name}` was never applied", hint=f"run `sqlguard policy apply {name}`")
    version, document, group, now, wanted = row
    _check_parameters(conn, name, params, wanted)
    policy = policy_from_document(document, f"sqlguard.policy {name}").model_copy(update={"version": version})
    return _Group(policy, group, frozenset(name for name, _ in wanted)), now


def _check_parameters(
    conn: Connection, policy: str, params: Mapping[str, str], wanted: Sequence[Sequence[str]]
) -> None:
    for name, type_name in wanted:
        if name not in params:
            raise PolicyError(
                f"policy `{policy}` scopes rows by `{name}`, which the task does not give",
                hint=f"open the task with --param {name}=…",
            )
        try:
            # The type's name comes from format_type(): it is SQL as it stands.
            conn.execute(sql.SQL("SELECT {}::" + type_name).format(sql.Literal(params[name])))
        except psycopg.DataError:
            raise PolicyError(
                f"parameter `{name}` is no value of type {type_name}", hint=f"give --param {name}=…"
            ) from None


def _values(task: Task, latest: datetime, role: str, group: _Group, verifier: str) -> dict[str, Any]:
    return {
        "id": task.id,
        "agent": task.agent,
        "agent_version": task.agent_version,
        "policy": task.policy,
        "version": task.policy_version,
        "purpose": task.purpose,
        "params": Jsonb(dict(task.params)),
        "plan_only": task.plan_only,
        "now": task.opened_at,
        "expires_at": task.expires_at,
        "latest": latest,
        "role": role,
        "group": group.role,
        "verifier": verifier,
    }


def _spec(role: str, group: _Group, verifier: str, expires_at: datetime) -> leases.RoleSpec:
    defaults = group.policy.defaults
    return leases.RoleSpec(
        role=role,
        group=group.role,
        verifier=verifier,
        valid_until=leases_model.valid_until(expires_at),
        connections=defaults.connections,
        settings=leases_model.settings(
            defaults.search_path,
            defaults.statement_timeout,
            defaults.lock_timeout,
            defaults.idle_in_transaction_timeout,
        ),
    )


def _verifier(password: str) -> str:
    return str(Verifier.make(password, secrets.token_bytes(_SALT_BYTES)))


def _token(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))


def _expiry(now: datetime, ttl: timedelta, latest: datetime) -> datetime:
    try:
        return leases_model.expiry(now, ttl, latest)
    except ValueError as fault:
        raise NotConfigured(str(fault), hint="give a longer TTL, e.g. 300s") from None


@contextmanager
def _abandoned(conn: Connection, task_id: str, role: str) -> Iterator[None]:
    """End what can't be opened; if that fails as well, the janitor finds it."""
    try:
        yield
    except (psycopg.Error, TaskEnded):
        with suppress(psycopg.Error):
            conn.execute(_ABANDON, {"task": task_id, "role": role})
        raise


@contextmanager
def _no_policy_change(conn: Connection) -> Iterator[None]:
    """Keep the group role that was just read from being dropped before a lease is in it."""
    conn.execute("SELECT pg_advisory_lock_shared(%s, %s)", POLICY_LOCK)
    try:
        yield
    finally:
        # The lock goes with the session, so a connection that broke needs nothing.
        if not conn.closed:
            conn.execute("SELECT pg_advisory_unlock_shared(%s, %s)", POLICY_LOCK)


@contextmanager
def _steps(conn: Connection) -> Iterator[None]:
    """Commit step by step, whatever mode the connection is in."""
    if conn.info.transaction_status != TransactionStatus.IDLE:
        raise NotConfigured(
            "tasks are opened and ended outside a transaction",
            hint="use a connection in autocommit, or commit first",
        )
    autocommit = conn.autocommit
    conn.autocommit = True
    try:
        with _explained():
            yield
    finally:
        if not conn.closed:
            conn.autocommit = autocommit


@contextmanager
def _explained() -> Iterator[None]:
    """Turn what an operator can mend into an error that says how."""
    try:
        yield
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName, psycopg.errors.UndefinedColumn):
        raise not_migrated() from None
    except psycopg.errors.InsufficientPrivilege as fault:
        raise NotConfigured(
            f"this role may not do that: {fault.diag.message_primary}",
            hint="the operator needs CREATEROLE, and ADMIN OPTION on the policies' group roles",
        ) from None
