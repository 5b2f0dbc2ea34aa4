"""Freeze and thaw, with the proxy taken away."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
from servers import Database
from task_world import World, refused, shop

from sqlguard.errors import NotConfigured
from sqlguard.journal import Intent
from sqlguard.postgres import journal
from sqlguard.postgres.freeze import freeze, freezes, thaw

UPDATE = "UPDATE orders SET note = 'x' WHERE id = 1"


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with shop(database) as made:
        made.apply()
        yield made


def test_a_freeze_stops_every_write_of_open_sessions_and_no_read(world: World) -> None:
    agent = world.login(world.task())
    agent.execute(UPDATE)
    made = freeze(world.op, None, None, "code freeze")
    for statement in (
        UPDATE,
        "INSERT INTO orders (customer_id) VALUES (42)",
        "DELETE FROM items WHERE id = 1",
        (
            "UPDATE orders SET deleted_at = statement_timestamp(), deleted_by_agent = (SELECT sqlguard.agent())"
            " WHERE id = 1"
        ),
        "UPDATE items SET quantity = 2 WHERE false",
    ):
        assert refused(agent, statement) == "SG005"
    assert agent.execute("SELECT count(*) FROM orders").fetchone() == (40,)
    assert freezes(world.op) == [made]
    # The application is no agent.
    world.database.execute(UPDATE)
    assert [f.id for f in thaw(world.op)] == [made.id]
    assert thaw(world.op) == []
    assert freezes(world.op) == []
    agent.execute(UPDATE)


def test_a_freeze_of_one_table_leaves_the_others(world: World) -> None:
    agent = world.login(world.task())
    made = freeze(world.op, ["orders"], None, "orders are being moved")
    assert made.tables == ["public.orders"]
    assert refused(agent, UPDATE) == "SG005"
    agent.execute("UPDATE items SET quantity = 2 WHERE id = 1")


def test_a_freeze_ends_by_itself(world: World) -> None:
    agent = world.login(world.task())
    row = world.op.execute("SELECT clock_timestamp()").fetchone()
    assert row is not None
    freeze(world.op, None, row[0] + timedelta(milliseconds=400), "short")
    assert refused(agent, UPDATE) == "SG005"
    world.op.execute("SELECT pg_sleep(0.5)")
    agent.execute(UPDATE)
    assert freezes(world.op) == []


def test_no_intent_is_recorded_while_frozen(world: World) -> None:
    opened = world.task()
    freeze(world.op, None, None, "stop")
    intent = Intent(task=opened.task.id, role=opened.role, statement=UPDATE, verdict="allow")
    with pytest.raises(Exception, match="writes are frozen"):
        journal.record_intent(world.op, intent)


def test_a_freeze_says_why_and_of_what(world: World) -> None:
    row = world.op.execute("SELECT clock_timestamp()").fetchone()
    assert row is not None
    for tables, until, reason, message in (
        (None, None, "  ", "has a reason"),
        (["nowhere"], None, "why", "no table `nowhere`"),
        ([], None, "why", "no table was named"),
        (None, row[0] - timedelta(seconds=1), "why", "is over"),
    ):
        with pytest.raises(NotConfigured, match=message):
            freeze(world.op, tables, until, reason)
    assert freezes(world.op) == []
