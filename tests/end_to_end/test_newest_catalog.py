"""A name that the proxy does not know is looked up in the newest catalog before it is refused, once a second at most."""

from collections.abc import Iterator
from time import monotonic
from typing import Any

import psycopg
import pytest
from end_to_end.wired import POLICY, Agent, Wired, wired_shop
from servers import fresh_database

from sqlguard.embedded import EmbeddedServer
from sqlguard.policy import parse_policy
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.policy_apply import apply_policy


@pytest.fixture(scope="module")
def world(server: EmbeddedServer) -> Iterator[Wired]:
    """The proxy does not look by itself while a test runs."""
    with fresh_database(server) as database, wired_shop(database, catalog_check_seconds=3600) as made:
        yield made


@pytest.fixture
def agent(world: Wired) -> Iterator[Agent]:
    world.proxy.operator._looked_at = 0.0
    with world.visiting() as visitor:
        yield visitor


def make(world: Wired, name: str) -> None:
    world.owner.execute(f"CREATE TABLE {name} (id integer PRIMARY KEY, word text)".encode())
    guard_tables(world.owner, [name], "soft")
    apply_policy(world.owner, parse_policy(POLICY, "wired.toml"), existing="drop")


@pytest.mark.parametrize("how", ["simple", "extended", "prepared", "pipeline"])
def test_a_table_made_a_moment_ago(world: Wired, agent: Agent, how: str) -> None:
    options: dict[str, Any] = {"cursor_factory": psycopg.ClientCursor} if how == "simple" else {}
    with agent.connect(**options) as conn:
        conn.execute("SELECT 1")
        make(world, f"fresh_{how}")
        select = f"SELECT count(*) FROM fresh_{how} WHERE id > %s".encode()
        if how == "pipeline":
            with conn.pipeline():
                written = conn.execute(f"INSERT INTO fresh_{how} VALUES (%s, 'a')".encode(), [1])
                found = conn.execute(select, [0])
            assert (written.rowcount, found.fetchone()) == (1, (1,))
            return
        assert conn.execute(select, [0], prepare=how == "prepared").fetchone() == (0,)
        conn.execute(f"INSERT INTO fresh_{how} VALUES (1, 'a')".encode())
        assert conn.execute(select, [0], prepare=how == "prepared").fetchone() == (1,)


def test_a_function_made_a_moment_ago(world: Wired, agent: Agent) -> None:
    with agent.connect() as conn:
        conn.execute("SELECT 1")
        world.owner.execute(
            "CREATE FUNCTION doubled(integer) RETURNS integer LANGUAGE sql IMMUTABLE RETURN $1 * 2"
        )
        assert conn.execute("SELECT doubled(21)").fetchone() == (42,)


def test_names_that_are_nowhere_cost_one_reading_a_second(
    world: Wired, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[float] = []
    operator = world.proxy.operator
    real = operator._newest
    monkeypatch.setattr(operator, "_newest", lambda conn: (looked.append(monotonic()), real(conn)))
    with agent.connect() as conn:
        start = monotonic()
        for number in range(20):
            with pytest.raises(psycopg.errors.UndefinedTable, match="nowhere"):
                conn.execute(f"SELECT * FROM nowhere_{number}".encode())
        with conn.pipeline() as pipeline, pytest.raises(psycopg.errors.UndefinedTable):
            conn.execute("SELECT 1")
            conn.execute("SELECT * FROM nowhere")
            pipeline.sync()
        assert conn.execute("SELECT 1").fetchone() == (1,)
        assert 1 <= len(looked) <= 1 + (monotonic() - start)


def test_a_block_goes_on_as_ever(world: Wired, agent: Agent) -> None:
    with agent.connect() as conn:
        with pytest.raises(psycopg.errors.UndefinedTable), conn.transaction():
            conn.execute("SELECT * FROM nowhere")
        with conn.transaction():
            assert conn.execute("SELECT 1").fetchone() == (1,)
            make(world, "fresh_in_block")
            world.proxy.operator._looked_at = 0.0
            assert conn.execute("SELECT count(*) FROM fresh_in_block").fetchone() == (0,)
