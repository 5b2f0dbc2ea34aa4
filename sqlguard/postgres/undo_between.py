"""
Changes by somebody else between two changes of the same row by the same agent.

A row's xmin tells who changed it last, so nobody sees there what happened before the agent's last change. But that
change kept what it found, and the one before it a hash of what it had left (small sets do, `walls_capture.HASHED`).
If the two differ, somebody else was at the row in between: the newer change can be taken back, the older can't.
"""

from collections.abc import Sequence
from typing import Any

import psycopg

from sqlguard.postgres.undo_plan import ChangeSet
from sqlguard.postgres.walls_capture import HASHED

# Nobody else can be at a row within one transaction, whose sets are not always numbered as they happened: a
# trigger's come before those of its statement. So what counts is what any of them had left.
_BETWEEN = """
    WITH mine AS MATERIALIZED (
        SELECT c.id, c.relid, c.txid, c.shape_id, r.id AS row, coalesce(r.new_key, r.key) AS key, r.after
        FROM sqlguard.change_set c JOIN sqlguard.row_change r ON r.change_set_id = c.id
        WHERE c.id = ANY (%(small)s)),
    later AS (
        SELECT DISTINCT ON (m.id, m.row) m.*, c.txid AS later_txid, c.shape_id AS later_shape, r.before
        FROM mine m
        JOIN sqlguard.change_set c ON c.id = ANY (%(sets)s) AND c.relid = m.relid AND c.id > m.id
        CROSS JOIN LATERAL sqlguard.row_changes(c.id) r
        WHERE r.key = m.key AND m.after IS NOT NULL
        ORDER BY m.id, m.row, c.id)
    INSERT INTO pg_temp.sqlguard_conflict (change_set_id, row_change_id, reason)
    SELECT x.id, x.row, 'somebody else changed the row between two of these changes' FROM later x
    WHERE x.later_txid <> x.txid AND x.later_shape = x.shape_id AND x.before IS NOT NULL
        AND NOT EXISTS (SELECT FROM mine m
                        WHERE m.relid = x.relid AND m.txid = x.txid AND m.key = x.key
                            AND (m.after IS NULL OR m.after = hashtextextended(x.before, 0)))
    ON CONFLICT DO NOTHING
"""
# What is older than such a change can't be taken back either, also where the row had another key then.
_OLDER = """
    INSERT INTO pg_temp.sqlguard_conflict (change_set_id, row_change_id, reason)
    SELECT r.change_set_id, r.id, x.reason
    FROM (SELECT DISTINCT change_set_id AS id FROM pg_temp.sqlguard_conflict) s
    JOIN sqlguard.change_set n ON n.id = s.id
    CROSS JOIN LATERAL sqlguard.row_changes(n.id) k
    JOIN pg_temp.sqlguard_conflict x ON k.change_set_id = x.change_set_id AND k.id = x.row_change_id
    JOIN sqlguard.change_set c ON c.id = ANY (%(sets)s) AND c.relid = n.relid AND c.id < n.id
    CROSS JOIN LATERAL sqlguard.row_changes(c.id) r
    WHERE coalesce(r.new_key, r.key) = k.key AND x.reason LIKE 'somebody else changed%%'
    ON CONFLICT DO NOTHING
"""


# What was undone before tells of the time before it as well.
_UNDONE = """
    SELECT DISTINCT c.id FROM sqlguard.change_set c JOIN sqlguard.undone u ON u.change_set_id = c.id
    WHERE c.relid = ANY (%s::oid[]) AND c.id > %s AND c.undo_id IS NULL
"""


def find_between(conn: psycopg.Connection[Any], sets: Sequence[ChangeSet]) -> None:
    """Note the rows of *sets* that somebody else changed before the agent did again, in the table of conflicts."""
    small = [s for s in sets if s.rows <= HASHED and s.op != "delete" and s.key_columns and s.undo_id is None]
    if not small:
        return
    relids = sorted({s.relid for s in small})
    rows = conn.execute(_UNDONE, [relids, small[0].id]).fetchall()
    later = {s.id for s in sets if s.undo_id is None} | {r[0] for r in rows}
    if len(later) == 1:
        return
    given = {"small": [s.id for s in small], "sets": sorted(later)}
    found = conn.execute(_BETWEEN, given).rowcount
    while found:
        found = conn.execute(_OLDER, {"sets": [s.id for s in sets]}).rowcount
