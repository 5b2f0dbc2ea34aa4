"""
What an undo has to take back, and in which order.

The order is last in, first out over change sets, with one exception that PostgreSQL forces on it. One
statement can write several change sets: a cascade's child set is recorded *after* its parent's, the set of a
statement inside a trigger *before* that of the statement around it. So the sets of one statement form a
unit. Units are undone newest first; inside a unit rows come back parents first, then updates are reverted,
then inserted rows go children first, which is an order that foreign keys always accept.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import class_row

# Sets in effect: those of the scope, and in place of a set that was undone and redone, the redo's set.
_SETS = sql.SQL("""
    WITH RECURSIVE live (id) AS (
        SELECT c.id FROM sqlguard.change_set c WHERE {scope}
        UNION
        SELECT again.id FROM live l
        JOIN sqlguard.change_set back ON back.reverts = l.id
        JOIN sqlguard.change_set again ON again.reverts = back.id
    )
    SELECT c.id, c.action_id, c.task_id, c.txid::text AS txid, c.statement_at, c.relid::bigint AS relid,
           c.schema_name AS schema, c.table_name AS name, c.op, c.key_columns, c.shape_id, c.depth, c.undo_id,
           CASE WHEN u.undo_id IS NULL THEN c.rows ELSE s.rows END AS rows,
           CASE WHEN s.rows > 0 THEN u.undo_id END AS pending
    FROM live l
    JOIN sqlguard.change_set c ON c.id = l.id
    LEFT JOIN LATERAL (
        SELECT max(u.undo_id) AS undo_id FROM sqlguard.undone u WHERE u.change_set_id = c.id
    ) u ON true
    LEFT JOIN LATERAL (
        SELECT count(*) AS rows FROM sqlguard.undo_skipped s
        WHERE s.change_set_id = c.id AND s.undo_id = u.undo_id
    ) s ON true
    ORDER BY c.id
