"""Statements per minute as the database gives them out: shared by all doors, out of the reach of tasks."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from time import monotonic
from typing import Any

import psycopg
import pytest
from servers import Database
from task_world import POLICY, World, shop

from sqlguard.budget import Grant, Slice
from sqlguard.errors import CapExceeded, DatabaseUnavailable, TaskEnded
from sqlguard.postgres.budgets import lease_statements
from sqlguard.postgres.sweep import sweep
from sqlguard.postgres.tasks import OpenedTask, end_task

Conn = psycopg.Connection[Any]


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with shop(database) as made:
        yield made


def task(world: World, rate: int) -> OpenedTask:
    world.apply(POLICY + f"[budgets]\nstatements_per_minute = {rate}\n")
    return world.task()


def pass_by(world: World, seconds: float) -> None:
    """Let the counts grow older."""
    world.op.execute(
        "UPDATE sqlguard.statement_rate r SET counted_until ="
        " ARRAY(SELECT u - %s * interval '1 second' FROM unnest(r.counted_until) WITH ORDINALITY AS f (u, n)"
        " ORDER BY n)",
        [seconds],
    )


def counted(world: World, opened: OpenedTask) -> int:
    found = world.value("SELECT taken FROM sqlguard.statement_rate WHERE task_id = %s", opened.task.id)
    return sum(found)


def test_one_by_one_until_the_rate_is_spent_and_again_a_minute_later(world: World) -> None:
    opened = task(world, 5)
    name = opened.task.id
    asked_at = datetime.now(UTC)
    for _ in range(5):
        # However much is asked for, of so few there is one at a time.
        assert lease_statements(world.op, name, 1, 100).statements == 1
    full = lease_statements(world.op, name, 1, 1)
    assert (full.statements, full.budget) == (0, 5)
    assert full.room_at is not None
    assert 55 < (full.room_at - asked_at).total_seconds() <= 63
    assert 55 < full.wait <= 61
    assert lease_statements(world.op, name, 6, 6).room_at is None
    pass_by(world, 61)
    assert lease_statements(world.op, name, 5, 5).statements == 5
    assert counted(world, opened) == 5


def test_room_is_where_enough_of_the_oldest_have_gone(world: World) -> None:
    opened = task(world, 5)
    name = opened.task.id
    lease_statements(world.op, name, 2, 2)
    pass_by(world, 20)
    lease_statements(world.op, name, 3, 3)
    one, three = (lease_statements(world.op, name, n, n).wait for n in (2, 3))
    assert 35 < one <= 41
    assert 55 < three <= 61


def test_of_a_large_rate_an_eighth_at_most(world: World) -> None:
    name = task(world, 800).task.id
    assert lease_statements(world.op, name, 1, 10) == Grant(10, 800, 2.0)
    assert lease_statements(world.op, name, 1, 10_000).statements == 790 // 8
    assert lease_statements(world.op, name, 500, 500).statements == 500


def test_doors_that_ask_at_the_same_time_never_have_more_than_the_rate(world: World) -> None:
    opened = task(world, 120)

    def work(_: int) -> int:
        held, sent = Slice(), 0
        with world.database.connect(world.database.owner_dsn) as conn:
            for _ in range(60):
                now = monotonic()
                try:
                    if not held.spend(1, now):
                        most = held.asks(1, now)
                        held.take(lease_statements(conn, opened.task.id, 1, most), 1, now)
                except CapExceeded:
                    break
                sent += 1
        return sent

    with ThreadPoolExecutor(4) as threads:
        sent = sum(threads.map(work, range(4)))
    assert 40 <= sent <= 120
    assert counted(world, opened) == 120


def test_tasks_have_their_own_and_what_has_no_budget_or_has_ended(world: World) -> None:
    first = task(world, 1)
    second = world.task()
    for opened in (first, second):
        assert lease_statements(world.op, opened.task.id, 1, 1).statements == 1
        assert lease_statements(world.op, opened.task.id, 1, 1).statements == 0
    world.apply(POLICY)
    assert lease_statements(world.op, world.task().task.id, 7, 70).statements == 70
    end_task(world.op, first.task.id, "tested")
    with pytest.raises(TaskEnded):
        lease_statements(world.op, first.task.id, 1, 1)
    sweep(world.op, datetime.now(UTC))
    left = world.op.execute("SELECT task_id FROM sqlguard.statement_rate").fetchall()
    assert (first.task.id,) not in left
    assert (second.task.id,) in left


def test_a_task_can_only_make_its_own_rest_smaller(world: World) -> None:
    opened, other = task(world, 5), world.task()
    conn = world.login(opened)
    assert lease_statements(conn, None, 2, 2).statements == 2
    assert lease_statements(world.op, opened.task.id, 4, 4).statements == 0
    for call in (
        "sqlguard.lease_own_statements(-5, 1)",
        "sqlguard.lease_own_statements(0, 5)",
        "sqlguard.lease_own_statements(NULL, 5)",
    ):
        with pytest.raises(psycopg.errors.InvalidParameterValue):
            conn.execute(f"SELECT * FROM {call}".encode())
    for most in ("-5", "NULL", "2147483647"):
        conn.execute(f"SELECT * FROM sqlguard.lease_own_statements(1, {most})".encode())
    conn.execute("SELECT * FROM sqlguard.lease_own_statements(2147483647, 2147483647)")
    assert counted(world, opened) == 5
    for text in (
        "SELECT * FROM sqlguard.statement_rate",
        "DELETE FROM sqlguard.statement_rate",
        "UPDATE sqlguard.statement_rate SET taken = '{}'",
        f"SELECT * FROM sqlguard.lease_statements('{other.task.id}', 1, 1)",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute(text.encode())
    assert lease_statements(world.op, other.task.id, 5, 5).statements == 5


def test_a_count_that_is_kept_locked_is_refused_and_holds_nobody_else_up(world: World) -> None:
    opened, other = task(world, 5), world.task()
    with world.login(opened) as conn, conn.transaction():
        conn.execute("SELECT * FROM sqlguard.lease_own_statements(1, 1)")
        began = monotonic()
        with pytest.raises(DatabaseUnavailable, match="keeps the count locked"):
            lease_statements(world.op, opened.task.id, 1, 1)
        assert monotonic() - began < 5
        assert lease_statements(world.op, other.task.id, 1, 1).statements == 1
        sweep(world.op, datetime.now(UTC))
    assert lease_statements(world.op, opened.task.id, 4, 4).statements == 4
