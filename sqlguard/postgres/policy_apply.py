"""
Turn a policy into a group role with grants and row-level security, in one transaction.

Theory of operation. What the policy gives on the tables that exist is worked out as a set (`policy_rights`),
compared with what its group has (`policy_sql`), and the difference is the plan: so applying the same
document again changes nothing, unless tables have come, gone or been guarded meanwhile. A changed document is
a new version with a group of its own, because open tasks keep the version that they began with.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from sqlguard.errors import NotConfigured
from sqlguard.policy import Policy
from sqlguard.postgres.catalog_reader import read_catalog
from sqlguard.postgres.control import not_migrated
from sqlguard.postgres.policy_guard import Guarded, as_guarded
from sqlguard.postgres.policy_plan import Draft, draft_policy
from sqlguard.postgres.policy_store import policy_document, record_tables, stored_versions
from sqlguard.postgres.tasks import POLICY_LOCK
from sqlguard.postgres.walls_run import LOCK_TIMEOUT_MS, again_while_busy

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class PolicyPlan:
    """What applying would do, as SQL; `lacking` are the GRANTs that the operator needs first."""

    name: str
    version: int
    group_role: str
    statements: list[str]
    warnings: list[str]
    lacking: list[str]


@dataclass(frozen=True, slots=True)
class AppliedPolicy:
    name: str
    version: int
    group_role: str
    statements: list[str]
    warnings: list[str]


def plan_policy(conn: Connection, policy: Policy, guards: Iterable[Guarded] = ()) -> PolicyPlan:
    """Return what `apply_policy` would do once *guards* are done; changes nothing. Raises PolicyError."""
    with _transaction(conn):
        draft = draft_policy(conn, policy, catalog=as_guarded(read_catalog(conn), guards))
        return PolicyPlan(
            policy.name,
            draft.version,
            draft.group,
            _shown(conn, draft.statements),
            [*draft.warnings, *(f"the operator lacks a right: run {text}" for text in draft.lacking)],
            list(draft.lacking),
        )


def apply_policy(conn: Connection, policy: Policy, *, existing: str = "keep") -> AppliedPolicy:
    """
    Bring the database to what *policy* says, in one transaction.

    *existing* `keep`: open tasks keep the version that they began with; `drop`: they have this one's rights,
    and no others, from their next statement on. Raises PolicyError, and NotConfigured when the operator lacks
    a right.
    """

    def once() -> AppliedPolicy:
        with _transaction(conn):
            draft = draft_policy(conn, policy, moving=existing == "drop")
            _refuse_lacking(draft)
            return _carry_out(conn, policy, draft)

    return again_while_busy(once)


def refresh_policies(conn: Connection) -> list[AppliedPolicy]:
    """
    Bring the rights of all versions in use to the tables as they are now: after tables were guarded or made.

    What a policy names and what is gone by now is a warning. Raises NotConfigured when the operator lacks a right.
    """

    def once() -> list[AppliedPolicy]:
        done = []
        with _transaction(conn):
            for stored in stored_versions(conn):
                if stored.in_use:
                    draft = draft_policy(conn, stored.policy, refreshing=stored)
                    _refuse_lacking(draft)
                    done.append(_carry_out(conn, stored.policy, draft))
        return done

    return again_while_busy(once)


def _carry_out(conn: Connection, policy: Policy, draft: Draft) -> AppliedPolicy:
    for text in draft.statements:
        conn.execute(text)
    if draft.is_new:
        conn.execute(
            "INSERT INTO sqlguard.policy (name, version, document, group_role, applied_by)"
            " VALUES (%s, %s, %s, %s, session_user)",
            [policy.name, draft.version, Jsonb(policy_document(policy)), draft.group],
        )
    record_tables(conn, policy, draft.version, draft.tables)
    for role, task in draft.moved:
        conn.execute("UPDATE sqlguard.lease SET group_role = %s WHERE role = %s", [draft.group, role])
        conn.execute("UPDATE sqlguard.task SET policy_version = %s WHERE id = %s", [draft.version, task])
    return AppliedPolicy(
        policy.name, draft.version, draft.group, _shown(conn, draft.statements), list(draft.warnings)
    )


def _shown(conn: Connection, statements: tuple[sql.Composed, ...]) -> list[str]:
    return [text.as_string(conn) for text in statements]


def _refuse_lacking(draft: Draft) -> None:
    if draft.lacking:
        raise NotConfigured(
            f"this role may not give what policy `{draft.name}` gives",
            detail="\n".join(f"{text};" for text in draft.lacking),
            hint=f"as a superuser or the owner, run: {'; '.join(draft.lacking)}",
        )


@contextmanager
def _transaction(conn: Connection) -> Iterator[None]:
    """One transaction, during which no other policy is applied and no task is being opened."""
    try:
        with conn.transaction():
            conn.execute("SELECT pg_advisory_xact_lock(%s, %s)", POLICY_LOCK)
            # Readers wait behind a statement that waits for ACCESS EXCLUSIVE, as row policies need it.
            conn.execute("SELECT set_config('lock_timeout', %s, true)", [f"{LOCK_TIMEOUT_MS}ms"])
            yield
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        raise not_migrated() from None
