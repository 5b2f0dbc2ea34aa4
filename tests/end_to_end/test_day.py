"""A scripted day of an agent gives the same through the guard as directly without it, with TLS and without."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from end_to_end.certificates import issued
from end_to_end.day import DAY, Step
from end_to_end.inprocess import proxy
from end_to_end.players import (
    Seen,
    with_asyncpg,
    with_node,
    with_psycopg,
    with_sqlalchemy,
    with_sqlalchemy_asyncpg,
)
from end_to_end.shop import SHOP
from end_to_end.wired import PLAIN_TABLE, Wired, wired_shop
from servers import Database, fresh_database

from sqlguard.embedded import EmbeddedServer

Play = Callable[..., Seen]
#: Texts that are answered otherwise, with the SQLSTATEs, directly and guarded: they are refused before PostgreSQL
#: sees them, without a position in the first case, and as a DELETE that nothing narrows down in the second.
DIFFERENT = {
    "SELECT 1 FROM nowhere": ("42P01", "42P01"),
    "DELETE FROM customers WHERE nmae = 'x'": ("42703", "SG002"),
}
PYTHON: dict[str, Play] = {
    "psycopg": with_psycopg,
    "asyncpg": with_asyncpg,
    "sqlalchemy": with_sqlalchemy,
    "sqlalchemy-asyncpg": with_sqlalchemy_asyncpg,
}


@pytest.fixture
def bare(server: EmbeddedServer) -> Iterator[Database]:
    """The same shop, and nobody guards it."""
    with fresh_database(server) as database:
        with database.connect() as conn:
            conn.execute(SHOP.encode())
            conn.execute(PLAIN_TABLE.encode())
        yield database


@pytest.fixture
def guarded(server: EmbeddedServer, tmp_path: Path, *, secure: bool) -> Iterator[Wired]:
    with fresh_database(server) as database, wired_shop(database) as made:
        if not secure:
            yield made
            return
        with proxy(database.owner_dsn, tls_required=True, **issued(tmp_path)) as running:
            yield replace(made, proxy=running)


def compare(play: Play, bare: Database, guarded: Wired, *, secure: bool, steps: Sequence[Step] = DAY) -> None:
    expected = play(bare.dsn, steps, secure=False)
    with guarded.visiting() as agent:
        seen = play(agent.dsn, steps, secure=secure)
    differences = [
        f"{step.way.value}: {step.text}\n  directly {_short(there)}\n  guarded  {_short(here)}"
        for step, there, here in zip(steps, expected, seen, strict=True)
        if _visible(there) != _visible(here) and (_state(there), _state(here)) != DIFFERENT.get(step.text)
    ]
    assert not differences, "\n".join(differences)


def _visible(seen: Any) -> Any:
    """What has to be the same: all, but for the line of a COPY's data that a constraint did not like."""
    match seen:
        # The rows come into a guarded table with an INSERT of their own, which knows no lines.
        case [str(state), position, constraint, _] if state.startswith("23"):
            return [state, position, constraint]
    return seen


def _state(seen: Any) -> Any:
    return seen[0] if isinstance(seen, list) else seen


def _short(seen: Any) -> str:
    return repr(seen)[:300]


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("driver", PYTHON)
def test_a_day_is_the_same(driver: str, bare: Database, guarded: Wired, *, secure: bool) -> None:
    compare(PYTHON[driver], bare, guarded, secure=secure)


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
def test_a_day_of_node_postgres_is_the_same(
    node_folder: Path, bare: Database, guarded: Wired, *, secure: bool
) -> None:
    compare(with_node(node_folder), bare, guarded, secure=secure)
