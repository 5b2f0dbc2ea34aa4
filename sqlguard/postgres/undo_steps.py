"""
Taking back one change set: the statements that do it, all set-based, and the rows that stand in the way.

Each reversal first keeps what it is about to change as a change set of the undo's own, then changes it; so
an undo can itself be undone. A row may be touched when its `xmin` is that of the change set's own row in
`sqlguard.change_set`: the trigger wrote both in the same (sub)transaction as the agent's change, so any later
change by anybody gives the row another xmin. No after image is needed, and savepoints do no harm.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from sqlguard.postgres.undo_plan import ChangeSet
from sqlguard.postgres.undo_table import ROW, SRC, Target

#: Below so many rows the key's index is the way in, whatever stale statistics say; above, a hash join is.
_FEW = 1000


@dataclass(frozen=True, slots=True)
class Shape:
    """How the captured images of a change set are read: the row type now, or a type made for this undo."""

    row_type: sql.Composable
    columns: tuple[str, ...]
    exact: bool


@dataclass(frozen=True, slots=True)
class Work:
    """One change set with all that taking it back needs; `new` is the id of the undo's own change set."""

    change: ChangeSet
    target: Target
    shape: Shape
    new: int
    #: Sets of other tasks on this table that are newer than the oldest set of the scope.
    foreign: tuple[int, ...] = ()

    @property
    def keys(self) -> list[str]:
        return self.change.key_columns or []


@dataclass(frozen=True, slots=True)
class Mode:
    """`own` is the xmin of what this undo writes; `careful` looks for every collision before writing."""

    own: str
    force: bool = False
    careful: bool = False


