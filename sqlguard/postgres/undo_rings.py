"""
Tables whose really deleted rows refer to one another in a ring: no order of inserts pleases all their keys.

The foreign keys of such a ring are checked at the end of the undo instead, by making them DEFERRABLE for its
time (their owner may do that; other writers of the tables wait). Most undos meet no ring and touch nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from sqlguard.postgres.undo_plan import ChangeSet, Reference

_KEYS = """
    SELECT c.conname::text AS name, n.nspname::text AS schema, t.relname::text AS table
    FROM pg_catalog.pg_constraint c JOIN pg_catalog.pg_class t ON t.oid = c.conrelid
    JOIN pg_catalog.pg_namespace n ON n.oid = t.relnamespace
    WHERE c.contype = 'f' AND NOT c.condeferrable AND c.conparentid = 0
        AND (c.conrelid::bigint, c.confrelid::bigint) IN (SELECT * FROM unnest(%s::bigint[], %s::bigint[]))
    ORDER BY c.oid
"""


@dataclass(frozen=True, slots=True)
class RingKey:
    name: str
    schema: str
    table: str


def put_off(
    conn: psycopg.Connection[Any], sets: Sequence[ChangeSet], references: Iterable[Reference]
) -> list[RingKey]:
    """Have the keys of rings checked at the end; return them for `put_back`."""
    deleted = {s.relid for s in sets if s.op == "delete"}
    edges = {(r.child, r.parent) for r in references if {r.child, r.parent} <= deleted}
    ring = [(child, parent) for child, parent in edges if child in _above(parent, edges)]
    if not ring:
        return []
    with conn.cursor(row_factory=class_row(RingKey)) as cursor:
        keys = cursor.execute(_KEYS, [[c for c, _ in ring], [p for _, p in ring]]).fetchall()
    _alter(conn, keys, sql.SQL("DEFERRABLE INITIALLY DEFERRED"))
    return keys


def put_back(conn: psycopg.Connection[Any], keys: Sequence[RingKey]) -> None:
    """Make the keys what they were. Nothing may be waiting to be checked."""
    _alter(conn, keys, sql.SQL("NOT DEFERRABLE"))


def _alter(conn: psycopg.Connection[Any], keys: Sequence[RingKey], how: sql.SQL) -> None:
    for key in keys:
        conn.execute(
            sql.SQL("ALTER TABLE {} ALTER CONSTRAINT {} {}").format(
                sql.Identifier(key.schema, key.table), sql.Identifier(key.name), how
            )
        )


def _above(start: int, edges: set[tuple[int, int]]) -> set[int]:
    """Return the tables that *start* refers to, directly or through others."""
    found: set[int] = set()
    todo = [start]
    while todo:
        here = todo.pop()
        for child, parent in edges:
            if child == here and parent not in found:
                found.add(parent)
                todo.append(parent)
    return found
