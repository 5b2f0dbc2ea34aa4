"""
Restore: make deleted rows live again, those of one action or those that are named; or show what that would do.

It is an undo of the deletes alone, carried out by the undo itself: journaled, exact, and to be taken back by
`undo --undo N`. What differs: rows can be chosen; a row that somebody changed while it was deleted is refused;
and a reference that the delete had set to NULL is put back only where it is still NULL, whatever else became
of its row.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg
from psycopg import sql

from sqlguard.errors import Refused, UndoConflict
from sqlguard.postgres.images import Images, pin
from sqlguard.postgres.restore_checks import changed, moved_references, set_columns, under_deleted_parents
from sqlguard.postgres.restore_choice import Choice, SetScope
from sqlguard.postgres.restore_report import OTHER, UNIQUE, RestoreReport, RowLeft, row_left
from sqlguard.postgres.retention import every_row, find_guarded, key_texts
from sqlguard.postgres.undo import Run
from sqlguard.postgres.undo_plan import ChangeSet
from sqlguard.postgres.undo_report import UndoReport
from sqlguard.postgres.undo_sql import Statements, Work, source
from sqlguard.postgres.undo_steps import Done, reverse, revert_columns
from sqlguard.postgres.walls_facts import read_facts

Progress = Callable[[int, int], None]
ON_CONFLICT = ("stop", "skip")


def restore(  # noqa: PLR0913 (one argument per flag)
    conn: psycopg.Connection[Any],
    *,
    action: int | None = None,
    table: str | None = None,
    keys: Sequence[str] = (),
    where: str | None = None,
    cascade: bool = True,
    preview: bool = False,
    on_conflict: str = "stop",
    accept_changed: bool = False,
    progress: Progress | None = None,
) -> RestoreReport:
    """
    Restore what *action* deleted, or the rows of *table* with *keys* or for which *where* is true.

    With *cascade*, rows come back with what their delete took along. *conn* must be the operator's. Safe to
    repeat. With `stop` (the default) any conflict leaves everything as it is, `skip` leaves only those rows;
    *accept_changed* restores rows that were changed while they were deleted, as they are now.
    """
    if (action is None) == (table is None):
        raise Refused(
            "nothing was named to restore", hint="give an action, or a table with keys or a condition"
        )
    if table is not None and bool(keys) == (where is not None):
        raise Refused("rows are named by keys or by a condition", hint="give --key or --where")
    if on_conflict not in ON_CONFLICT:
        raise ValueError(f"on_conflict is one of {', '.join(ON_CONFLICT)}")
    # The record of a restore lasts; the values that name a person must not.
    named = None if table is None else "by key" if keys else "by condition"
    asked = {"action": action, "table": table, "rows": named}
    run = _Restore(
        conn,
        tuple((k, v) for k, v in asked.items() if v is not None),
        preview=preview,
        on_conflict=on_conflict,
        accept_changed=accept_changed,
        progress=progress,
    )
    with conn.transaction() as transaction:
        report = run.carry_out(action=action, table=table, keys=keys, where=where, cascade=cascade)
        if preview or report.stopped:
            raise psycopg.Rollback(transaction)
    return report


@dataclass
class _Restore:
    conn: psycopg.Connection[Any]
    asked: tuple[tuple[str, Any], ...]
    preview: bool
    on_conflict: str
    accept_changed: bool
    progress: Progress | None
    _choice: Choice = field(init=False)
    #: For sets that a SET NULL or SET DEFAULT made: the columns to put back.
    _columns: dict[int, list[str]] = field(default_factory=dict)

    def carry_out(
        self,
        *,
        action: int | None,
        table: str | None,
        keys: Sequence[str],
        where: str | None,
        cascade: bool,
    ) -> RestoreReport:
        pin(self.conn)
        facts = read_facts(self.conn)
        self._choice = Choice(self.conn, facts, Images(self.conn))
        guarded = [r for oid in facts.guarded for r in facts.tree(facts.relations[oid])]
        with every_row(self.conn, guarded):
            if table is None:
                assert action is not None  # noqa: S101 (the caller names one of the two)
                self._pick_action(action)
            else:
                self._pick_rows(table, keys, where, cascade=cascade)
            sets = self._choice.settle()
            left, conflicts = self._look(sets)
            return self._restore(sets, left, conflicts)

    def _pick_action(self, action: int) -> None:
        if self.conn.execute("SELECT FROM sqlguard.action WHERE id = %s", [action]).fetchone() is None:
            raise Refused(f"there is no action {action}", hint="see `sqlguard journal list`")
        self._choice.pick_action(action)
        if not self._choice.base:
            raise Refused(
                f"action {action} deleted nothing", hint="`sqlguard undo` takes back other changes, too"
            )

    def _pick_rows(self, table: str, keys: Sequence[str], where: str | None, *, cascade: bool) -> None:
        root = find_guarded(self._choice.facts, table)
        target = self._choice.target(root.oid)
        texts = key_texts(self.conn, target, root.key_columns, keys)
        self._choice.pick_rows(root, texts, where)
        if cascade:
            self._choice.pick_consequences()
        if self._choice.base:
            return
        for key in texts:
            there = sql.SQL("SELECT FROM {} AS {} WHERE {}").format(
                target.ident,
                sql.Identifier("sg row"),
                target.matches(root.key_columns, sql.SQL("{}::text[]").format(sql.Literal(key))),
            )
            if self.conn.execute(there).fetchone() is None:
                raise Refused(
                    f"`{root.label}` has no such deleted row",
                    hint="it was purged or erased, or the journal's entries of it were retired",
                )

    def _look(self, sets: Sequence[ChangeSet]) -> tuple[list[RowLeft], list[RowLeft]]:
        """Return references that were pointed elsewhere, and what stands in the way; neither stays chosen."""
        self._columns = {s.id: c for s in sets if s.op == "update" and (c := set_columns(self._choice, s))}
        left = [
            row
            for s in sets
            if s.id in self._columns
            for row in moved_references(self._choice, s, self._columns[s.id])
        ]
        conflicts: list[RowLeft] = []
        if not self.accept_changed:
            conflicts += [row for s in sets for row in changed(self._choice, s)]
        # A parent that can't come back keeps its children from it, to any depth.
        while found := [row for s in sets for row in under_deleted_parents(self._choice, s, sets)]:
            conflicts += found
        return left, conflicts

    def _restore(
        self, sets: Sequence[ChangeSet], left: list[RowLeft], conflicts: list[RowLeft]
    ) -> RestoreReport:
        scope = SetScope(sets=self._choice.base, asked=self.asked)
        facts: dict[str, Any] = {"scope": scope.as_dict(), "preview": self.preview, "left": tuple(left)}
        if conflicts and self.on_conflict == "stop":
            return RestoreReport(stopped=True, conflicts=tuple(conflicts), **facts)
        chosen = self._chosen(sets)
        if not chosen:
            return RestoreReport(already_restored=not conflicts, conflicts=tuple(conflicts), **facts)
        run = Run(
            self.conn,
            scope,
            self.preview,
            self.on_conflict,
            self.progress,
            read=lambda _conn, _scope: (chosen, True),
            take_back=self._take_back,
        )
        try:
            done = run.carry_out()
        except UndoConflict as fault:
            return self._impossible(fault, conflicts, facts)
        if done.undo is not None:
            self._leave_the_rest(done.undo, sets)
        self._choice.close()
        return self._report(done, conflicts, facts)

    def _report(self, done: UndoReport, conflicts: list[RowLeft], facts: dict[str, Any]) -> RestoreReport:
        return RestoreReport(
            undo=done.undo,
            stopped=done.stopped,
            tables=done.tables,
            conflicts=(*conflicts, *map(row_left, done.conflicts)),
            differences=done.differences,
            notes=done.notes,
            **facts,
        )

    def _impossible(
        self, fault: UndoConflict, conflicts: list[RowLeft], facts: dict[str, Any]
    ) -> RestoreReport:
        """Two of the rows want the same unique value, say: no single row is to blame."""
        code = UNIQUE if isinstance(fault.__context__, psycopg.errors.UniqueViolation) else OTHER
        problem = ": ".join(filter(None, (fault.message, fault.detail)))
        return RestoreReport(stopped=True, conflicts=(*conflicts, RowLeft("", {}, code, problem)), **facts)

    def _chosen(self, sets: Sequence[ChangeSet]) -> list[ChangeSet]:
        counts = dict(
            self.conn.execute(
                "SELECT change_set_id, count(*) FROM pg_temp.sqlguard_chosen GROUP BY 1"
            ).fetchall()
        )
        return [replace(s, rows=counts[s.id], chosen=True) for s in sets if s.id in counts]

    def _take_back(self, run: Statements, work: Work) -> Iterator[Done]:
        columns = self._columns.get(work.change.id)
        if columns is None:
            yield from reverse(run, work)
        else:
            yield revert_columns(run, work, columns)

    def _leave_the_rest(self, undo_id: int, sets: Sequence[ChangeSet]) -> None:
        """Rows of the same sets that were not chosen stay deleted, and can be restored later."""
        for one in sets:
            self.conn.execute(
                sql.SQL(
                    "INSERT INTO sqlguard.undo_skipped (undo_id, change_set_id, row_change_id, reason)"
                    " SELECT {undo}, r.change_set_id, r.id, 'was not restored' {source}"
                    " AND NOT EXISTS (SELECT FROM pg_temp.sqlguard_chosen h"
                    "                 WHERE h.change_set_id = r.change_set_id AND h.row_change_id = r.id)"
                    " AND EXISTS (SELECT FROM sqlguard.undone u"
                    "             WHERE u.change_set_id = r.change_set_id AND u.undo_id = {undo})"
                    " ON CONFLICT DO NOTHING"
                ).format(undo=sql.Literal(undo_id), source=source(one))
            )
