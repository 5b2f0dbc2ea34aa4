"""Undo takes back exactly what the agent did, says what stands in the way, and can itself be undone."""

from collections.abc import Iterator
from datetime import UTC, datetime

import psycopg
import pytest
from journaled import World, rows
from journaled import world as made_world
from servers import Database

from sqlguard.errors import Refused
from sqlguard.postgres import history, journal, undo

SCHEMA = """
    CREATE SCHEMA app;
    CREATE TABLE app.parent (id int PRIMARY KEY, email text UNIQUE, note text, updated_at timestamptz DEFAULT now());
    CREATE TABLE app.child (
        id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        parent_id int REFERENCES app.parent ON DELETE CASCADE ON UPDATE CASCADE,
        qty numeric(10, 2),
        double numeric GENERATED ALWAYS AS (qty * 2) STORED);
    CREATE TABLE app.link (id int PRIMARY KEY, parent_id int REFERENCES app.parent ON DELETE SET NULL ON UPDATE CASCADE,
                           "sg row" text, "key" text, image text);
    CREATE FUNCTION app.touch() RETURNS trigger LANGUAGE plpgsql
        AS $$ BEGIN NEW.updated_at = clock_timestamp(); RETURN NEW; END $$;
    CREATE TRIGGER touch BEFORE UPDATE ON app.parent FOR EACH ROW EXECUTE FUNCTION app.touch();
    INSERT INTO app.parent SELECT g, 'e' || g, 'n' || g FROM generate_series(1, 20) g;
    INSERT INTO app.child (parent_id, qty) SELECT 1 + g % 20, g * 1.50 FROM generate_series(1, 60) g;
    INSERT INTO app.link SELECT g, 1 + g % 20, 'x' FROM generate_series(1, 40) g;
"""
TABLES = ("app.parent", "app.child", "app.link")


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with made_world(database) as made:
        made.op.execute(SCHEMA)
        made.grant()
        made.guard(*TABLES)
        made.task("t")
        yield made


def act(world: World, *statements: str) -> int:
    return world.act(world.agents[0], *statements)


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


def test_a_dropped_table_is_said_to_be_gone(world: World) -> None:
    action = act(
        world, "UPDATE app.link SET image = 'x' WHERE id = 1", "UPDATE app.child SET qty = 1 WHERE id = 1"
    )
    world.op.execute("DROP TABLE app.link")
    report = undo.undo(world.op, action=action)
    assert [str(c) for c in report.conflicts] == ["app.link (id=1): the table is gone"]
    assert undo.undo(world.op, action=action, on_conflict="skip").rows == 1


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
