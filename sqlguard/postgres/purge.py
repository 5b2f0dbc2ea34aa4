"""
Purge: remove tombstones for good, once they are old enough. It can't be undone.

Theory of operation. A row goes only when no row at all refers to it any more, so that no ON DELETE action of a
foreign key can ever take or change another row. Tables are worked through children first, each in batches
along its pages, every batch a short transaction: lock the rows, look again in a new statement who refers to
them, delete. Tables that refer to themselves or to one another lose their leaves first; what is left of them
are rings, and a ring goes in one statement, as a whole, if nothing outside refers to it.

A live row that refers to a tombstone stops the purge before it begins: something is wrong there that a person
has to look at. A dry run is the same run, rolled back.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from sqlguard.errors import Refused
from sqlguard.postgres.images import pin
from sqlguard.postgres.purge_report import Blocked, PurgeReport, TablePurge
from sqlguard.postgres.purge_sql import RING, Doomed, doom, groups, is_ring, storage
from sqlguard.postgres.retention import (
    LOCK,
    around,
    every_row,
    find_guarded,
    open_target,
    read_holds,
    tree_oids,
)
from sqlguard.postgres.walls_facts import Facts, Relation, read_facts

Progress = Callable[[int, int], None]
#: Pages of a table that one batch looks at: about 5,000 rows of 100 bytes.
_PAGES = 64
#: Layers of leaves that are taken off a tree of rows one by one; what is deeper goes as a whole.
_LAYERS = 20
# A batch gives up soon where it has to lift forced row-level security on a table that others are using.
_LOCK_TIMEOUT = "2s"


def purge(  # noqa: PLR0913 (one argument per flag)
    conn: psycopg.Connection[Any],
    tables: Sequence[str] | None = None,
    *,
    older_than: timedelta | datetime,
    dry_run: bool = False,
    batch: int = 5000,
    skip_blocked: bool = False,
    reason: str | None = None,
    progress: Progress | None = None,
) -> PurgeReport:
    """
    Remove the rows of *tables* (None: of all soft tables) that were deleted before *older_than*.

    *conn* must be the operator's, in autocommit mode. Rows on hold stay. With a live row that refers to one
    of the rows, nothing is removed (`stopped`), unless *skip_blocked*: then only those rows stay.
    """
    if not conn.autocommit:
        raise Refused("a purge needs a connection in autocommit mode: each batch is a transaction of its own")
    if batch < 1:
        raise Refused("a batch has at least one row")
    conn.execute("SELECT pg_advisory_lock(%s, %s)", LOCK)
    try:
        whole: AbstractContextManager[Any] = nullcontext()
        if dry_run:
            whole = conn.transaction(force_rollback=True)
        with whole:
            run = _Run(conn, read_facts(conn), batch, progress)
            run.prepare(tables, older_than)
            if (blocked := run.blocked()) and not skip_blocked:
                return PurgeReport(run.cutoff, dry_run=dry_run, stopped=True, blocked=blocked)
            run.carry_out(reason)
            return run.report(blocked, dry_run=dry_run)
    finally:
        if not conn.closed:
            conn.execute("SELECT pg_advisory_unlock(%s, %s)", LOCK)


@dataclass
class _Run:
    conn: psycopg.Connection[Any]
    facts: Facts
    batch: int
    progress: Progress | None
    cutoff: datetime = field(init=False)
    #: Number of the record in sqlguard.removal; made with the first row that goes.
    id: int | None = None
    _doomed: list[Doomed] = field(default_factory=list)
    _removed: dict[int, int] = field(default_factory=dict)
    _total: int = 0

    def prepare(self, tables: Sequence[str] | None, older_than: timedelta | datetime) -> None:
        with self.conn.transaction():
            self.cutoff = self._cutoff(older_than)
            roots = self._roots(tables)
            holds = read_holds(self.conn)
            for root in roots:
                target = open_target(self.conn, root)
                self._doomed.append(doom(self.facts, root, target, self.cutoff, holds))
        for one in self._doomed:
            due, held = self._count(one)
            self._total += due - held

    def blocked(self) -> tuple[Blocked, ...]:
        """Return what live rows refer to; nothing has been touched yet."""
        return tuple(b for one in self._doomed for b in self._blocked(one))

    def carry_out(self, reason: str | None) -> None:
        by_oid = {one.root.oid: one for one in self._doomed}
        scope = {"tables": [one.root.label for one in self._doomed], "cutoff": self.cutoff.isoformat()}
        for group in groups(self.facts, [one.root for one in self._doomed]):
            members = [by_oid[root.oid] for root in group]
            ring = is_ring(self.facts, group)
            for _ in range(_LAYERS if ring else 1):
                if not sum(self._walk(one, scope, reason) for one in members):
                    break
            if ring:
                self._ring(members, scope, reason)

    def report(self, blocked: tuple[Blocked, ...], *, dry_run: bool) -> PurgeReport:
        tables = []
        for one in self._doomed:
            due, held = self._count(one)
            tables.append(TablePurge(one.root.label, self._removed.get(one.root.oid, 0), held, due - held))
        return PurgeReport(
            self.cutoff,
            purge=None if dry_run else self.id,
            dry_run=dry_run,
            tables=tuple(sorted(tables, key=lambda t: t.table)),
            blocked=blocked,
        )

    # Before ----

    def _cutoff(self, older_than: timedelta | datetime) -> datetime:
        if isinstance(older_than, datetime):
            return older_than
        if older_than < timedelta(0):
            raise Refused("rows can't have been deleted in the future")
        row = self.conn.execute("SELECT clock_timestamp() - %s::interval", [older_than]).fetchone()
        assert row is not None  # noqa: S101 (a SELECT without FROM has one row)
        return row[0]  # type: ignore[no-any-return]

    def _roots(self, tables: Sequence[str] | None) -> list[Relation]:
        guarded = self.facts.guarded
        if tables is None:
            return [self.facts.relations[g.relid] for g in guarded.values() if g.mode == "soft"]
        roots = {r.oid: r for r in (find_guarded(self.facts, table) for table in tables)}
        for root in roots.values():
            if guarded[root.oid].mode != "soft":
                raise Refused(
                    f"`{root.label}` is guarded as `journal`: its deleted rows are in the journal alone",
                    hint="old entries of ended tasks go with `sqlguard.retire`, one row with `sqlguard erase`",
                )
        return list(roots.values())

    @contextmanager
    def _seeing(self, one: Doomed) -> Iterator[None]:
        """One transaction in which all rows can be seen; those of tables that refer to the rows, too."""
        with self.conn.transaction():
            pin(self.conn)
            self.conn.execute("SELECT set_config('lock_timeout', %s, true)", [_LOCK_TIMEOUT])
            with every_row(self.conn, around(self.facts, one.root)):
                yield

    def _count(self, one: Doomed) -> tuple[int, int]:
        with self._seeing(one):
            row = self.conn.execute(one.count()).fetchone()
        assert row is not None  # noqa: S101 (an aggregate has one row)
        return row[0], row[1]

    def _blocked(self, one: Doomed) -> Iterator[Blocked]:
        with self._seeing(one):
            for reference in one.references:
                rows = self.conn.execute(one.blocking(reference)).fetchall()
                if rows:
                    keys = [row[1] for row in rows if row[1] is not None]
                    yield Blocked(one.root.label, reference.child.label, reference.key.name, rows[0][0], keys)

    # The work ----

    def _walk(self, one: Doomed, scope: dict[str, Any], reason: str | None) -> int:
        """Remove every free row, along the pages of each relation; return how many there were."""
        return sum(
            self._batch(one, leaf, (first, first + _PAGES), scope, reason)
            for leaf in storage(self.facts, one.root)
            for first in range(0, self._pages(leaf), _PAGES)
        )

    def _pages(self, leaf: Relation) -> int:
        row = self.conn.execute(
            "SELECT pg_relation_size(%s::oid::regclass) / current_setting('block_size')::bigint", [leaf.oid]
        ).fetchone()
        assert row is not None  # noqa: S101 (a SELECT without FROM has one row)
        return int(row[0])

    def _batch(
        self,
        one: Doomed,
        leaf: Relation,
        pages: tuple[int, int],
        scope: dict[str, Any],
        reason: str | None,
    ) -> int:
        done = 0
        while True:
            with self._seeing(one):
                tids = [row[0] for row in self.conn.execute(one.lock(leaf, pages, self.batch))]
                if not tids:
                    return done
                gone = self.conn.execute(one.delete(leaf, tids)).fetchall()
                self._note(one, leaf, [row[0] for row in gone], scope, reason)
            done += len(gone)
            if len(tids) < self.batch:
                return done
            if not gone:
                raise Refused(
                    f"a trigger of `{one.root.label}` keeps its rows from being deleted",
                    hint="disable the trigger for the purge, or remove the rows by hand",
                )

    def _note(
        self, one: Doomed, leaf: Relation, gone: Sequence[datetime], scope: dict[str, Any], reason: str | None
    ) -> None:
        """Write down, in the same transaction, how many rows went and which soft deletes had marked them."""
        if not gone:
            return
        if self.id is None:
            self.id = record(self.conn, "purge", scope, reason)
        note_removed(self.conn, self.id, leaf, tree_oids(self.facts, one.root), gone)
        oid = one.root.oid
        self._removed[oid] = self._removed.get(oid, 0) + len(gone)
        if self.progress is not None:
            self.progress(sum(self._removed.values()), self._total)

    def _ring(self, members: Sequence[Doomed], scope: dict[str, Any], reason: str | None) -> None:
        """Remove what refers to one another and to which nothing else refers, in one statement."""
        leaves = [(one, leaf) for one in members for leaf in storage(self.facts, one.root)]
        relations = [r for one in members for r in around(self.facts, one.root)]
        with self.conn.transaction():
            pin(self.conn)
            self.conn.execute("SELECT set_config('lock_timeout', %s, true)", [_LOCK_TIMEOUT])
            with every_row(self.conn, {r.oid: r for r in relations}.values()):
                self.conn.execute(
                    "CREATE TEMP TABLE sqlguard_ring (leaf oid, tid tid, PRIMARY KEY (leaf, tid)) ON COMMIT DROP"
                )
                for one, leaf in leaves:
                    self.conn.execute(one.collect(leaf))
                while sum(self.conn.execute(q).rowcount for one, leaf in leaves for q in one.let_go(leaf)):
                    pass
                gone = self._delete_rings(leaves)
                for one, leaf in leaves:
                    self._note(one, leaf, gone.get(leaf.oid, []), scope, reason)
                self.conn.execute(sql.SQL("DROP TABLE {}").format(RING))

    def _delete_rings(self, leaves: Sequence[tuple[Doomed, Relation]]) -> dict[int, list[datetime]]:
        # One statement: foreign keys are looked at when all rows of it are gone.
        parts = [
            sql.SQL("{} AS ({})").format(sql.Identifier(f"d{n}"), one.delete_ring(leaf))
            for n, (one, leaf) in enumerate(leaves)
        ]
        every = [
            sql.SQL("SELECT deleted_at, leaf FROM {}").format(sql.Identifier(f"d{n}"))
            for n in range(len(parts))
        ]
        query = sql.SQL("WITH {} {}").format(sql.SQL(", ").join(parts), sql.SQL(" UNION ALL ").join(every))
        found: dict[int, list[datetime]] = {}
        for at, leaf in self.conn.execute(query):
            found.setdefault(leaf, []).append(at)
        return found


def record(conn: psycopg.Connection[Any], kind: str, scope: dict[str, Any], reason: str | None) -> int:
    """Write that rows are removed for good; return the number of the record."""
    row = conn.execute(
        "INSERT INTO sqlguard.removal (kind, reason, scope) VALUES (%s, %s, %s) RETURNING id",
        [kind, reason, Jsonb(scope)],
    ).fetchone()
    assert row is not None  # noqa: S101 (RETURNING of one row)
    return int(row[0])


def note_removed(
    conn: psycopg.Connection[Any],
    removal: int,
    leaf: Relation,
    tree: Sequence[int],
    gone: Sequence[datetime],
) -> None:
    """Write how many rows of *leaf* went, by the soft delete (of any relation of *tree*) that had marked them."""
    conn.execute(
        "INSERT INTO sqlguard.removed (removal_id, relid, schema_name, table_name, change_set_id, rows)"
        " SELECT %(id)s, %(oid)s, %(schema)s, %(name)s, c.id, sum(g.n)"
        " FROM (SELECT at, count(*) AS n FROM unnest(%(gone)s::timestamptz[]) AS at GROUP BY at) g"
        " LEFT JOIN (SELECT c.statement_at AS at, min(c.id) AS id FROM sqlguard.change_set c"
        "            WHERE c.relid = ANY (%(tree)s::oid[]) AND c.op = 'soft_delete'"
        "              AND c.statement_at = ANY (%(gone)s::timestamptz[]) GROUP BY 1) c USING (at)"
        " GROUP BY c.id",
        {
            "id": removal,
            "oid": leaf.oid,
            "schema": leaf.schema,
            "name": leaf.name,
            "gone": list(gone),
            "tree": list(tree),
        },
    )
