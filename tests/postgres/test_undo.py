"""Undo takes back exactly what the agent did, and can itself be undone."""

from collections.abc import Iterator
from datetime import UTC, datetime

import psycopg
import pytest
from journaled import World, rows
from journaled import world as made_world
from servers import Database
from undo_world import SCHEMA, TABLES, act, undo_world

from sqlguard.errors import Refused
from sqlguard.postgres import history, journal, undo


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with undo_world(database) as made:
        yield made


MUCH = (
    "UPDATE app.parent SET note = 'X' WHERE id < 5",
    "SAVEPOINT a",
    "UPDATE app.parent SET note = note || 'y', email = 'e' || id || 'z' WHERE id IN (1, 2, 9)",
    "RELEASE a",
    "DELETE FROM app.parent WHERE id IN (3, 4)",
    "INSERT INTO app.parent VALUES (3, 'e3', 'new')",
    "INSERT INTO app.child (parent_id, qty) VALUES (3, 1), (3, 2)",
    "UPDATE app.parent SET id = 100 WHERE id = 19",
    "UPDATE app.child SET qty = qty + 1",
    "DELETE FROM app.link WHERE id % 2 = 0",
    "INSERT INTO app.link VALUES (1, 1, 'y') ON CONFLICT (id) DO UPDATE SET \"key\" = 'upserted'",
    "UPDATE app.child SET qty = 7 WHERE id < 10",
)


def test_undo_redo_and_undo_again_are_exact(world: World) -> None:
    before = world.contents(*TABLES)
    action = act(world, *MUCH)
    after = world.contents(*TABLES)
    assert after != before

    preview = undo.undo(world.op, action=action, preview=True)
    assert world.contents(*TABLES) == after
    done = undo.undo(world.op, action=action)
    assert world.contents(*TABLES) == before
    assert (done.conflicts, done.already_undone, done.stopped) == ((), False, False)
    assert preview.tables == done.tables
    assert (preview.undo, preview.preview) == (None, True)
    assert sum(1 for _ in preview.differences) == preview.rows

    again = undo.undo(world.op, action=action)
    assert (again.already_undone, again.rows, again.undo) == (True, 0, None)
    assert undo.undo(world.op, task="t").already_undone
    assert world.contents(*TABLES) == before

    redone = undo.undo(world.op, undo_id=done.undo)
    assert redone.conflicts == ()
    assert world.contents(*TABLES) == after
    assert undo.undo(world.op, undo_id=done.undo).already_undone
    assert undo.undo(world.op, undo_id=redone.undo).conflicts == ()
    assert world.contents(*TABLES) == before
    assert undo.undo(world.op, task="t").already_undone
    events = [(e["kind"], e["detail"]) for e in journal.show_action(world.op, action).events]
    assert [k for k, _ in events] == ["undone"] * 3
    assert [d.get("redo", False) for _, d in events] == [False, True, True]
    assert journal.verify(world.op).ok


def test_a_task_is_undone_whole_and_actions_one_by_one(world: World) -> None:
    states = [world.contents(*TABLES)]
    actions = []
    for statement in MUCH:
        if statement.split()[0] not in ("SAVEPOINT", "RELEASE"):
            actions.append(act(world, statement))
            states.append(world.contents(*TABLES))
    last = undo.undo(world.op, action=actions[-1])
    assert (last.rows, world.contents(*TABLES)) == (7, states[-2])
    middle = undo.undo(world.op, action=actions[-2])
    assert world.contents(*TABLES) == states[-3]
    whole = undo.undo(world.op, task="t")
    assert whole.conflicts == ()
    assert world.contents(*TABLES) == states[0]
    for one in (whole, middle, last):
        assert undo.undo(world.op, undo_id=one.undo).conflicts == ()
    assert world.contents(*TABLES) == states[-1]


def test_what_is_not_there_to_undo(world: World) -> None:
    with pytest.raises(Refused, match="nothing was named"):
        undo.undo(world.op)
    with pytest.raises(ValueError, match="on_conflict"):
        undo.undo(world.op, task="t", on_conflict="maybe")
    empty = undo.undo(world.op, task="nobody")
    assert (empty.already_undone, empty.rows) == (False, 0)
    assert undo.undo(world.op, since=datetime.now(tz=UTC)).rows == 0


def test_by_time_and_by_agent(world: World) -> None:
    other = world.task("u", agent="other")
    first = act(world, "UPDATE app.link SET image = 'a' WHERE id = 1")
    since = journal.show_action(world.op, first).action.at
    world.act(other, "UPDATE app.link SET image = 'b' WHERE id = 2")
    assert undo.undo(world.op, since=since, agent="other").rows == 1
    assert undo.undo(world.op, agent="bot").rows == 1
    assert undo.undo(world.op, since=since).already_undone


def test_triggers_and_their_state_are_as_before(world: World) -> None:
    world.op.execute("ALTER TABLE app.parent ENABLE ALWAYS TRIGGER touch")
    states = "SELECT tgname, tgenabled FROM pg_trigger WHERE tgrelid = 'app.parent'::regclass ORDER BY 1"
    before = rows(world.op, states)
    action = act(world, "UPDATE app.parent SET note = 'x'")
    assert undo.undo(world.op, action=action).rows == 20
    assert rows(world.op, states) == before


