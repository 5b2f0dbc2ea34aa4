"""A restore brings back what one delete took, and says why where it does not."""

from collections.abc import Iterator
from typing import Any

import pytest
from journaled import World, rows
from journaled import world as made_world
from servers import Database

from sqlguard.errors import Refused
from sqlguard.postgres import journal, undo
from sqlguard.postgres.restore import restore
from sqlguard.postgres.restore_report import CHANGED, GONE, MOVED, PARENT, UNIQUE

SCHEMA = """
    CREATE SCHEMA app;
    CREATE TABLE app.customer (id int PRIMARY KEY, name text);
    CREATE TABLE app.invoice (
        id int PRIMARY KEY, customer_id int REFERENCES app.customer ON DELETE CASCADE, amount int);
    CREATE TABLE app.note (id int PRIMARY KEY, customer_id int REFERENCES app.customer ON DELETE SET NULL, text text);
    CREATE TABLE app.usr (id int PRIMARY KEY, email text UNIQUE, name text);
    INSERT INTO app.customer VALUES (1, 'ann'), (2, 'bob');
    INSERT INTO app.invoice VALUES (10, 1, 100), (11, 1, 50), (12, 2, 70);
    INSERT INTO app.note VALUES (20, 1, 'a'), (21, 1, 'b'), (22, 2, 'c');
    INSERT INTO app.usr VALUES (1, 'a@x', 'ann'), (2, 'b@x', 'bob');
"""
TABLES = ("app.customer", "app.invoice", "app.note", "app.usr")


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with made_world(database) as made:
        made.op.execute(SCHEMA)
        made.grant()
        made.guard(*TABLES, mode="soft")
        made.task("t")
        yield made


def delete(world: World, table: str, where: str) -> int:
    """Delete softly, as the rewritten statement does."""
    return world.act(
        world.agents[0],
        f"UPDATE {table} SET deleted_at = statement_timestamp(), deleted_by_agent = sqlguard.agent()"
        f" WHERE {where} AND deleted_at IS NULL",
    )


def live(world: World, table: str) -> list[tuple[Any, ...]]:
    columns = {"app.customer": "id, name", "app.invoice": "id, customer_id", "app.note": "id, customer_id"}
    text = f"SELECT {columns.get(table, 'id')} FROM {table} WHERE deleted_at IS NULL ORDER BY id"
    return rows(world.op, text)


def counts(report: Any) -> dict[tuple[str, str], int]:
    return {(t.table, t.op): t.rows for t in report.tables}


def test_an_action_comes_back_with_what_it_took_along(world: World) -> None:  # SD-S01
    before = world.contents(*TABLES)
    action = delete(world, "app.customer", "id = 1")
    after = world.contents(*TABLES)
    assert live(world, "app.invoice") == [(12, 2)]
    told = restore(world.op, action=action, preview=True)
    assert world.contents(*TABLES) == after
    done = restore(world.op, action=action)
    assert world.contents(*TABLES) == before
    assert told.tables == done.tables
    assert counts(done) == {
        ("app.customer", "restore"): 1,
        ("app.invoice", "restore"): 2,
        ("app.note", "update"): 2,
    }
    again = restore(world.op, action=action)
    assert (again.already_restored, again.rows, again.undo, again.stopped) == (True, 0, None, False)
    assert world.contents(*TABLES) == before
    assert journal.show_action(world.op, action).action.outcome == "undone"
    assert journal.verify(world.op).ok
    # A restore is journaled: it can be taken back, and then be done again.
    undo.undo(world.op, undo_id=done.undo)
    assert world.contents(*TABLES) == after
    assert counts(restore(world.op, action=action))["app.invoice", "update"] == 2
    assert world.contents(*TABLES) == before


def test_what_was_deleted_before_stays_deleted(world: World) -> None:  # SD-S02
    earlier = delete(world, "app.invoice", "id = 11")
    action = delete(world, "app.customer", "id = 1")
    assert restore(world.op, action=action).rows == 4
    assert live(world, "app.invoice") == [(10, 1), (12, 2)]
    assert restore(world.op, action=earlier).rows == 1
    assert live(world, "app.invoice") == [(10, 1), (11, 1), (12, 2)]


