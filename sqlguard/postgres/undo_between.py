"""
Changes by somebody else between two changes of the same row by the same agent.

A row's xmin tells who changed it last, so nobody sees there what happened before the agent's last change. But that
change kept what it found, and the one before it a hash of what it had left. If the two differ, somebody else was at the
row in between: the newer change can be taken back, the older can't.

So each set gives points, per key of a row and in the order of sets: what it found, that it made a row of this key, what
it left. A soft delete keeps no image of a row that is its own: what it found is read from the deleted row, and when the
row lives again it is passed over. A set that was undone has left what it had found, and a redo what the set left for
which it stands.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from sqlguard.catalog import DELETED_AT
from sqlguard.postgres.images import Images
from sqlguard.postgres.undo_keyless import live_image
from sqlguard.postgres.undo_plan import ChangeSet
from sqlguard.postgres.undo_sql import Statements
from sqlguard.postgres.undo_table import ROW, Target

REASON = "somebody else changed the row between two of these changes"
#: Kinds of points. WAS_THERE gives nothing to compare, but the row has to be left alone when a newer change of it is;
#: LEFT_AGAIN is noted as LEFT, at the time of the undo.
FOUND, MADE, LEFT, WAS_THERE, LEFT_AGAIN = range(5)

_TABLE = """
    CREATE TEMP TABLE sqlguard_point (relid oid, key text[], at bigint, place smallint, id bigint, row bigint,
        old_key text[], txid xid8, shape_id bigint, op text, hash bigint, other bigint, deleted boolean,
        buried boolean) ON COMMIT DROP
"""
_POINT = """
    INSERT INTO pg_temp.sqlguard_point
    SELECT {relid}, p.key, p.at, p.place, {id}, r.id, r.key, {txid}, {shape}, {op}, p.hash, p.other, r.deleted, r.buried
    FROM ({rows}) r CROSS JOIN LATERAL (VALUES {points}) AS p (at, place, key, hash, other) WHERE p.key IS NOT NULL
"""
# Of a set that was undone, rows may have been skipped. Others may have been at a row before that was.
_IS_UNDONE = """
    NOT EXISTS (SELECT FROM sqlguard.undo_skipped k
                WHERE k.undo_id = {undo} AND k.change_set_id = {id} AND k.row_change_id = r.id)
"""
_UNDONE_AT = "(SELECT max(b.id) FROM sqlguard.change_set b WHERE b.reverts = {id} AND b.undo_id = {undo})"
_ROWS = """
    SELECT r.id, r.key, coalesce(r.new_key, r.key) AS now_key, r.after, hashtextextended(r.before, 0) AS found,
           NULL::bigint AS whole, false AS deleted, {buried} AS buried, {undone} AS undone
    FROM sqlguard.row_changes({id}) r
"""
_ROWS_AGAIN = """
    SELECT r.id, r.key, coalesce(r.new_key, r.key) AS now_key, b.after, false AS deleted, false AS buried,
           {undone} AS undone
    FROM sqlguard.row_changes({id}) r JOIN sqlguard.row_changes({base}) b
        ON coalesce(b.new_key, b.key) = coalesce(r.new_key, r.key)
"""
_ROWS_DELETED = """
    SELECT r.id, r.key, r.key AS now_key, r.after,
           CASE WHEN r.before IS NOT NULL THEN hashtextextended(r.before, 0)
                WHEN {row}.deleted_at IS NOT NULL THEN hashtextextended(sqlguard.row_text({live}), 0) END AS found,
           hashtextextended(sqlguard.row_text(ROW({row}.*)), 0) AS whole,
           r.before IS NULL AND {row}.deleted_at IS NOT NULL AS deleted, false AS buried, {undone} AS undone
    FROM sqlguard.row_changes({id}) r LEFT JOIN {table} AS {row} ON {matches} AND {row}.deleted_at = {at}
