"""Wall 2: what the policies' groups have, compared with what `sqlguard policy apply` would give them now."""

from collections.abc import Iterator

from sqlguard.errors import PolicyError
from sqlguard.postgres.doctor.finding import Connection, Finding, Severity
from sqlguard.postgres.policy_plan import draft_policy
from sqlguard.postgres.policy_store import StoredPolicy, stored_versions
from sqlguard.postgres.tasks import POLICY_LOCK

_WALL = "role"


def check_policies(conn: Connection, name: str | None) -> Iterator[Finding]:
    """Draft every version in use anew, in a transaction that is rolled back."""
    found: list[Finding] = []
    with conn.transaction(force_rollback=True):
        conn.execute("SELECT pg_advisory_xact_lock_shared(%s, %s)", POLICY_LOCK)
        for stored in stored_versions(conn, name):
            if stored.in_use:
                found += _version(conn, stored)
            elif stored.latest:
                found.append(_gone(stored))
    yield from found


def _version(conn: Connection, stored: StoredPolicy) -> Iterator[Finding]:
    shown = f"{stored.policy.name} (version {stored.policy.version})"
    try:
        draft = draft_policy(conn, stored.policy, refreshing=stored)
    except PolicyError as fault:
        yield Finding(
            "policy-unusable",
            Severity.BROKEN,
            _WALL,
            shown,
            f"policy `{shown}` does not fit the tables any more: {fault.message}",
            command="sqlguard policy apply FILE",
        )
        return
    statements = [text.as_string(conn) for text in draft.statements]
    taken = [text for text in statements if text.startswith("REVOKE")]
    scopes = [text for text in statements if "POLICY" in text or "ROW LEVEL" in text]
    if statements:
        yield Finding(
            "policy-drift",
            Severity.BROKEN if taken or scopes else Severity.NOTE,
            _WALL,
            shown,
            f"the group `{stored.group}` has other rights than its policy gives"
            if taken or scopes
            else f"tables have come or changed since the policy was applied: `{stored.group}` lacks rights that it gives",
            sql="; ".join(statements),
            command="sqlguard policy refresh",
        )
    for warning in draft.warnings:
        yield Finding(
            "policy-names",
            Severity.NOTE,
            _WALL,
            shown,
            f"policy `{shown}`: {warning}",
            command="sqlguard policy apply FILE",
        )


def _gone(stored: StoredPolicy) -> Finding:
    shown = f"{stored.policy.name} (version {stored.policy.version})"
    return Finding(
        "policy-without-role",
        Severity.BROKEN,
        _WALL,
        shown,
        f"the group role `{stored.group}` is gone: no task can be opened under the policy",
        sql=f'CREATE ROLE "{stored.group}" NOLOGIN; GRANT sqlguard_agent TO "{stored.group}"',
        command="sqlguard policy refresh",
    )
