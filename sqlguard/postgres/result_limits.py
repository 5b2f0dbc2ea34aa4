"""
The Python door's half of the limits on results.

psycopg has a whole answer before anybody can count it, unless it is asked for row by row.
"""

from collections.abc import Generator
from contextlib import closing, suppress
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from sqlguard.budget import ResultLimits
from sqlguard.plan import Decision, Outcome
from sqlguard.statement.model import Kind

#: Rows beyond those that are wanted are counted up to here.
COUNTED = 100_000
#: Rows that come at a time where libpq can do that; singly they take their time.
_CHUNK = 500 if psycopg.capabilities.has_stream_chunked() else 1


def keep_to(limits: ResultLimits | None, cursor: psycopg.Cursor[Any]) -> None:
    """Raise CapExceeded for an answer beyond *limits*; an open transaction fails with it, as with any error."""
    result = cursor.pgresult
    if limits is None or result is None or cursor.description is None:
        return
    is_within = limits.rows is None or result.ntuples <= limits.rows
    if is_within and (limits.bytes is None or _size(result) <= limits.bytes):
        return
    if cursor.connection.info.transaction_status == TransactionStatus.INTRANS:
        with suppress(psycopg.Error):
            cursor.connection.execute("SELECT 1 / 0")
    raise limits.excess()


def first_rows(  # noqa: PLR0913 (a statement, and how much of its answer is wanted)
    conn: psycopg.Connection[Any],
    decision: Decision,
    text: str,
    params: list[Any] | None,
    *,
    most: int,
    limits: ResultLimits | None,
) -> Outcome:
    """
    Run a read, keep *most* of its rows and count the others as they pass, up to a number at which it is stopped.

    In a transaction, which that would fail, it is not. Raises CapExceeded beyond *limits*.
    """
    stops = conn.info.transaction_status == TransactionStatus.IDLE
    kept: list[tuple[Any, ...]] = []
    total = size = 0
    chunk = None
    with psycopg.RawCursor(conn) as cursor, closing(_stream(cursor, text, params)) as stream:
        for row in stream:
            total += 1
            if chunk is not cursor.pgresult:
                chunk = cursor.pgresult
                size += _size(chunk) if limits and limits.bytes is not None else 0
            if limits and (total > (limits.rows or total) or size > (limits.bytes or size)):
                raise limits.excess()
            if total <= most:
                kept.append(tuple(row))
            elif stops and total > COUNTED:
                break
        count = min(total, COUNTED) if stops else total
        columns = tuple(c.name for c in cursor.description) if cursor.description else _columns(conn, text)
    return Outcome(
        verdict=str(decision.verdict.effect),
        tag=f"SELECT {count}" if decision.kind in (Kind.SELECT, Kind.VALUES) else decision.kind.name,
        rowcount=count,
        has_more=total > count,
        columns=columns,
        rows=tuple(kept),
        tier=decision.verdict.tier,
        committed=True,
        statement=decision.statement.text,
        executed=decision.text,
    )


def _stream(
    cursor: psycopg.RawCursor[Any], text: str, params: list[Any] | None
) -> Generator[tuple[Any, ...], None, None]:
    """Yield the rows as they come; who closes this early has PostgreSQL stop."""
    yield from cursor.stream(text, params, size=_CHUNK)


def _columns(conn: psycopg.Connection[Any], text: str) -> tuple[str, ...]:
    """Return the names of a read's columns: psycopg does not keep those of an answer that came without rows."""
    conn.pgconn.prepare(b"", text.encode(conn.info.encoding))
    found = conn.pgconn.describe_prepared(b"")
    names = [found.fname(n) for n in range(found.nfields)]
    return tuple([name.decode(conn.info.encoding) for name in names if name is not None])


def _size(result: Any) -> int:
    """Return the bytes of all values, with four of length for each as on the wire."""
    columns = range(result.nfields)
    return sum(4 + len(result.get_value(row, c) or b"") for row in range(result.ntuples) for c in columns)
