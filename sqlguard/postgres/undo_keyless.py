"""
Taking back changes of a table without a key: its rows are told apart by their whole contents.

A deleted row belongs to a soft delete when it has that statement's deleted_at and, but for the bookkeeping
columns, the text of an image that the statement left. A row that was inserted or updated is one that nobody has
changed since (its xmin says so) and whose text has the hash that was kept of it. Of rows with the same text any
will do; each image is used once. Large sets keep no hashes: theirs are taken back all together, or not at all.
Nothing here can be forced: of a row that somebody changed since, nobody can say which one it is.
"""

from collections.abc import Sequence

from psycopg import sql

from sqlguard.catalog import DELETED_AT, DELETED_BY_AGENT
from sqlguard.postgres.undo_sql import Statements, Work
from sqlguard.postgres.undo_table import ROW, Target

_LOST = "there is no key to find the row by, and it is not as the agent left it"
# Rows of the set beside the rows of the table that they became, as `pairs`; `conflict` notes those without one.
_PAIRS = """
    {src} AS MATERIALIZED (
        SELECT s.id, s.image, {made} AS hash, row_number() OVER (PARTITION BY {made} ORDER BY s.id) AS n
        FROM ({images}) s JOIN sqlguard.row_change k ON k.change_set_id = {old} AND k.id = s.id
        WHERE NOT EXISTS (SELECT FROM pg_temp.sqlguard_conflict x
                          WHERE x.change_set_id = {old} AND x.row_change_id = s.id)),
    there AS MATERIALIZED (
        SELECT t.*, row_number() OVER (PARTITION BY t.hash ORDER BY t.leaf, t.at) AS n
        FROM (SELECT {row}.tableoid AS leaf, {row}.ctid AS at, sqlguard.row_text(ROW({row}.*)) AS now, {found} AS hash
              FROM {table} AS {row} WHERE {left_alone} AND {single} FOR UPDATE OF {row}) t),
    pairs AS MATERIALIZED (
        SELECT {src}.id, {src}.image, there.leaf, there.at, there.now FROM {src} JOIN there USING (hash, n)
        WHERE {complete}),
    left_over AS (
        INSERT INTO pg_temp.sqlguard_conflict (change_set_id, row_change_id, reason)
        SELECT {old}, {src}.id, {lost} FROM {src} WHERE {src}.id NOT IN (SELECT id FROM pairs))"""


def remove_by_image(run: Statements, work: Work) -> int:
    """Remove what the set inserted, keep it, and note what is not as it was."""
    return _count(
        run,
        run.fill(
            """
            WITH {pairs},
            done AS (
                DELETE FROM {table} AS {row} USING pairs
                WHERE {row}.tableoid = pairs.leaf AND {row}.ctid = pairs.at RETURNING pairs.now),
            kept AS (
                INSERT INTO sqlguard.row_change (change_set_id, before) SELECT {new}, now FROM done)
            SELECT count(*) FROM done
            """,
            work,
            pairs=_pairs(run, work),
        ),
    )


def revert_by_image(run: Statements, work: Work) -> int:
    """Give what the set updated its old values back, keep what it was, and note what is not as it was."""
    columns = work.target.settable(work.shape.columns)
    return _count(
        run,
        run.fill(
            """
            WITH {pairs},
            done AS (
                UPDATE {table} AS {row} SET ({columns}) = ROW({values}) FROM pairs
                WHERE {row}.tableoid = pairs.leaf AND {row}.ctid = pairs.at
                RETURNING pairs.now, hashtextextended(sqlguard.row_text(ROW({row}.*)), 0) AS after),
            kept AS (
                INSERT INTO sqlguard.row_change (change_set_id, before, after) SELECT {new}, now, after FROM done)
            SELECT count(*) FROM done
            """,
            work,
            pairs=_pairs(run, work),
            columns=sql.SQL(", ").join(map(sql.Identifier, columns)),
            values=sql.SQL(", ").join(sql.SQL("(pairs.image).{}").format(sql.Identifier(c)) for c in columns),
        ),
    )


def not_inserted(run: Statements, work: Work) -> None:
    """Note the deleted rows of the set that could not be brought back; those that were have hashes by now."""
    run.run(
        work,
        """
        INSERT INTO pg_temp.sqlguard_conflict (change_set_id, row_change_id, reason)
        SELECT {old}, w.id, 'a unique value is taken'
        FROM (SELECT s.id, hashtextextended(sqlguard.row_text(s.image), 0) AS hash,
                     row_number() OVER (PARTITION BY sqlguard.row_text(s.image) ORDER BY s.id) AS n FROM ({images}) s) w
        LEFT JOIN (SELECT r.after AS hash, row_number() OVER (PARTITION BY r.after) AS n
                   FROM sqlguard.row_change r WHERE r.change_set_id = {new}) b USING (hash, n)
        WHERE b.n IS NULL
        ON CONFLICT DO NOTHING
        """,
    )