class Steps:
    """Runs the statements of an undo inside the caller's transaction."""

    def __init__(self, conn: psycopg.Connection[Any], mode: Mode) -> None:
        self._conn = conn
        self._mode = mode

    def reverse(self, work: Work) -> tuple[str, int]:
        """Take back *work*; return what was done (an op, or `restore`) and to how many rows."""
        self._advise(work.change.rows)
        match work.change.op:
            case "insert":
                return "delete", self._remove(work)
            case "delete":
                return "insert", self._insert(work)
            case "soft_delete":
                return "restore", self._unmark(work)
            case _:
                return work.change.op, self._revert(work)

    # One method per reversal ------------------------------------------------------------------------------

    def _remove(self, work: Work) -> int:
        self._find_referenced(work)
        done = self._run(
            work,
            """
            WITH {src} AS MATERIALIZED ({rows}),
            gone AS (
                DELETE FROM {table} AS {row} USING {src}
                WHERE {matches} AND {untouched} AND {unblocked}
                RETURNING {src}.key, ({row}.*)::text AS image
            )
            INSERT INTO sqlguard.row_change (change_set_id, key, before) SELECT {new}, key, image FROM gone
            """,
        )
        if done < work.change.rows:
            # A row that is not there any more is what the undo wants.
            self._blocked(work, "the row was changed since", sql.SQL("true"))
        return done

    def _insert(self, work: Work) -> int:
        columns = work.target.insertable(work.shape.columns)
        if self._mode.careful:
            self._find_orphans(work)
            self._find_taken(work)
        done = self._run(
            work,
            """
            WITH {src} AS MATERIALIZED ({images}),
            back AS (
                INSERT INTO {table} AS {row} ({columns}) OVERRIDING SYSTEM VALUE
                SELECT {values} FROM {src} WHERE {unblocked} ORDER BY {src}.id
                ON CONFLICT DO NOTHING
                RETURNING {key_of_row} AS key
            )
            INSERT INTO sqlguard.row_change (change_set_id, key) SELECT {new}, key FROM back
            """,
            columns=sql.SQL(", ").join(map(sql.Identifier, columns)),
            values=self._values(columns),
        )
        if done < work.change.rows:
            self._not_done(work, "the key or a unique value is taken")
        return done

    def _revert(self, work: Work) -> int:
        if self._mode.careful:
            self._find_orphans(work)
            self._find_taken(work)
        kept = self._keep(work)
        columns = work.target.settable(work.shape.columns)
        done = self._run(
            work,
            """
            UPDATE {table} AS {row} SET ({columns}) = ROW({values}) FROM ({images}) AS {src}
            WHERE {matches} AND {untouched} AND {unblocked}
            """,
            columns=sql.SQL(", ").join(map(sql.Identifier, columns)),
            values=self._values(columns),
        )
        _agree(work, kept, done)
        if done < work.change.rows:
            self._missing(work)
            self._blocked(work, "the row was changed since", sql.SQL("true"))
        return done

    def _unmark(self, work: Work) -> int:
        if self._mode.careful:
            self._find_taken(work)
        kept = self._keep(work)
        done = self._run(
            work,
            """
            UPDATE {table} AS {row} SET deleted_at = NULL, deleted_by_agent = NULL FROM ({rows}) AS {src}
            WHERE {matches} AND {untouched} AND {unblocked}
            """,
        )
        _agree(work, kept, done)
        if done < work.change.rows:
            self._missing(work)
            marked = sql.SQL("{}.deleted_at IS NOT NULL").format(ROW)
            self._blocked(work, "the row was deleted again since", marked)
        return done

    def _keep(self, work: Work) -> int:
        """Lock the rows and keep them as they are now, before they are changed."""
        return self._run(
            work,
            """
            WITH {src} AS MATERIALIZED ({rows}),
            now AS (
                SELECT {src}.id, {src}.key, {src}.now_key, ({row}.*)::text AS image
                FROM {src} JOIN {table} AS {row} ON {matches}
                WHERE {untouched} AND {unblocked} FOR UPDATE OF {row}
            )
            INSERT INTO sqlguard.row_change (change_set_id, key, new_key, before)
            SELECT {new}, now_key, {moved}, image FROM now
            """,
            moved=sql.SQL("key" if work.change.op == "rekey" else "NULL"),
        )

    # Conflicts: what stands in the way goes to the table sqlguard_conflict of this transaction ------

    def _find_referenced(self, work: Work) -> None:
        """A row that others refer to now must not be removed: their rows would go with it, or it fails."""
        for key in work.target.children:
            itself: sql.Composable = sql.SQL("true")
            if key.child == key.parent:
                # Rows of the same set may refer to one another.
                itself = sql.SQL("NOT EXISTS (SELECT FROM {src} AS other WHERE {same})").format(
                    src=SRC,
                    same=sql.SQL(" AND ").join(
                        sql.SQL("child.{}::text = other.key[{}]").format(sql.Identifier(k), sql.Literal(n))
                        for n, k in enumerate(work.keys, 1)
                    ),
                )
            self._run(
                work,
                """
                WITH {src} AS MATERIALIZED ({rows})
                INSERT INTO pg_temp.sqlguard_conflict (change_set_id, row_change_id, reason)
                SELECT {old}, {src}.id, {reason}
                FROM {src} JOIN {table} AS {row} ON {matches}
                WHERE {untouched} AND EXISTS (
                    SELECT FROM {child} AS child WHERE {joins} AND {itself})
                ON CONFLICT DO NOTHING
                """,
                child=sql.SQL(key.child_name),
                joins=key.joins(sql.Identifier("child"), ROW),
                itself=itself,
                reason=sql.Literal(f"rows of `{key.child_name}` refer to it"),
            )

    def _find_orphans(self, work: Work) -> None:
        """A row whose parent is gone, or deleted softly, can't come back."""
        for key in work.target.parents:
            if key.deferrable or any(c not in work.shape.columns for c in key.columns):
                continue
            image = sql.SQL("({}.image)").format(SRC)
            living = sql.SQL("parent.deleted_at IS NULL" if key.parent_soft else "true")
            itself: sql.Composable = sql.SQL("true")
            if key.child == key.parent:
                other = sql.SQL("(other.image)")
                pairs = zip(key.columns, key.ref_columns, key.operators, strict=True)
                itself = sql.SQL("NOT EXISTS (SELECT FROM {src} AS other WHERE {same})").format(
                    src=SRC,
                    same=sql.SQL(" AND ").join(
                        sql.SQL("{}.{} OPERATOR({}) {}.{}").format(
                            other, sql.Identifier(there), sql.SQL(op), image, sql.Identifier(here)
                        )
                        for here, there, op in pairs
                    ),
                )
            self._run(
                work,
                """
                WITH {src} AS MATERIALIZED ({images})
                INSERT INTO pg_temp.sqlguard_conflict (change_set_id, row_change_id, reason)
                SELECT {old}, {src}.id, {reason} FROM {src}
                WHERE {given} AND {itself}
                  AND NOT EXISTS (SELECT FROM {parent} AS parent WHERE {joins} AND {living})
                ON CONFLICT DO NOTHING
                """,
                given=sql.SQL(" AND ").join(
                    sql.SQL("{}.{} IS NOT NULL").format(image, sql.Identifier(c)) for c in key.columns
                ),
                parent=sql.SQL(key.parent_name),
                joins=key.joins(image, sql.Identifier("parent")),
                living=living,
                itself=itself,
                reason=sql.Literal(f"the row of `{key.parent_name}` that it refers to is gone"),
            )

    def _find_taken(self, work: Work) -> None:
        """A unique value that another row has by now (not one of this set) can't be taken back."""
        if work.change.op == "soft_delete":
            wanted = sql.SQL(
                "SELECT {src}.id, {src}.key, {src}.now_key, {row}.* FROM ({rows}) {src}"
                " JOIN {table} {row} ON {matches}"
            )
            predicate_holds = True
        else:
            wanted = sql.SQL(
                "SELECT {src}.id, {src}.key, {src}.now_key, ({src}.image).* FROM ({images}) {src}"
            )
            predicate_holds = False
        for unique in work.target.uniques:
            names = [sql.Identifier(f"sg key {n}") for n in range(len(unique.keys))]
            keys = sql.SQL(", ").join(
                sql.SQL("{} AS {}").format(sql.SQL(k), n) for k, n in zip(unique.keys, names, strict=True)
            )
            where = sql.SQL(unique.predicate or "true")
            self._run(
                work,
                """
                WITH wanted AS MATERIALIZED (
                    SELECT x.id AS "sg id", x.now_key AS "sg now", {keys} FROM ({wanted}) x WHERE {mine}),
                others AS (
                    SELECT {key_of_other} AS "sg now", {keys} FROM {table} x WHERE {where})
                INSERT INTO pg_temp.sqlguard_conflict (change_set_id, row_change_id, reason)
                SELECT {old}, w."sg id", {reason} FROM wanted w JOIN others o ON {equal}
                WHERE NOT EXISTS (SELECT FROM ({rows}) s WHERE s.now_key = o."sg now")
                ON CONFLICT DO NOTHING
                """,
                wanted=self._fill(wanted, work),
                keys=keys,
                where=where,
                # Unmarked rows will fulfil the predicate of an index over live rows; before, they do not.
                mine=sql.SQL("true") if predicate_holds else where,
                key_of_other=work.target.key_of(work.keys, sql.Identifier("x")),
                equal=sql.SQL(" AND ").join(sql.SQL("w.{0} = o.{0}").format(n) for n in names),
                reason=sql.Literal(f"another row has its value of `{unique.name}`"),
            )

    def _blocked(self, work: Work, reason: str, condition: sql.Composable) -> None:
        """Rows of the set that are there but were not touched, because somebody else's xmin is on them."""
        self._run(
            work,
            """
            INSERT INTO pg_temp.sqlguard_conflict (change_set_id, row_change_id, reason)
            SELECT {old}, {src}.id, {reason} FROM ({rows}) {src} JOIN {table} AS {row} ON {matches}
            WHERE {row}.xmin <> {own}::xid AND {condition} ON CONFLICT DO NOTHING
            """,
            reason=sql.Literal(reason),
            condition=condition,
        )

    def _missing(self, work: Work) -> None:
        self._run(
            work,
            """
            INSERT INTO pg_temp.sqlguard_conflict (change_set_id, row_change_id, reason)
            SELECT {old}, {src}.id, 'the row is gone' FROM ({rows}) {src}
            WHERE NOT EXISTS (SELECT FROM {table} AS {row} WHERE {matches}) ON CONFLICT DO NOTHING
            """,
        )

    def _not_done(self, work: Work, reason: str) -> None:
        self._run(
            work,
            """
            INSERT INTO pg_temp.sqlguard_conflict (change_set_id, row_change_id, reason)
            SELECT {old}, {src}.id, {reason} FROM ({rows}) {src}
            WHERE NOT EXISTS (
                SELECT FROM sqlguard.row_change r WHERE r.change_set_id = {new} AND r.key = {src}.key)
            ON CONFLICT DO NOTHING
            """,
            reason=sql.Literal(reason),
        )

    # Parts of the statements --------------------------------------------------------------------------------

    def _run(self, work: Work, text: str, **parts: sql.Composable) -> int:
        query = self._fill(sql.SQL(text), work, **parts)
        return self._conn.execute(query).rowcount

    def _fill(self, query: sql.SQL, work: Work, **parts: sql.Composable) -> sql.Composed:
        target = work.target
        key = sql.SQL("{}.key" if work.change.op == "delete" else "{}.now_key").format(SRC)
        return query.format(
            **{
                "src": SRC,
                "row": ROW,
                "table": target.ident,
                "old": sql.Literal(work.change.id),
                "new": sql.Literal(work.new),
                "own": sql.Literal(self._mode.own),
                "rows": _rows(work),
                "images": _images(work),
                "matches": target.matches(work.keys, key),
                "key_of_row": target.key_of(work.keys, ROW),
                "untouched": self._untouched(work),
                "unblocked": sql.SQL(
                    "NOT EXISTS (SELECT FROM pg_temp.sqlguard_conflict x"
                    " WHERE x.change_set_id = {} AND x.row_change_id = {}.id)"
                ).format(sql.Literal(work.change.id), SRC),
                **parts,
            }
        )

    def _untouched(self, work: Work) -> sql.Composable:
        """Return the condition that nobody changed the row ROW since the change set."""
        change = work.change
        if change.op == "soft_delete":
            return sql.SQL(
                "{}.deleted_at = (SELECT c.statement_at FROM sqlguard.change_set c WHERE c.id = {})"
            ).format(ROW, sql.Literal(change.id))
        if self._mode.force:
            return sql.SQL("true")
        # Besides the set's own xmin: what this undo, or an earlier one, put back after a newer change.
        accepted = sql.SQL(
            "{row}.xmin = ANY (ARRAY(SELECT c.xmin FROM sqlguard.change_set c WHERE c.id = {old}"
            " OR (c.reverts > {old} AND c.relid = {relid})) || {own}::xid)"
        ).format(
            row=ROW,
            old=sql.Literal(change.id),
            relid=sql.Literal(change.relid),
            own=sql.Literal(self._mode.own),
        )
        if not work.foreign:
            return accepted
        return sql.SQL(
            "{accepted} AND NOT EXISTS (SELECT FROM sqlguard.row_change f"
            " WHERE f.change_set_id = ANY({foreign}) AND f.change_set_id > {old}"
            " AND {src}.now_key IN (f.key, f.new_key))"
        ).format(
            accepted=accepted, foreign=sql.Literal(list(work.foreign)), old=sql.Literal(change.id), src=SRC
        )

    def _values(self, columns: Sequence[str]) -> sql.Composable:
        return sql.SQL(", ").join(
            sql.SQL("({}.image).{}").format(SRC, sql.Identifier(name)) for name in columns
        )

    def _advise(self, rows: int) -> None:
        """Statistics of the journal are always old, but the number of rows is known: plan with that."""
        few = "off" if rows <= _FEW else "on"
        many = "on" if rows <= _FEW else "off"
        self._conn.execute(
            "SELECT set_config('enable_hashjoin', %(few)s, true),"
            " set_config('enable_mergejoin', %(few)s, true), set_config('enable_nestloop', %(many)s, true)",
            {"few": few, "many": many},
        )


