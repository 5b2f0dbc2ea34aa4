"""
The statements of a purge about one soft table: which rows are due, which are free to go, and how they go.

Rows are named by table and ctid inside one transaction, after they were locked; so tables without a key are
purged like any other. No parameters are bound: a condition of a hold may hold a percent sign.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from psycopg import sql

from sqlguard.postgres.retention import Hold, is_held, name_of, tree_oids
from sqlguard.postgres.undo_table import ROW, Target
from sqlguard.postgres.walls_facts import Facts, Key, Relation

_CHILD = sql.Identifier("sg child")
#: Rows of the tables that go together, while it is found out which of them can.
RING = sql.SQL("pg_temp.sqlguard_ring")


@dataclass(frozen=True, slots=True)
class Reference:
    """A foreign key that refers to rows of the table; *child* with what belongs to it."""

    key: Key
    child: Relation
    #: Deleted rows of the child are tombstones, too.
    child_soft: bool
    #: The key refers to this one relation of a tree, not to the whole.
    only: int | None

    def exists(self, extra: sql.Composable) -> sql.Composable:
        """Return the condition that a row of the child refers to ROW; *extra* is about the child's row."""
        pairs = zip(self.key.ref_columns, self.key.operators, self.key.columns, strict=True)
        match = [
            sql.SQL("{}.{} {} {}.{}").format(
                ROW, sql.Identifier(ref), sql.SQL(op), _CHILD, sql.Identifier(column)
            )
            for ref, op, column in pairs
        ]
        if self.only is not None:
            match.append(sql.SQL("{}.tableoid = {}::oid").format(ROW, sql.Literal(self.only)))
        return sql.SQL("EXISTS (SELECT FROM {} {} AS {} WHERE {} AND {})").format(
            sql.SQL("" if self.child.kind == "p" else "ONLY"),
            name_of(self.child),
            _CHILD,
            sql.SQL(" AND ").join(match),
            extra,
        )

    @property
    def live(self) -> sql.Composable:
        return sql.SQL("{}.deleted_at IS NULL").format(_CHILD) if self.child_soft else sql.SQL("true")


@dataclass(frozen=True, slots=True)
class Doomed:
    """The tombstones of one soft table that are due."""

    facts: Facts
    root: Relation
    target: Target
    cutoff: datetime
    holds: Sequence[Hold]
    references: tuple[Reference, ...]

    @property
    def due(self) -> sql.Composable:
        return sql.SQL("{}.deleted_at < {}").format(ROW, sql.Literal(self.cutoff))

    @property
    def held(self) -> sql.Composable:
        return is_held(self.holds, self.target, self.root.key_columns, ROW)

    @property
    def free(self) -> sql.Composable:
        """The condition that no row refers to ROW; as conjuncts, so that each becomes an anti-join."""
        parts = [sql.SQL("NOT {}").format(r.exists(sql.SQL("true"))) for r in self.references]
        return sql.SQL(" AND ").join([sql.SQL("true"), *parts])

    @property
    def key(self) -> sql.Composable:
        return self.target.key_of(self.root.key_columns, ROW) if self.root.key_columns else sql.SQL("NULL")

    def count(self) -> sql.Composed:
        """Return the query for: rows that are due, and those of them that are held."""
        return sql.SQL("SELECT count(*), count(*) FILTER (WHERE {}) FROM {} AS {} WHERE {}").format(
            self.held, name_of(self.root), ROW, self.due
        )

    def blocking(self, reference: Reference) -> sql.Composed:
        """Return the query for rows that a live row refers to: their number and a few keys."""
        return sql.SQL("SELECT count(*) OVER (), {} FROM {} AS {} WHERE {} AND NOT {} AND {} LIMIT 5").format(
            self.key, name_of(self.root), ROW, self.due, self.held, reference.exists(reference.live)
        )

    def lock(self, leaf: Relation, pages: tuple[int, int], limit: int) -> sql.Composed:
        """Return the query that locks free rows on some pages of *leaf*; rows that others have stay."""
        first, last = pages
        return sql.SQL(
            "SELECT {row}.ctid::text FROM ONLY {leaf} AS {row}"
            " WHERE {row}.ctid >= {first}::tid AND {row}.ctid < {last}::tid AND {due} AND NOT {held} AND {free}"
            " LIMIT {limit} FOR UPDATE OF {row} SKIP LOCKED"
        ).format(
            row=ROW,
            leaf=name_of(leaf),
            first=sql.Literal(f"({first},0)"),
            last=sql.Literal(f"({last},0)"),
            due=self.due,
            held=self.held,
            free=self.free,
            limit=sql.Literal(limit),
        )

    def delete(self, leaf: Relation, tids: list[str]) -> sql.Composed:
        """Return the DELETE of the locked rows *tids* that are still free, in a snapshot of its own."""
        return sql.SQL(
            "DELETE FROM ONLY {leaf} AS {row} WHERE {row}.ctid = ANY ({tids}::tid[]) AND {due} AND {free}"
            " RETURNING {row}.deleted_at"
        ).format(leaf=name_of(leaf), row=ROW, tids=sql.Literal(tids), due=self.due, free=self.free)

    # Rings ----

    def collect(self, leaf: Relation) -> sql.Composed:
        return sql.SQL(
            "INSERT INTO {ring} SELECT {oid}, {row}.ctid FROM ONLY {leaf} AS {row}"
            " WHERE {due} AND NOT {held} FOR UPDATE OF {row} SKIP LOCKED"
        ).format(
            ring=RING,
            oid=sql.Literal(leaf.oid),
            row=ROW,
            leaf=name_of(leaf),
            due=self.due,
            held=self.held,
        )

    def let_go(self, leaf: Relation) -> Iterator[sql.Composed]:
        """Yield what takes rows out of the ring to which rows outside of it refer."""
        outside = sql.SQL(
            "NOT EXISTS (SELECT FROM {} i WHERE i.leaf = {}.tableoid AND i.tid = {}.ctid)"
        ).format(RING, _CHILD, _CHILD)
        for reference in self.references:
            yield sql.SQL(
                "DELETE FROM {ring} o USING ONLY {leaf} AS {row}"
                " WHERE o.leaf = {oid} AND o.tid = {row}.ctid AND {exists}"
            ).format(
                ring=RING,
                leaf=name_of(leaf),
                row=ROW,
                oid=sql.Literal(leaf.oid),
                exists=reference.exists(outside),
            )

    def delete_ring(self, leaf: Relation) -> sql.Composed:
        return sql.SQL(
            "DELETE FROM ONLY {leaf} AS {row} USING {ring} o"
            " WHERE o.leaf = {oid} AND o.tid = {row}.ctid RETURNING {row}.deleted_at, {oid} AS leaf"
        ).format(leaf=name_of(leaf), row=ROW, ring=RING, oid=sql.Literal(leaf.oid))


