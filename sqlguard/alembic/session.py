"""
A psycopg connection for a migration: its own where the driver is psycopg 3, else one opened beside it.

Guarding runs many short transactions and CREATE INDEX CONCURRENTLY, so its caller must have ended the
migration's transaction (Alembic's `autocommit_block`); the comparator only reads, in the transaction that is
there. What is set in the session meanwhile is set back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row
from sqlalchemy import URL, Connection

from sqlguard.errors import GuardError
from sqlguard.postgres.connect import connect

#: Settings that guarding changes; also those that decide what a bare name means and who owns what is made.
_SETTINGS = (
    "lock_timeout",
    "statement_timeout",
    "idle_in_transaction_session_timeout",
    "search_path",
    "client_min_messages",
    "maintenance_work_mem",
)
_SOUND = (TransactionStatus.IDLE, TransactionStatus.INTRANS)
_READ = "SELECT s, pg_catalog.current_setting(s) FROM unnest(%s::text[]) AS s"
_WRITE = "SELECT pg_catalog.set_config(s, v, false) FROM unnest(%s::text[], %s::text[]) AS u (s, v)"
_ROLE = "SELECT pg_catalog.current_setting('role'), pg_catalog.current_setting('search_path')"


@contextmanager
def psycopg_connection(connection: Connection, dsn: str | None = None) -> Iterator[psycopg.Connection[Any]]:
    """
    Yield a psycopg connection to the database of *connection*: in autocommit, unless that is in a transaction.

    *dsn* replaces the URL of the engine where a connection beside the migration's own has to be opened.
    """
    driver = connection.connection.driver_connection
    if isinstance(driver, psycopg.Connection) and dsn is None:
        with _settings_kept(driver), _plain_rows(driver):
            yield driver
    elif isinstance(driver, psycopg.AsyncConnection) and dsn is None:
        with _borrowed(driver) as borrowed, _settings_kept(borrowed):
            yield borrowed
    else:
        with connect(dsn or _conninfo(connection, driver)) as beside:
            role, path = connection.exec_driver_sql(_ROLE).one()
            if role != "none":
                beside.execute("SELECT pg_catalog.set_config('role', %s, false)", [role])
            beside.execute("SELECT pg_catalog.set_config('search_path', %s, false)", [path])
            yield beside


@contextmanager
def _settings_kept(conn: psycopg.Connection[Any]) -> Iterator[None]:
    names = list(_SETTINGS)
    with conn.cursor(row_factory=tuple_row) as cursor:
        before: dict[str, str] = dict(cursor.execute(_READ, [names]).fetchall())
    try:
        yield
    finally:
        # A session that is gone or failed can't be set back, and its own error must be the one that is seen.
        if not conn.closed and conn.info.transaction_status in _SOUND:
            conn.execute(_WRITE, [list(before), list(before.values())])


@contextmanager
def _plain_rows(conn: psycopg.Connection[Any]) -> Iterator[None]:
    factory, conn.row_factory = conn.row_factory, tuple_row
    try:
        yield
    finally:
        conn.row_factory = factory


@contextmanager
def _borrowed(driver: psycopg.AsyncConnection[Any]) -> Iterator[psycopg.Connection[Any]]:
    """Lend the session of an asynchronous connection to a synchronous one: same backend, same settings."""
    pgconn = driver.pgconn
    handlers = pgconn.notice_handler, pgconn.notify_handler
    borrowed = psycopg.Connection(pgconn)
    # Its own prepared statements would have the names of those that the other connection has prepared.
    borrowed.prepare_threshold = None
    # Not this object's to close; psycopg warns of open connections unless they belong to a pool.
    borrowed._pool = None  # noqa: SLF001
    if pgconn.transaction_status == TransactionStatus.IDLE:
        borrowed.autocommit = True
    try:
        yield borrowed
    finally:
        pgconn.notice_handler, pgconn.notify_handler = handlers


def _conninfo(connection: Connection, driver: Any) -> str:
    """Return how to connect once more to where *connection* is."""
    info = getattr(driver, "info", None)
    parameters = getattr(info, "dsn_parameters", None)
    if isinstance(parameters, dict):  # psycopg2: what libpq was given, wherever it came from
        return make_conninfo(**parameters, password=getattr(info, "password", None) or None)
    return _from_url(connection.engine.url)


def _from_url(url: URL) -> str:
    if not (url.host or url.query):
        raise GuardError(
            f"guarding needs a psycopg connection, and the URL of this `{url.drivername}` engine does not say where to",
            hint="use the driver `postgresql+psycopg`, or pass `sqlguard_dsn=…` to `context.configure`",
        )
    query = {name: value for name, value in url.query.items() if isinstance(value, str) and name in _LIBPQ}
    return make_conninfo(
        host=url.host or query.pop("host", None),
        port=url.port,
        user=url.username,
        password=url.password,
        dbname=url.database,
        **query,
    )


#: Options of an URL that libpq knows as well; the others (`prepared_statement_cache_size` …) are the driver's.
_LIBPQ = frozenset(option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults())
