"""Row changes are kept by period: a period whose tasks have ended goes as a whole, and what is left verifies."""

from collections.abc import Iterator

import psycopg
import pytest
from journaled import World, rows
from journaled import world as made_world
from servers import Database

from sqlguard.postgres import journal, undo

PARTITIONS = "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'sqlguard.row_change'::regclass ORDER BY 1"


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with made_world(database) as made:
        made.op.execute("""
            CREATE SCHEMA app;
            CREATE TABLE app.t (id int PRIMARY KEY, note text);
            INSERT INTO app.t SELECT g, 'n' || g FROM generate_series(1, 5) g;
        """)
        made.grant()
        made.guard("app.t")
        made.task("t")
        yield made


def begin(world: World, age: str = "0") -> int:
    ((number,),) = rows(world.op, f"SELECT sqlguard.begin_period('{age}')")
    return int(number)


def retire(world: World, cutoff: str = "now()") -> None:
    with world.database.connect() as root:
        root.execute("SET ROLE sqlguard_retention")
        root.execute(f"SELECT sqlguard.retire({cutoff})")


def end(world: World, task: str) -> None:
    world.op.execute("UPDATE sqlguard.task SET state = 'ended', ended_at = now() WHERE id = %s", [task])


def change(world: World, agent: int, note: str) -> int:
    return world.act(world.agents[agent], f"UPDATE app.t SET note = '{note}' WHERE id < 4")


def test_a_period_begins_when_the_one_before_is_old(world: World) -> None:
    assert begin(world, "7 days") == 0
    change(world, 0, "a")
    assert [begin(world), begin(world), begin(world, "7 days")] == [1, 2, 2]
    change(world, 0, "b")
    assert rows(world.op, "SELECT id >> 32 FROM sqlguard.change_set ORDER BY 1") == [(0,), (2,)]
    assert rows(
        world.op, "SELECT tableoid::regclass::text, count(*) FROM sqlguard.row_change GROUP BY 1 ORDER BY 1"
    ) == [
        ("sqlguard.row_change_0", 3),
        ("sqlguard.row_change_2", 3),
    ]
    before = undo.undo(world.op, task="t")
    assert (before.conflicts, before.rows) == ((), 6)
    assert rows(world.op, "SELECT DISTINCT left(note, 1) FROM app.t") == [("n",)]


def test_a_period_of_ended_tasks_is_dropped_and_leaves_a_stub(world: World) -> None:
    world.task("living")
    change(world, 0, "a")
    undo.undo(world.op, task="t")
    begin(world)
    change(world, 1, "b")
    end(world, "t")
    retire(world)
    assert rows(world.op, PARTITIONS) == [("sqlguard.row_change_1",), ("sqlguard.row_change_2",)]
    stub = "SELECT number, dropped_at IS NOT NULL, change_sets, rows FROM sqlguard.period WHERE began_at IS NOT NULL ORDER BY 1"
    # The change and its undo.
    assert rows(world.op, stub) == [(0, True, 2, 6), (1, False, None, None)]
    assert rows(world.op, "SELECT task_id FROM sqlguard.change_set") == [("living",)]
    report = journal.verify(world.op)
    assert (report.ok, report.tasks) == (True, 2)
    assert undo.undo(world.op, task="living").conflicts == ()
    retire(world)
    assert rows(world.op, stub)[1] == (1, False, None, None)


def test_what_is_needed_keeps_its_period(world: World) -> None:
    world.task("living")
    change(world, 0, "a")
    change(world, 1, "b")
    begin(world)
    end(world, "t")
    retire(world)
    # Of the ended task nothing is left all the same.
    assert len(rows(world.op, PARTITIONS)) == 3
    assert rows(world.op, "SELECT count(*) FROM sqlguard.row_change") == [(3,)]
    assert undo.undo(world.op, task="living").rows == 3
    end(world, "living")
    retire(world)
    assert len(rows(world.op, PARTITIONS)) == 2


def test_the_current_period_and_one_that_somebody_may_still_write_to_stay(world: World) -> None:
    change(world, 0, "a")
    end(world, "t")
    retire(world)
    assert len(rows(world.op, PARTITIONS)) == 2
    with world.database.connect() as late:
        late.autocommit = False
        late.execute("SELECT nextval('sqlguard.change_set_id_seq'), pg_current_xact_id()")
        begin(world)
        retire(world)
        assert len(rows(world.op, PARTITIONS)) == 3
    retire(world)
    assert len(rows(world.op, PARTITIONS)) == 2


def test_only_the_retention_role_drops_and_a_partition_only_grows(world: World) -> None:
    change(world, 0, "a")
    agent = world.agents[0].conn
    for text in (
        "SELECT sqlguard.drop_period(0, now())",
        "SELECT sqlguard.begin_period('0')",
        "TABLE sqlguard.row_change_0",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            agent.execute(text)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        world.op.execute("SELECT sqlguard.drop_period(0, now())")
    begin(world)
    for place in ("row_change", "row_change_0", "row_change_1", "row_change_2"):
        for text in (
            f"DELETE FROM sqlguard.{place}",
            f"UPDATE sqlguard.{place} SET key = NULL",
            f"TRUNCATE sqlguard.{place}",
        ):
            with world.database.connect() as root, pytest.raises(psycopg.errors.InsufficientPrivilege):
                root.execute(text)
