"""
What stands in the way of taking a row back; every find goes to the table sqlguard_conflict of the undo.

Before the change (only these rows are left out then): rows that others refer to, parents that are gone,
unique values that are taken. After it: rows that were left over, because somebody had changed them.
"""

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import sql

from sqlguard.postgres.undo_sql import Statements, Work
from sqlguard.postgres.undo_table import ROW, SRC, Key

_IMAGE = sql.SQL("({}.image)").format(SRC)


def find_removed(conn: psycopg.Connection[Any], sets: Sequence[int]) -> None:
    """Rows whose images were removed for good can't come back, and must not be looked for."""
    conn.execute(
        "INSERT INTO pg_temp.sqlguard_conflict (change_set_id, row_change_id, reason)"
        " SELECT r.change_set_id, r.id, 'the row was ' || CASE m.kind WHEN 'erase' THEN 'erased' ELSE 'purged' END"
        " FROM sqlguard.row_change r JOIN sqlguard.removal m ON m.id = r.removal_id"
        " WHERE r.change_set_id = ANY (%s) ON CONFLICT DO NOTHING",
        [list(sets)],
    )


def find_deleted_parents(run: Statements, work: Work) -> None:
    """
    A deleted row can't come back under a parent that stays deleted; nothing else would notice it.

    Parents come first. One that is still deleted is in the scope, too, when the very same statement deleted it:
    tables that refer to one another in a circle have no first.
    """
    for key in work.target.parents:
        if not key.parent_soft:
            continue
        run.run(
            work,
            """
            INSERT INTO pg_temp.sqlguard_conflict (change_set_id, row_change_id, reason)
            SELECT {old}, {src}.id, {reason} FROM ({rows}) {src} JOIN {table} AS {row} ON {matches}
            JOIN {parent} AS parent ON {joins}
            WHERE parent.deleted_at IS NOT NULL
              AND NOT (parent.deleted_at = {row}.deleted_at AND parent.xmin = {row}.xmin)
            ON CONFLICT DO NOTHING
            """,
            parent=sql.SQL(key.parent_name),
            joins=key.joins(ROW, sql.Identifier("parent")),
            reason=sql.Literal(f"the row of `{key.parent_name}` that it refers to is deleted"),
        )


def children_of_left_parents(run: Statements, work: Work) -> list[tuple[int, int, str]]:
    """
    Return rows that came back although their parent, left alone for a conflict of its own, stays deleted.

    Before the change this can't be told of rows that one statement deleted with their parents: see above.
    """
    found: list[tuple[int, int, str]] = []
    for key in work.target.parents if work.change.op == "soft_delete" and work.keys else ():
        if key.parent_soft:
            query = run.fill(
                "SELECT {old}::bigint, {src}.id, {reason} FROM ({rows}) {src}"
                " JOIN {table} AS {row} ON {matches} JOIN {parent} AS parent ON {joins}"
                " WHERE {row}.deleted_at IS NULL AND parent.deleted_at IS NOT NULL AND {unblocked}",
                work,
                parent=sql.SQL(key.parent_name),
                joins=key.joins(ROW, sql.Identifier("parent")),
                reason=sql.Literal(f"the row of `{key.parent_name}` that it refers to is deleted"),
            )
            found += run.conn.execute(query).fetchall()
    return found


def find_referenced(run: Statements, work: Work) -> None:
    """A row that others refer to now must not be removed: their rows would go with it, or it fails."""
    for key in work.target.children:
        # Rows of the same set may refer to one another.
        itself: sql.Composable = sql.SQL("true")
        if key.child == key.parent:
            same = [
                sql.SQL("child.{}::text = other.now_key[{}]").format(sql.Identifier(k), sql.Literal(n))
                for n, k in enumerate(work.keys, 1)
            ]
            itself = _none_of_set(sql.SQL(" AND ").join(same))
        run.run(
            work,
            """
            WITH {src} AS MATERIALIZED ({rows})
            INSERT INTO pg_temp.sqlguard_conflict (change_set_id, row_change_id, reason)
            SELECT {old}, {src}.id, {reason}
            FROM {src} JOIN {table} AS {row} ON {matches}
            WHERE {untouched} AND EXISTS (SELECT FROM {child} AS child WHERE {joins} AND {itself})
            ON CONFLICT DO NOTHING
            """,
            child=sql.SQL(key.child_name),
            joins=key.joins(sql.Identifier("child"), ROW),
            itself=itself,
            reason=sql.Literal(f"rows of `{key.child_name}` refer to it"),
        )


