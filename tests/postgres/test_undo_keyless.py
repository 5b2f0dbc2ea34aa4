"""Undo where no primary key tells rows apart: by what they are, and an honest conflict where that is not enough."""

from collections.abc import Iterator

import pytest
from journaled import World, rows
from journaled import world as made_world
from servers import Database

from sqlguard.postgres import undo

SCHEMA = """
    CREATE SCHEMA app;
    CREATE TABLE app.log (what text, n int, at timestamptz DEFAULT '2026-01-01');
    INSERT INTO app.log SELECT 'old ' || g % 3, g / 4 FROM generate_series(1, 40) g;
    CREATE TABLE app.code (code text UNIQUE, note text);
    CREATE TABLE app.use (id int PRIMARY KEY, code text REFERENCES app.code (code) ON DELETE CASCADE);
    INSERT INTO app.code SELECT 'c' || g, 'n' FROM generate_series(1, 5) g;
"""
TABLES = ("app.log", "app.code", "app.use")


@pytest.fixture(params=["journal", "soft"])
def world(database: Database, request: pytest.FixtureRequest) -> Iterator[World]:
    with made_world(database) as made:
        made.op.execute(SCHEMA)
        made.grant()
        made.guard(*TABLES, mode=request.param)
        made.task("t")
        yield made


def act(world: World, *statements: str) -> int:
    return world.act(world.agents[0], *statements)


MUCH = (
    "UPDATE app.log SET n = n + 1 WHERE n < 5",
    "INSERT INTO app.log (what, n) VALUES ('new', 1), ('new', 1), ('new', 2)",
    "UPDATE app.log SET what = what || '!' WHERE what = 'new' OR n = 3",
    "UPDATE app.log SET what = what || '?' WHERE what = 'new!'",
    "INSERT INTO app.log (what, n) SELECT what, n FROM app.log WHERE n = 2",
    "UPDATE app.log SET at = '2027-01-01'",
    "INSERT INTO app.code VALUES ('c9', 'mine')",
    "UPDATE app.code SET note = 'changed', code = code || 'x' WHERE code IN ('c1', 'c2')",
)


@pytest.mark.parametrize("separate", [False, True], ids=["one transaction", "one each"])
def test_undo_and_redo_are_exact(world: World, *, separate: bool) -> None:
    before = world.contents(*TABLES)
    for one in MUCH if separate else [MUCH]:
        act(world, *([one] if isinstance(one, str) else one))
    after = world.contents(*TABLES)
    preview = undo.undo(world.op, task="t", preview=True)
    assert world.contents(*TABLES) == after
    assert preview.conflicts == ()
    done = undo.undo(world.op, task="t")
    assert (done.conflicts, world.contents(*TABLES)) == ((), before)
    assert done.tables == preview.tables
    redone = undo.undo(world.op, undo_id=done.undo)
    assert (redone.conflicts, world.contents(*TABLES)) == ((), after)
    again = undo.undo(world.op, undo_id=redone.undo)
    assert (again.conflicts, world.contents(*TABLES)) == ((), before)


def test_many_rows_come_back(world: World) -> None:
    world.op.execute("INSERT INTO app.log SELECT 'many', g FROM generate_series(1, 3000) g")
    before = world.contents("app.log")
    act(world, "UPDATE app.log SET n = -n WHERE what = 'many'")
    act(world, "INSERT INTO app.log SELECT 'more', g FROM generate_series(1, 2000) g")
    done = undo.undo(world.op, task="t")
    assert (done.conflicts, world.contents("app.log")) == ((), before)
    redone = undo.undo(world.op, undo_id=done.undo)
    assert redone.conflicts == ()
    assert undo.undo(world.op, undo_id=redone.undo).conflicts == ()
    assert world.contents("app.log") == before


def test_of_many_rows_one_that_was_changed_since_is_left_alone(world: World) -> None:
    world.op.execute("INSERT INTO app.log SELECT 'many', g FROM generate_series(1, 3000) g")
    act(world, "UPDATE app.log SET n = -n WHERE what = 'many'")
    world.op.execute("UPDATE app.log SET what = 'touched' WHERE n = -17")
    report = undo.undo(world.op, task="t", on_conflict="skip")
    assert (report.conflict_count, report.rows) == (1, 2999)
    assert rows(world.op, "SELECT what, n FROM app.log WHERE n < 0 OR what = 'touched'") == [("touched", -17)]


def test_a_row_that_was_changed_since_is_a_conflict_that_no_force_hides(world: World) -> None:
    act(world, "UPDATE app.log SET n = 100 WHERE n = 1")
    act(world, "INSERT INTO app.log (what, n) VALUES ('mine', 7), ('mine', 8)")
    world.op.execute("UPDATE app.log SET what = 'theirs' WHERE what = 'mine' AND n = 8")
    world.op.execute(
        "UPDATE app.log SET what = 'theirs' WHERE ctid = (SELECT min(ctid) FROM app.log WHERE n = 100)"
    )
    stopped = undo.undo(world.op, task="t")
    assert (stopped.stopped, stopped.conflict_count) == (True, 2)
    assert str(stopped.conflicts[0]).startswith("app.log (a row without key): there is no key")
    forced = undo.undo(world.op, task="t", on_conflict="force")
    assert forced.conflict_count == 2
    assert rows(
        world.op,
        "SELECT what, n FROM app.log WHERE what = 'theirs' OR n IN (7, 8) AND what = 'mine' ORDER BY n",
    ) == [
        ("theirs", 8),
        ("theirs", 100),
    ]
    assert undo.undo(world.op, task="t").conflict_count == 2


def test_rows_that_others_refer_to_stay(world: World) -> None:
    act(world, "INSERT INTO app.code VALUES ('c7', 'mine'), ('c8', 'mine')")
    world.op.execute("INSERT INTO app.use VALUES (1, 'c7')")
    report = undo.undo(world.op, task="t", on_conflict="skip")
    assert report.conflict_count == 1
    assert rows(world.op, "SELECT code FROM app.code WHERE note = 'mine'") == [("c7",)]


def test_a_unique_value_that_is_taken(world: World) -> None:
    before = world.contents("app.code")
    if rows(world.op, "SELECT mode FROM sqlguard.guarded_table LIMIT 1") == [("soft",)]:
        pytest.skip("a soft delete keeps its row")
    act(world, "DELETE FROM app.code WHERE code IN ('c1', 'c2')")
    world.op.execute("INSERT INTO app.code VALUES ('c2', 'theirs')")
    for choice in ("skip", "force"):
        report = undo.undo(world.op, task="t", on_conflict=choice)
        assert ["unique" in c.reason or "code_code_key" in c.reason for c in report.conflicts] == [True]
    assert rows(world.op, "SELECT code, note FROM app.code WHERE code IN ('c1', 'c2') ORDER BY 1") == [
        ("c1", "n"),
        ("c2", "theirs"),
    ]
    world.op.execute("DELETE FROM app.code WHERE code = 'c2'")
    assert undo.undo(world.op, task="t").conflicts == ()
    assert world.contents("app.code") == before
