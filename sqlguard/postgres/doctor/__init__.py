"""
What protects each table, wall by wall, and what is open.

Theory of operation. Checks are queries (`Check`) or comparisons of what is there with what `guard` and `policy
apply` would make of it now; so nothing has to be kept to know what changed since. Nothing is changed here, and
nothing is ever mended on its own: each finding carries the SQL or the command that does.
"""

from dataclasses import dataclass

from sqlguard.errors import NotConfigured
from sqlguard.postgres.control import not_migrated
from sqlguard.postgres.doctor import roles, server, tables
from sqlguard.postgres.doctor.finding import Connection as Connection
from sqlguard.postgres.doctor.finding import Finding as Finding
from sqlguard.postgres.doctor.finding import Severity as Severity
from sqlguard.postgres.doctor.policies import check_policies

#: Who protects a table, and how.
_PROTECTION = """
SELECT c.oid::bigint, n.nspname || '.' || c.relname, g.mode,
       coalesce(array_agg(DISTINCT t.policy ORDER BY t.policy) FILTER (WHERE t.policy IS NOT NULL), '{}'),
       coalesce(array_agg(DISTINCT t.policy ORDER BY t.policy)
           FILTER (WHERE t.can_insert OR t.can_update OR t.delete_mode <> 'refuse'), '{}'),
       coalesce(array_agg(DISTINCT t.policy ORDER BY t.policy) FILTER (WHERE t.row_scope IS NOT NULL), '{}')
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN sqlguard.guarded_table g ON g.relid = c.oid
LEFT JOIN (SELECT q.* FROM sqlguard.policy_table q JOIN sqlguard.policy p ON p.name = q.policy AND p.version = q.version
           WHERE p.version = (SELECT max(v.version) FROM sqlguard.policy v WHERE v.name = p.name)) t ON t.relid = c.oid
WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence <> 't'
    AND n.nspname !~ '^pg_' AND n.nspname NOT IN ('information_schema', 'sqlguard')
GROUP BY c.oid, n.nspname, c.relname, g.mode ORDER BY n.nspname, c.relname
"""


@dataclass(frozen=True, slots=True)
class Protection:
    """One table: `mode` soft, journal or None; the policies that let tasks `read`, `write`, and that `scope` rows."""

    table: str
    mode: str | None
    read: tuple[str, ...]
    write: tuple[str, ...]
    scope: tuple[str, ...]
    worst: Severity | None

    def as_dict(self) -> dict[str, object]:
        return {
            "table": self.table,
            "mode": self.mode,
            "read": list(self.read),
            "write": list(self.write),
            "scope": list(self.scope),
            "worst": None if self.worst is None else str(self.worst),
        }


@dataclass(frozen=True, slots=True)
class Report:
    tables: tuple[Protection, ...]
    findings: tuple[Finding, ...]

    @property
    def broken(self) -> bool:
        return any(f.severity is Severity.BROKEN for f in self.findings)

    def as_dict(self) -> dict[str, object]:
        return {
            "broken": self.broken,
            "tables": [t.as_dict() for t in self.tables],
            "findings": [f.as_dict() for f in self.findings],
        }


def examine(conn: Connection, policy: str | None = None) -> Report:
    """
    Look at the whole database, or at what concerns *policy*. Needs the operator's connection, in autocommit.

    Raises NotConfigured when the schema sqlguard is not there or the policy is not known.
    """
    if conn.execute("SELECT to_regclass('sqlguard.policy_table')").fetchone() == (None,):
        raise not_migrated()
    versions = list(server.check_versions(conn))
    if any(f.code == "schema-version" for f in versions):
        # Another schema would answer other questions.
        return Report((), tuple(versions))
    known = conn.execute("SELECT count(*) FROM sqlguard.policy WHERE name = %s", [policy]).fetchone()
    if policy is not None and known == (0,):
        raise NotConfigured(f"policy `{policy}` was never applied", hint="see `sqlguard policy list`")
    findings = [
        *versions,
        *(f for group in (server, roles, tables) for check in group.CHECKS for f in check.run(conn)),
        *check_policies(conn, policy),
        *tables.check_walls(conn),
    ]
    rows = conn.execute(_PROTECTION).fetchall()
    if policy is not None:
        rows = [row for row in rows if policy in row[3]]
        theirs = {row[0] for row in rows}
        findings = [f for f in findings if f.table is None or f.table in theirs]
    worst: dict[int, Severity] = {}
    for finding in findings:
        if finding.table is not None:
            worst[finding.table] = max(finding.severity, worst.get(finding.table, Severity.NOTE))
    shown = tuple(
        Protection(name, mode, tuple(read), tuple(write), tuple(scope), worst.get(oid))
        for oid, name, mode, read, write, scope in rows
    )
    return Report(shown, tuple(sorted(findings, key=lambda f: (-f.severity, f.wall, f.code, f.object))))