def test_forced_row_level_security_hides_nothing_from_an_undo(world: World) -> None:
    before = world.contents("app.link")
    action = act(world, "DELETE FROM app.link WHERE id < 9", "UPDATE app.link SET image = 'x'")
    world.op.execute("ALTER TABLE app.link ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY")
    assert undo.undo(world.op, action=action).conflicts == ()
    forced = "SELECT relforcerowsecurity FROM pg_class WHERE oid = 'app.link'::regclass"
    assert rows(world.op, forced) == [(True,)]
    world.op.execute("ALTER TABLE app.link NO FORCE ROW LEVEL SECURITY")
    assert world.contents("app.link") == before


def test_a_table_that_changed_since_gets_back_what_it_can(world: World) -> None:
    action = act(
        world,
        "UPDATE app.link SET image = 'new', \"key\" = 'k' WHERE id = 1",
        "DELETE FROM app.link WHERE id = 2",
    )
    world.op.execute('ALTER TABLE app.link DROP COLUMN "key"')
    world.op.execute("ALTER TABLE app.link ADD COLUMN extra int DEFAULT 5")
    report = undo.undo(world.op, action=action)
    assert report.conflicts == ()
    assert sorted(report.notes) == [
        "`app.link` has a new column extra: it keeps what it has",
        "`app.link` has no column key now: its values stay lost",
    ]
    found = rows(world.op, 'SELECT id, "sg row", image, extra FROM app.link WHERE id < 3 ORDER BY 1')
    assert found == [(1, "x", None, 5), (2, "x", None, 5)]
    assert undo.undo(world.op, undo_id=report.undo).conflicts == ()
    assert rows(world.op, "SELECT id, image FROM app.link WHERE id < 3") == [(1, "new")]


def test_a_permutation_of_unique_values_comes_back(world: World) -> None:
    before = world.contents("app.parent")
    action = act(
        world,
        "UPDATE app.parent SET email = 'swap' WHERE id = 1",
        "UPDATE app.parent SET email = 'e1' WHERE id = 2",
        "UPDATE app.parent SET email = 'e2' WHERE id = 1",
        "UPDATE app.parent SET id = id + 1 WHERE id > 19",
    )
    assert undo.undo(world.op, action=action).conflicts == ()
    assert world.contents("app.parent") == before


def test_progress_counts_rows(world: World) -> None:
    action = act(world, "UPDATE app.link SET image = 'x'", "DELETE FROM app.child")
    seen: list[tuple[int, int]] = []
    undo.undo(world.op, action=action, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(60, 100), (100, 100)]


def test_an_agent_can_not_undo(world: World) -> None:
    action = act(world, "UPDATE app.link SET image = 'x'")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        undo.undo(world.agents[0].conn, action=action)


def test_a_rows_life_over_changes_of_its_key(world: World) -> None:
    world.act(world.agents[0], "UPDATE app.parent SET note = 'a' WHERE id = 5", reason="first")
    moved = act(world, "UPDATE app.parent SET id = 500 WHERE id = 5")
    act(world, "DELETE FROM app.parent WHERE id = 500")
    report = undo.undo(world.op, action=moved + 1)
    life = history.history(world.op, "app.parent", 5)
    assert life == history.history(world.op, "app.parent", {"id": "500"})
    assert [c.op for c in life] == ["update", "rekey", "delete", "insert"]
    assert [c.key["id"] for c in life] == ["5", "500", "500", "500"]
    assert [c.reason for c in life] == ["first", None, None, None]
    assert life[0].changed["note"] == ("n5", "a")
    assert [(c.undo, c.undone_by) for c in life] == [
        (None, None),
        (None, None),
        (None, report.undo),
        (report.undo, None),
    ]
    assert life[3].by == "app_owner"
    assert (life[2].before or {})["note"] == "a"
    assert life[2].after is None
    assert history.history(world.op, "app.parent", [19]) == []


def test_soft_deleted_rows_come_back_unless_their_place_is_taken(database: Database) -> None:
    with made_world(database) as world:
        world.op.execute(SCHEMA)
        world.grant()
        world.guard(*TABLES, mode="soft")
        agent = world.task("t")
        before = world.contents(*TABLES)
        mark = "UPDATE app.parent SET deleted_at = statement_timestamp(), deleted_by_agent = 'bot' WHERE id"
        action = world.act(agent, f"{mark} IN (1, 2, 3, 4)", f"{mark} = 5")
        assert rows(world.op, "SELECT count(*) FROM app.child WHERE deleted_at IS NOT NULL") == [(15,)]
        done = undo.undo(world.op, action=action)
        assert (done.conflicts, world.contents(*TABLES)) == ((), before)
        assert {(t.table, t.op) for t in done.tables} == {
            ("app.parent", "restore"),
            ("app.child", "restore"),
            ("app.link", "update"),
        }
        redone = undo.undo(world.op, undo_id=done.undo)
        assert undo.undo(world.op, undo_id=redone.undo).conflicts == ()
        assert world.contents(*TABLES) == before

        action = world.act(agent, f"{mark} IN (1, 2, 3, 4)", f"{mark} = 5")
        world.op.execute("INSERT INTO app.parent (id, email) VALUES (50, 'e2')")
        world.op.execute("DELETE FROM app.parent WHERE id = 3")
        world.op.execute("UPDATE app.parent SET note = 'of the owner' WHERE id = 4")
        report = undo.undo(world.op, action=action, on_conflict="skip")
        taken = {str(c) for c in report.conflicts if c.table == "app.parent"}
        assert len(taken) == 2
        assert rows(world.op, "SELECT id FROM app.parent WHERE id < 6 AND deleted_at IS NULL ORDER BY 1") == [
            (1,),
            (4,),
            (5,),
        ]
        assert rows(world.op, "SELECT note FROM app.parent WHERE id = 4") == [("of the owner",)]
