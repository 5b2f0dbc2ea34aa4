"""Options that many commands share, and how a command reaches the database."""

from dataclasses import dataclass
from typing import Annotated, Any

import psycopg
import typer

from sqlguard import settings
from sqlguard.errors import NotConfigured
from sqlguard.postgres.connect import connect


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
    """Return the operator's DSN from flag, environment or file. Raises NotConfigured when there is none."""
    found = settings.load(dsn=dsn).dsn
    if not found:
        raise NotConfigured(
            "no database was named",
            hint="give --dsn, set SQLGUARD_DSN, or write `dsn = …` in sqlguard.toml",
        )
    return found


def operator(dsn: str | None) -> psycopg.Connection[Any]:
    """Connect as the operator, in autocommit."""
    return connect(operator_dsn(dsn))
