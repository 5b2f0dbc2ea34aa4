"""
Idempotency keys: a write that was done before is answered, not done again.

The order in which an executor uses them, on the task's own session:

    1. journal the intent, with its key, as always (refused with SG002 when the key has another statement)
    2. BEGIN READ WRITE
    3. claim(conn, key, statement_hash, action)   waits while a twin with the same key is at work
       - a Kept: ROLLBACK, answer with its tag, columns and rows; the event of this action is `committed`
         with `{"repeats": kept.action}`
       - None: the key is ours
    4. the write
    5. keep(conn, key, tag, columns, rows)
    6. COMMIT

Claim, write and result are one transaction. So whatever dies in between, either all of it happened, and a
repeat finds the result; or nothing did, and a repeat does the work. `find` is step 3 without a claim, for
an early answer before anything is journaled. Keys belong to the agent under one policy and one set of
parameters: a task that was renewed, or opened again, finds its keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from sqlguard.postgres.journal import translated

LIFETIME = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class Kept:
    """
    The stored answer of action *action*; `tag` is None when the write is done but its answer was not kept.

    `columns` and `rows` are what `keep` was given, both None for a statement without RETURNING.
    """

    action: int | None
    tag: str | None
    columns: Any = None
    rows: Any = None


def find(conn: psycopg.Connection[Any], key: str, statement_hash: str) -> Kept | None:
    """Return what is stored under *key*, None if nothing is; raises Refused for another statement's key."""
    with translated():
        row = conn.execute("SELECT * FROM sqlguard.find_key(%s, %s)", [key, statement_hash]).fetchone()
    return None if row is None else Kept(*row)


def claim(
    conn: psycopg.Connection[Any],
    key: str,
    statement_hash: str,
    action: int | None,
    lifetime: timedelta = LIFETIME,
) -> Kept | None:
    """
    Claim *key* for the transaction that *conn* is in; None says that the write is to be done now.

    Raises Refused when the key was used for another statement. Under REPEATABLE READ or SERIALIZABLE a race
    ends in PostgreSQL's own 40001, and the client's repeat gets the stored answer.
    """
    with translated():
        row = conn.execute(
            "SELECT * FROM sqlguard.claim_key(%s, %s, %s, %s)", [key, statement_hash, action, lifetime]
        ).fetchone()
    assert row is not None  # noqa: S101 (the function returns one row or raises)
    claimed, *stored = row
    return None if claimed else Kept(*stored)


def keep(
    conn: psycopg.Connection[Any],
    key: str,
    tag: str,
    columns: Sequence[Any] | None = None,
    rows: Sequence[Sequence[Any]] | None = None,
) -> None:
    """Store what the write answered, for repeats; must run in the transaction that claimed the key."""
    values = [key, tag, None if columns is None else Jsonb(list(columns))]
    values.append(None if rows is None else Jsonb([list(r) for r in rows]))
    with translated():
        conn.execute("SELECT sqlguard.keep_result(%s, %s, %s, %s)", values)


def expire(conn: psycopg.Connection[Any]) -> int:
    """Remove keys whose time is over (operator); return how many."""
    return conn.execute("DELETE FROM sqlguard.idempotency WHERE expires_at <= clock_timestamp()").rowcount
