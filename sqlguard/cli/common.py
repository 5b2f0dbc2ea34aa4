"""Options that many commands share, and how a command reaches the database."""

from dataclasses import dataclass
from typing import Annotated, Any

import psycopg
import typer

from sqlguard import settings
from sqlguard.errors import BadAddress
from sqlguard.postgres.connect import connect
from sqlguard.postgres.control import not_migrated


@dataclass
class State:
    """What `main` must know of the command that failed: whether its caller reads JSON."""

    json: bool = False


state = State()


def _remember_json(value: bool) -> bool:  # noqa: FBT001 (typer calls it so)
    state.json = value
    return value


Dsn = Annotated[
    str | None,
    typer.Option(
        "--dsn",
        help="Connection of the operator, e.g. postgresql://owner@localhost/shop. [env: SQLGUARD_DSN]",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document instead of text.", callback=_remember_json)
]


def operator_dsn(dsn: str | None) -> str:
    """Return the operator's DSN from flag, environment or file. Raises BadAddress when there is none."""
    found = settings.load(dsn=dsn).dsn
    if not found:
        raise BadAddress(
            "no database was named",
            hint="give --dsn, set SQLGUARD_DSN, or write `dsn = …` in sqlguard.toml",
        )
    return found


def approver(dsn: str | None) -> psycopg.Connection[Any]:
    """
    Connect as a person who decides, in autocommit.

    Never to where a file in the working directory says: an agent may write there, and whoever stands between a person
    and the database decides in the person's name.
    """
    found = settings.load(file=False, dsn=dsn).dsn
    if not found:
        raise BadAddress(
            "an approval names its database itself",
            hint="give --dsn, or set SQLGUARD_DSN; sqlguard.toml does not count here",
        )
    return _connected(found)


def operator(dsn: str | None) -> psycopg.Connection[Any]:
    """Connect as the operator, in autocommit. Raises NotConfigured where `sqlguard migrate` never ran."""
    return _connected(operator_dsn(dsn))


def _connected(dsn: str) -> psycopg.Connection[Any]:
    conn = connect(dsn)
    # By catalog rows: whoever may not use the schema shall hear of that, and not that it is missing.
    found = conn.execute(
        "SELECT FROM pg_catalog.pg_class WHERE relname = 'task' AND relnamespace = to_regnamespace('sqlguard')"
    ).fetchone()
    if found is None:
        conn.close()
        raise not_migrated()
    return conn
