"""
Operator connections: one place that opens them, so that every failure reads the same.

These are the connections of sqlguard's own work (migrate, guard, control), never an agent's. No message holds
a password: what libpq quotes of a connection string that it could not read may be the password, or half of it.
"""

from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from sqlguard.errors import BadAddress, DatabaseUnavailable

APPLICATION_NAME = "sqlguard"
#: The first half of all advisory locks of ours, the bytes of "sqlg": an agent's session that takes one is ended.
OWN_LOCKS = 0x73716C67
_SHAPE = "postgresql://USER:PASSWORD@HOST:PORT/DATABASE"


def connect(dsn: str, *, autocommit: bool = True) -> psycopg.Connection:
    """
    Open a connection to *dsn*.

    Raises BadAddress when it is no connection string, DatabaseUnavailable when there is no connection to be had.
    """
    parts = parsed(dsn)
    try:
        return psycopg.connect(dsn, autocommit=autocommit, fallback_application_name=APPLICATION_NAME)
    except psycopg.ProgrammingError as fault:
        raise _unreadable(str(fault)) from None
    except psycopg.OperationalError as fault:
        message = str(fault).strip()
        raise DatabaseUnavailable(
            f"can't connect to PostgreSQL: {_without(parts.get('password'), message)}"
        ) from None


def parsed(dsn: str) -> dict[str, Any]:
    """Return the parts of *dsn*. Raises BadAddress, without a word of the password."""
    try:
        parts = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError as fault:
        raise _unreadable(str(fault)) from None
    # `u:p@ss@host`, `u:p/ss@host`: libpq splits at the first `@` or `/`, and the rest of the password is elsewhere.
    split = "@" in str(parts.get("host", ""))[1:] or "@" in str(parts.get("dbname", ""))
    ports = str(parts.get("port", "5432")).split(",")
    if split or not all(port.isdigit() for port in ports if port):
        raise BadAddress(
            "the connection string can't be read: a part of it is not where it belongs",
            hint=f"write {_SHAPE} with `@`, `/`, `:`, `?` and `#` in the password as %40, %2F, %3A, %3F and %23",
        )
    return parts


def _unreadable(message: str) -> BadAddress:
    # From the first quote to the last: a password may hold quotes itself.
    said, quote, rest = message.strip().partition('"')
    shown = f"{said}…{rest.rpartition(quote)[2]}" if quote else said
    return BadAddress(
        f"the connection string can't be read: {shown}",
        hint=f"write {_SHAPE}, or `host=… port=… dbname=… user=…`, in --dsn or SQLGUARD_DSN",
    )


def _without(password: Any, message: str) -> str:
    return message.replace(str(password), "…") if password else message
