"""Undo of tables whose columns got other names, were dropped, made anew or added since."""

from collections.abc import Iterator

import pytest
from journaled import World, rows
from journaled import world as made_world
from servers import Database

from sqlguard.postgres import undo

CHANGES = (
    "UPDATE app.t SET note = 'new' WHERE id = 1",
    "DELETE FROM app.t WHERE id = 2",
    "UPDATE app.t SET id = 30 WHERE id = 3",
    "INSERT INTO app.t VALUES (40, 'made', 'up')",
)


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with made_world(database) as made:
        made.op.execute("""
            CREATE SCHEMA app;
            CREATE TABLE app.t (id int PRIMARY KEY, note text, other text);
            CREATE TABLE app.bare (note text, other text);
            INSERT INTO app.t SELECT g, 'n' || g, 'o' || g FROM generate_series(1, 5) g;
            INSERT INTO app.bare SELECT 'n' || g, 'o' || g FROM generate_series(1, 5) g;
        """)
        made.grant()
        made.guard("app.t", "app.bare")
        made.task("t")
        yield made


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE app.t RENAME note TO remark",
        "ALTER TABLE app.t RENAME id TO number",
        "ALTER TABLE app.t RENAME note TO x; ALTER TABLE app.t RENAME other TO note; ALTER TABLE app.t RENAME x TO other",
        "ALTER TABLE app.t RENAME TO u; ALTER TABLE app.u RENAME note TO remark; ALTER TABLE app.u RENAME TO t",
        "ALTER TABLE app.t RENAME id TO note_id; ALTER TABLE app.t ADD late int; ALTER TABLE app.t RENAME note TO id",
    ],
)
def test_renamed_columns_get_their_values_back(world: World, change: str) -> None:
    before = rows(world.op, "TABLE app.t ORDER BY 1")
    action = world.act(world.agents[0], *CHANGES)
    done = rows(world.op, "TABLE app.t ORDER BY 1")
    world.op.execute(change)
    added = [(None,)] if "ADD" in change else [()]
    preview = undo.undo(world.op, action=action, preview=True)
    assert preview.conflicts == ()
    report = undo.undo(world.op, action=action)
    assert report.conflicts == ()
    assert not [note for note in report.notes if "lost" in note]
    assert rows(world.op, "TABLE app.t ORDER BY 1") == [row + added[0] for row in before]
    redo = undo.undo(world.op, undo_id=report.undo)
    assert redo.conflicts == ()
    assert rows(world.op, "TABLE app.t ORDER BY 1") == [row + added[0] for row in done]
    assert undo.undo(world.op, undo_id=redo.undo).conflicts == ()
    assert rows(world.op, "TABLE app.t ORDER BY 1") == [row + added[0] for row in before]


def test_a_rename_between_two_changes_and_one_after_them(world: World) -> None:
    before = rows(world.op, "TABLE app.t ORDER BY 1")
    agent = world.agents[0]
    world.act(agent, "UPDATE app.t SET note = 'first' WHERE id = 1")
    world.op.execute("ALTER TABLE app.t RENAME note TO remark")
    world.act(
        agent,
        "UPDATE app.t SET remark = 'second', other = 'x' WHERE id = 1",
        "DELETE FROM app.t WHERE id = 2",
    )
    world.op.execute("ALTER TABLE app.t RENAME remark TO text")
    report = undo.undo(world.op, task="t")
    assert (report.conflicts, report.notes) == ((), ())
    assert rows(world.op, "TABLE app.t ORDER BY 1") == before


def test_a_conflict_names_columns_as_they_are_called_now(world: World) -> None:
    action = world.act(world.agents[0], "UPDATE app.t SET note = 'new' WHERE id = 1")
    world.op.execute("ALTER TABLE app.t RENAME note TO remark; ALTER TABLE app.t RENAME id TO number")
    world.op.execute("UPDATE app.t SET other = 'mine' WHERE number = 1")
    (conflict,) = undo.undo(world.op, action=action).conflicts
    assert conflict.key == {"number": "1"}
    assert conflict.wanted == {"number": 1, "remark": "n1", "other": "o1"}
    assert undo.undo(world.op, action=action, on_conflict="force").rows == 1
    assert rows(world.op, "SELECT remark, other FROM app.t WHERE number = 1") == [("n1", "o1")]


def test_without_a_key_too(world: World) -> None:
    before = rows(world.op, "TABLE app.bare ORDER BY 1")
    action = world.act(
        world.agents[0],
        "UPDATE app.bare SET note = 'new' WHERE other = 'o1'",
        "DELETE FROM app.bare WHERE note = 'n2'",
    )
    world.op.execute("ALTER TABLE app.bare RENAME note TO remark")
    assert undo.undo(world.op, action=action).conflicts == ()
    assert rows(world.op, "TABLE app.bare ORDER BY 1") == before


def test_a_column_that_took_the_name_of_a_dropped_one_keeps_what_it_has(world: World) -> None:
    action = world.act(world.agents[0], "UPDATE app.t SET note = 'new', other = 'x' WHERE id = 1")
    world.op.execute("ALTER TABLE app.t DROP COLUMN note; ALTER TABLE app.t RENAME other TO note")
    report = undo.undo(world.op, action=action)
    assert report.conflicts == ()
    assert report.notes == ("`app.t` has no column note now: its values stay lost",)
    assert rows(world.op, "SELECT note FROM app.t WHERE id = 1") == [("o1",)]


def test_a_column_that_was_made_anew_is_the_one_of_its_name(world: World) -> None:
    action = world.act(
        world.agents[0], "UPDATE app.t SET note = 'new' WHERE id = 1", "DELETE FROM app.t WHERE id = 2"
    )
    world.op.execute("ALTER TABLE app.t DROP COLUMN note; ALTER TABLE app.t ADD note text DEFAULT 'd'")
    assert undo.undo(world.op, action=action).conflicts == ()
    assert rows(world.op, "SELECT id, note FROM app.t WHERE id < 4 ORDER BY 1") == [
        (1, "n1"),
        (2, "n2"),
        (3, "d"),
    ]