def doom(facts: Facts, root: Relation, target: Target, cutoff: datetime, holds: Sequence[Hold]) -> Doomed:
    own = [h for h in holds if h.relid in tree_oids(facts, root)]
    return Doomed(facts, root, target, cutoff, own, tuple(_references(facts, root)))


def _references(facts: Facts, root: Relation) -> Iterator[Reference]:
    alone = not root.children
    for key in facts.keys_to(root):
        child = facts.relations.get(key.child)
        if child is None:
            continue
        guarded = facts.guarded.get(facts.root(child).oid)
        soft = guarded is not None and guarded.mode == "soft"
        parent = facts.relations[key.parent]
        yield Reference(key, child, soft, None if alone or parent.kind == "p" else parent.oid)


def storage(facts: Facts, root: Relation) -> list[Relation]:
    """Return the relations of the tree that hold rows."""
    return [r for r in facts.tree(root) if r.kind == "r"]


def groups(facts: Facts, roots: Sequence[Relation]) -> list[list[Relation]]:
    """Return *roots* children first; tables that refer to one another in a circle are one group."""
    wanted = {r.oid: r for r in roots}
    above = {
        oid: {
            facts.root(facts.relations[k.parent]).oid
            for k in facts.keys_of(root)
            if k.parent in facts.relations
        }
        & wanted.keys()
        for oid, root in wanted.items()
    }
    reach = {oid: _reach(oid, above) for oid in wanted}
    found: list[list[Relation]] = []
    placed: set[int] = set()
    # Whoever reaches more is further down; members of a circle reach the same.
    for oid in sorted(wanted, key=lambda o: (-len(reach[o] | {o}), wanted[o].label)):
        if oid not in placed:
            circle = [o for o in wanted if o == oid or (o in reach[oid] and oid in reach[o])]
            placed.update(circle)
            found.append([wanted[o] for o in circle])
    return found


def is_ring(facts: Facts, group: Sequence[Relation]) -> bool:
    """Tell whether rows of *group* can refer to rows of the group."""
    inside = {oid for root in group for oid in tree_oids(facts, root)}
    return any(k.child in inside for root in group for k in facts.keys_to(root))


def _reach(start: int, above: dict[int, set[int]]) -> set[int]:
    seen: set[int] = set()
    waiting = list(above[start])
    while waiting:
        one = waiting.pop()
        if one not in seen:
            seen.add(one)
            waiting.extend(above[one])
    return seen