""")


@dataclass(frozen=True, slots=True)
class Scope:
    """What to undo: exactly one of task, action, undo and since; *since* may go with a task or an agent."""

    task: str | None = None
    action: int | None = None
    undo: int | None = None
    since: datetime | None = None
    agent: str | None = None

    def condition(self) -> sql.Composable:
        parts: list[sql.Composable] = [
            sql.SQL("c.undo_id = {}").format(sql.Literal(self.undo))
            if self.undo is not None
            else sql.SQL("c.undo_id IS NULL")
        ]
        parts += self.where(
            task=sql.SQL("c.task_id = {}"),
            action=sql.SQL("c.action_id = {}"),
            since=sql.SQL("c.at >= {}"),
            agent=sql.SQL("c.task_id IN (SELECT t.id FROM sqlguard.task t WHERE t.agent = {})"),
        )
        return sql.SQL(" AND ").join(parts)

    def where(self, **conditions: sql.SQL) -> list[sql.Composable]:
        """Return those of *conditions* whose field says something, with its value in their place `{}`."""
        given = ((text, getattr(self, field)) for field, text in conditions.items())
        return [text.format(sql.Literal(value)) for text, value in given if value is not None]

    def as_dict(self) -> dict[str, Any]:
        found = {"task": self.task, "action": self.action, "undo": self.undo, "agent": self.agent}
        since = {} if self.since is None else {"since": self.since.isoformat()}
        return {k: v for k, v in found.items() if v is not None} | since


@dataclass(frozen=True, slots=True)
class ChangeSet:
    """One firing of a capture trigger; `pending` is the undo that skipped some of its rows, which remain."""

    id: int
    action_id: int | None
    task_id: str | None
    txid: str
    statement_at: datetime
    relid: int
    schema: str
    name: str
    op: str
    rows: int
    key_columns: list[str] | None
    shape_id: int
    depth: int
    undo_id: int | None
    pending: int | None
    #: Only rows that are in the table sqlguard_chosen of a restore.
    chosen: bool = False

    @property
    def table(self) -> str:
        return f"{self.schema}.{self.name}"


@dataclass(frozen=True, slots=True)
class Reference:
    """A foreign key between two tables; the actions as in pg_constraint (a, r, c, n, d)."""

    child: int
    parent: int
    on_delete: str
    on_update: str


def read_sets(conn: psycopg.Connection[Any], scope: Scope) -> tuple[list[ChangeSet], bool]:
    """Return the sets still to be undone, oldest first, and whether the scope has any set at all."""
    with conn.cursor(row_factory=class_row(ChangeSet)) as cursor:
        found = cursor.execute(_SETS.format(scope=scope.condition())).fetchall()
    return [s for s in found if s.rows > 0], bool(found)


def read_actions(conn: psycopg.Connection[Any], sets: Sequence[ChangeSet]) -> list[int]:
    """Return the actions behind *sets*, also behind those of an undo or a redo."""
    rows = conn.execute(
        """
        WITH RECURSIVE up (action_id, reverts) AS (
            SELECT c.action_id, c.reverts FROM sqlguard.change_set c WHERE c.id = ANY (%s)
            UNION
            SELECT c.action_id, c.reverts FROM up JOIN sqlguard.change_set c ON c.id = up.reverts
        )
        SELECT DISTINCT action_id FROM up WHERE action_id IS NOT NULL ORDER BY 1
        """,
        [[s.id for s in sets]],
    )
    return [r[0] for r in rows]


def read_foreign(conn: psycopg.Connection[Any], relid: int, sets: Sequence[ChangeSet]) -> tuple[int, ...]:
    """Return newer sets on the table that are not among *sets* and are still in effect."""
    own = [s.id for s in sets if s.relid == relid]
    rows = conn.execute(
        "SELECT c.id FROM sqlguard.change_set c WHERE c.relid = %s AND c.id > %s AND c.id <> ALL (%s)"
        " AND c.undo_id IS NULL"
        " AND NOT EXISTS (SELECT FROM sqlguard.undone u WHERE u.change_set_id = c.id)",
        [relid, min(own), own],
    )
    return tuple(r[0] for r in rows)


def read_references(conn: psycopg.Connection[Any]) -> list[Reference]:
    with conn.cursor(row_factory=class_row(Reference)) as cursor:
        return cursor.execute("""
            SELECT conrelid::bigint AS child, confrelid::bigint AS parent,
                   confdeltype::text AS on_delete, confupdtype::text AS on_update
            FROM pg_catalog.pg_constraint WHERE contype = 'f' AND conrelid <> confrelid
        """).fetchall()


def ordered(sets: Sequence[ChangeSet], references: Iterable[Reference]) -> list[ChangeSet]:
    """Return *sets* (oldest first) in the order in which they must be undone."""
    edges = list(references)
    return [s for unit in reversed(_units(sets, edges)) for s in _within(unit, edges)]


def _units(sets: Sequence[ChangeSet], edges: Sequence[Reference]) -> list[list[ChangeSet]]:
    units: list[list[ChangeSet]] = []
    for one in sets:
        unit = [one]
        # Statements inside triggers of this statement were recorded just before it.
        while units and _same_statement(units[-1], one) and units[-1][-1].depth > one.depth:
            unit = units.pop() + unit
        if units and _same_statement(units[-1], one) and _follows(units[-1], one, edges):
            unit = units.pop() + unit
        units.append(unit)
    return units


def _same_statement(unit: Sequence[ChangeSet], one: ChangeSet) -> bool:
    last = unit[-1]
    return (
        last.txid == one.txid
        and last.statement_at == one.statement_at
        and last.undo_id is None
        and one.undo_id is None
    )


def _follows(unit: Sequence[ChangeSet], one: ChangeSet, edges: Sequence[Reference]) -> bool:
    """
    Tell whether *one* can be what a foreign key did because of a member of *unit*, or what it let pass because
    parent and child went in one statement (a WITH query): either way the parent has to be there first.
    """
    # A soft delete that went on in its own table; the rows that refer to either come back behind both.
    if one.op == "soft_delete" and any(m.op == one.op and m.relid == one.relid for m in unit):
        return True
    for edge in edges:
        if edge.child != one.relid:
            continue
        for member in unit:
            # The walls' own referential actions of a soft delete run one level deeper.
            if member.relid != edge.parent or member.depth > one.depth:
                continue
            both = one.op in ("delete", "soft_delete")
            removed = member.op in ("delete", "soft_delete") and (both or edge.on_delete in "cnd")
            moved = member.op in ("update", "rekey") and edge.on_update in "cnd"
            if (removed or moved) and one.op != "insert":
                return True
    return False


def _within(unit: list[ChangeSet], edges: Sequence[Reference]) -> list[ChangeSet]:
    if len(unit) == 1:
        return unit
    happened = _as_it_happened(unit)
    if _replaces(happened):
        return happened[::-1]
    rank = _ranks({s.relid for s in unit}, edges)
    newest_first = happened[::-1]
    back = [s for s in newest_first if s.op in ("delete", "soft_delete")]
    reverted = [s for s in newest_first if s.op in ("update", "rekey")]
    gone = [s for s in newest_first if s.op == "insert"]
    # sorted() is stable: inside one table it stays last in, first out.
    return [
        *sorted(back, key=lambda s: rank[s.relid]),
        *sorted(reverted, key=lambda s: rank[s.relid]),
        *sorted(gone, key=lambda s: -rank[s.relid]),
    ]


def _as_it_happened(unit: Sequence[ChangeSet]) -> list[ChangeSet]:
    """
    Put what triggers did after the statement that fired them.

    PostgreSQL does not let a trigger change a row before the statement changes it (27000), so for one row
    the outer change is always the older one; except that a BEFORE INSERT trigger may clear the way.
    """
    outer = sorted(unit, key=lambda s: (s.depth, s.id))
    inserted = {s.relid for s in unit if s.op == "insert"}
    clearing = [s for s in outer if s.depth > outer[0].depth and s.op == "delete" and s.relid in inserted]
    return clearing + [s for s in outer if s not in clearing]


def _replaces(happened: Sequence[ChangeSet]) -> bool:
    """Tell whether a table lost rows before it got rows: then only the exact reverse is safe."""
    removed: set[int] = set()
    for one in happened:
        if one.op in ("delete", "rekey"):
            removed.add(one.relid)
        elif one.op == "insert" and one.relid in removed:
            return True
    return False


def _ranks(tables: Iterable[int], edges: Sequence[Reference]) -> dict[int, int]:
    """Return for each table how many tables of the set stand above it; a cycle is cut where it is met."""
    some = set(tables)
    parents = {t: {e.parent for e in edges if e.child == t and e.parent in some} for t in some}
    ranks: dict[int, int] = {}

    def rank(table: int, above: frozenset[int]) -> int:
        if table not in ranks:
            higher = [rank(p, above | {table}) for p in parents[table] if p not in above and p != table]
            ranks[table] = 1 + max(higher, default=-1)
        return ranks[table]

    for table in sorted(some):
        rank(table, frozenset())
    return ranks
