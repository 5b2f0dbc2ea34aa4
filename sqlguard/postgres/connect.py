"""
Operator connections: one place that opens them, so that every failure reads the same.

These are the connections of sqlguard's own work (migrate, guard, control), never an agent's. No message holds
a password: what libpq quotes of a connection string that it could not read may be the password, or half of it.
"""

from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from sqlguard.errors import BadAddress, DatabaseUnavailable
from sqlguard.task import ROLE_PREFIX

APPLICATION_NAME = "sqlguard"
#: The first half of all advisory locks of ours, the bytes of "sqlg": an agent's session that takes one is ended. Second
#: halves: 1 migrate, 2 janitor, 3 policies' groups, 4 counts of statements (0007), 5 holds and removals, 6 guard,
#: 7 reconcile; for feeds and compensations a hash of the name.
OWN_LOCKS = 0x73716C67
#: A server that is gone without a word is noticed within two minutes, whether something was sent to it or not: whoever
#: waits for the operator's answer would wait for the system's quarter of an hour, or for ever.
KEEP_ALIVE: dict[str, Any] = {
    "keepalives_idle": 60,
    "keepalives_interval": 15,
    "keepalives_count": 4,
    "tcp_user_timeout": 120_000,
}
#: Schemas of the path in which agents may create: a function there that fits our arguments better than the one of
#: pg_catalog would be called in its place, with the operator's rights. Everything here is qualified for that reason.
_OPEN = """
    SELECT pg_catalog.array_agg(u.s ORDER BY u.n) FILTER (WHERE NOT u.is_open), pg_catalog.bool_or(u.is_open)
    FROM (SELECT p.s::pg_catalog.text AS s, p.n,
                 pg_catalog.has_schema_privilege(r.oid, p.s::pg_catalog.text, 'CREATE') AS is_open
          FROM pg_catalog.pg_roles r,
               pg_catalog.unnest(pg_catalog.current_schemas(false)) WITH ORDINALITY AS p (s, n)
          WHERE r.rolname OPERATOR(pg_catalog.=) 'sqlguard_agent') u
"""
_SHAPE = "postgresql://USER:PASSWORD@HOST:PORT/DATABASE"


def connect(dsn: str, *, autocommit: bool = True, alone: bool = False) -> psycopg.Connection:
    """
    Open a connection to *dsn*.

    An operator's finds no names in schemas where agents may create, and in none at all if *alone*, for what runs by
    itself.

    Raises BadAddress when it is no connection string, DatabaseUnavailable when there is no connection to be had.
    """
    parts = parsed(dsn)
    try:
        # What the connection string says itself holds.
        kept = {name: value for name, value in KEEP_ALIVE.items() if name not in parts}
        conn = psycopg.connect(dsn, autocommit=autocommit, fallback_application_name=APPLICATION_NAME, **kept)
        if autocommit and not conn.info.user.startswith(ROLE_PREFIX):
            _narrow(conn, alone=alone)
        return conn
    except psycopg.ProgrammingError as fault:
        raise _unreadable(str(fault)) from None
    except psycopg.OperationalError as fault:
        message = str(fault).strip()
        raise DatabaseUnavailable(
            f"can't connect to PostgreSQL: {_without(parts.get('password'), message)}"
        ) from None


def _narrow(conn: psycopg.Connection, *, alone: bool) -> None:
    kept, is_open = ([], True) if alone else conn.execute(_OPEN).fetchone() or ([], False)
    if is_open:
        names = sql.SQL(", ").join(map(sql.Identifier, kept)) if kept else sql.Literal("")
        conn.execute(sql.SQL("SET search_path = {}").format(names))


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