"""
# Nobody else can be at a row within one transaction, whose sets are not always numbered as they happened: a
# trigger's come before those of its statement. So what counts is what any of them had left; a text has its key in it.
_BETWEEN = """
    WITH told AS (
        SELECT * FROM (
            SELECT p.*, lag(p.place) OVER w AS place_before,
                   lead(p.at, 3) OVER w IS NOT NULL AS goes_on  -- behind the two points of a soft delete
            FROM pg_temp.sqlguard_point p
            WINDOW w AS (PARTITION BY p.relid, p.key COLLATE "C" ORDER BY p.at, p.place)) p
        -- What a deleted row was found to be says nothing of the living one before it.
        WHERE p.place < 3 AND NOT (p.place = 0 AND p.buried AND p.place_before = 3)),
    neighbour AS (
        SELECT p.*, lead(p.place) OVER w AS next_place, lead(p.txid) OVER w AS next_txid,
               lead(p.shape_id) OVER w AS next_shape, lead(p.hash) OVER w AS next_hash,
               lead(p.other) OVER w AS next_other, lead(p.deleted) OVER w AS next_deleted
        FROM told p
        WINDOW w AS (PARTITION BY p.relid, p.key COLLATE "C" ORDER BY p.at, p.place)),
    strange AS MATERIALIZED (
        SELECT n.* FROM neighbour n
        WHERE n.place = 2 AND n.hash IS NOT NULL AND (n.next_txid <> n.txid OR n.next_deleted)
            AND CASE n.next_place
                -- A deleted row that was changed again since does not tell what it was.
                WHEN 0 THEN n.next_shape = n.shape_id AND n.next_hash <> n.hash AND NOT (n.next_deleted AND n.goes_on)
                -- Somebody else took the row away before there was another one of its key.
                WHEN 1 THEN n.op <> 'insert' END)
    INSERT INTO pg_temp.sqlguard_conflict (change_set_id, row_change_id, reason)
    SELECT s.id, s.row, %(reason)s FROM strange s
    WHERE NOT EXISTS (SELECT FROM pg_temp.sqlguard_point m
                      WHERE m.relid = s.relid AND m.txid = s.txid AND m.place = 2 AND m.hash = s.next_hash)
      AND NOT EXISTS (SELECT FROM pg_temp.sqlguard_point m
                      WHERE m.relid = s.relid AND m.txid = s.txid AND m.place = 2 AND m.hash = s.next_other)
      -- Erased: nobody knows.
      AND NOT EXISTS (SELECT FROM pg_temp.sqlguard_point m
                      WHERE m.relid = s.relid AND m.txid = s.txid AND m.place = 2 AND m.key = s.key AND m.hash IS NULL)
    ON CONFLICT DO NOTHING
"""
# What is older than such a change can't be taken back either, also where the row had another key then.
_OLDER = """
    INSERT INTO pg_temp.sqlguard_conflict (change_set_id, row_change_id, reason)
    SELECT p.id, p.row, x.reason
    FROM pg_temp.sqlguard_conflict x
    JOIN pg_temp.sqlguard_point n ON n.id = x.change_set_id AND n.row = x.row_change_id AND n.place > 1
    JOIN pg_temp.sqlguard_point p ON p.relid = n.relid AND p.key = n.old_key AND p.at < n.at AND p.place > 1
    WHERE x.reason = %(reason)s
    ON CONFLICT DO NOTHING
"""
# Sets that are not to be undone, and rows of others that are undone already.
_NOT_ASKED = """
    DELETE FROM pg_temp.sqlguard_conflict x
    USING unnest(%(ids)s::bigint[], %(pending)s::bigint[], %(wanted)s::boolean[]) AS s (id, pending, wanted)
    WHERE x.change_set_id = s.id AND x.reason = %(reason)s AND (NOT s.wanted OR s.pending IS NOT NULL
        AND NOT EXISTS (SELECT FROM sqlguard.undo_skipped k WHERE k.undo_id = s.pending
                        AND k.change_set_id = x.change_set_id AND k.row_change_id = x.row_change_id))
"""
# What was undone before tells of the time before it as well.
_UNDONE = """
    SELECT c.id, c.action_id, c.task_id, c.txid::text AS txid, c.statement_at, c.relid::bigint AS relid,
           c.schema_name AS schema, c.table_name AS name, c.op, c.key_columns, c.shape_id, c.depth, c.undo_id,
           c.rows, u.undo_id AS pending
    FROM sqlguard.change_set c
    JOIN (SELECT change_set_id, max(undo_id) AS undo_id FROM sqlguard.undone GROUP BY 1) u ON u.change_set_id = c.id
    WHERE c.relid = ANY (%s::oid[]) AND c.id > %s AND c.id <> ALL (%s) AND c.undo_id IS NULL
"""
_BASES = """
    WITH RECURSIVE up (id, base, reverts, steps) AS (
        SELECT c.id, c.id, c.reverts, 0 FROM sqlguard.change_set c WHERE c.id = ANY (%s)
        UNION ALL
        SELECT up.id, c.id, c.reverts, up.steps + 1 FROM up JOIN sqlguard.change_set c ON c.id = up.reverts)
    SELECT id, base FROM up WHERE reverts IS NULL AND steps %% 2 = 0
"""


@dataclass(frozen=True, slots=True)
class _Event:
    """One set on a table; `base` is the agent's own set that it stands for."""

    change: ChangeSet
    base: int
    wanted: bool = True

    def points(self, *, first: bool, last: bool) -> Iterator[tuple[int, str, str, str]]:
        """Yield the points of each row `r`: kind, key, hash, and another hash that will do."""
        op, again = self.change.op, self.base != self.change.id
        if not first and not again:
            if op != "insert":
                yield FOUND, "CASE WHEN r.found IS NOT NULL THEN r.key END", "r.found", "r.whole"
            if op in ("insert", "rekey"):
                yield MADE, "r.key" if op == "insert" else "nullif(r.now_key, r.key)", "NULL", "NULL"
        if last:
            return
        if op in ("delete", "soft_delete"):
            yield WAS_THERE, "r.key", "NULL", "NULL"
        else:
            yield LEFT, "r.now_key", "r.after", "NULL"
        if op in ("update", "rekey", "delete") and self.change.pending is not None:
            yield LEFT_AGAIN, "CASE WHEN r.undone THEN r.key END", "r.found", "NULL"


