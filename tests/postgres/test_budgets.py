"""Budgets of changed rows, kept by the table walls: a task's own role talks to PostgreSQL directly."""

from collections.abc import Iterator

import psycopg
import pytest
from servers import Database
from task_world import POLICY, World, shop

from sqlguard.postgres.guard_table import guard_tables

BUDGETS = """
[budgets]
rows_per_task = {task}
rows_per_hour = {hour}
"""
Raised = psycopg.Error


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with shop(database) as made:
        yield made


def agent(world: World, task: int = 1000, hour: int = 1000) -> psycopg.Connection[tuple[object, ...]]:
    world.apply(POLICY + BUDGETS.format(task=task, hour=hour))
    return world.login(world.task())


def update(conn: psycopg.Connection[tuple[object, ...]], rows: int) -> None:
    conn.execute("UPDATE orders SET note = 'x' WHERE id <= %s", [rows])


def add_up(world: World) -> int:
    found: int = world.value("SELECT sqlguard.add_up_spent()")
    return found


def test_a_task_s_rows_run_up_over_statements_and_sessions(world: World) -> None:
    conn = agent(world, task=10)
    update(conn, 6)
    update(conn, 4)
    for _ in range(2):
        with pytest.raises(Raised, match="may change 10 rows in all") as caught:
            update(conn, 1)
        assert caught.value.sqlstate == "SG006"
        assert "new task" in (caught.value.diag.message_hint or "")
        # Added up or not, they are counted once.
        assert add_up(world) in (1, 0)
    update(world.login(world.task()), 5)
    assert world.value("SELECT count(*) FROM orders WHERE note = 'x'") == 6


def test_within_a_transaction_too_and_what_is_rolled_back_is_not_spent(world: World) -> None:
    conn = agent(world, task=10)
    with pytest.raises(Raised, match="in all"), conn.transaction():
        update(conn, 6)
        update(conn, 5)
    add_up(world)
    with conn.transaction(force_rollback=True):
        update(conn, 10)
    update(conn, 10)


def test_all_agents_share_the_rows_of_an_hour(world: World) -> None:
    first = agent(world, hour=12)
    second = world.login(world.task())
    update(first, 8)
    add_up(world)
    with pytest.raises(Raised, match="agents may change 12 rows an hour together") as caught:
        update(second, 5)
    assert caught.value.sqlstate == "SG006"
    assert "send it again after 2" in (caught.value.diag.message_hint or "")
    update(second, 4)
    # An hour later there is room again.
    world.op.execute("UPDATE sqlguard.spent SET minute = minute - interval '62 minutes'")
    update(second, 8)


def test_a_statement_that_never_fits_is_told_so(world: World) -> None:
    with pytest.raises(Raised) as caught:
        update(agent(world, hour=5), 6)
    assert caught.value.diag.message_hint == "narrow the WHERE to fewer rows"


def test_cascades_functions_and_unlisted_tables_count(world: World) -> None:
    world.op.execute("CREATE TABLE log (id integer PRIMARY KEY, word text)")
    world.op.execute("INSERT INTO log SELECT n, 'a' FROM generate_series(1, 20) n")
    world.op.execute(
        "CREATE FUNCTION touch(n integer) RETURNS void LANGUAGE sql SECURITY DEFINER"
        " AS 'UPDATE log SET word = ''b'' WHERE id <= n'"
    )
    guard_tables(world.op, ["log"], "journal")
    conn = agent(world, task=10)
    conn.execute("SELECT touch(6)")
    with pytest.raises(Raised, match="in all"):
        conn.execute("SELECT touch(5)")


def test_an_open_transaction_is_added_up_when_it_is_over(world: World) -> None:
    slow, quick = agent(world, hour=20), world.login(world.task())
    slow.autocommit = False
    update(slow, 5)
    quick.execute("UPDATE orders SET note = 'y' WHERE id > 30 AND id <= 35")
    assert add_up(world) == 0
    slow.commit()
    assert add_up(world) == 2
    assert world.value("SELECT sum(rows)::int FROM sqlguard.spent") == 10
    assert add_up(world) == 0


def test_budgets_are_part_of_the_version(world: World) -> None:
    world.apply()
    assert world.apply().version == 1
    assert world.apply(POLICY + BUDGETS.format(task=1, hour=1)).version == 2
    assert world.value("SELECT DISTINCT task_rows FROM sqlguard.policy_table WHERE version = 2") == 1


def test_a_budget_of_the_task_alone_asks_nothing_of_the_hour(world: World) -> None:
    # With a share below 1, ten rows and more are judged by the whole judgement and not by the quick one.
    policy = POLICY.replace("max_share = 1.0", "max_share = 0.9")
    world.apply(policy + "[budgets]\nrows_per_task = 22\n")
    conn = world.login(world.task())
    update(conn, 12)
    with pytest.raises(Raised, match="may change 22 rows in all"):
        update(conn, 11)
    world.apply(policy + "[budgets]\nrows_per_hour = 100\n")
    update(world.login(world.task()), 12)