def _count(run: Statements, query: sql.Composed) -> int:
    row = run.conn.execute(query).fetchone()
    assert row is not None  # noqa: S101 (an aggregate has one row)
    return int(row[0])


def _pairs(run: Statements, work: Work) -> sql.Composed:
    hashed = work.shape.exact and _is_hashed(run, work)
    zero, true = sql.SQL("0::bigint"), sql.SQL("true")
    return run.fill(
        _PAIRS,
        work,
        made=sql.SQL("k.after") if hashed else zero,
        found=sql.SQL("hashtextextended(sqlguard.row_text(ROW({}.*)), 0)").format(ROW) if hashed else zero,
        # Without hashes the rows of the set must be all that its transaction left in the table, and all there.
        complete=true if hashed else run.fill(_ALL_THERE, work, relid=sql.Literal(work.change.relid)),
        left_alone=run.fill(_LEFT_ALONE, work, relid=sql.Literal(work.change.relid)),
        single=_unreferenced(work) if work.change.op == "insert" else true,
        lost=sql.Literal(_LOST),
    )


_LEFT_ALONE = """{row}.xmin = ANY (ARRAY(
    SELECT c.xmin FROM sqlguard.change_set c WHERE c.id = {old} OR (c.reverts > {old} AND c.relid = {relid}))
    || {own}::xid)"""
_ALL_THERE = """(SELECT count(*) FROM there) = (SELECT count(*) FROM {src}) AND NOT EXISTS (
    SELECT FROM sqlguard.change_set o JOIN sqlguard.change_set c ON c.id = {old}
    WHERE o.relid = {relid} AND o.txid = c.txid AND o.id <> c.id AND o.op IN ('insert', 'update'))"""


def _is_hashed(run: Statements, work: Work) -> bool:
    row = run.conn.execute(
        "SELECT NOT EXISTS (SELECT FROM sqlguard.row_change WHERE change_set_id = %s AND after IS NULL)",
        [work.change.id],
    ).fetchone()
    return row == (True,)


def _unreferenced(work: Work) -> sql.Composable:
    """Return the condition that no row refers to ROW (by a unique key of its): such rows would go with it."""
    free = [
        sql.SQL("NOT EXISTS (SELECT FROM {child} AS child WHERE {joins})").format(
            child=sql.SQL(key.child_name), joins=key.joins(sql.Identifier("child"), ROW)
        )
        for key in work.target.children
    ]
    return sql.SQL(" AND ").join([sql.SQL("true"), *free])


def unmark_by_image(run: Statements, work: Work) -> int:
    """Unmark the rows of *work*, keep them as they were, and note those that are not there or were changed."""
    row = run.conn.execute(
        run.fill(
            """
            WITH {src} AS MATERIALIZED (
                SELECT s.id, (s.image)::text AS image,
                       row_number() OVER (PARTITION BY sqlguard.row_text(s.image) ORDER BY s.id) AS n
                FROM ({images}) s
                WHERE NOT EXISTS (SELECT FROM pg_temp.sqlguard_conflict x
                                  WHERE x.change_set_id = {old} AND x.row_change_id = s.id)),
            marked AS MATERIALIZED (
                SELECT m.*, row_number() OVER (PARTITION BY m.image ORDER BY m.leaf, m.at) AS n
                FROM (SELECT {row}.tableoid AS leaf, {row}.ctid AS at, {live}::text AS image,
                             sqlguard.row_text(ROW({row}.*)) AS now
                      FROM {table} AS {row} WHERE {untouched} FOR UPDATE OF {row}) m),
            pairs AS MATERIALIZED (
                SELECT {src}.id, marked.leaf, marked.at, marked.now
                FROM {src} JOIN marked USING (image, n)),
            done AS (
                UPDATE {table} AS {row} SET deleted_at = NULL, deleted_by_agent = NULL FROM pairs
                WHERE {row}.tableoid = pairs.leaf AND {row}.ctid = pairs.at RETURNING 1),
            kept AS (
                INSERT INTO sqlguard.row_change (change_set_id, before) SELECT {new}, now FROM pairs),
            left_over AS (
                INSERT INTO pg_temp.sqlguard_conflict (change_set_id, row_change_id, reason)
                SELECT {old}, {src}.id, 'the row was changed or removed since' FROM {src}
                WHERE {src}.id NOT IN (SELECT id FROM pairs))
            SELECT count(*) FROM done
            """,
            work,
            live=live_image(work.target, work.shape.columns),
        )
    ).fetchone()
    assert row is not None  # noqa: S101 (an aggregate has one row)
    return int(row[0])


def live_image(target: Target, names: Sequence[str]) -> sql.Composable:
    """Return ROW as an image of it has it: with the columns *names*, and not deleted."""
    values: list[sql.Composable] = []
    for name in names:
        kept = name in target.by_name and name not in (DELETED_AT, DELETED_BY_AGENT)
        values.append(sql.SQL("{}.{}").format(ROW, sql.Identifier(name)) if kept else sql.SQL("NULL"))
    return sql.SQL("ROW({})").format(sql.SQL(", ").join(values))
