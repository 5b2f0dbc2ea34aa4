"""The statements that bring the database to what a policy says; nothing is changed here."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql

from sqlguard.catalog import Catalog
from sqlguard.lease import group_name
from sqlguard.policy import Policy
from sqlguard.postgres import leases
from sqlguard.postgres.catalog_reader import read_catalog
from sqlguard.postgres.policy_rights import Right, TableGrant, wanted
from sqlguard.postgres.policy_rows import compile_scope
from sqlguard.postgres.policy_sql import Writer, giveable, given, read_world
from sqlguard.postgres.policy_store import StoredPolicy, TableEntry, policy_document, stored_versions
from sqlguard.postgres.policy_walls import Secured, scope_name, scoped, secured_tables, unscoped

Connection = psycopg.Connection[Any]
AGENTS = "sqlguard_agent"
_ELSEWHERE = """
SELECT FROM pg_shdepend d WHERE d.refclassid = 'pg_authid'::regclass AND d.refobjid = %s
AND d.dbid NOT IN (0, (SELECT oid FROM pg_database WHERE datname = current_database()))
"""
_ROLE_RIGHTS = """
SELECT r.rolsuper, r.rolcreaterole, pg_has_role(%s, 'MEMBER WITH ADMIN OPTION'), r.oid::regrole::text
FROM pg_roles r WHERE r.rolname = current_user
"""
_OWNER_RIGHTS = """
SELECT pg_has_role(c.relowner, 'USAGE'), c.relowner::regrole::text, current_user::regrole::text
FROM pg_class c WHERE c.oid = %s::bigint::oid
"""


@dataclass(frozen=True)
class Draft:
    """`moved`: leases (role, task) that get this version's group; `lacking`: GRANTs that the operator needs."""

    name: str
    version: int
    group: str
    is_new: bool
    statements: tuple[sql.Composed, ...] = ()
    tables: tuple[TableEntry, ...] = ()
    moved: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()
    lacking: tuple[str, ...] = field(default=())


def draft_policy(
    conn: Connection,
    policy: Policy,
    *,
    moving: bool = False,
    refreshing: StoredPolicy | None = None,
    catalog: Catalog | None = None,
) -> Draft:
    """
    Work out what makes *policy* true. Must be called within a transaction that holds the policy lock.

    *moving*: open tasks of other versions get this one's group. *refreshing*: bring a version that is stored
    to the tables as they are now, whether or not it is the latest. *catalog*: what is to be assumed instead of
    what is there. Raises PolicyError.
    """
    catalog = catalog or read_catalog(conn)
    return _Drafting(conn, policy, catalog, moving=moving, refreshing=refreshing).draft()


