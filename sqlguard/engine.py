"""
SQLAlchemy engines for a task's work: `sqlguard.create_engine`, and `sqlguard.create_async_engine` for asyncio.

An engine goes through the proxy, which is what drivers and ORMs speak to unchanged; a connection that turns out to
go past it is refused. What an agent says about its statements travels as execution options:

    engine = sqlguard.create_engine(dsn)                          # the task's `dsn`, through the proxy
    engine = sqlguard.create_engine(operator_dsn, task=task_id)   # a login of its own, ends with `dispose()`
    with engine.begin() as conn:
        conn.execute(text("DELETE FROM orders WHERE id = 7"),
                     execution_options={"sqlguard_reason": "duplicate", "sqlguard_confidence": 0.9})
"""

from contextlib import suppress
from typing import Any
from urllib.parse import quote

import psycopg
import sqlalchemy as sa
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg, PGDialectAsync_psycopg
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.ext.asyncio import create_async_engine as sa_async

from sqlguard import settings
from sqlguard.catalog import BOOKKEEPING_COMMENT
from sqlguard.connection import PROXY_PARAMETER
from sqlguard.errors import NotConfigured, SqlguardError
from sqlguard.postgres import tasks
from sqlguard.postgres.connect import connect

#: Execution option -> tag of the comment that carries it.
OPTIONS = {
    "sqlguard_reason": "reason",
    "sqlguard_confidence": "confidence",
    "sqlguard_idempotency_key": "idempotency_key",
    "sqlguard_step": "step",
}


class _AsATaskSeesIt:
    """What reads a table's columns must not find those that no task may name."""

    def get_multi_columns(self, *args: Any, **kwargs: Any) -> Any:
        """Return SQLAlchemy's own answer without the columns that guarding added."""
        found = super().get_multi_columns(*args, **kwargs)  # type: ignore[misc]
        return [
            (table, [c for c in columns if c.get("comment") != BOOKKEEPING_COMMENT])
            for table, columns in found
        ]


class AsyncDialect(_AsATaskSeesIt, PGDialectAsync_psycopg):
    supports_statement_cache = True


class Dialect(_AsATaskSeesIt, PGDialect_psycopg):
    supports_statement_cache = True

    @classmethod
    def get_async_dialect_cls(cls, url: sa.URL) -> type[AsyncDialect]:  # noqa: ARG003 (SQLAlchemy's signature)
        """Return what an asynchronous engine of this name speaks."""
        return AsyncDialect


sa.dialects.registry.register("postgresql.sqlguard", __name__, "Dialect")


def create_engine(dsn: str, *, task: str | None = None, **options: Any) -> sa.Engine:
    """
    Return an engine for a task; *dsn* is the task's `dsn`, or the operator's together with a *task* id.

    *options* are SQLAlchemy's. Connecting raises NotConfigured when it does not end at a proxy of ours. With a task
    id raises TaskEnded, DatabaseUnavailable; the proxy's address is that of SQLGUARD_PUBLIC_HOST or SQLGUARD_LISTEN.
    """
    target, role = _target(dsn, task)
    made = sa.create_engine("postgresql+sqlguard://", creator=lambda: psycopg.connect(target), **options)
    _listen(made, dsn, role)
    return made


def create_async_engine(dsn: str, *, task: str | None = None, **options: Any) -> AsyncEngine:
    """Return the same for asyncio; SQLAlchemy needs `greenlet` for it. Opening and ending the login blocks."""
    target, role = _target(dsn, task)
    made = sa_async(
        "postgresql+sqlguard://",
        async_creator=lambda: psycopg.AsyncConnection.connect(target),
        **options,
    )
    _listen(made.sync_engine, dsn, role)
    return made


def _target(dsn: str, task: str | None) -> tuple[str, str | None]:
    """Return where to connect to, and the login that was made for it."""
    if task is None:
        return dsn, None
    with connect(dsn) as operator:
        role, password = tasks.add_lease(operator, task, "connection")
    return _through_the_proxy(dsn, role, password), role


def _listen(engine: sa.Engine, dsn: str, role: str | None) -> None:
    sa.event.listen(engine, "connect", _must_be_guarded)
    sa.event.listen(engine, "before_cursor_execute", _annotate, retval=True)
    if role is not None:
        sa.event.listen(engine, "engine_disposed", lambda _: _end(dsn, role))


def comment(said: dict[str, Any]) -> str:
    """Return what *said* (execution options) says as a sqlcommenter comment, empty when it says nothing."""
    tags = [
        f"{tag}='{quote(str(said[option]), safe='')}'"
        for option, tag in OPTIONS.items()
        if said.get(option) is not None
    ]
    return f"/*{','.join(tags)}*/" if tags else ""


def _through_the_proxy(dsn: str, role: str, password: str) -> str:
    configuration = settings.load()
    host, port = settings.host_and_port(configuration.public_host or configuration.listen)
    dbname = conninfo_to_dict(dsn).get("dbname")
    return make_conninfo(host=host, port=port, user=role, password=password, dbname=dbname)


def _must_be_guarded(connection: Any, _record: Any) -> None:
    # An asynchronous engine has its driver's connection inside one that looks synchronous.
    connected = getattr(connection, "driver_connection", connection)
    if not connected.pgconn.parameter_status(PROXY_PARAMETER):
        connection.close()
        raise NotConfigured(
            "this engine's connections do not go through the proxy",
            hint="give the `dsn` that `sqlguard task open` prints, not `direct_dsn`; see `sqlguard serve`",
        )


def _annotate(
    _conn: Any,
    _cursor: Any,
    statement: str,
    parameters: Any,
    context: Any,
    _many: bool,  # noqa: FBT001
) -> tuple[str, Any]:
    said = comment(context.execution_options) if context is not None else ""
    if not said:
        return statement, parameters
    if not context.execution_options.get("no_parameters"):
        said = said.replace("%", "%%")  # psycopg takes a single one for a placeholder
    # On a line of its own: the statement may end in a comment.
    return f"{statement}\n{said}", parameters


def _end(dsn: str, role: str) -> None:
    with suppress(psycopg.Error, SqlguardError), connect(dsn) as operator:
        tasks.end_lease(operator, role)
