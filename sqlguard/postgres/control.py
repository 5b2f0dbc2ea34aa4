"""What every door asks the database about a login: its task, its policy, its SCRAM verifier."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import psycopg
from psycopg.rows import dict_row

from sqlguard.errors import NotConfigured
from sqlguard.journal import Intent
from sqlguard.policy import Policy, policy_from_document
from sqlguard.task import Task

_LOGIN = """
    SELECT l.role, l.verifier, l.expires_at AS lease_expires_at, l.state AS lease_state,
           t.id, t.agent, t.agent_version, t.policy, t.policy_version, t.purpose, t.params, t.state,
           t.opened_at, t.expires_at, t.ended_at, t.end_reason, p.document, l.group_role, t.plan_only
    FROM sqlguard.lease l
    JOIN sqlguard.task t ON t.id = l.task_id
    JOIN sqlguard.policy p ON p.name = t.policy AND p.version = t.policy_version
    WHERE l.role = %s
"""


@dataclass(frozen=True)
class Login:
    """A task's login role with what the guard needs to know of it."""

    role: str
    verifier: str | None
    task: Task
    policy: Policy
    lease_expires_at: datetime
    lease_state: str = "live"
    #: Where the client is that has logged in so, if a door knows.
    client_addr: str | None = None

    def complete(self, intent: Intent, backend_pid: int | None) -> Intent:
        """Return *intent* with the fields that are the login's, not the statement's."""
        return replace(
            intent,
            task=self.task.id,
            role=self.role,
            agent=self.task.agent,
            agent_version=self.task.agent_version,
            policy=self.task.policy,
            policy_version=self.task.policy_version,
            backend_pid=backend_pid,
            client_addr=self.client_addr,
        )


def read_login(conn: psycopg.Connection[Any], role: str) -> Login | None:
    """Return what is known of login role *role*, None when it is no task's."""
    with conn.cursor(row_factory=dict_row) as cursor:
        try:
            row = cursor.execute(_LOGIN, [role]).fetchone()
        except psycopg.errors.UndefinedTable:
            raise not_migrated() from None
    return None if row is None else _login(row)


def door_joined(conn: psycopg.Connection[Any], role: str, pid: int) -> None:
    """Write down that the session with backend *pid* came through a door: `sqlguard doctor` tells it from others."""
    conn.execute(
        "INSERT INTO sqlguard.door_session (pid, role) VALUES (%s, %s)"
        " ON CONFLICT (pid) DO UPDATE SET role = excluded.role, joined_at = clock_timestamp()",
        [pid, role],
    )


def current_login(conn: psycopg.Connection[Any]) -> Login | None:
    """Return the login of *conn* itself, None when it is no task's (the operator, say)."""
    with conn.cursor(row_factory=dict_row) as cursor:
        try:
            row = cursor.execute("SELECT * FROM sqlguard.current_login()").fetchone()
        except (psycopg.errors.UndefinedFunction, psycopg.errors.InvalidSchemaName):
            raise not_migrated() from None
    return None if row is None or row["role"] is None else _login(row)


def count_leases(conn: psycopg.Connection[Any]) -> dict[str, float]:
    """Return how many leases there are in each state."""
    return dict(conn.execute("SELECT state, count(*)::float8 FROM sqlguard.lease GROUP BY state").fetchall())


def not_migrated() -> NotConfigured:
    return NotConfigured(
        "the database has no schema `sqlguard` yet", hint="run `sqlguard migrate` as the operator"
    )


def _login(row: Mapping[str, Any]) -> Login:
    task = Task(
        id=row["id"],
        agent=row["agent"],
        policy=row["policy"],
        policy_version=row["policy_version"],
        expires_at=row["expires_at"],
        state=row["state"],
        agent_version=row["agent_version"],
        purpose=row["purpose"],
        params=row["params"] or {},
        opened_at=row["opened_at"],
        ended_at=row["ended_at"],
        end_reason=row["end_reason"],
        plan_only=row["plan_only"],
    )
    policy = policy_from_document(row["document"], f"sqlguard.policy {task.policy}")
    return Login(
        role=row["role"],
        verifier=row["verifier"],
        task=task,
        policy=policy.model_copy(update={"version": task.policy_version}),
        lease_expires_at=row["lease_expires_at"],
        lease_state=row["lease_state"],
    )
