"""
Taking back one change set: the statements that do it, all set-based.

Each reversal first keeps what it is about to change as a change set of the undo's own, then changes it; so
an undo can itself be undone. What was not possible is in the table of conflicts afterwards.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from psycopg import sql

from sqlguard.postgres import undo_conflicts as conflicts
from sqlguard.postgres import undo_keyless as keyless
from sqlguard.postgres.undo_sql import Statements, Work


@dataclass(frozen=True, slots=True)
class Done:
    """What was done: an op of the change sets (or `restore`) on `rows` rows, kept under the id of `work.new`."""

    work: Work
    op: str
    rows: int


def reverse(run: Statements, work: Work) -> Iterator[Done]:
    """Take back *work*, and yield what was done as soon as it is done."""
    run.advise(work.change.rows)
    match work.change.op:
        case "insert":
            yield Done(work, "delete", (_remove if work.keys else keyless.remove_by_image)(run, work))
        case "delete":
            yield from _bring_back(run, work)
        case "soft_delete":
            yield Done(work, "restore", (_unmark if work.keys else keyless.unmark_by_image)(run, work))
        case _ if not work.keys:
            if run.mode.careful:
                conflicts.find_orphans(run, work)
                conflicts.find_taken(run, work)
            yield Done(work, "update", keyless.revert_by_image(run, work))
        case _:
            yield from _revert(run, work)


def _remove(run: Statements, work: Work) -> int:
    conflicts.find_referenced(run, work)
    done = run.run(
        work,
        """
        WITH {src} AS ({rows}),
        gone AS (
            DELETE FROM {table} AS {row} USING {src}
            WHERE {matches} AND {untouched} AND {unblocked}
            RETURNING {src}.now_key, ({row}.*)::text AS image
        )
        INSERT INTO sqlguard.row_change (change_set_id, key, before) SELECT {new}, now_key, image FROM gone
        """,
    )
    if done < work.change.rows:
        # A row that is not there any more is what the undo wants, unless an older one was in its place.
        if not run.mode.force:
            conflicts.removed_before(run, work)
        conflicts.left_over(run, work, "the row was changed since")
    return done


def _bring_back(run: Statements, work: Work) -> Iterator[Done]:
    if not run.mode.force:
        conflicts.find_disturbed(run, work)
    if run.mode.careful:
        conflicts.find_orphans(run, work)
        if not run.mode.force:
            conflicts.find_taken(run, work)
    done = _insert(run, work)
    yield Done(work, "insert", done)
    if done < work.change.rows:
        if not work.keys:
            keyless.not_inserted(run, work)
        elif run.mode.force:
            # Somebody else's row has the key: it gets the values of the row that was deleted.
            over = run.another(work)
            overwritten = _keep(run, over, only_foreign=True)
            if overwritten:
                _set(run, over)
                yield Done(over, "update", overwritten)
            conflicts.missing(run, work, "a unique value is taken")
        else:
            conflicts.not_inserted(run, work)


def _revert(run: Statements, work: Work) -> Iterator[Done]:
    if run.mode.careful:
        conflicts.find_orphans(run, work)
        conflicts.find_taken(run, work)
    kept = _keep(run, work)
    _agree(work, kept, _set(run, work))
    yield Done(work, work.change.op, kept)
    if kept < work.change.rows:
        if run.mode.force:
            again = run.another(work)
            yield Done(again, "insert", _insert(run, again, only_missing=True))
            conflicts.missing(run, work, "a unique value is taken")
            return
        conflicts.missing(run, work)
        conflicts.left_over(run, work, "the row was changed since")


def revert_columns(run: Statements, work: Work, columns: Sequence[str]) -> Done:
    """Give only *columns* of the rows their old values back, whoever changed the rows' other columns since."""
    run.advise(work.change.rows)
    loose = Statements(run.conn, replace(run.mode, force=True))
    narrow = replace(work, shape=replace(work.shape, columns=tuple(columns)))
    if run.mode.careful:
        conflicts.find_orphans(run, narrow)
    kept = _keep(loose, narrow)
    _agree(work, kept, _set(loose, narrow))
    return Done(work, "update", kept)


def _unmark(run: Statements, work: Work) -> int:
    if run.mode.careful:
        conflicts.find_taken(run, work)
    conflicts.find_deleted_parents(run, work)
    kept = _keep(run, work)
    done = run.run(
        work,
        """
        UPDATE {table} AS {row} SET deleted_at = NULL, deleted_by_agent = NULL FROM ({rows}) AS {src}
        WHERE {matches} AND {untouched} AND {unblocked}
        """,
    )
    _agree(work, kept, done)
    if done < work.change.rows:
        conflicts.missing(run, work)
        conflicts.left_over(run, work, "the row was deleted again since")
    return done


