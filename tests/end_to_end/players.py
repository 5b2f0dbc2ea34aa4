"""How each driver plays the steps of `day`: the DSN and the steps go in, what a client sees of each comes out."""

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import sqlalchemy as sa
from end_to_end.day import Step, Way
from end_to_end.node import run_node
from sqlalchemy.ext.asyncio import create_async_engine

#: What was seen of each step.
Seen = list[Any]
_REPEATS = 3
_PIECE = 7
_PATIENCE = 0.4
_NUMBERED = re.compile(r"\$(\d+)")
#: The steps' COPY … FROM STDIN, for the driver that writes the statement itself.
_COPY_IN = re.compile(r"COPY (\w+)(?: \((.*?)\))? FROM STDIN(?: \(FORMAT (\w+)\))?")
_COPIES = (Way.COPY_OUT, Way.COPY_IN, Way.COPY_BROKEN, Way.COPY_ROWS)


class OutOfData(Exception):
    """What a client breaks its COPY off with."""


def rows(found: Any) -> list[list[Any]]:
    return [list(row) for row in found]


# --- psycopg


def with_psycopg(dsn: str, steps: Sequence[Step], *, secure: bool) -> Seen:
    mode = "require" if secure else "disable"
    with psycopg.connect(dsn, autocommit=True, sslmode=mode) as conn:
        assert conn.pgconn.ssl_in_use == secure
        return [_psycopg_step(conn, step) for step in steps]


def _psycopg_step(  # noqa: PLR0911 (one way a line)
    conn: psycopg.Connection[Any], step: Step
) -> Any:
    text = _NUMBERED.sub("%s", step.text) if step.params else step.text
    try:
        match step.way:
            case Way.PLAIN | Way.PARAMS:
                return _told(conn.execute(text.encode(), step.params or None))
            case Way.PREPARED:
                return [
                    _told(conn.execute(text.encode(), step.params, prepare=True)) for _ in range(_REPEATS)
                ]
            case Way.MANY:
                cursor = conn.cursor()
                cursor.executemany(text.encode(), step.params)
                return cursor.rowcount
            case Way.CURSOR:
                with conn.transaction(), conn.cursor("named") as named:
                    named.execute(text.encode())
                    return [rows(piece) for piece in iter(lambda: named.fetchmany(_PIECE), [])]
            case Way.COPY_OUT:
                with conn.cursor().copy(text.encode()) as copy:
                    return b"".join(bytes(piece) for piece in copy).decode()
            case Way.COPY_IN | Way.COPY_BROKEN | Way.COPY_ROWS:
                return _psycopg_copy_in(conn, step)
            case Way.CANCEL:
                timer = threading.Timer(_PATIENCE, conn.cancel_safe)
                timer.start()
                try:
                    return _told(conn.execute(text.encode()))
                finally:
                    timer.join()
    except OutOfData:
        return "broken off"
    except psycopg.Error as fault:
        diag = fault.diag
        return [fault.sqlstate, diag.statement_position, diag.constraint_name, diag.context]


def _psycopg_copy_in(conn: psycopg.Connection[Any], step: Step) -> Any:
    cursor = conn.cursor()
    form = " (FORMAT binary)" if step.way is Way.COPY_ROWS else ""
    with cursor.copy((step.text + form).encode()) as copy:
        if step.way is Way.COPY_ROWS:
            copy.set_types(["int4", "text"])
            for row in step.params:
                copy.write_row(row)
        else:
            for piece in step.params:
                copy.write(piece)
        if step.way is Way.COPY_BROKEN:
            raise OutOfData
    return [cursor.statusmessage, cursor.rowcount]


def _told(cursor: psycopg.Cursor[Any]) -> Any:
    return [cursor.statusmessage, rows(cursor.fetchall()) if cursor.description else None]


# --- asyncpg


def with_asyncpg(dsn: str, steps: Sequence[Step], *, secure: bool) -> Seen:
    async def play() -> Seen:
        conn = await asyncpg.connect(dsn, ssl="require" if secure else False)
        try:
            return [await _asyncpg_step(conn, step) for step in steps]
        finally:
            await conn.close()

    return asyncio.run(play())


async def _asyncpg_step(  # noqa: C901, PLR0911 (one way a line)
    conn: Any, step: Step
) -> Any:
    try:
        match step.way:
            case Way.PLAIN if not step.text.startswith(("SELECT", "VALUES", "WITH", "FETCH", "SHOW")):
                return await conn.execute(step.text)
            case Way.PLAIN | Way.PARAMS | Way.PREPARED:
                statement = await conn.prepare(step.text)
                times = _REPEATS if step.way is Way.PREPARED else 1
                found = [rows(await statement.fetch(*step.params)) for _ in range(times)]
                return [statement.get_statusmsg(), found]
            case Way.MANY:
                return await conn.executemany(step.text, step.params)
            case Way.CURSOR:
                async with conn.transaction():
                    return rows([row async for row in conn.cursor(step.text, prefetch=_PIECE)])
            case Way.COPY_OUT:
                return await _asyncpg_copy(conn, step.text)
            case Way.COPY_IN | Way.COPY_BROKEN | Way.COPY_ROWS:
                return await _asyncpg_copy_in(conn, step)
            case Way.CANCEL:
                return await conn.fetch(step.text, timeout=_PATIENCE)
    except OutOfData:
        return "broken off"
    except asyncpg.PostgresError as fault:
        told = fault.as_dict()
        return [fault.sqlstate, *(told.get(part) for part in ("position", "constraint_name", "context"))]
    except TimeoutError:
        return "cancelled"