class _Drafting:
    def __init__(
        self,
        conn: Connection,
        policy: Policy,
        catalog: Catalog,
        *,
        moving: bool,
        refreshing: StoredPolicy | None,
    ) -> None:
        self.conn = conn
        self.policy = policy
        self.moving = moving
        self.strict = refreshing is None
        self.versions = stored_versions(conn, policy.name)
        self.current = refreshing or self._same()
        self.version = self.current.policy.version if self.current else self._next()
        self.group = self.current.group if self.current else self._free_name()
        self.oid = self.current.oid if self.current else None
        self.world = read_world(conn, catalog)
        self.writer = Writer(conn, catalog)
        self.secured = secured_tables(conn)
        self.statements: list[sql.Composed] = []
        self.lacking: list[str] = []

    def draft(self) -> Draft:
        # Names in row scopes mean what they mean to the task's sessions.
        path = ", ".join(sql.Identifier(s).as_string(self.conn) for s in self.policy.defaults.search_path)
        self.conn.execute("SELECT set_config('search_path', %s, true)", [path])
        gives = wanted(self.policy, self.world, strict=self.strict)
        entries = [self._entry(grant) for grant in gives.tables]
        if self.oid is None:
            self._create_group()
        self._change_rights(gives.rights)
        self._change_scopes(entries)
        moved = self._move() if self.moving else ()
        warnings = list(gives.warnings)
        if self.strict:
            warnings += self._drop_old({role for role, _ in moved})
        return Draft(
            self.policy.name,
            self.version,
            self.group,
            is_new=self.current is None,
            statements=tuple(self.statements),
            tables=tuple(entries),
            moved=moved,
            warnings=tuple(warnings),
            lacking=tuple(dict.fromkeys(self.lacking)),
        )

    def _same(self) -> StoredPolicy | None:
        latest = self.versions[-1] if self.versions else None
        return latest if latest and latest.document == policy_document(self.policy) else None

    def _next(self) -> int:
        return self.versions[-1].policy.version + 1 if self.versions else 1

    def _free_name(self) -> str:
        """Roles belong to the cluster: another database may have a policy of the same name."""
        name = group_name(self.policy.name, self.version)
        if leases.role_oid(self.conn, name) is None:
            return name
        row = self.conn.execute(
            "SELECT oid::bigint FROM pg_database WHERE datname = current_database()"
        ).fetchone()
        return group_name(self.policy.name, self.version, row[0] if row else 0)

    def _entry(self, grant: TableGrant) -> TableEntry:
        scopes = [compile_scope(self.conn, grant.table, text) for text in grant.scopes]
        params = {name: type_ for scope in scopes for name, type_ in scope.params.items()}
        expression = " AND ".join(scope.expression for scope in scopes)
        return TableEntry(grant, expression or None, params)

    def _create_group(self) -> None:
        group = sql.Identifier(self.group)
        options = " WITH INHERIT TRUE, SET FALSE" if leases.has_grant_options(self.conn) else ""
        self.statements += [
            sql.SQL("CREATE ROLE {} NOLOGIN").format(group),
            sql.SQL("GRANT {} TO {}" + options).format(sql.Identifier(AGENTS), group),
        ]
        self.lacking += _lacking_for_roles(self.conn)

    def _change_rights(self, rights: frozenset[Right]) -> None:
        has = given(self.conn, self.oid) if self.oid is not None else frozenset()
        able = giveable(self.conn, rights - has)
        self.lacking += able.lacking
        self.statements += self.writer.revocations(has - rights, self.group)
        self.statements += self.writer.grants(rights - has - able.public, self.group)

    def _change_scopes(self, entries: Iterable[TableEntry]) -> None:
        name = scope_name(self.policy.name, self.version)
        scopes = {e.grant.table.oid: e for e in entries if e.scope is not None}
        for oid, entry in scopes.items():
            table = entry.grant.table
            there = self.secured.get(oid) or Secured(
                table.schema, table.name, table.row_security, frozenset()
            )
            before_16 = not leases.has_grant_options(self.conn)
            found = scoped(there, name, self.group, entry.scope or "", can_become_agent=before_16)
            if found:
                self.lacking += _lacking_owner(self.conn, oid)
                self.statements += found
                self.secured[oid] = there.with_scope(name, can_become_agent=before_16)
        for oid in [o for o, there in self.secured.items() if name in there.policies and o not in scopes]:
            self._unscope(oid, name)

    def _unscope(self, oid: int, name: str) -> None:
        self.lacking += _lacking_owner(self.conn, oid)
        self.statements += unscoped(self.secured[oid], name)
        self.secured[oid] = self.secured[oid].without_scope(name)

    def _move(self) -> tuple[tuple[str, str], ...]:
        rows = self.conn.execute(
            "SELECT l.role::text, t.id FROM sqlguard.lease l JOIN sqlguard.task t ON t.id = l.task_id"
            " WHERE t.policy = %s AND t.policy_version <> %s AND l.state = 'live' AND t.state = 'open' FOR UPDATE",
            [self.policy.name, self.version],
        ).fetchall()
        for role, _ in rows:
            self.statements += leases.switch_group(self.conn, role, self.group)
        return tuple((role, task) for role, task in rows)

    def _drop_old(self, moved: set[str]) -> list[str]:
        """Drop the groups of older versions that no lease is in; return warnings."""
        warnings = []
        for old in self.versions:
            if old.oid is None or old.group == self.group or self._is_used(old, moved):
                continue
            self.statements += self.writer.revocations(given(self.conn, old.oid), old.group)
            name = scope_name(self.policy.name, old.policy.version)
            for oid in [o for o, there in self.secured.items() if name in there.policies]:
                self._unscope(oid, name)
            if self.conn.execute(_ELSEWHERE, [old.oid]).fetchone() is None:
                self.statements.append(sql.SQL("DROP ROLE {}").format(sql.Identifier(old.group)))
            else:
                warnings.append(
                    f"role `{old.group}` has rights in another database and was kept, without any here"
                )
        return warnings

    def _is_used(self, old: StoredPolicy, moved: set[str]) -> bool:
        rows = self.conn.execute(
            "SELECT role::text FROM sqlguard.lease WHERE group_role = %s AND state IN ('creating', 'live')",
            [old.group],
        ).fetchall()
        return any(role not in moved for (role,) in rows)


def _lacking_for_roles(conn: Connection) -> Iterator[str]:
    """Making a group takes CREATEROLE and, since 16, the right to let others into `sqlguard_agent`."""
    row = conn.execute(_ROLE_RIGHTS, [AGENTS]).fetchone()
    if row is None or row[0]:
        return
    _, may_create, may_admit, operator = row
    if not may_create:
        yield f"ALTER ROLE {operator} CREATEROLE"
    if not may_admit and (leases.has_grant_options(conn) or not may_create):
        yield f"GRANT {AGENTS} TO {operator} WITH ADMIN OPTION"


def _lacking_owner(conn: Connection, table: int) -> Iterator[str]:
    """Row-level security is the owner's business alone."""
    row = conn.execute(_OWNER_RIGHTS, [table]).fetchone()
    if row is not None and not row[0]:
        yield f"GRANT {row[1]} TO {row[2]}"
