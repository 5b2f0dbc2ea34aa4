"""What there is: the tables with their guards, and the policies with their versions, for people who look."""

from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

import psycopg
from psycopg.rows import class_row

# Partitions go with their root, and what an extension brought along is the extension's.
_TABLES = """
SELECT n.nspname || '.' || c.relname AS "table", g.mode, g.key_columns, g.options ->> 'unique' AS "unique",
       g.guarded_at, g.guarded_by,
       ARRAY(SELECT t.policy || ' v' || t.version FROM sqlguard.policy_table t
             WHERE t.relid = c.oid
                 AND t.version = (SELECT max(p.version) FROM sqlguard.policy p WHERE p.name = t.policy)
             ORDER BY 1) AS policies
FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN sqlguard.guarded_table g ON g.relid = c.oid
WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence <> 't'
    AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'sqlguard') AND n.nspname !~ '^pg_toast'
    AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend d
                    WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.deptype = 'e')
ORDER BY n.nspname, c.relname
"""
_POLICIES = """
SELECT p.name, p.version, p.version = max(p.version) OVER (PARTITION BY p.name) AS latest,
       p.document ->> 'description' AS description, p.group_role::text, p.applied_at, p.applied_by,
       (SELECT count(*) FROM sqlguard.policy_table t WHERE t.policy = p.name AND t.version = p.version) AS tables,
       (SELECT count(*) FROM sqlguard.task t
        WHERE t.policy = p.name AND t.policy_version = p.version AND t.state = 'open') AS open_tasks
FROM sqlguard.policy p ORDER BY p.name, p.version
"""


@dataclass(frozen=True, slots=True)
class TableState:
    """A table: `mode` is None when it is not guarded; `policies` are the newest versions that name it."""

    table: str
    mode: str | None
    key_columns: list[str] | None
    unique: str | None
    guarded_at: datetime | None
    guarded_by: str | None
    policies: list[str]

    def as_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, slots=True)
class PolicyState:
    """A version of a policy; new tasks get the `latest`, open ones keep the version that they began with."""

    name: str
    version: int
    latest: bool
    description: str | None
    group_role: str
    applied_at: datetime
    applied_by: str
    tables: int
    open_tasks: int

    def as_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def table_states(conn: psycopg.Connection[Any]) -> list[TableState]:
    """Return every table that can be guarded, with its guard if it has one."""
    with conn.cursor(row_factory=class_row(TableState)) as cursor:
        return cursor.execute(_TABLES).fetchall()


def policy_states(conn: psycopg.Connection[Any]) -> list[PolicyState]:
    """Return every version of every policy that was applied, oldest first."""
    with conn.cursor(row_factory=class_row(PolicyState)) as cursor:
        return cursor.execute(_POLICIES).fetchall()