def find_between(
    run: Statements, sets: Sequence[ChangeSet], tables: Mapping[int, Target | None], images: Images
) -> None:
    """Note the rows of *sets* that somebody else changed before the agent did again, in the table of conflicts."""
    lives = [one for one in _lives(run.conn, sets) if len(one) > 1 and any(e.wanted for e in one[:-1])]
    if not lives:
        return
    run.conn.execute(_TABLE)
    for events in lives:
        for event in events:
            points = list(event.points(first=event is events[0], last=event is events[-1]))
            if points:
                run.advise(event.change.rows)
                _note(run.conn, event, points, _rows(event, tables.get(event.change.relid), images))
    every = [event for events in lives for event in events]
    run.advise(sum(event.change.rows for event in every))
    found = run.conn.execute(_BETWEEN, {"reason": REASON}).rowcount
    noted = found
    while found:
        found = run.conn.execute(_OLDER, {"reason": REASON}).rowcount
    if noted:
        asked = [(e.change.id, e.change.pending, e.wanted) for e in every]
        ids, pending, wanted = (list(column) for column in zip(*asked, strict=True))
        given = {"ids": ids, "pending": pending, "wanted": wanted, "reason": REASON}
        run.conn.execute(_NOT_ASKED, given)
    run.conn.execute("DROP TABLE pg_temp.sqlguard_point")


def _lives(conn: psycopg.Connection[Any], sets: Sequence[ChangeSet]) -> list[list[_Event]]:
    """Return for each table the sets that tell of its rows, oldest first."""
    keyed = [s for s in sets if s.key_columns]
    again = [s.id for s in keyed if s.undo_id is not None]
    bases = dict(conn.execute(_BASES, [again]).fetchall()) if again else {}
    lives: dict[int, list[_Event]] = {}
    for one in keyed:
        base = one.id if one.undo_id is None else bases.get(one.id)
        if base is not None:
            lives.setdefault(one.relid, []).append(_Event(one, base))
    if lives:
        oldest = {relid: min(e.change.id for e in events) for relid, events in lives.items()}
        asked = [sorted(lives), min(oldest.values()), [s.id for s in sets]]
        with conn.cursor(row_factory=class_row(ChangeSet)) as cursor:
            for one in cursor.execute(_UNDONE, asked).fetchall():
                if one.id > oldest[one.relid] and one.key_columns:
                    lives[one.relid].append(_Event(one, one.id, wanted=False))
    return [sorted(events, key=lambda e: e.change.id) for events in lives.values()]


def _note(
    conn: psycopg.Connection[Any],
    event: _Event,
    points: Sequence[tuple[int, str, str, str]],
    rows: sql.Composable,
) -> None:
    change = event.change
    number = sql.Literal(change.id)
    undone_at = sql.SQL(_UNDONE_AT).format(id=number, undo=sql.Literal(change.pending))
    values = [
        sql.SQL("({}::bigint, {}, {}, {}::bigint, {}::bigint)").format(
            undone_at if place == LEFT_AGAIN else number,
            sql.Literal(LEFT if place == LEFT_AGAIN else place),
            *map(sql.SQL, texts),
        )
        for place, *texts in points
    ]
    conn.execute(
        sql.SQL(_POINT).format(
            relid=sql.Literal(change.relid),
            id=number,
            txid=sql.SQL("{}::xid8").format(sql.Literal(change.txid)),
            shape=sql.Literal(change.shape_id),
            op=sql.Literal(change.op),
            rows=rows,
            points=sql.SQL(", ").join(values),
        )
    )


def _rows(event: _Event, target: Target | None, images: Images) -> sql.Composable:
    change = event.change
    number = sql.Literal(change.id)
    undone: sql.Composable = sql.SQL("false")
    if change.pending is not None:
        undone = sql.SQL(_IS_UNDONE).format(undo=sql.Literal(change.pending), id=number)
    if event.base != change.id:
        return sql.SQL(_ROWS_AGAIN).format(id=number, base=sql.Literal(event.base), undone=undone)
    if target is None or not target.soft:
        return sql.SQL(_ROWS).format(id=number, undone=undone, buried=sql.SQL("false"))
    shape = images.shape(target, change.shape_id)
    if change.op == "soft_delete":
        keys = change.key_columns or []
        if shape.exact and not shape.renamed and all(k in target.by_name for k in keys):
            return sql.SQL(_ROWS_DELETED).format(
                id=number,
                undone=undone,
                table=target.ident,
                row=ROW,
                at=sql.Literal(change.statement_at),
                matches=target.matches(keys, sql.SQL("r.key")),
                live=live_image(target, shape.columns),
            )
    buried = sql.SQL("(r.before::{}).{} IS NOT NULL").format(shape.row_type, sql.Identifier(DELETED_AT))
    is_known = DELETED_AT in shape.columns
    return sql.SQL(_ROWS).format(id=number, undone=undone, buried=buried if is_known else sql.SQL("false"))
