"""
How the statements of an undo are put together: the parts that all of them share.

A row may be touched when its `xmin` is that of the change set's own row in `sqlguard.change_set`: the trigger
wrote both in the same (sub)transaction as the agent's change, so any later change by anybody gives the row
another xmin. No after image is needed, and savepoints do no harm.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from sqlguard.postgres.images import Shape
from sqlguard.postgres.undo_plan import ChangeSet
from sqlguard.postgres.undo_table import ROW, SRC, Target

#: Below so many rows the key's index is the way in, whatever stale statistics say; above, a hash join is.
_FEW = 1000


@dataclass(frozen=True, slots=True)
class Work:
    """One change set with all that taking it back needs; `new` is the id of the undo's own change set."""

    change: ChangeSet
    target: Target
    shape: Shape
    new: int
    #: Sets on this table that are newer than the oldest of the scope, in effect, and not of the scope.
    foreign: tuple[int, ...] = ()
    #: Sets of the scope that inserted into this table: what they inserted is to go anyway.
    inserted: tuple[int, ...] = ()
    #: Sets of the scope that deleted from this table: what they deleted is to come back anyway.
    deleted: tuple[int, ...] = ()
    #: All sets of the scope on this table: whether what they touched is there is known when all are done.
    scope: tuple[int, ...] = ()

    @property
    def keys(self) -> list[str]:
        return self.change.key_columns or []


@dataclass(frozen=True, slots=True)
class Mode:
    """`own` is the xmin of what this undo writes; `careful` looks for every collision before writing."""

    own: str
    force: bool = False
    careful: bool = False


@dataclass(frozen=True, slots=True)
class Statements:
    """Runs statements about a Work inside the caller's transaction."""

    conn: psycopg.Connection[Any]
    mode: Mode

    def next_id(self) -> int:
        row = self.conn.execute("SELECT nextval('sqlguard.change_set_id_seq')").fetchone()
        assert row is not None  # noqa: S101 (a SELECT without FROM has one row)
        return int(row[0])

    def another(self, work: Work) -> Work:
        """Return *work* with a further change set of the undo's own."""
        return replace(work, new=self.next_id())

    def advise(self, rows: int) -> None:
        """Statistics of the journal are always old, but the number of rows is known: plan with that."""
        self._plan(joins=rows > _FEW, loops=rows <= _FEW, scans=True)

    @contextmanager
    def nested_loops(self, rows: int) -> Iterator[None]:
        """Plan nothing but nested loops over rows found by index or place, for the time of the block."""
        self._plan(joins=False, loops=True, scans=False)
        yield
        self.advise(rows)

    def _plan(self, *, joins: bool, loops: bool, scans: bool) -> None:
        on = {True: "on", False: "off"}
        self.conn.execute(
            "SELECT set_config('enable_hashjoin', %(joins)s, true),"
            " set_config('enable_mergejoin', %(joins)s, true), set_config('enable_nestloop', %(loops)s, true),"
            " set_config('enable_seqscan', %(scans)s, true)",
            {"joins": on[joins], "loops": on[loops], "scans": on[scans]},
        )

    def run(self, work: Work, text: LiteralString, **parts: sql.Composable) -> int:
        """Run *text*, filled in, and return how many rows it wrote."""
        return self.conn.execute(self.fill(text, work, **parts)).rowcount

    def fill(self, text: LiteralString, work: Work, **parts: sql.Composable) -> sql.Composed:
        """
        Fill in what statements about a change set speak of.

        `src`: alias of the set's rows; `row`: alias of the table; `rows`, `images`: the set's rows without
        and with their images; `matches`: the row is the one; `untouched`: nobody changed it since;
        `unblocked`: no conflict was found for it; `old`, `new`: the set, and the undo's own.
        """
        target = work.target
        key = sql.SQL("{}.key" if work.change.op == "delete" else "{}.now_key").format(SRC)
        return sql.SQL(text).format(
            **{
                "src": SRC,
                "row": ROW,
                "table": target.ident,
                "old": sql.Literal(work.change.id),
                "new": sql.Literal(work.new),
                "own": sql.Literal(self.mode.own),
                "rows": _rows(work.change),
                "images": _images(work),
                "matches": target.matches(work.keys, key),
                "key_of_row": target.key_of(work.keys, ROW),
                "untouched": self._untouched(work),
                "unblocked": _unblocked(work.change),
                **parts,
            }
        )

    def values(self, columns: Sequence[str]) -> sql.Composable:
        """Return the wanted values of *columns*, out of the image."""
        return sql.SQL(", ").join(
            sql.SQL("({}.image).{}").format(SRC, sql.Identifier(name)) for name in columns
        )

    def _untouched(self, work: Work) -> sql.Composable:
        change = work.change
        if change.op == "soft_delete":
            return sql.SQL(
                "{}.deleted_at = (SELECT c.statement_at FROM sqlguard.change_set c WHERE c.id = {})"
            ).format(ROW, sql.Literal(change.id))
        if self.mode.force:
            return sql.SQL("true")
        # Besides the set's own xmin: what this undo, or an earlier one, put back after a newer change.
        accepted = sql.SQL(
            "{row}.xmin = ANY (ARRAY(SELECT c.xmin FROM sqlguard.change_set c WHERE c.id = {old}"
            " OR (c.reverts > {old} AND c.relid = {relid})) || {own}::xid)"
        ).format(
            row=ROW,
            old=sql.Literal(change.id),
            relid=sql.Literal(change.relid),
            own=sql.Literal(self.mode.own),
        )
        if not work.foreign:
            return accepted
        return sql.SQL(
            # As a set of its own it is hashed; a NOT EXISTS of either key would be looked through for each row.
            "{accepted} AND ({src}.now_key IN (SELECT k.key FROM unnest({foreign}::bigint[]) AS s (id)"
            " CROSS JOIN LATERAL sqlguard.row_changes(s.id) f"
            " CROSS JOIN LATERAL (VALUES (f.key), (f.new_key)) AS k (key)"
            " WHERE s.id > {old} AND k.key IS NOT NULL)) IS NOT TRUE"
        ).format(
            accepted=accepted, foreign=sql.Literal(list(work.foreign)), old=sql.Literal(change.id), src=SRC
        )


