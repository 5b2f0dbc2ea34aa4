"""
Undo: take back what an agent did, newest first, in one transaction; or show what that would do.

How a restored row stays exactly as it was: triggers of other people that would act on it are switched off
for the time of the undo (`ALTER TABLE … DISABLE TRIGGER`, which the owner may do; it makes other writers of
that table wait until the undo has committed). What those triggers did when the agent wrote is in the journal
and is taken back like everything else. Tables without such triggers are not locked. The same goes for forced
row-level security, and for GENERATED ALWAYS AS IDENTITY where an UPDATE has to set such a column.

A preview is the same run, rolled back. A conflict (a row that somebody changed since, a value that is taken,
a parent that is gone) is never overwritten unless the operator says `force`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from sqlguard.errors import Refused, UndoConflict
from sqlguard.postgres import undo_rings
from sqlguard.postgres.images import Images, pin
from sqlguard.postgres.undo_between import find_between
from sqlguard.postgres.undo_conflicts import children_of_left_parents, find_removed
from sqlguard.postgres.undo_look import LISTED, Look
from sqlguard.postgres.undo_plan import (
    ChangeSet,
    Reference,
    Scope,
    ordered,
    read_actions,
    read_foreign,
    read_references,
    read_sets,
)
from sqlguard.postgres.undo_report import Difference, TableCount, UndoReport
from sqlguard.postgres.undo_sql import Mode, Statements, Work
from sqlguard.postgres.undo_steps import Done, reverse
from sqlguard.postgres.undo_table import Target, read_target

Progress = Callable[[int, int], None]
ON_CONFLICT = ("stop", "skip", "force")
#: One undo at a time, by a table that no agent may lock so: advisory locks are anybody's, and one that a
#: prepared transaction holds stays when its session and its role have ended.
_LOCK = "LOCK TABLE sqlguard.undo IN SHARE ROW EXCLUSIVE MODE"
#: For rows and chains that other sessions keep locked, an agent's among them. The undo before is waited for.
_PATIENCE = "10s"
#: Tasks with a transaction that has changed something: only such a one keeps rows locked.
_HOLDERS = """
    SELECT DISTINCT l.task_id FROM sqlguard.lease l JOIN pg_catalog.pg_stat_activity a ON a.usename = l.role
    JOIN pg_catalog.pg_locks k ON k.pid = a.pid
    WHERE k.locktype = 'transactionid' AND k.mode = 'ExclusiveLock' AND k.granted AND a.datname = current_database()
    UNION SELECT l.task_id FROM sqlguard.lease l JOIN pg_catalog.pg_prepared_xacts x ON x.owner = l.role