def find_orphans(run: Statements, work: Work) -> None:
    """A row whose parent is gone, or deleted softly, can't come back."""
    for key in work.target.parents:
        if key.deferrable or any(c not in work.shape.columns for c in key.columns):
            continue  # checked by PostgreSQL when all is back
        given = [sql.SQL("{}.{} IS NOT NULL").format(_IMAGE, sql.Identifier(c)) for c in key.columns]
        run.run(
            work,
            """
            WITH {src} AS MATERIALIZED ({images})
            INSERT INTO pg_temp.sqlguard_conflict (change_set_id, row_change_id, reason)
            SELECT {old}, {src}.id, {reason} FROM {src}
            WHERE {given} AND {itself}
              AND NOT EXISTS (SELECT FROM {parent} AS parent WHERE {joins} AND {living})
            ON CONFLICT DO NOTHING
            """,
            given=sql.SQL(" AND ").join(given),
            parent=sql.SQL(key.parent_name),
            joins=key.joins(_IMAGE, sql.Identifier("parent")),
            living=_living(run, work, key),
            itself=_parent_in_set(key),
            reason=sql.Literal(f"the row of `{key.parent_name}` that it refers to is gone"),
        )


def find_disturbed(run: Statements, work: Work) -> None:
    """A deleted row whose later life had a conflict: somebody else has decided about it since."""
    run.run(
        work,
        """
        INSERT INTO pg_temp.sqlguard_conflict (change_set_id, row_change_id, reason)
        SELECT {old}, {src}.id, 'the row was changed since' FROM ({rows}) {src}
        WHERE (SELECT count(*) > 1 FROM pg_temp.sqlguard_conflict) AND {src}.key IN (
            SELECT k.key FROM (SELECT DISTINCT change_set_id AS id FROM pg_temp.sqlguard_conflict) s
            JOIN sqlguard.change_set c ON c.id = s.id AND c.relid = {relid}
            CROSS JOIN LATERAL sqlguard.row_changes(c.id) r
            JOIN pg_temp.sqlguard_conflict x ON r.change_set_id = x.change_set_id AND r.id = x.row_change_id
            CROSS JOIN LATERAL (VALUES (r.key), (r.new_key)) k (key)
            WHERE k.key IS NOT NULL
                -- What somebody did before this delete is in its image, and is brought back with it.
                AND NOT (x.change_set_id < {old} AND x.reason LIKE 'somebody else changed the row%'))
        ON CONFLICT DO NOTHING
        """,
        relid=sql.Literal(work.change.relid),
    )


def find_taken(run: Statements, work: Work) -> None:
    """A unique value that another row has by now (not one of this set) can't be taken back."""
    marked = work.change.op == "soft_delete"
    wanted = run.fill('SELECT {src}.id AS "sg id", ({src}.image).* FROM ({images}) {src}', work)
    if marked:
        wanted = run.fill(
            'SELECT {src}.id AS "sg id", {row}.* FROM ({rows}) {src} JOIN {table} {row} ON {matches}', work
        )
    for unique in work.target.uniques:
        names = [sql.Identifier(f"sg key {n}") for n in range(len(unique.keys))]
        named = [sql.SQL("{} AS {}").format(sql.SQL(k), n) for k, n in zip(unique.keys, names, strict=True)]
        where = sql.SQL(unique.predicate or "true")
        run.run(
            work,
            """
            WITH wanted AS MATERIALIZED (
                SELECT x."sg id", {keys} FROM ({wanted}) x WHERE {mine}),
            others AS (
                SELECT {key_of_other} AS "sg now", {keys} FROM {table} x WHERE {where})
            INSERT INTO pg_temp.sqlguard_conflict (change_set_id, row_change_id, reason)
            SELECT {old}, w."sg id", {reason} FROM wanted w JOIN others o ON {equal}
            WHERE NOT EXISTS (SELECT FROM ({rows}) s WHERE s.now_key = o."sg now")
            ON CONFLICT DO NOTHING
            """,
            wanted=wanted,
            keys=sql.SQL(", ").join(named),
            where=where,
            # Unmarked rows will fulfil the predicate of an index over live rows; before, they do not.
            mine=sql.SQL("true") if marked else where,
            key_of_other=work.target.key_of(work.keys, sql.Identifier("x")),
            equal=sql.SQL(" AND ").join(sql.SQL("w.{0} = o.{0}").format(n) for n in names),
            reason=sql.Literal(f"another row has its value of `{unique.name}`"),
        )


def left_over(run: Statements, work: Work, reason: str) -> None:
    """Rows of the set that are there but were not touched, because somebody else changed them."""
    still = sql.SQL("{}.deleted_at IS NOT NULL" if work.change.op == "soft_delete" else "true")
    run.run(
        work,
        """
        INSERT INTO pg_temp.sqlguard_conflict (change_set_id, row_change_id, reason)
        SELECT {old}, {src}.id, {reason} FROM ({rows}) {src} JOIN {table} AS {row} ON {matches}
        WHERE {still} AND NOT EXISTS (
            SELECT FROM sqlguard.row_change r WHERE r.change_set_id = {new} AND r.key = {src}.now_key)
        ON CONFLICT DO NOTHING
        """,
        reason=sql.Literal(reason),
        still=still.format(ROW),
    )


