"""What stands in the way of an undo: it is told, stops it all, and can be skipped or forced."""

from collections.abc import Iterator

import pytest
from journaled import World, rows
from servers import Database
from undo_world import TABLES, act, undo_world

from sqlguard.postgres import undo


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with undo_world(database) as made:
        yield made


CONFLICTS = {
    "app.link (id=3): the key or a unique value is taken",
    "app.parent (id=50): rows of `app.child` refer to it",
    "app.parent (id=2): the row was changed since",
}


def conflicting(world: World) -> int:
    action = act(
        world,
        "UPDATE app.parent SET note = 'Q' WHERE id < 8",
        "INSERT INTO app.parent VALUES (50, 'e50')",
        "DELETE FROM app.link WHERE id < 5",
    )
    world.op.execute("UPDATE app.parent SET note = 'mine' WHERE id = 2")
    world.op.execute("INSERT INTO app.child (parent_id, qty) VALUES (50, 9)")
    world.op.execute("INSERT INTO app.link VALUES (3, 3, 'taken')")
    return action


def test_any_conflict_stops_it_all_and_shows_both_values(world: World) -> None:
    action = conflicting(world)
    state = world.contents(*TABLES)
    report = undo.undo(world.op, action=action)
    assert world.contents(*TABLES) == state
    assert (report.stopped, report.undo, report.tables, report.conflict_count) == (True, None, (), 3)
    assert {str(c) for c in report.conflicts} == CONFLICTS
    shown = next(c for c in report.conflicts if c.key == {"id": "3"}).as_dict()
    assert shown["current"]["sg row"] == "taken"
    assert shown["wanted"]["sg row"] == "x"
    assert undo.undo(world.op, action=action, preview=True).conflict_count == 3
    assert rows(world.op, "SELECT count(*) FROM sqlguard.undo") == [(0,)]


def test_skipped_rows_stay_undoable_and_can_be_forced(world: World) -> None:
    action = conflicting(world)
    report = undo.undo(world.op, action=action, on_conflict="skip")
    assert {str(c) for c in report.conflicts} == CONFLICTS
    assert {(t.table, t.op, t.rows) for t in report.tables} == {
        ("app.link", "insert", 3),
        ("app.parent", "update", 6),
    }
    assert rows(world.op, "SELECT note FROM app.parent WHERE id = 2") == [("mine",)]
    repeat = undo.undo(world.op, action=action)
    assert (repeat.stopped, repeat.conflict_count) == (True, 3)
    world.op.execute("DELETE FROM app.child WHERE parent_id = 50")
    forced = undo.undo(world.op, action=action, on_conflict="force")
    assert forced.conflicts == ()
    assert {(t.table, t.op, t.rows) for t in forced.tables} == {
        ("app.link", "update", 1),
        ("app.parent", "update", 1),
        ("app.parent", "delete", 1),
    }
    assert rows(world.op, "SELECT note FROM app.parent WHERE id = 2") == [("n2",)]
    assert rows(world.op, 'SELECT "sg row" FROM app.link WHERE id = 3') == [("x",)]
    assert undo.undo(world.op, action=action).already_undone
    # What was forced can be taken back like anything else.
    assert undo.undo(world.op, undo_id=forced.undo).conflicts == ()
    assert rows(world.op, "SELECT note FROM app.parent WHERE id = 2") == [("mine",)]
    assert rows(world.op, 'SELECT "sg row" FROM app.link WHERE id = 3') == [("taken",)]


def test_a_row_that_somebody_deleted_since(world: World) -> None:
    action = act(
        world, "UPDATE app.link SET image = 'a' WHERE id IN (1, 2)", "INSERT INTO app.link VALUES (77), (78)"
    )
    world.op.execute("DELETE FROM app.link WHERE id IN (1, 77)")
    report = undo.undo(world.op, action=action)
    # That the inserted row is gone is just what an undo wants.
    assert [str(c) for c in report.conflicts] == ["app.link (id=1): the row is gone"]
    undo.undo(world.op, action=action, on_conflict="force")
    assert rows(world.op, "SELECT id, image FROM app.link WHERE id IN (1, 2, 77, 78) ORDER BY 1") == [
        (1, None),
        (2, None),
    ]


