"""
Guard what a policy lets agents write to, in the mode that its `delete` asks for.

No write is granted on a table that nothing watches. `delete = "soft"` asks for soft deletes, and gets them unless
the pre-flight finds a reason against it; everything else takes journal mode, which adds triggers and no columns.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import psycopg

from sqlguard.catalog import Catalog, Column, Guard, Table
from sqlguard.errors import GuardError
from sqlguard.policy import Policy
from sqlguard.postgres.catalog_reader import read_catalog
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.preflight import BOOKKEEPING, Weight, choose, judge
from sqlguard.postgres.walls_facts import Facts, Relation, read_facts

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class Guarded:
    """One table: the mode that it has, or would have, by now (None: it can't be guarded); `why` not as wanted."""

    table: str
    wanted: str
    mode: str | None
    why: str | None = None
    hint: str | None = None

    @property
    def warning(self) -> str | None:
        if self.why is None:
            return None
        name = self.table.removeprefix("public.")
        if self.mode is None:
            return f"`{self.table}` is not guarded, so no write is granted: {self.why}"
        mended = f"; {self.hint}, then `sqlguard guard {name} --mode soft`" if self.hint else ""
        return (
            f"`{self.table}` is guarded as journal although the policy says soft, so no DELETE is granted:"
            f' {self.why}{mended}, or say delete = "journal" in the policy'
        )

    def as_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def guard_writable(conn: Connection, policy: Policy, *, dry_run: bool = False) -> list[Guarded]:
    """
    Guard the tables that *policy* lets agents write to and that are not guarded yet; *dry_run* only says how.

    What can't be guarded is left alone, and the rest is guarded all the same.
    """
    wanted = {t.qualified: mode for t, mode in _unguarded(conn, policy)}
    if not wanted:
        return []
    plan = [_planned(conn, name, mode) for name, mode in sorted(wanted.items())]
    return plan if dry_run else _carry_out(conn, plan)


def as_guarded(catalog: Catalog, guards: Iterable[Guarded]) -> Catalog:
    """Return *catalog* as it will be when the tables of *guards* are guarded: with their columns, for a dry run."""
    modes = {guard.table: guard.mode for guard in guards if guard.mode is not None}
    tables = {
        oid: table if table.qualified not in modes else _as_guarded(table, modes[table.qualified])
        for oid, table in catalog.tables.items()
    }
    return replace(catalog, tables=tables)


def _as_guarded(table: Table, mode: str) -> Table:
    if mode != "soft":
        return replace(table, guard=Guard(mode))
    missing = [name for name in BOOKKEEPING if table.column(name) is None]
    last = max((column.attnum for column in table.columns), default=0)
    added = tuple(Column(name, last + n, 0, BOOKKEEPING[name]) for n, name in enumerate(missing, 1))
    return replace(table, columns=table.columns + added, guard=Guard(mode, bookkeeping=tuple(BOOKKEEPING)))


def _unguarded(conn: Connection, policy: Policy) -> Iterator[tuple[Table, str]]:
    for table in read_catalog(conn).tables.values():
        rule = policy.table_rule(table.schema, table.name)
        ordinary = table.kind in ("r", "p") and table.schema != "sqlguard" and table.extension is None
        if rule is None or not ordinary or table.parents or table.guard is not None:
            continue
        # A pattern like `public.*` with delete = "soft" alone asks for nothing yet: DELETE is a write as well.
        if rule.insert or rule.update or rule.delete != "refuse":
            yield table, "soft" if rule.delete == "soft" else "journal"


def _planned(conn: Connection, name: str, wanted: str) -> Guarded:
    facts = read_facts(conn)
    root = _relation(facts, name)
    if root is None:
        return Guarded(name, wanted, None, "it can't be read by the operator")
    notes = judge(facts, root, {g.relid: g.mode for g in facts.guarded.values()})
    try:
        mode = choose(root, notes, None if wanted == "soft" else "journal")
    except GuardError as fault:
        return Guarded(name, wanted, None, fault.message, fault.hint)
    if mode == wanted:
        return Guarded(name, wanted, mode)
    reason = next(n for n in notes if n.weight >= Weight.PREFER)
    return Guarded(name, wanted, mode, str(reason), reason.hint)


def _relation(facts: Facts, name: str) -> Relation | None:
    return next((r for r in facts.relations.values() if r.label == name), None)


def _carry_out(conn: Connection, plan: list[Guarded]) -> list[Guarded]:
    """Parents before children, as `guard_tables` orders them: a parent that deletes for real decides for both."""
    done: list[Guarded] = []
    for mode in ("journal", None):
        names = [
            g.table for g in plan if g.mode is not None and (g.wanted == "journal") == (mode == "journal")
        ]
        done += _guarded(conn, plan, names, mode)
    return sorted([*done, *(g for g in plan if g.mode is None)], key=lambda g: g.table)


def _guarded(conn: Connection, plan: list[Guarded], names: list[str], mode: str | None) -> list[Guarded]:
    if not names:
        return []
    planned = {g.table: g for g in plan}
    try:
        reports = guard_tables(conn, names, mode)
    except GuardError as fault:
        if len(names) > 1:
            return [g for name in names for g in _guarded(conn, plan, [name], mode)]
        return [Guarded(names[0], planned[names[0]].wanted, None, fault.message, fault.hint)]
    found = []
    for report in reports:
        was = planned.get(report.table, Guarded(report.table, report.mode, report.mode))
        reason = next((n for n in report.notes if n.weight >= Weight.PREFER), None)
        if report.mode == was.wanted or reason is None:
            found.append(Guarded(report.table, was.wanted, report.mode))
        else:
            found.append(Guarded(report.table, was.wanted, report.mode, str(reason), reason.hint))
    return found