def test_other_changes_of_the_action_stay(world: World) -> None:
    action = world.act(
        world.agents[0],
        "UPDATE app.customer SET name = 'new' WHERE id = 2",
        "UPDATE app.invoice SET deleted_at = statement_timestamp(), deleted_by_agent = sqlguard.agent() WHERE id = 12",
    )
    assert counts(restore(world.op, action=action)) == {("app.invoice", "restore"): 1}
    assert live(world, "app.customer") == [(1, "ann"), (2, "new")]
    # The rest of the action can still be undone.
    assert counts(undo.undo(world.op, action=action)) == {("app.customer", "update"): 1}


def test_a_value_that_is_taken_stops_it(world: World) -> None:  # SD-S04
    action = delete(world, "app.usr", "id IN (1, 2)")
    world.op.execute("INSERT INTO app.usr VALUES (3, 'b@x', 'bea')")
    before = world.contents("app.usr", "sqlguard.undo")
    for asked in ({"action": action}, {"table": "app.usr", "keys": ["2"]}):
        report = restore(world.op, **asked)  # type: ignore[arg-type]
        assert (report.stopped, [(c.reason, c.key) for c in report.conflicts]) == (
            True,
            [(UNIQUE, {"id": "2"})],
        )
        assert world.contents("app.usr", "sqlguard.undo") == before
    partly = restore(world.op, action=action, on_conflict="skip")
    assert (partly.rows, [c.reason for c in partly.conflicts]) == (1, [UNIQUE])
    assert live(world, "app.usr") == [(1,), (3,)]
    world.op.execute("DELETE FROM app.usr WHERE id = 3")
    assert restore(world.op, action=action).rows == 1
    assert live(world, "app.usr") == [(1,), (2,)]


def delete_trees(world: World) -> int:
    """Users 1 > 3 > 4 and 2 > 5, what they posted and what they saw last; 1 and 2 are deleted by one statement."""
    world.op.execute(
        "ALTER TABLE app.usr ADD boss int REFERENCES app.usr ON DELETE CASCADE;"
        "CREATE TABLE app.post (id int PRIMARY KEY, usr int REFERENCES app.usr ON DELETE CASCADE);"
        "CREATE TABLE app.seen (id int PRIMARY KEY, usr int REFERENCES app.usr ON DELETE SET NULL);"
    )
    world.guard("app.usr", "app.post", "app.seen", mode="soft")
    world.op.execute(
        "INSERT INTO app.usr (id, email, name, boss) VALUES (3, 'c@x', 'cid', 1), (4, 'd@x', 'dan', 3), (5, 'e@x', 'eve', 2);"
        "INSERT INTO app.post VALUES (1, 1), (2, 4), (3, 5); INSERT INTO app.seen VALUES (1, 3), (2, 2)"
    )
    world.grant()
    return delete(world, "app.usr", "id IN (1, 2)")


def take_back(world: World, how: str, action: int, on_conflict: str) -> Any:
    if how == "restore":
        return restore(world.op, action=action, on_conflict=on_conflict)
    return undo.undo(world.op, action=action, on_conflict=on_conflict)


@pytest.mark.parametrize("how", ["restore", "undo"])
def test_a_tree_comes_back_with_what_referred_to_it(world: World, how: str) -> None:
    assert not take_back(world, how, delete_trees(world), "stop").stopped
    assert live(world, "app.usr") == [(1,), (2,), (3,), (4,), (5,)]
    assert rows(world.op, "SELECT id, usr FROM app.seen ORDER BY id") == [(1, 3), (2, 2)]