def _rows(work: Work) -> sql.Composable:
    """Return the rows of the set: id, key at the time before, key at the time after."""
    skipped: sql.Composable = sql.SQL("")
    if work.change.pending is not None:
        skipped = sql.SQL(
            " JOIN sqlguard.undo_skipped s ON s.change_set_id = r.change_set_id AND s.row_change_id = r.id"
            " AND s.undo_id = {}"
        ).format(sql.Literal(work.change.pending))
    return sql.SQL(
        "SELECT r.id, r.key, coalesce(r.new_key, r.key) AS now_key FROM sqlguard.row_change r{}"
        " WHERE r.change_set_id = {}"
    ).format(skipped, sql.Literal(work.change.id))


def _images(work: Work) -> sql.Composable:
    """Return the rows with their images; OFFSET 0 has each text read once, not once a column."""
    return sql.SQL(
        "SELECT q.id, q.key, q.now_key, q.image FROM ("
        "SELECT i.id, i.key, i.now_key, b.before::{} AS image FROM ({}) i"
        " JOIN sqlguard.row_change b ON b.change_set_id = {} AND b.id = i.id OFFSET 0) q"
    ).format(work.shape.row_type, _rows(work), sql.Literal(work.change.id))


def _agree(work: Work, kept: int, done: int) -> None:
    if kept != done:
        raise RuntimeError(f"undo of change set {work.change.id} kept {kept} rows and changed {done}")
