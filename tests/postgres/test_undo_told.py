"""What an undo says of the rows it left alone: values on both sides, and no row called undone that was not."""

from collections.abc import Iterator

import pytest
from journaled import World
from journaled import world as made_world
from servers import Database

from sqlguard.postgres import history, journal, undo


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with made_world(database) as made:
        made.op.execute("""
            CREATE SCHEMA app;
            CREATE TABLE app.parent (id int PRIMARY KEY, email text UNIQUE, note text);
            CREATE TABLE app.child (id int PRIMARY KEY, parent_id int REFERENCES app.parent);
            CREATE TABLE app.link (id int PRIMARY KEY, "sg row" text);
            INSERT INTO app.parent SELECT g, 'e' || g, 'n' || g FROM generate_series(1, 20) g;
            INSERT INTO app.link SELECT g, 'x' FROM generate_series(1, 40) g;
        """)
        made.grant()
        made.guard("app.parent", "app.child", "app.link")
        made.task("t")
        yield made


def conflicting(world: World) -> int:
    action = world.act(
        world.agents[0],
        "UPDATE app.parent SET note = 'Q' WHERE id < 8",
        "INSERT INTO app.parent VALUES (50, 'e50')",
        "DELETE FROM app.link WHERE id < 5",
    )
    world.op.execute("UPDATE app.parent SET note = 'mine' WHERE id = 2")
    world.op.execute("INSERT INTO app.child VALUES (1, 50)")
    world.op.execute("INSERT INTO app.link VALUES (3, 'taken')")
    return action


def test_what_was_skipped_is_not_called_undone(world: World) -> None:
    action = conflicting(world)
    done = undo.undo(world.op, action=action, on_conflict="skip")
    told = journal.show_action(world.op, action)
    assert told.action.outcome == "partly_undone"
    assert {(c["table"], c["undone_rows"], c["undone"]) for c in told.changes} == {
        ("app.parent", 6, False),
        ("app.parent", 0, False),
        ("app.link", 3, False),
    }
    lives = {key: history.history(world.op, "app.parent", key)[0].undone_by for key in (1, 2)}
    assert lives == {1: done.undo, 2: None}
    undo.undo(world.op, action=action, on_conflict="force")
    assert history.history(world.op, "app.parent", 2)[0].undone_by is not None
    told = journal.show_action(world.op, action)
    assert [c["undone"] for c in told.changes if c["op"] == "update"] == [True]


def test_a_conflict_says_what_is_there_and_what_was(world: World) -> None:
    action = conflicting(world)
    told = {str(c): c.values() for c in undo.undo(world.op, action=action, preview=True).conflicts}
    assert told["app.parent (id=2): the row was changed since"][0] == 'note is "mine", was "n2" before'
    assert 'sg row is "taken", was "x" before' in told["app.link (id=3): the key or a unique value is taken"]
    (now, was) = told["app.parent (id=50): rows of `app.child` refer to it"]
    assert now.startswith("is id=50, ")
    assert was == "was no row before"