@pytest.mark.parametrize("how", ["restore", "undo"])
def test_what_belongs_to_a_row_that_is_skipped_stays_deleted_with_it(world: World, how: str) -> None:
    action = delete_trees(world)
    world.op.execute("INSERT INTO app.usr VALUES (9, 'a@x', 'other')")
    told = take_back(world, how, action, "skip")
    assert live(world, "app.usr") == [(2,), (5,), (9,)]
    assert live(world, "app.post") == [(3,)]
    assert rows(world.op, "SELECT id, usr FROM app.seen ORDER BY id") == [(1, None), (2, 2)]
    left = {(c.table, c.key["id"]) for c in told.conflicts}
    assert left == {
        *(("app.usr", key) for key in ("1", "3", "4")),
        *(("app.post", key) for key in ("1", "2")),
        ("app.seen", "1"),
    }
    world.op.execute("DELETE FROM app.usr WHERE id = 9")
    assert not restore(world.op, table="app.usr", keys=["1"]).stopped
    assert live(world, "app.post") == [(1,), (2,), (3,)]
    assert rows(world.op, "SELECT id, usr FROM app.seen ORDER BY id") == [(1, 3), (2, 2)]


def test_a_deleted_parent_stops_it(world: World) -> None:  # SD-S05
    child = delete(world, "app.invoice", "id = 12")
    parent = delete(world, "app.customer", "id = 2")
    for asked in ({"action": child}, {"table": "app.invoice", "keys": ["12"]}):
        report = restore(world.op, **asked)  # type: ignore[arg-type]
        assert (report.stopped, [(c.reason, c.table) for c in report.conflicts]) == (
            True,
            [(PARENT, "app.invoice")],
        )
    # Nor does an undo of that action alone make a live child of a deleted parent.
    assert undo.undo(world.op, action=child).stopped
    assert live(world, "app.invoice") == [(10, 1), (11, 1)]
    restore(world.op, action=parent)
    assert restore(world.op, action=child).rows == 1


def test_a_reference_is_put_back_where_nobody_changed_it(world: World) -> None:  # SD-S06
    action = delete(world, "app.customer", "id = 1")
    world.op.execute(
        "UPDATE app.note SET customer_id = 2 WHERE id = 21; UPDATE app.note SET text = 'A' WHERE id = 20"
    )
    report = restore(world.op, action=action)
    assert (report.stopped, [(c.reason, c.key) for c in report.left]) == (False, [(MOVED, {"id": "21"})])
    assert rows(world.op, "SELECT id, customer_id, text FROM app.note ORDER BY id") == [
        (20, 1, "A"),
        (21, 2, "b"),
        (22, 2, "c"),
    ]
    assert restore(world.op, action=action).already_restored


def test_a_row_that_was_changed_while_it_was_deleted(world: World) -> None:
    action = delete(world, "app.usr", "true")
    world.op.execute("UPDATE app.usr SET name = 'xxx' WHERE id = 2")
    report = restore(world.op, action=action)
    assert (report.stopped, [(c.reason, c.key) for c in report.conflicts]) == (True, [(CHANGED, {"id": "2"})])
    assert restore(world.op, action=action, accept_changed=True).rows == 2
    assert rows(world.op, "SELECT id, name FROM app.usr ORDER BY id") == [(1, "ann"), (2, "xxx")]


def test_a_row_that_is_gone(world: World) -> None:
    action = delete(world, "app.usr", "true")
    world.op.execute("DELETE FROM app.usr WHERE id = 2")
    assert [c.reason for c in restore(world.op, action=action).conflicts] == [GONE]
    assert restore(world.op, action=action, on_conflict="skip").rows == 1


def test_rows_by_key_come_back_with_what_their_delete_took_along(world: World) -> None:
    before = world.contents(*TABLES)
    delete(world, "app.invoice", "id = 11")
    action = delete(world, "app.customer", "true")
    report = restore(world.op, table="app.customer", keys=["1"])
    assert counts(report) == {
        ("app.customer", "restore"): 1,
        ("app.invoice", "restore"): 1,
        ("app.note", "update"): 2,
    }
    assert live(world, "app.invoice") == [(10, 1)]
    assert restore(world.op, table="app.customer", keys=["1"]).already_restored
    # What was not chosen is still there to be restored, or undone.
    alone = restore(world.op, table="app.customer", keys=["2"], cascade=False)
    assert counts(alone) == {("app.customer", "restore"): 1}
    assert counts(undo.undo(world.op, action=action)) == {
        ("app.invoice", "restore"): 1,
        ("app.note", "update"): 1,
    }
    assert restore(world.op, table="app.invoice", where="amount = 50").rows == 1
    assert world.contents(*TABLES) == before