def missing(run: Statements, work: Work, reason: str = "the row is gone") -> None:
    """Rows of the set that are not there, nor have just been given their old keys."""
    run.run(
        work,
        """
        INSERT INTO pg_temp.sqlguard_conflict (change_set_id, row_change_id, reason)
        SELECT {old}, {src}.id, CASE WHEN p.key IS NULL THEN {reason} ELSE 'the row was purged' END
        FROM ({rows}) {src} LEFT JOIN ({purged}) p ON p.key = {src}.now_key
        WHERE NOT EXISTS (SELECT FROM {table} AS {row} WHERE {matches})
          AND NOT EXISTS (SELECT FROM sqlguard.row_change r
                          WHERE r.change_set_id = {new} AND r.key = {src}.now_key)
          AND NOT EXISTS (SELECT FROM sqlguard.row_change r
                          WHERE r.change_set_id = ANY ({inserted}) AND r.key = {src}.key)
        ON CONFLICT DO NOTHING
        """,
        reason=sql.Literal(reason),
        purged=_purged(run, work),
        inserted=sql.SQL("{}::bigint[]").format(sql.Literal(list(work.inserted))),
    )


def removed_before(run: Statements, work: Work) -> None:
    """Rows of the set that are not there, and that the rest of the undo would bring back as they once were."""
    run.run(
        work,
        """
        INSERT INTO pg_temp.sqlguard_conflict (change_set_id, row_change_id, reason)
        SELECT {old}, {src}.id, 'the row is gone' FROM ({rows}) {src}
        WHERE NOT EXISTS (SELECT FROM {table} AS {row} WHERE {matches})
          AND NOT EXISTS (SELECT FROM sqlguard.row_change r
                          WHERE r.change_set_id = {new} AND r.key = {src}.now_key)
          AND EXISTS (SELECT FROM sqlguard.row_change r
                      WHERE r.change_set_id = ANY ({deleted}) AND r.change_set_id < {old}
                        AND r.key = {src}.now_key)
        ON CONFLICT DO NOTHING
        """,
        deleted=sql.SQL("{}::bigint[]").format(sql.Literal(list(work.deleted))),
    )


def _purged(run: Statements, work: Work) -> sql.Composable:
    """Return the keys of rows that a purge may have taken: of those of a soft delete it took some."""
    return run.fill(
        """
            SELECT DISTINCT r.key FROM sqlguard.removed p
            JOIN sqlguard.change_set c ON c.id = p.change_set_id
            JOIN sqlguard.change_set k ON k.relid = c.relid AND k.statement_at = c.statement_at
            CROSS JOIN LATERAL sqlguard.row_changes(k.id) r
            WHERE c.relid = {relid} AND k.op = 'soft_delete' AND r.key IS NOT NULL""",
        work,
        relid=sql.Literal(work.change.relid),
    )


def not_inserted(run: Statements, work: Work) -> None:
    """Rows of the set that are not among those that the undo has just written."""
    run.run(
        work,
        """
        INSERT INTO pg_temp.sqlguard_conflict (change_set_id, row_change_id, reason)
        SELECT {old}, {src}.id, 'the key or a unique value is taken' FROM ({rows}) {src}
        WHERE NOT EXISTS (SELECT FROM sqlguard.row_change r WHERE r.change_set_id = {new} AND r.key = {src}.key)
        ON CONFLICT DO NOTHING
        """,
    )


def _living(run: Statements, work: Work, key: Key) -> sql.Composable:
    """Return the condition that the parent is there when all is undone: of its own tree, more may come back later."""
    if not key.parent_soft:
        return sql.SQL("true")
    if key.child != key.parent or not work.keys:
        return sql.SQL("parent.deleted_at IS NULL")
    return run.fill(
        """(parent.deleted_at IS NULL OR {key_of_parent} IN (
            SELECT k.key FROM unnest({scope}::bigint[]) AS s (id) CROSS JOIN LATERAL sqlguard.row_changes(s.id) r
            CROSS JOIN LATERAL (VALUES (r.key), (r.new_key)) AS k (key) WHERE k.key IS NOT NULL))""",
        work,
        key_of_parent=work.target.key_of(work.keys, sql.Identifier("parent")),
        scope=sql.Literal(list(work.scope)),
    )


def _parent_in_set(key: Key) -> sql.Composable:
    if key.child != key.parent:
        return sql.SQL("true")
    pairs = zip(key.columns, key.ref_columns, key.operators, strict=True)
    same = [
        sql.SQL("(other.image).{} OPERATOR({}) {}.{}").format(
            sql.Identifier(there), sql.SQL(operator), _IMAGE, sql.Identifier(here)
        )
        for here, there, operator in pairs
    ]
    return _none_of_set(sql.SQL(" AND ").join(same))


def _none_of_set(same: sql.Composable) -> sql.Composable:
    return sql.SQL("NOT EXISTS (SELECT FROM {} AS other WHERE {})").format(SRC, same)
