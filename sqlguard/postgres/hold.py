"""
Legal hold: rows that must not be removed for good, by purge or erasure, until the hold is released.

A hold on a condition stands for rows that will fulfil it later, too.
"""

from typing import Any

import psycopg
from psycopg import sql

from sqlguard.errors import Refused
from sqlguard.postgres.retention import (
    LOCK,
    Hold,
    every_row,
    find_guarded,
    fulfils,
    is_one_of,
    key_texts,
    name_of,
    one_expression,
    open_target,
    read_holds,
)
from sqlguard.postgres.undo_table import ROW
from sqlguard.postgres.walls_facts import Relation, read_facts


def hold(
    conn: psycopg.Connection[Any],
    table: str,
    *,
    reason: str,
    keys: tuple[str, ...] = (),
    where: str | None = None,
) -> tuple[list[Hold], int]:
    """
    Hold all rows of *table*, those with *keys*, or those for which *where* is true.

    Returns the new holds and how many rows, deleted or not, are under them now.
    """
    if keys and where is not None:
        raise Refused("rows are named by key or by condition, not by both")
    with conn.transaction():
        # A removal that is at work has ended before this returns; the next one sees the hold.
        conn.execute("SELECT pg_advisory_xact_lock(%s, %s)", LOCK)
        facts = read_facts(conn)
        root = find_guarded(facts, table)
        target = open_target(conn, root)
        texts = key_texts(conn, target, root.key_columns, keys)
        chosen: sql.Composable = sql.SQL("true")
        if texts:
            chosen = is_one_of(target, root.key_columns, ROW, texts)
        elif where is not None:
            chosen = fulfils(one_expression(where), ROW, root.name)
        with every_row(conn, facts.tree(root)):
            covered = _count(conn, root, chosen)
        if covered < len({tuple(t) for t in texts}):
            raise Refused(
                f"`{root.label}` has no such row",
                hint="a row that is gone can't be held; a hold with --where covers later rows",
            )
        wanted: list[list[str] | None] = [*texts] if texts else [None]
        ids = [_insert(conn, root, key, where, reason) for key in wanted]
        made = [h for h in read_holds(conn, [root.oid]) if h.id in ids]
    return made, covered


def release(
    conn: psycopg.Connection[Any], table: str | None = None, *, hold_id: int | None = None
) -> list[Hold]:
    """End the hold *hold_id*, or all holds on *table*; returns those that were ended."""
    with conn.transaction():
        conn.execute("SELECT pg_advisory_xact_lock(%s, %s)", LOCK)
        relids = None if table is None else [find_guarded(read_facts(conn), table).oid]
        ended = [h for h in read_holds(conn, relids) if hold_id is None or h.id == hold_id]
        conn.execute(
            "UPDATE sqlguard.hold SET released_at = clock_timestamp(), released_by = session_user"
            " WHERE id = ANY (%s)",
            [[h.id for h in ended]],
        )
    return ended


def _count(conn: psycopg.Connection[Any], root: Relation, chosen: sql.Composable) -> int:
    row = conn.execute(
        sql.SQL("SELECT count(*) FROM {} AS {} WHERE {}").format(name_of(root), ROW, chosen)
    ).fetchone()
    assert row is not None  # noqa: S101 (an aggregate has one row)
    return int(row[0])


def _insert(
    conn: psycopg.Connection[Any],
    root: Relation,
    key: list[str] | None,
    where: str | None,
    reason: str,
) -> int:
    row = conn.execute(
        "INSERT INTO sqlguard.hold (relid, schema_name, table_name, key, condition, reason)"
        " VALUES (%s, %s, %s, %s, %s, %s) RETURNING id",
        [root.oid, root.schema, root.name, key, where, reason],
    ).fetchone()
    assert row is not None  # noqa: S101 (RETURNING of one row)
    return int(row[0])