def _unblocked(change: ChangeSet) -> sql.Composable:
    return sql.SQL(
        "NOT EXISTS (SELECT FROM pg_temp.sqlguard_conflict x"
        " WHERE x.change_set_id = {} AND x.row_change_id = {}.id)"
    ).format(sql.Literal(change.id), SRC)


def _rows(change: ChangeSet) -> sql.Composable:
    """Return the rows of the set: id, key at the time before, key at the time after."""
    return sql.SQL("SELECT r.id, r.key, coalesce(r.new_key, r.key) AS now_key {}").format(source(change))


def _images(work: Work) -> sql.Composable:
    """Return the rows with their images; OFFSET 0 has each text read once, not once a column."""
    return sql.SQL(
        "SELECT r.id, r.key, coalesce(r.new_key, r.key) AS now_key, r.before::{} AS image {} OFFSET 0"
    ).format(work.shape.row_type, source(work.change))


def source(change: ChangeSet) -> sql.Composable:
    """Return the FROM and WHERE that give the rows of the set that are still to be taken back, as `r`."""
    skipped: sql.Composable = sql.SQL("")
    if change.pending is not None:
        skipped = sql.SQL(
            " JOIN sqlguard.undo_skipped s ON s.change_set_id = r.change_set_id AND s.row_change_id = r.id"
            " AND s.undo_id = {}"
        ).format(sql.Literal(change.pending))
    if change.chosen:
        skipped += sql.SQL(
            " JOIN pg_temp.sqlguard_chosen h ON h.change_set_id = r.change_set_id AND h.row_change_id = r.id"
        )
    return sql.SQL("FROM sqlguard.row_changes({}) r{} WHERE true").format(sql.Literal(change.id), skipped)