def test_unique_values_and_parents_that_are_gone_by_now(world: World) -> None:
    before = world.contents("app.parent")
    action = act(
        world,
        "UPDATE app.parent SET email = 'x' || id WHERE id IN (5, 6)",
        "UPDATE app.child SET parent_id = 1 WHERE parent_id = 20",
        "DELETE FROM app.child WHERE parent_id = 18",
    )
    world.op.execute("UPDATE app.parent SET email = 'e5' WHERE id = 7")
    world.op.execute("DELETE FROM app.parent WHERE id IN (18, 20)")
    report = undo.undo(world.op, action=action)
    reasons = sorted(str(c) for c in report.conflicts)
    assert [r for r in reasons if "parent_email_key" in r] == [
        "app.parent (id=5): another row has its value of `parent_email_key`"
    ]
    gone = [r for r in reasons if "the row of `app.parent` that it refers to is gone" in r]
    assert len(gone) == len(reasons) - 1 == 6
    done = undo.undo(world.op, action=action, on_conflict="skip")
    assert [(t.table, t.rows) for t in done.tables] == [("app.parent", 1)]
    world.op.execute("UPDATE app.parent SET email = 'e7' WHERE id = 7")
    rest = undo.undo(world.op, action=action, on_conflict="skip")
    assert [(t.table, t.rows) for t in rest.tables] == [("app.parent", 1)]
    assert rows(world.op, "SELECT email FROM app.parent WHERE id IN (5, 6) ORDER BY 1") == [("e5",), ("e6",)]
    assert before != b""


def test_another_task_in_between_is_a_conflict_until_it_is_undone(world: World) -> None:
    other = world.task("u")
    before = world.contents(*TABLES)
    mine = act(world, "UPDATE app.link SET image = 'mine' WHERE id < 4")
    theirs = world.act(other, "UPDATE app.link SET image = image || '+' WHERE id = 2")
    later = act(world, "UPDATE app.link SET image = image || '!' WHERE id < 3")
    report = undo.undo(world.op, task="t")
    why = "somebody else changed the row between two of these changes"
    assert [str(c) for c in report.conflicts] == [f"app.link (id=2): {why}"]
    assert undo.undo(world.op, action=theirs).conflict_count == 1
    for action in (later, theirs, mine):
        assert undo.undo(world.op, action=action).conflicts == ()
    assert world.contents(*TABLES) == before


def test_a_dropped_table_is_said_to_be_gone(world: World) -> None:
    action = act(
        world, "UPDATE app.link SET image = 'x' WHERE id = 1", "UPDATE app.child SET qty = 1 WHERE id = 1"
    )
    world.op.execute("DROP TABLE app.link")
    report = undo.undo(world.op, action=action)
    assert [str(c) for c in report.conflicts] == ["app.link (id=1): the table is gone"]
    assert undo.undo(world.op, action=action, on_conflict="skip").rows == 1


@pytest.mark.parametrize("ids", ["id = 1", "id < 4", "id < 19"])
def test_a_change_of_the_owners_between_two_of_the_agents_is_a_conflict(world: World, ids: str) -> None:
    before = world.contents(*TABLES)
    first = act(world, f"UPDATE app.link SET image = 'a' WHERE {ids}")
    world.op.execute("UPDATE app.link SET image = 'of the owner' WHERE id = 1")
    second = act(world, f"UPDATE app.link SET image = image || '+' WHERE {ids}")
    report = undo.undo(world.op, task="t")
    why = "somebody else changed the row between two of these changes"
    assert [str(c) for c in report.conflicts] == [f"app.link (id=1): {why}"]
    assert undo.undo(world.op, action=second).conflicts == ()
    assert undo.undo(world.op, action=first).conflict_count == 1
    assert undo.undo(world.op, action=first, on_conflict="skip").conflict_count == 1
    assert rows(world.op, "SELECT image FROM app.link WHERE id = 1") == [("of the owner",)]
    assert undo.undo(world.op, action=first, on_conflict="force").conflicts == ()
    assert world.contents(*TABLES) == before


def test_it_is_one_for_inserts_new_keys_and_older_changes_too(world: World) -> None:
    world.op.execute("INSERT INTO app.parent (id, email) VALUES (900, 'x')")
    old = act(world, "UPDATE app.parent SET note = 'older' WHERE id = 900")
    inserted = act(world, "INSERT INTO app.parent (id, email) VALUES (901, 'y')")
    moved = act(world, "UPDATE app.parent SET id = 902 WHERE id = 900")
    world.op.execute("UPDATE app.parent SET note = 'of the owner' WHERE id IN (901, 902)")
    act(
        world,
        "DELETE FROM app.parent WHERE id = 901",
        "UPDATE app.parent SET note = note || '!' WHERE id = 902",
    )
    report = undo.undo(world.op, task="t", on_conflict="skip")
    assert {c.key["id"] for c in report.conflicts} == {"900", "901", "902"}
    assert rows(world.op, "SELECT id, note FROM app.parent WHERE id > 800 ORDER BY 1") == [
        (901, "of the owner"),
        (902, "of the owner"),
    ]
    assert len({old, inserted, moved}) == 3


def test_the_agents_own_changes_in_a_row_are_none(world: World) -> None:
    before = world.contents(*TABLES)
    for n in range(3):
        act(world, f"UPDATE app.link SET image = image || '{n}' WHERE id < 5")
        act(world, f"UPDATE app.parent SET note = note || '{n}', id = id + 100 WHERE id % 5 = {n}")
    assert undo.undo(world.op, task="t").conflicts == ()
    assert world.contents(*TABLES) == before