def test_rows_that_nobody_captured(world: World) -> None:
    world.op.execute("UPDATE app.usr SET deleted_at = '2024-01-01' WHERE id = 1")
    world.op.execute("UPDATE app.usr SET deleted_at = '2024-01-02', deleted_by_agent = 'x' WHERE id = 2")
    before = world.contents("app.usr")
    report = restore(world.op, table="app.usr", where="email LIKE '%@x'")
    assert (report.rows, report.stopped) == (2, False)
    assert live(world, "app.usr") == [(1,), (2,)]
    undo.undo(world.op, undo_id=report.undo)
    assert world.contents("app.usr") == before
    assert restore(world.op, table="app.usr", keys=["2"]).rows == 1
    assert live(world, "app.usr") == [(2,)]


def test_a_table_without_a_key(world: World) -> None:
    world.op.execute("CREATE TABLE app.log (a int, b text)")
    world.op.execute("INSERT INTO app.log VALUES (1, 'x'), (1, 'x'), (1, 'x'), (2, 'y'), (3, '(\",)')")
    world.grant()
    world.guard("app.log", mode="soft")
    first = delete(world, "app.log", "ctid = (SELECT min(ctid) FROM app.log)")
    second = delete(
        world, "app.log", "ctid = (SELECT min(ctid) FROM app.log WHERE deleted_at IS NULL) OR a > 1"
    )
    both = "SELECT a, count(*) FROM app.log WHERE deleted_at IS NULL GROUP BY a ORDER BY a"
    assert rows(world.op, both) == [(1, 1)]
    assert restore(world.op, action=second).rows == 3
    assert rows(world.op, both) == [(1, 2), (2, 1), (3, 1)]
    assert restore(world.op, action=second).already_restored
    assert undo.undo(world.op, action=first).rows == 1
    assert rows(world.op, both) == [(1, 3), (2, 1), (3, 1)]
    third = delete(world, "app.log", "true")
    world.op.execute("UPDATE app.log SET b = 'changed' WHERE a = 2")
    stopped = restore(world.op, action=third)
    assert (stopped.stopped, [c.reason for c in stopped.conflicts]) == (True, [CHANGED])
    assert restore(world.op, table="app.log", where="a = 3").rows == 1
    assert rows(world.op, both) == [(3, 1)]


def test_a_table_in_journal_mode(database: Database) -> None:  # SD-S10, SD-S11
    with made_world(database) as world:
        world.op.execute("""
            CREATE SCHEMA app;
            CREATE TABLE app.g (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, arr int[], j json,
                                b int GENERATED ALWAYS AS (arr[5] * 2) STORED);
            INSERT INTO app.g (arr, j) VALUES ('[5:6]={7,8}', '{"b":1, "a":2, "a":3}'), ('{1}', '{}'), ('{2}', '[]');
            CREATE TABLE app.part (id int PRIMARY KEY, g int REFERENCES app.g ON DELETE CASCADE);
            CREATE TABLE app.ref (id int PRIMARY KEY, g int REFERENCES app.g ON DELETE SET NULL);
            INSERT INTO app.part VALUES (1, 1), (2, 2); INSERT INTO app.ref VALUES (1, 1), (2, 2);
            CREATE TABLE app.keyless (a int); INSERT INTO app.keyless VALUES (1), (1), (2);
        """)
        world.grant()
        tables = ("app.g", "app.part", "app.ref", "app.keyless")
        world.guard(*tables, mode="journal")
        before = world.contents(*tables)
        agent = world.task("t")
        action = world.act(agent, "DELETE FROM app.g WHERE id = 1")
        assert restore(world.op, action=action).rows == 3
        assert world.contents(*tables) == before
        world.act(agent, "DELETE FROM app.g")
        assert restore(world.op, table="app.g", keys=["1"]).rows == 3
        assert restore(world.op, table="app.g", where="j::text = '{}'").rows == 3
        assert restore(world.op, table="app.g", keys=["1", "3"]).rows == 1
        assert restore(world.op, table="app.g", keys=["1", "3"]).already_restored
        keyless = world.act(
            agent, "DELETE FROM app.keyless WHERE ctid IN (SELECT max(ctid) FROM app.keyless GROUP BY a)"
        )
        assert restore(world.op, action=keyless).rows == 2
        assert restore(world.op, action=keyless).already_restored
        assert world.contents(*tables) == before


