"""
Where proxies of this database listen: `sqlguard serve` writes it down, `sqlguard task open` prints it.

A row outlives a proxy that was killed, so an address counts only when something answers there.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg

from sqlguard.errors import SqlguardError
from sqlguard.postgres.connect import connect

#: Seconds that a proxy may take to accept; the operator is waiting.
_PATIENCE = 0.5
_NEWEST = 8


@contextmanager
def announced(dsn: str, address: str) -> Iterator[None]:
    """Keep *address* in the database for the time of the block; a database that says no to it is no reason to stop."""
    number = None
    with suppress(psycopg.Error, SqlguardError), connect(dsn) as conn:
        row = conn.execute(
            "INSERT INTO sqlguard.proxy (address) VALUES (%s) RETURNING id", [address]
        ).fetchone()
        number = row[0] if row else None
    try:
        yield
    finally:
        if number is not None:
            with suppress(psycopg.Error, SqlguardError), connect(dsn) as conn:
                conn.execute("DELETE FROM sqlguard.proxy WHERE id = %s", [number])


def addresses(conn: psycopg.Connection[Any]) -> list[str]:
    """Return where proxies said they listen, newest first."""
    with suppress(psycopg.errors.InsufficientPrivilege):
        rows = conn.execute(
            "SELECT address FROM sqlguard.proxy GROUP BY 1 ORDER BY max(started_at) DESC LIMIT %s", [_NEWEST]
        )
        return [row[0] for row in rows]
    return []


def answers(host: str, port: int) -> bool:
    """Say whether something accepts connections there."""
    try:
        with socket.create_connection((host, port), timeout=_PATIENCE):
            return True
    except OSError:
        return False
