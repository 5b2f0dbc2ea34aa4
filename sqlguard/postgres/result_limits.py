"""The Python door's half of the limits on results: psycopg has the whole answer before anybody can count it."""

from contextlib import suppress
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from sqlguard.budget import ResultLimits


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


def _size(result: Any) -> int:
    """Return the bytes of all values, with four of length for each as on the wire."""
    columns = range(result.nfields)
    return sum(4 + len(result.get_value(row, c) or b"") for row in range(result.ntuples) for c in columns)