def test_rows_that_refer_to_one_another(world: World) -> None:
    world.op.execute("""
        CREATE TABLE app.node (id int PRIMARY KEY, up int REFERENCES app.node ON DELETE CASCADE);
        INSERT INTO app.node VALUES (1, NULL), (2, 1), (3, 2), (4, 3), (9, NULL), (10, 9);
    """)
    world.grant()
    world.guard("app.node", mode="soft")
    before = world.contents("app.node")
    delete(world, "app.node", "id IN (1, 9)")
    assert live(world, "app.node") == []
    assert [c.reason for c in restore(world.op, table="app.node", keys=["3"]).conflicts] == [PARENT] * 2
    assert restore(world.op, table="app.node", keys=["1"]).rows == 4
    assert restore(world.op, table="app.node", keys=["9"], cascade=False).rows == 1
    assert restore(world.op, table="app.node", keys=["10"]).rows == 1
    assert world.contents("app.node") == before


def test_partitions(world: World) -> None:
    world.op.execute("""
        CREATE TABLE app.part (id int, at date, note text, PRIMARY KEY (id, at)) PARTITION BY RANGE (at);
        CREATE TABLE app.part_1 PARTITION OF app.part FOR VALUES FROM ('2024-01-01') TO ('2025-01-01');
        CREATE TABLE app.part_2 PARTITION OF app.part FOR VALUES FROM ('2025-01-01') TO ('2026-01-01');
        INSERT INTO app.part VALUES (1, '2024-02-02', 'a,b'), (1, '2025-02-02', 'c'), (2, '2025-02-02', 'd');
    """)
    world.grant()
    world.guard("app.part", mode="soft")
    before = world.contents("app.part")
    delete(world, "app.part", "id = 1")
    delete(world, "app.part_2", "id = 2")
    assert restore(world.op, table="app.part", keys=["1,2024-02-02", "1,2025-02-02"]).rows == 2
    assert restore(world.op, table="app.part", where="note = 'd'").rows == 1
    assert world.contents("app.part") == before


def test_rows_that_row_level_security_hides(world: World) -> None:
    world.op.execute("""
        ALTER TABLE app.usr FORCE ROW LEVEL SECURITY;
        CREATE POLICY mine ON app.usr AS RESTRICTIVE TO app_owner USING (name = 'nobody');
    """)
    action = delete(world, "app.usr", "id = 1")
    assert restore(world.op, table="app.usr", keys=["1"], preview=True).rows == 1
    assert restore(world.op, action=action).rows == 1
    forced = "SELECT relforcerowsecurity FROM pg_class WHERE oid = 'app.usr'::regclass"
    assert rows(world.op, forced) == [(True,)]


def test_what_can_not_be_asked(world: World) -> None:
    changed = world.act(world.agents[0], "UPDATE app.usr SET name = 'x' WHERE id = 1")
    asked: list[tuple[dict[str, Any], str]] = [
        ({}, "nothing was named"),
        ({"action": 1, "table": "app.usr"}, "nothing was named"),
        ({"table": "app.usr"}, "by keys or by a condition"),
        ({"table": "app.usr", "keys": ["1"], "where": "true"}, "by keys or by a condition"),
        ({"action": 4711}, "no action"),
        ({"action": changed}, "deleted nothing"),
        ({"table": "app.usr", "keys": ["77"]}, "no such deleted row"),
        ({"table": "app.usr", "keys": ["1", "77"]}, "no such deleted row"),
        ({"table": "app.nonesuch", "keys": ["1"]}, "no table"),
    ]
    for arguments, problem in asked:
        with pytest.raises(Refused, match=problem):
            restore(world.op, **arguments)
