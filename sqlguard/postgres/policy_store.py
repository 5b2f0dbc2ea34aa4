"""Policies as the database keeps them: the document of every version, and what the walls need of it per table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from sqlguard.policy import Policy, policy_from_document
from sqlguard.postgres.policy_rights import TableGrant

Connection = psycopg.Connection[Any]
_VERSIONS = """
SELECT p.name, p.version, p.document, p.group_role::text,
       p.version = max(p.version) OVER (PARTITION BY p.name) AS latest,
       EXISTS (SELECT FROM sqlguard.lease l WHERE l.group_role = p.group_role AND l.state IN ('creating', 'live')),
       (SELECT r.oid::bigint FROM pg_roles r WHERE r.rolname = p.group_role)
FROM sqlguard.policy p ORDER BY p.name, p.version
"""
_TABLE = """
INSERT INTO sqlguard.policy_table (policy, version, relid, schema_name, table_name, can_select, can_insert,
                                   can_update, delete_mode, max_rows, max_share, on_excess, classes, task_rows,
                                   hour_rows, row_scope, scope_params)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
"""


@dataclass(frozen=True, slots=True)
class StoredPolicy:
    """`oid` is the group role's, None when it has been dropped; `leased`: a living lease is in that group."""

    policy: Policy
    document: Mapping[str, Any]
    group: str
    latest: bool
    leased: bool
    oid: int | None

    @property
    def in_use(self) -> bool:
        return self.oid is not None and (self.latest or self.leased)


@dataclass(frozen=True, slots=True)
class TableEntry:
    """What is recorded of a table: the grant and its compiled row scope."""

    grant: TableGrant
    scope: str | None
    params: Mapping[str, str]


def stored_versions(conn: Connection, name: str | None = None) -> list[StoredPolicy]:
    """Return all versions, oldest first, of one policy or of all."""
    return [
        StoredPolicy(
            policy_from_document(document, f"sqlguard.policy {policy}").model_copy(
                update={"version": version}
            ),
            document,
            group,
            latest,
            leased,
            oid,
        )
        for policy, version, document, group, latest, leased, oid in conn.execute(_VERSIONS).fetchall()
        if name is None or policy == name
    ]


def policy_document(policy: Policy) -> dict[str, Any]:
    """Return *policy* as JSON that `policy_from_document` reads back: only what was set, durations in seconds."""
    found: dict[str, Any] = _plain(policy.model_dump(exclude_unset=True, by_alias=True))
    found.pop("version", None)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value


def record_tables(conn: Connection, policy: Policy, version: int, tables: Sequence[TableEntry]) -> None:
    """Replace what is recorded of the policy version's tables, if that is something else."""
    wanted = [_row(policy, version, entry) for entry in tables]
    there = conn.execute(
        "SELECT policy, version, relid::bigint, schema_name, table_name, can_select, can_insert, can_update,"
        " delete_mode, max_rows, max_share, on_excess, classes, task_rows, hour_rows, row_scope, scope_params"
        " FROM sqlguard.policy_table WHERE policy = %s AND version = %s",
        [policy.name, version],
    ).fetchall()
    if sorted(map(repr, wanted)) == sorted(map(repr, there)):
        return
    conn.execute(
        "DELETE FROM sqlguard.policy_table WHERE policy = %s AND version = %s", [policy.name, version]
    )
    for row in wanted:
        conn.execute(_TABLE, [*row[:-1], Jsonb(row[-1])])


def _row(policy: Policy, version: int, entry: TableEntry) -> tuple[Any, ...]:
    table, rule = entry.grant.table, entry.grant.rule
    return (
        policy.name,
        version,
        table.oid,
        table.schema,
        table.name,
        bool(rule.select),
        bool(rule.insert),
        bool(rule.update),
        rule.delete,
        policy.max_rows(table.schema, table.name),
        policy.max_share(table.schema, table.name),
        policy.on_excess(table.schema, table.name),
        list(rule.class_),
        policy.budgets.rows_per_task,
        policy.budgets.rows_per_hour,
        entry.scope,
        dict(entry.params),
    )
