"""
Row scopes as restrictive row-level security policies, one per table and policy version.

Enabling row-level security closes a table to everyone else, so the first scope brings the permissive policy
`sqlguard_everyone` along (the same that a soft guard uses), unless the application uses row-level security itself.

A scope holds for its policy's group. Before PostgreSQL 16 a session may become `sqlguard_agent`, which no scope is for
and which sees what is granted to PUBLIC; there a second policy shows it nothing.
"""

from dataclasses import dataclass, replace
from typing import Any

import psycopg
from psycopg import sql

from sqlguard.postgres.walls_policies import AGENTS, EVERYONE

Connection = psycopg.Connection[Any]
UNSCOPED = "sqlguard_unscoped"
_SCOPE = "sg_rows_"
_POLICIES = """
SELECT p.polrelid::bigint, n.nspname, c.relname, c.relrowsecurity, p.polname
FROM pg_policy p JOIN pg_class c ON c.oid = p.polrelid JOIN pg_namespace n ON n.oid = c.relnamespace
"""


@dataclass(frozen=True, slots=True)
class Secured:
    """A table with policies; `enabled`: whether row-level security is on."""

    schema: str
    name: str
    enabled: bool
    policies: frozenset[str]

    def with_scope(self, name: str, *, can_become_agent: bool) -> "Secured":
        more = frozenset({name, *([UNSCOPED] if can_become_agent else [])})
        everyone = frozenset() if self.enabled else {EVERYONE.name}
        return replace(self, enabled=True, policies=self.policies | more | everyone)

    def without_scope(self, name: str) -> "Secured":
        left = self.policies - {name} - self.unneeded(name)
        if left == {EVERYONE.name}:
            return replace(self, enabled=False, policies=frozenset())
        return replace(self, policies=left)

    def unneeded(self, name: str) -> frozenset[str]:
        """Return what goes with the scope *name* because it is the last one."""
        last = not any(p.startswith(_SCOPE) for p in self.policies - {name})
        return self.policies & {UNSCOPED} if last else frozenset()


def scope_name(policy: str, version: int) -> str:
    return f"{_SCOPE}{policy}_{version}"


def secured_tables(conn: Connection) -> dict[int, Secured]:
    """Return every table that has a policy, by oid."""
    found: dict[int, Secured] = {}
    for oid, schema, name, enabled, policy in conn.execute(_POLICIES).fetchall():
        there = found.get(oid)
        policies = (there.policies if there is not None else frozenset()) | {policy}
        found[oid] = Secured(schema, name, enabled, policies)
    return found


def scoped(
    secured: Secured, name: str, group: str, expression: str, *, can_become_agent: bool
) -> list[sql.Composed]:
    """Return what puts the row scope *expression* for *group* on a table; empty when it is there."""
    shown = sql.Identifier(secured.schema, secured.name)
    statements = []
    if not secured.enabled and EVERYONE.name not in secured.policies:
        statements.append(
            sql.SQL("CREATE POLICY {} ON {} TO PUBLIC USING (true) WITH CHECK (true)").format(
                sql.Identifier(EVERYONE.name), shown
            )
        )
    if name not in secured.policies:
        # The expression is the policy file's own condition, proved to be one by `policy_rows`.
        statements.append(
            sql.SQL("CREATE POLICY {} ON {} AS RESTRICTIVE TO {} USING ({}) WITH CHECK ({})").format(
                sql.Identifier(name),
                shown,
                sql.Identifier(group),
                sql.SQL(expression),
                sql.SQL(expression),
            )
        )
    if can_become_agent and UNSCOPED not in secured.policies:
        statements.append(
            sql.SQL("CREATE POLICY {} ON {} AS RESTRICTIVE TO {} USING (CURRENT_USER <> {})").format(
                sql.Identifier(UNSCOPED), shown, sql.Identifier(AGENTS), sql.Literal(AGENTS)
            )
        )
    if not secured.enabled:
        statements.append(sql.SQL("ALTER TABLE {} ENABLE ROW LEVEL SECURITY").format(shown))
    return statements


def unscoped(secured: Secured, name: str) -> list[sql.Composed]:
    """Return what takes the scope *name* from a table, and row-level security with the last of them."""
    shown = sql.Identifier(secured.schema, secured.name)
    gone = [name, *secured.unneeded(name)]
    drops = [sql.SQL("DROP POLICY {} ON {}").format(sql.Identifier(one), shown) for one in gone]
    if secured.policies - set(gone) == {EVERYONE.name}:
        drops.append(sql.SQL("ALTER TABLE {} DISABLE ROW LEVEL SECURITY").format(shown))
        drops.append(sql.SQL("DROP POLICY {} ON {}").format(sql.Identifier(EVERYONE.name), shown))
    return drops