def _insert(run: Statements, work: Work, *, only_missing: bool = False) -> int:
    columns = work.target.insertable(work.shape.columns)
    absent = run.fill("NOT EXISTS (SELECT FROM {table} AS {row} WHERE {matches})", work)
    return run.run(
        work,
        """
        WITH {src} AS ({images}),
        back AS (
            INSERT INTO {table} AS {row} ({columns}) OVERRIDING SYSTEM VALUE
            SELECT {values} FROM {src} WHERE {unblocked} AND {absent}
            {collisions}
            RETURNING {key_of_row} AS key, {hash} AS after
        )
        INSERT INTO sqlguard.row_change (change_set_id, key, after) SELECT {new}, key, after FROM back
        """,
        columns=sql.SQL(", ").join(map(sql.Identifier, columns)),
        values=run.values(columns),
        absent=absent if only_missing else sql.SQL("true"),
        # Without a key a redo finds the rows by this.
        hash=run.fill("NULL::bigint" if work.keys else "hashtextextended(({row}.*)::text, 0)", work),
        # ON CONFLICT makes an insert half as slow again, so it is kept for the second attempt.
        collisions=sql.SQL("ON CONFLICT DO NOTHING" if run.mode.careful else ""),
    )


def _keep(run: Statements, work: Work, *, only_foreign: bool = False) -> int:
    """Lock the rows and keep them as they are now, before they are changed."""
    return run.run(
        work,
        """
        WITH {src} AS ({rows}),
        now AS (
            SELECT {src}.id, {src}.key, {src}.now_key, ({row}.*)::text AS image
            FROM {src} JOIN {table} AS {row} ON {matches}
            WHERE {untouched} AND {unblocked} AND {foreign} FOR UPDATE OF {row}
        )
        INSERT INTO sqlguard.row_change (change_set_id, key, new_key, before)
        SELECT {new}, now_key, {moved}, image FROM now {order}
        """,
        moved=sql.SQL("key" if work.change.op == "rekey" else "NULL"),
        foreign=run.fill("{row}.xmin <> {own}::xid", work) if only_foreign else sql.SQL("true"),
        # The reverse of the agent's order, so that a redo finds the agent's order by reversing again.
        order=sql.SQL("ORDER BY id DESC" if _has_order(work) else ""),
    )


def _has_order(work: Work) -> bool:
    """Tell whether one row's new value may be another row's old one, so that the order of rows matters."""
    return work.change.rows > 1 and (work.change.op == "rekey" or len(work.target.uniques) > 1)


def _set(run: Statements, work: Work) -> int:
    """Give the rows that were kept the values of their images."""
    if run.mode.careful and _has_order(work):
        return _set_in_order(run, work)
    columns = work.target.settable(work.shape.columns)
    return run.run(
        work,
        """
        UPDATE {table} AS {row} SET ({columns}) = ROW({values}) FROM ({images}) AS {src}
        WHERE {matches} AND {untouched} AND {unblocked}
        """,
        columns=sql.SQL(", ").join(map(sql.Identifier, columns)),
        values=run.values(columns),
    )


def _set_in_order(run: Statements, work: Work) -> int:
    """
    Do the same row by row in the reverse of the agent's order.

    Unique indexes are checked at each row: `SET place = place - 1` went upwards, its undo has to go downwards.
    The rows were recorded in the order in which they were changed; a nested loop keeps the order of its outer
    side.
    """
    columns = work.target.settable(work.shape.columns)
    with run.nested_loops(work.change.rows):
        return run.run(
            work,
            """
            WITH todo AS MATERIALIZED (
                SELECT {row}.ctid AS at, {src}.image FROM ({images}) AS {src} JOIN {table} AS {row} ON {matches}
                WHERE {untouched} AND {unblocked} ORDER BY {src}.id DESC)
            UPDATE {table} AS {row} SET ({columns}) = ROW({values}) FROM todo AS {src}
            WHERE {row}.ctid = {src}.at
            """,
            columns=sql.SQL(", ").join(map(sql.Identifier, columns)),
            values=run.values(columns),
        )


def _agree(work: Work, kept: int, done: int) -> None:
    if kept != done:
        raise RuntimeError(f"undo of change set {work.change.id} kept {kept} rows and changed {done}")
