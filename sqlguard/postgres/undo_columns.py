"""
Conflicts settled by column: of a row that somebody changed since, only the columns that the operator names go back.

The rows without a conflict are taken back whole, as ever. What is in conflict for another reason (a row that is gone,
a value that is taken) stays a conflict and is left alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from sqlguard.postgres.undo_sql import Statements, Work
from sqlguard.postgres.undo_steps import Done, reverse, revert_columns

_CHOSEN = (
    "CREATE TEMP TABLE IF NOT EXISTS sqlguard_chosen (change_set_id bigint, row_change_id bigint,"
    " PRIMARY KEY (change_set_id, row_change_id)) ON COMMIT DROP"
)
# Settled from now on: the rows are there, and only somebody's other values were in the way.
_SETTLE = """
    WITH settled AS (
        DELETE FROM pg_temp.sqlguard_conflict x
        WHERE x.change_set_id = %s
            AND (x.reason = 'the row was changed since' OR x.reason LIKE 'somebody else changed the row%%')
        RETURNING x.change_set_id, x.row_change_id)
    INSERT INTO pg_temp.sqlguard_chosen SELECT * FROM settled
"""
# What of a row was settled so in a newer set is in an older one too: this undo was at the row, but not with all of it.
_AGAIN = """
    INSERT INTO pg_temp.sqlguard_conflict (change_set_id, row_change_id, reason)
    SELECT r.change_set_id, r.id, 'the row was changed since'
    FROM sqlguard.row_changes(%(old)s) r
    WHERE coalesce(r.new_key, r.key) IN (
        SELECT k.key FROM pg_temp.sqlguard_chosen h
        JOIN sqlguard.change_set c ON c.id = h.change_set_id AND c.relid = %(relid)s
        JOIN sqlguard.row_change k ON k.change_set_id = h.change_set_id AND k.id = h.row_change_id)
    ON CONFLICT DO NOTHING
"""


def by_columns(columns: Sequence[str]) -> Callable[[Statements, Work], Iterator[Done]]:
    """Return how a change set is taken back when of rows in conflict only *columns* shall be."""

    def take_back(run: Statements, work: Work) -> Iterator[Done]:
        run.conn.execute(_CHOSEN)
        run.conn.execute(_AGAIN, {"old": work.change.id, "relid": work.change.relid})
        yield from reverse(run, work)
        wanted = [c for c in columns if c in work.shape.columns and c not in work.keys]
        if work.change.op != "update" or not wanted:
            return
        found = run.conn.execute(_SETTLE, [work.change.id]).rowcount
        if found:
            chosen = replace(work.change, chosen=True, rows=found, pending=None)
            yield revert_columns(run, replace(run.another(work), change=chosen), wanted)

    return take_back