"""
#: Megabytes for each sort or hash of an undo: a million keys then fit without many batches.
_WORK_MEM = 64
# Errors that mean a collision; the undo is then run again with every collision looked for beforehand.
_COLLISIONS = (
    psycopg.errors.UniqueViolation,
    psycopg.errors.ForeignKeyViolation,
    psycopg.errors.RestrictViolation,
    psycopg.errors.ExclusionViolation,
)


def undo(  # noqa: PLR0913 (the scope has several forms)
    conn: psycopg.Connection[Any],
    *,
    task: str | None = None,
    action: int | None = None,
    since: datetime | None = None,
    agent: str | None = None,
    undo_id: int | None = None,
    preview: bool = False,
    on_conflict: str = "stop",
    progress: Progress | None = None,
) -> UndoReport:
    """
    Undo a task, an action, everything *since* a time, or an earlier undo (which is a redo).

    *conn* must be the operator's: a member of the owner of the tables and of the schema `sqlguard`.
    Safe to repeat. With `stop` (the default) any conflict leaves everything as it is. *progress* is called
    with rows done and rows in all.
    """
    if on_conflict not in ON_CONFLICT:
        raise ValueError(f"on_conflict is one of {', '.join(ON_CONFLICT)}")
    scope = Scope(task=task, action=action, undo=undo_id, since=since, agent=agent)
    if scope == Scope():
        raise Refused("nothing was named to undo", hint="give a task, an action, a time or an earlier undo")
    return Run(conn, scope, preview, on_conflict, progress).carry_out()


class _Again(Exception):
    """Raised to roll an attempt back and make another, with what was learned."""


@dataclass
class Run:
    """One undo; an attempt is a transaction of its own."""

    conn: psycopg.Connection[Any]
    scope: Scope
    preview: bool
    on_conflict: str
    progress: Progress | None
    read: Callable[[psycopg.Connection[Any], Scope], tuple[list[ChangeSet], bool]] = read_sets
    take_back: Callable[[Statements, Work], Iterator[Done]] = reverse
    _images: Images = field(init=False)
    _look: Look = field(init=False)
    _tables: dict[int, Target | None] = field(default_factory=dict)
    #: Columns that are GENERATED ALWAYS AS IDENTITY, of tables where they have to be set.
    _fixed: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _counts: dict[tuple[str, str], int] = field(default_factory=dict)
    _differences: list[Difference] = field(default_factory=list)
    #: Rows that an attempt brought back under parents that stay deleted: the next one leaves them, too.
    _orphans: list[tuple[int, int, str]] = field(default_factory=list)

    def carry_out(self) -> UndoReport:
        try:
            return self.attempt(careful=False)
        except _COLLISIONS:
            try:
                return self.attempt(careful=True)
            except _COLLISIONS as fault:
                raise UndoConflict(
                    f"the undo is not possible: {fault.diag.message_primary}",
                    detail=fault.diag.message_detail,
                ) from None
        except psycopg.errors.LockNotAvailable as fault:
            raise self._waited(fault) from None

    def _waited(self, fault: psycopg.Error) -> Refused:
        """Return what is to be done about sessions that keep locked what the undo needs."""
        tasks = [row[0] for row in self.conn.execute(_HOLDERS).fetchall()]
        ends = " and ".join(f"`sqlguard task end {task}`" for task in tasks)
        return Refused(
            f"what the undo needs is locked by another session: {fault.diag.message_primary}",
            detail=fault.diag.context,
            hint=f"run {ends}, then undo again" if ends else "undo again when that session is done",
        )

    def attempt(self, *, careful: bool) -> UndoReport:
        for kept in (self._tables, self._fixed, self._counts, self._differences):
            kept.clear()
        self._images = Images(self.conn)
        self._look = Look(self.conn, self._images, self._tables)
        try:
            with self.conn.transaction() as transaction:
                report = self._undo(careful=careful)
                if self.preview or report.stopped:
                    raise psycopg.Rollback(transaction)
        except _Again:
            return self.attempt(careful=careful)
        return report

    def _undo(self, *, careful: bool) -> UndoReport:
        self.conn.execute(_LOCK)
        pin(self.conn)
        sets, any_at_all = self.read(self.conn, self.scope)
        if not sets:
            return UndoReport(self.scope.as_dict(), preview=self.preview, already_undone=any_at_all)
        path = self._prepare()
        references = read_references(self.conn)
        ring = undo_rings.put_off(self.conn, sets, references)
        self._read_tables(sets)
        sets = [self._renamed(one) for one in sets]
        works = self._works(sets, references, path)
        own = self.conn.execute(
            "INSERT INTO pg_temp.sqlguard_conflict VALUES (0, 0, '') RETURNING xmin::text"
        ).fetchone()
        assert own is not None  # noqa: S101 (RETURNING of one row)
        run = Statements(self.conn, Mode(own[0], force=self.on_conflict == "force", careful=careful))
        undo_id = self._next("sqlguard.undo_id_seq")
        self._quiet(on=False)
        if self.on_conflict != "force":
            find_between(run, sets, self._tables, self._images)
        self._all(run, works, undo_id, total=sum(s.rows for s in sets))
        if self.on_conflict != "stop" and (
            found := [o for w in works for o in children_of_left_parents(run, w)]
        ):
            self._orphans += found
            raise _Again
        self.conn.execute("SET CONSTRAINTS ALL IMMEDIATE")
        undo_rings.put_back(self.conn, ring)
        self._quiet(on=True)
        return self._finish(undo_id, sets)

    # Before ----

    def _prepare(self) -> str:
        """Make room and the table of conflicts; return the session's own search_path."""
        self.conn.execute(
            "SELECT set_config('lock_timeout', %s, true) WHERE current_setting('lock_timeout') = '0'",
            [_PATIENCE],
        )
        self.conn.execute(
            "SELECT set_config('work_mem', %(mb)s || 'MB', true) FROM pg_catalog.pg_settings"
            " WHERE name = 'work_mem' AND setting::bigint < %(mb)s::bigint * 1024",
            {"mb": str(_WORK_MEM)},
        )
        self.conn.execute(
            "CREATE TEMP TABLE sqlguard_conflict (change_set_id bigint, row_change_id bigint, reason text,"
            " PRIMARY KEY (change_set_id, row_change_id)) ON COMMIT DROP"
        )
        row = self.conn.execute(
            "SELECT current_setting('search_path'), set_config('search_path', 'pg_catalog', true)"
        ).fetchone()
        assert row is not None  # noqa: S101 (a SELECT without FROM has one row)
        return str(row[0])

    def _read_tables(self, sets: Sequence[ChangeSet]) -> None:
        for one in sets:
            if one.relid not in self._tables:
                self._tables[one.relid] = read_target(self.conn, one.relid, one.schema, one.name)
            target = self._tables[one.relid]
            if target is not None and one.op in ("update", "rekey"):
                # Only the keys of a rekey can differ, and columns outside of the key at any time.
                fixed = [
                    c for c in target.identities if one.op == "rekey" or c not in (one.key_columns or [])
                ]
                if fixed:
                    self._fixed[one.relid] = target.identities
                    self._tables[one.relid] = target.relaxed()

    def _renamed(self, one: ChangeSet) -> ChangeSet:
        """Return *one* with the names that its key has now. Reads its shape while the types' names are unambiguous."""
        target = self._tables[one.relid]
        if target is None:
            return one
        renamed = self._images.shape(target, one.shape_id).renamed
        return replace(one, key_columns=one.key_columns and [renamed.get(k, k) for k in one.key_columns])

    def _works(self, sets: Sequence[ChangeSet], references: Sequence[Reference], path: str) -> list[Work]:
        relids = {s.relid for s in sets}
        foreign = {relid: read_foreign(self.conn, relid, sets) for relid in relids}
        every = {r: tuple(s.id for s in sets if s.relid == r) for r in relids}
        inserted, deleted = (
            {r: tuple(s.id for s in sets if s.relid == r and s.op == op) for r in relids}
            for op in ("insert", "delete")
        )
        # Functions in checks and domains may count on it, and type names are read by now.
        self.conn.execute("SELECT set_config('search_path', %s, true)", [path])
        find_removed(self.conn, [s.id for s in sets])
        with self.conn.cursor() as cursor:
            cursor.executemany("INSERT INTO pg_temp.sqlguard_conflict VALUES (%s, %s, %s)", self._orphans)
        works = []
        for one in ordered(sets, references):
            target = self._tables[one.relid]
            if target is None:
                self._impossible(one, "the table is gone")
                continue
            missing = [k for k in one.key_columns or [] if k not in target.by_name]
            if missing:
                self._impossible(one, "the table has lost the key by which its rows could be found")
                continue
            new = self._next("sqlguard.change_set_id_seq")
            shape = self._images.shape(target, one.shape_id)
            scope = foreign[one.relid], inserted[one.relid], deleted[one.relid], every[one.relid]
            works.append(Work(one, target, shape, new, *scope))
        return works

    def _impossible(self, one: ChangeSet, reason: str) -> None:
        self.conn.execute(
            "INSERT INTO pg_temp.sqlguard_conflict SELECT r.change_set_id, r.id, %s"
            " FROM sqlguard.row_changes(%s) r ON CONFLICT DO NOTHING",
            [reason, one.id],
        )

    def _quiet(self, *, on: bool) -> None:
        """Switch off, or back on, what would not let rows be written as they were: see the page above."""
        for relid, target in self._tables.items():
            if target is None:
                continue
            for name, state in target.triggers:
                word = {"O": "ENABLE", "A": "ENABLE ALWAYS"}[state] if on else "DISABLE"
                self.conn.execute(
                    sql.SQL("ALTER TABLE {} {} TRIGGER {}").format(
                        target.ident, sql.SQL(word), sql.Identifier(name)
                    )
                )
            for column in self._fixed.get(relid, ()):
                self.conn.execute(
                    sql.SQL("ALTER TABLE {} ALTER COLUMN {} SET GENERATED {}").format(
                        target.ident, sql.Identifier(column), sql.SQL("ALWAYS" if on else "BY DEFAULT")
                    )
                )
            if target.forced:
                self.conn.execute(
                    sql.SQL("ALTER TABLE {} {} ROW LEVEL SECURITY").format(
                        target.ident, sql.SQL("FORCE" if on else "NO FORCE")
                    )
                )

    # The work ----

    def _all(self, run: Statements, works: Sequence[Work], undo_id: int, *, total: int) -> None:
        done = 0
        for work in works:
            for step in self.take_back(run, work):
                self._note(step, undo_id)
            done += work.change.rows
            if self.progress is not None:
                self.progress(done, total)

    def _note(self, step: Done, undo_id: int) -> None:
        if not step.rows:
            return
        at = step.work.change.table, step.op
        self._counts[at] = self._counts.get(at, 0) + step.rows
        self._record(step.work, step.op, step.rows, undo_id)
        if self.preview and len(self._differences) < LISTED:
            room = LISTED - len(self._differences)
            self._differences += self._look.differences(step.work, step.op, room)

    def _record(self, work: Work, op: str, rows: int, undo_id: int) -> None:
        """Write the undo's own change set, last: its number of rows is known by now."""
        as_it_was = work.shape.exact and not work.shape.renamed
        self.conn.execute(
            "INSERT INTO sqlguard.change_set (id, relid, schema_name, table_name, op, rows, key_columns,"
            " shape_id, undo_id, reverts) OVERRIDING SYSTEM VALUE"
            " SELECT %(new)s, c.relid, c.schema_name, c.table_name, %(op)s, %(rows)s, %(keys)s,"
            " %(shape)s, %(undo)s, c.id FROM sqlguard.change_set c WHERE c.id = %(old)s",
            {
                "new": work.new,
                "op": "update" if op == "restore" else op,
                "rows": rows,
                "keys": work.change.key_columns,
                "shape": work.change.shape_id if as_it_was else self._shape_now(work.target),
                "undo": undo_id,
                "old": work.change.id,
            },
        )

    def _shape_now(self, target: Target) -> int:
        row = self.conn.execute(
            "SELECT k.id, sqlguard.keep_shape(k.id, %(oid)s) FROM"
            " (SELECT sqlguard.shape_key(%(oid)s::oid::regclass) AS id OFFSET 0) k",
            {"oid": target.oid},
        ).fetchone()
        assert row is not None  # noqa: S101 (a SELECT without FROM has one row)
        return int(row[0])

    # After ----

    def _finish(self, undo_id: int, sets: Sequence[ChangeSet]) -> UndoReport:
        count, conflicts = self._look.conflicts(sets)
        self._images.close()
        stopped = count > 0 and self.on_conflict == "stop"
        tables = tuple(TableCount(t, op, n) for (t, op), n in sorted(self._counts.items()))
        report = UndoReport(
            scope=self.scope.as_dict(),
            undo=None if self.preview or stopped else undo_id,
            preview=self.preview,
            stopped=stopped,
            tables=() if stopped and not self.preview else tables,
            conflicts=conflicts,
            conflict_count=count,
            differences=tuple(self._differences),
            notes=tuple(self._images.notes),
        )
        if not (self.preview or stopped):
            self._write(undo_id, sets, report)
        return report

    def _write(self, undo_id: int, sets: Sequence[ChangeSet], report: UndoReport) -> None:
        kept = {k: v for k, v in report.as_dict().items() if k not in ("conflicts", "differences")}
        self.conn.execute(
            "INSERT INTO sqlguard.undo (id, scope, report) OVERRIDING SYSTEM VALUE VALUES (%s, %s, %s)",
            [undo_id, Jsonb(self.scope.as_dict()), Jsonb(kept)],
        )
        self.conn.execute(
            "INSERT INTO sqlguard.undone (change_set_id, undo_id) SELECT unnest(%s::bigint[]), %s",
            [[s.id for s in sets], undo_id],
        )
        self.conn.execute(
            "INSERT INTO sqlguard.undo_skipped (undo_id, change_set_id, row_change_id, reason)"
            " SELECT %s, change_set_id, row_change_id, reason FROM pg_temp.sqlguard_conflict"
            " WHERE change_set_id > 0",
            [undo_id],
        )
        detail = {"undo": undo_id} | ({} if self.scope.undo is None else {"redo": True})
        skipped = dict(
            self.conn.execute(
                "SELECT c.action_id, count(*) FROM sqlguard.undo_skipped s"
                " JOIN sqlguard.change_set c ON c.id = s.change_set_id WHERE s.undo_id = %s GROUP BY 1",
                [undo_id],
            ).fetchall()
        )
        for action in read_actions(self.conn, sets):
            told = detail | ({"skipped": skipped[action]} if action in skipped else {})
            self.conn.execute("SELECT sqlguard.record_event(%s, 'undone', %s)", [action, Jsonb(told)])

    def _next(self, sequence: str) -> int:
        row = self.conn.execute("SELECT nextval(%s::text::regclass)", [sequence]).fetchone()
        assert row is not None  # noqa: S101 (a SELECT without FROM has one row)
        return int(row[0])
