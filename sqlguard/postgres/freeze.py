"""
Freeze and thaw: stop every agent's writes, on all guarded tables or on some, until a time or until further notice.

The capture triggers and `sqlguard.record_intent` look at `sqlguard.freeze` before each write, so a freeze holds
from its commit on, through every proxy and without one; reads go on.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg.rows import class_row

from sqlguard.errors import NotConfigured
from sqlguard.postgres.control import not_migrated
from sqlguard.postgres.named import find_named

Connection = psycopg.Connection[Any]
_COLUMNS = "id, tables, until_at, reason, frozen_at, frozen_by, thawed_at, thawed_by"
_FREEZE = f"""
INSERT INTO sqlguard.freeze (tables, until_at, reason) VALUES (%s, %s, %s) RETURNING {_COLUMNS}
"""  # noqa: S608 (constants of this module)
_IN_FORCE = f"""
SELECT {_COLUMNS} FROM sqlguard.freeze
WHERE thawed_at IS NULL AND (until_at IS NULL OR until_at > clock_timestamp()) ORDER BY id
"""  # noqa: S608 (constants of this module)
_THAW = f"""
UPDATE sqlguard.freeze SET thawed_at = clock_timestamp(), thawed_by = session_user
WHERE thawed_at IS NULL AND (until_at IS NULL OR until_at > clock_timestamp())
RETURNING {_COLUMNS}
"""  # noqa: S608 (constants of this module)
#: As it is said, as in every other command; else as SQL would read it, `orders` along the search_path.
_NAMES = tuple(
    f"""
SELECT n.nspname || '.' || c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE {which}
"""  # noqa: S608 (constants of this module)
    for which in ("n.nspname || '.' || c.relname = %s AND c.relkind IN ('r', 'p')", "c.oid = to_regclass(%s)")
)


@dataclass(frozen=True, slots=True)
class Freeze:
    """`tables` as `schema.table`, None for all; `until_at` None until it is thawed."""

    id: int
    tables: list[str] | None
    until_at: datetime | None
    reason: str
    frozen_at: datetime
    frozen_by: str
    thawed_at: datetime | None = None
    thawed_by: str | None = None


def freeze(conn: Connection, tables: Sequence[str] | None, until: datetime | None, reason: str) -> Freeze:
    """
    Stop the writes of every agent from now on; *tables* None means all.

    Raises NotConfigured when a table is not there, *until* is over, or no reason is given.
    """
    if not reason.strip():
        raise NotConfigured("a freeze has a reason", hint="say why, the agents are told: --reason '…'")
    if tables is not None and not tables:
        raise NotConfigured("no table was named", hint="name tables, or leave the option out to freeze all")
    with _explained(conn), conn.transaction(), conn.cursor(row_factory=class_row(Freeze)) as cursor:
        if until is not None and not _is_ahead(conn, until):
            raise NotConfigured(f"{until} is over", hint="give a time in the future, with its time zone")
        names = None if tables is None else [_name(conn, table) for table in tables]
        made = cursor.execute(_FREEZE, [names, until, reason.strip()]).fetchone()
    assert made is not None  # noqa: S101 (INSERT … RETURNING has a row)
    return made


def thaw(conn: Connection) -> list[Freeze]:
    """End all freezes that are in force and return them; empty when nothing was frozen."""
    return _run(conn, _THAW)


def freezes(conn: Connection) -> list[Freeze]:
    """Return the freezes that are in force, oldest first."""
    return _run(conn, _IN_FORCE)


def _run(conn: Connection, query: str) -> list[Freeze]:
    with _explained(conn), conn.transaction(), conn.cursor(row_factory=class_row(Freeze)) as cursor:
        return cursor.execute(query.encode()).fetchall()


def _is_ahead(conn: Connection, until: datetime) -> bool:
    return conn.execute("SELECT %s > clock_timestamp()", [until]).fetchone() == (True,)


def _name(conn: Connection, table: str) -> str:
    row = find_named(conn, _NAMES, table)
    if row is None:
        raise NotConfigured(f"there is no table `{table}`", hint="name it as schema.table")
    return str(row[0])


@contextmanager
def _explained(conn: Connection) -> Iterator[None]:
    try:
        yield
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        raise not_migrated() from None
    except psycopg.errors.InsufficientPrivilege as fault:
        raise NotConfigured(
            f"this role may not do that: {fault.diag.message_primary}",
            hint=f"connect as the operator who migrated, or run GRANT … TO {conn.info.user}",
        ) from None
