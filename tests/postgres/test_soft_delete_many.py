"""A soft delete of many rows keeps keys by the thousand; whatever reads the journal finds each row as ever."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from journaled import World, rows
from journaled import world as made_world
from servers import Database

from sqlguard.postgres import history, journal, undo
from sqlguard.postgres.erase import erase
from sqlguard.postgres.feed import export
from sqlguard.postgres.purge import purge
from sqlguard.postgres.restore import restore

# Keys of two columns with texts that look like parts of an array; the note loses its parent, the others go with it.
SCHEMA = r"""
    CREATE SCHEMA app;
    CREATE TABLE app.parent (id int PRIMARY KEY, code text UNIQUE);
    CREATE TABLE app.child (parent_id int REFERENCES app.parent ON DELETE CASCADE, name text, n int,
                            PRIMARY KEY (parent_id, name));
    CREATE TABLE app.note (id int PRIMARY KEY, parent_id int REFERENCES app.parent ON DELETE SET NULL);
    INSERT INTO app.parent SELECT n, 'code ' || n FROM generate_series(1, 3000) n;
    INSERT INTO app.child SELECT n, x.name || CASE WHEN n > 9 THEN n::text ELSE '' END, n
        FROM generate_series(1, 3000) n, unnest(ARRAY['NULL', '', 'a,"b\', '{1,2}']) AS x (name) WHERE n % 2 = 0;
    INSERT INTO app.note SELECT n, n FROM generate_series(1, 2000) n;
"""
TABLES = ("app.parent", "app.child", "app.note")
DELETE = "UPDATE app.parent SET deleted_at = statement_timestamp(), deleted_by_agent = sqlguard.agent() WHERE id <= 2500"


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with made_world(database) as made:
        made.op.execute(SCHEMA)
        made.grant()
        made.guard(*TABLES, mode="soft")
        made.task("t")
        yield made


def delete(world: World) -> int:
    action = world.act(world.agents[0], DELETE)
    found = rows(
        world.op,
        "SELECT c.table_name, count(*), count(r.chunk) FROM sqlguard.row_change r"
        " JOIN sqlguard.change_set c ON c.id = r.change_set_id WHERE c.action_id = %s GROUP BY 1 ORDER BY 1",
        [action],
    )
    assert found == [("child", 5, 5), ("note", 2000, 0), ("parent", 3, 3)]
    return action


def counts(report: Any) -> dict[tuple[str, str], int]:
    return {(t.table, t.op): t.rows for t in report.tables}


WHOLE = {("app.parent", "restore"): 2500, ("app.child", "restore"): 5000, ("app.note", "update"): 2000}


def test_it_is_undone_and_redone_to_the_byte(world: World) -> None:
    before = world.contents(*TABLES)
    action = delete(world)
    after = world.contents(*TABLES)
    done = undo.undo(world.op, action=action)
    assert (counts(done), world.contents(*TABLES)) == (WHOLE, before)
    assert undo.undo(world.op, action=action).already_undone
    redone = undo.undo(world.op, undo_id=done.undo)
    assert world.contents(*TABLES) == after
    undo.undo(world.op, undo_id=redone.undo)
    assert world.contents(*TABLES) == before
    assert journal.verify(world.op).ok


def test_a_row_has_the_key_and_the_number_that_it_is_known_by(world: World) -> None:
    action = delete(world)
    for table, key in (("parent", "ARRAY[t.id::text]"), ("child", "ARRAY[t.parent_id::text, t.name]")):
        odd = f"""
            WITH r AS (SELECT r.* FROM sqlguard.change_set c CROSS JOIN LATERAL sqlguard.row_changes(c.id) r
                       WHERE c.action_id = {action} AND c.table_name = '{table}')
            SELECT (SELECT count(*) FROM r), (SELECT count(DISTINCT id) FROM r), (SELECT max(id) FROM r),
                   (SELECT count(*) FROM app.{table} t JOIN r ON r.key = {key} WHERE t.deleted_at IS NOT NULL)"""
        assert len(set(rows(world.op, odd)[0])) == 1
    exported = [e for e in export(world.op, journal.filters(), rows=True) if e.get("op") == "soft_delete"]
    assert len([e for e in exported if "key" in e]) == 7500


def test_rows_in_conflict_are_left_and_can_be_undone_later(world: World) -> None:
    before = world.contents(*TABLES)
    action = delete(world)
    world.op.execute("UPDATE app.parent SET deleted_at = '2024-01-01' WHERE id IN (1, 1000, 1001, 2500)")
    world.op.execute("INSERT INTO app.parent VALUES (9999, 'code 77')")
    found = undo.undo(world.op, action=action)
    assert (found.stopped, found.conflict_count) == (True, 5 + 2 * 4 + 4)
    skipped = undo.undo(world.op, action=action, on_conflict="skip")
    assert counts(skipped) == {
        ("app.parent", "restore"): 2495,
        ("app.child", "restore"): 4992,
        ("app.note", "update"): 1996,
    }
    assert {c.key["id"] for c in skipped.conflicts if c.table == "app.parent"} == {
        "1",
        "77",
        "1000",
        "1001",
        "2500",
    }
    world.op.execute("DELETE FROM app.parent WHERE id = 9999")
    world.op.execute(
        "UPDATE app.parent SET deleted_at = (SELECT c.statement_at FROM sqlguard.change_set c"
        " WHERE c.action_id = %s AND c.table_name = 'parent') WHERE deleted_at IS NOT NULL",
        [action],
    )
    assert counts(undo.undo(world.op, action=action)) == {
        ("app.parent", "restore"): 5,
        ("app.child", "restore"): 8,
        ("app.note", "update"): 4,
    }
    assert world.contents(*TABLES) == before


def test_history_and_the_journal_find_one_row(world: World) -> None:
    action = delete(world)
    for key in ("1", "1000", "1001", "2500"):
        assert [(c.op, c.action) for c in history.history(world.op, "app.parent", key)] == [
            ("soft_delete", action)
        ]
        assert [a.id for a in journal.list_actions(world.op, table="app.parent", row=[key])] == [action]
    assert history.history(world.op, "app.parent", "2501") == []
    assert [c.op for c in history.history(world.op, "app.child", ["2000", 'a,"b\\2000'])] == ["soft_delete"]
    undo.undo(world.op, action=action)
    life = history.history(world.op, "app.parent", "1500")
    assert [(c.op, c.undone_by is None) for c in life] == [("soft_delete", False), ("update", True)]


def test_named_rows_are_restored_with_theirs(world: World) -> None:
    before = world.contents(*TABLES)
    action = delete(world)
    some = restore(world.op, table="app.parent", keys=["2000", "2001"])
    assert counts(some) == {
        ("app.parent", "restore"): 2,
        ("app.child", "restore"): 4,
        ("app.note", "update"): 1,
    }
    many = restore(world.op, table="app.parent", where="id > 1000")
    assert counts(many)["app.parent", "restore"] == 1498
    world.op.execute("UPDATE app.parent SET code = 'mine' WHERE id = 5")
    rest = restore(world.op, action=action, on_conflict="skip")
    assert [(c.table, c.key) for c in rest.conflicts] == [
        ("app.parent", {"id": "5"}),
        ("app.note", {"id": "5"}),
    ]
    restore(world.op, action=action, accept_changed=True)
    world.op.execute("UPDATE app.parent SET code = 'code 5' WHERE id = 5")
    assert world.contents(*TABLES) == before


def test_an_erased_row_leaves_its_chunk_and_the_others_stay(world: World) -> None:
    action = delete(world)
    erase(world.op, "app.child", keys=["1000,NULL1000"], reason="asked")
    done = erase(world.op, "app.parent", keys=["1", "1001"], reason="asked")
    assert (done.rows, done.images) == (2, 2)
    texts = " ".join(t for (t,) in rows(world.op, "SELECT r::text FROM sqlguard.row_change r"))
    assert "NULL1000" not in texts
    assert history.history(world.op, "app.parent", "1001") == []
    assert [c.op for c in history.history(world.op, "app.parent", "1002")] == ["soft_delete"]
    left = undo.undo(world.op, action=action, on_conflict="skip")
    assert counts(left) == {
        ("app.parent", "restore"): 2498,
        ("app.child", "restore"): 4999,
        ("app.note", "update"): 1998,
    }
    assert {c.reason for c in left.conflicts if not c.key} == {"the row was erased"}
    assert journal.verify(world.op).ok


def test_purged_rows_are_told_of(world: World) -> None:
    action = delete(world)
    restore(world.op, table="app.parent", keys=["1"])
    done = purge(world.op, ["app.parent", "app.child"], older_than=timedelta(0))
    assert done.rows == 7499
    left = undo.undo(world.op, action=action, on_conflict="skip")
    assert not counts(left)
    skipped = rows(
        world.op,
        "SELECT c.table_name, s.reason, count(*) FROM sqlguard.undo_skipped s JOIN sqlguard.change_set c"
        " ON c.id = s.change_set_id WHERE s.undo_id = %s AND c.op = 'soft_delete' GROUP BY 1, 2 ORDER BY 1",
        [left.undo],
    )
    assert skipped == [("child", "the row was purged", 5000), ("parent", "the row was purged", 2499)]


def test_the_agent_sees_samples_of_it_and_nobody_rewrites_it(world: World) -> None:
    agent = world.agents[0].conn
    with agent.transaction(force_rollback=True):
        agent.execute("SET TRANSACTION READ WRITE")
        agent.execute(DELETE)
        found = rows(agent, "SELECT table_name, key FROM sqlguard.transaction_samples(3)")
    assert [f[0] for f in found].count("child") == 3
    assert all(len(key) == (2 if name == "child" else 1) for name, key in found)
    with pytest.raises(Exception, match="permission denied"):
        agent.execute("SELECT FROM sqlguard.row_changes(1)")
    delete(world)
    for text in ("UPDATE sqlguard.row_change SET chunk = NULL", "DELETE FROM sqlguard.row_change"):
        with pytest.raises(Exception, match=r"the journal only grows|permission denied"):
            world.op.execute(text)
