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

Answers are kept so that any door can give them again: a column as `[name, type, size, modifier, format]`, a row as
a list of values, each null, the value's text, or in a binary column (format 1) its bytes in base64. `described` makes
both from a cursor, `loaded` makes Python values of them; `proxy.kept` does it for the wire.
"""

from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg
from psycopg import sql
from psycopg.adapt import Transformer
from psycopg.pq import Format
from psycopg.types.json import Jsonb

from sqlguard.errors import Refused
from sqlguard.plan import Decision, Outcome
from sqlguard.postgres.journal import translated

LIFETIME = timedelta(days=7)
#: Literals are written by it: to make one for each of them takes longer than all the rest.
_WRITER = Transformer()


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


def call(function: str, *values: str | None) -> str:
    """Return the call of a function of ours as a text, for a Query message: it has no parameters."""
    call = sql.SQL("SELECT sqlguard.{}({})").format(
        sql.Identifier(function), sql.SQL(", ").join(map(sql.Literal, values))
    )
    return call.as_string(_WRITER)


def expire(conn: psycopg.Connection[Any]) -> int:
    """Remove keys whose time is over (operator); return how many."""
    return conn.execute("DELETE FROM sqlguard.idempotency WHERE expires_at <= clock_timestamp()").rowcount


def described(cursor: psycopg.Cursor[Any]) -> tuple[list[list[Any]] | None, list[list[str | None]] | None]:
    """Return columns and rows of a cursor's whole result as they are kept, None twice if it has none."""
    result = cursor.pgresult
    if result is None or cursor.description is None:
        return None, None
    encoding = cursor.connection.info.encoding
    names = [column.name for column in cursor.description]
    columns = [
        [name, result.ftype(n), result.fsize(n), result.fmod(n), int(result.fformat(n))]
        for n, name in enumerate(names)
    ]
    formats = [result.fformat(n) for n in range(result.nfields)]
    rows = [
        [_kept(result.get_value(row, n), form, encoding) for n, form in enumerate(formats)]
        for row in range(result.ntuples)
    ]
    return columns, rows


def loaded(conn: psycopg.Connection[Any], kept: Kept) -> tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]:
    """Return the names and the rows of a kept answer as Python values, as psycopg would have read them."""
    if not kept.columns:
        return (), ()
    encoding = conn.info.encoding
    transformer = Transformer(conn)
    loaders = [transformer.get_loader(oid, Format(form)) for _, oid, _, _, form in kept.columns]
    formats = [Format(form) for *_, form in kept.columns]
    rows = tuple(
        [
            tuple(
                [
                    None if value is None else loader.load(_raw(value, form, encoding))
                    for value, loader, form in zip(row, loaders, formats, strict=True)
                ]
            )
            for row in kept.rows or ()
        ]
    )
    return tuple([name for name, *_ in kept.columns]), rows


def repeated(conn: psycopg.Connection[Any], decision: Decision, kept: Kept) -> Outcome:
    """Answer with what was kept, and say so; raises Refused when the write was done and its answer is lost."""
    if kept.tag is None:
        raise Refused(
            f"this write was done before, by action {kept.action}, and its answer was not kept",
            hint="look at the rows it changed; a new idempotency key would do it again",
        )
    columns, rows = loaded(conn, kept)
    count = kept.tag.split(" ")[-1]
    return Outcome(
        verdict=str(decision.verdict.effect),
        tag=kept.tag,
        rowcount=int(count) if count.isdigit() else 0,
        columns=columns,
        rows=rows,
        statement=decision.statement.text,
        executed=decision.text,
        notices=(
            f"a repeat: action {kept.action} did this already, and this is its answer; nothing was changed",
        ),
        repeats=kept.action,
    )


def _kept(value: bytes | None, form: int, encoding: str) -> str | None:
    if value is None:
        return None
    return value.decode(encoding) if form == Format.TEXT else b64encode(value).decode("ascii")


def _raw(value: str, form: Format, encoding: str) -> bytes:
    return value.encode(encoding) if form is Format.TEXT else b64decode(value)
