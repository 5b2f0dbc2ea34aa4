"""
Unmarking deleted rows of a table without a key: its rows are told apart by their whole contents.

A row belongs to a soft delete when it has that statement's deleted_at and, but for the bookkeeping columns, the
text of an image that the statement left. Of rows with the same text any will do; each image is used once.
"""

from collections.abc import Sequence

from psycopg import sql

from sqlguard.catalog import DELETED_AT, DELETED_BY_AGENT
from sqlguard.postgres.undo_sql import Statements, Work
from sqlguard.postgres.undo_table import ROW, Target


def unmark_by_image(run: Statements, work: Work) -> int:
    """Unmark the rows of *work*, keep them as they were, and note those that are not there or were changed."""
    row = run.conn.execute(
        run.fill(
            """
            WITH {src} AS MATERIALIZED (
                SELECT s.id, (s.image)::text AS image,
                       row_number() OVER (PARTITION BY (s.image)::text ORDER BY s.id) AS n
                FROM ({images}) s
                WHERE NOT EXISTS (SELECT FROM pg_temp.sqlguard_conflict x
                                  WHERE x.change_set_id = {old} AND x.row_change_id = s.id)),
            marked AS MATERIALIZED (
                SELECT m.*, row_number() OVER (PARTITION BY m.image ORDER BY m.leaf, m.at) AS n
                FROM (SELECT {row}.tableoid AS leaf, {row}.ctid AS at, {live}::text AS image,
                             ({row}.*)::text AS now
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