async def _asyncpg_copy(conn: Any, text: str) -> str:
    got = bytearray()

    async def take(data: bytes) -> None:
        got.extend(data)

    # The driver writes the statement itself.
    query = text.removeprefix("COPY ").partition(" TO STDOUT")[0]
    if query.startswith("("):
        await conn.copy_from_query(query[1:-1], output=take)
    else:
        await conn.copy_from_table("staff", columns=["id", "name"], format="csv", header=True, output=take)
    return got.decode()


async def _asyncpg_copy_in(conn: Any, step: Step) -> str:
    found = _COPY_IN.fullmatch(step.text)
    assert found, step.text
    table, named, form = found.groups()
    columns = named.split(", ") if named else None
    if step.way is Way.COPY_ROWS:
        return str(await conn.copy_records_to_table(table, records=step.params, columns=columns))

    async def data() -> AsyncIterator[bytes]:
        for piece in step.params:
            yield piece.encode()
        if step.way is Way.COPY_BROKEN:
            raise OutOfData

    return str(await conn.copy_to_table(table, source=data(), columns=columns, format=form))


# --- SQLAlchemy


def with_sqlalchemy(dsn: str, steps: Sequence[Step], *, secure: bool) -> Seen:
    engine = sa.create_engine(
        dsn.replace("postgresql:", "postgresql+psycopg:"),
        isolation_level="AUTOCOMMIT",
        connect_args={"sslmode": "require" if secure else "disable"},
    )
    try:
        with engine.connect() as conn:
            driver: Any = conn.connection.driver_connection
            # SQLAlchemy has no COPY; who wants one asks the driver.
            return [
                _psycopg_step(driver, step)
                if step.way in _COPIES
                else _sqlalchemy_step(conn, step, _cancel_psycopg)
                for step in steps
            ]
    finally:
        engine.dispose()


def with_sqlalchemy_asyncpg(dsn: str, steps: Sequence[Step], *, secure: bool) -> Seen:
    async def play() -> Seen:
        engine = create_async_engine(
            dsn.replace("postgresql:", "postgresql+asyncpg:"),
            isolation_level="AUTOCOMMIT",
            connect_args={"ssl": "require" if secure else False},
        )
        try:
            async with engine.connect() as conn:
                seen = []
                for step in steps:
                    if step.way is Way.CANCEL:
                        seen.append(await _cancel_asyncpg(conn, step.text))
                    elif step.way in _COPIES:
                        driver = (await conn.get_raw_connection()).driver_connection
                        seen.append(await _asyncpg_step(driver, step))
                    else:
                        seen.append(await conn.run_sync(_sqlalchemy_step, step))
                return seen
        finally:
            await engine.dispose()

    return asyncio.run(play())


def _sqlalchemy_step(
    conn: sa.Connection, step: Step, cancelled: Callable[[sa.Connection, str], Any] | None = None
) -> Any:
    text = sa.text(_NUMBERED.sub(r":p\1", step.text.replace(":", "\\:")))
    try:
        match step.way:
            case Way.PLAIN:
                return _shown(conn.exec_driver_sql(step.text))
            case Way.PARAMS | Way.PREPARED:
                named = _named(step.params)
                times = _REPEATS if step.way is Way.PREPARED else 1
                return [_shown(conn.execute(text, named)) for _ in range(times)]
            case Way.MANY:
                return conn.execute(text, [_named(values) for values in step.params]).rowcount
            case Way.CURSOR:
                # A driver's cursor is one of a transaction.
                conn.exec_driver_sql("BEGIN")
                try:
                    found = conn.execute(text, execution_options={"stream_results": True})
                    return [rows(piece) for piece in found.partitions(_PIECE)]
                finally:
                    conn.exec_driver_sql("COMMIT")
            case Way.CANCEL if cancelled is not None:
                return cancelled(conn, step.text)
            case _:
                raise AssertionError(step.way)
    except sa.exc.DBAPIError as fault:
        return getattr(fault.orig, "sqlstate", None)


def _named(values: Sequence[Any]) -> dict[str, Any]:
    return {f"p{number}": value for number, value in enumerate(values, 1)}


def _shown(result: sa.CursorResult[Any]) -> Any:
    return rows(result.fetchall()) if result.returns_rows else result.rowcount


def _cancel_psycopg(conn: sa.Connection, text: str) -> Any:
    driver: Any = conn.connection.driver_connection
    timer = threading.Timer(_PATIENCE, driver.cancel_safe)
    timer.start()
    try:
        return _shown(conn.exec_driver_sql(text))
    finally:
        timer.join()


async def _cancel_asyncpg(conn: Any, text: str) -> Any:
    raw: Any = (await conn.get_raw_connection()).driver_connection
    try:
        return await raw.fetch(text, timeout=_PATIENCE)
    except TimeoutError:
        return "cancelled"


# --- node-postgres


def with_node(folder: Path) -> Callable[..., Seen]:
    """Return what plays with node-postgres, which is installed in *folder*."""

    def play(dsn: str, steps: Sequence[Step], *, secure: bool) -> Seen:
        script = Path(__file__).with_name("day.js").read_text(encoding="utf-8")
        told = {"dsn": dsn, "secure": secure, "steps": [step.as_dict() for step in steps]}
        done = run_node(folder, script, given=json.dumps(told), timeout=120)
        found: Seen = json.loads(done.stdout)
        return found

    return play
