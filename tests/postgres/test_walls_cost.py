"""What must not grow with the number of rows that a statement changes, told by counts, never by time."""

from collections.abc import Iterator

import pytest
from journaled import World, world
from servers import Database

ROWS = 3000


@pytest.fixture
def walls(database: Database) -> Iterator[World]:
    with world(database) as made:
        made.op.execute("CREATE SCHEMA app")
        made.op.execute("CREATE TABLE app.item (id int PRIMARY KEY, name text)")
        made.op.execute("INSERT INTO app.item SELECT g, 'old' FROM generate_series(1, 50) g")
        made.op.execute("VACUUM ANALYZE app.item")
        made.guard("app.item", mode="soft")
        made.op.execute(f"UPDATE sqlguard.policy_table SET max_rows = {2 * ROWS}, max_share = 1")
        made.grant()
        yield made


def test_a_long_insert_does_not_read_the_table_for_each_row(walls: World) -> None:
    """Whether a deleted row holds a value is asked with a plan that was made while the table was small."""
    agent = walls.task("one")
    with agent.conn.transaction():
        agent.conn.execute(
            "INSERT INTO app.item SELECT g, 'new' FROM generate_series(101, %s) g", [100 + ROWS]
        )
        row = agent.conn.execute("SELECT pg_stat_get_xact_numscans('app.item'::regclass)").fetchone()
    assert row is not None
    assert row[0] < 10
