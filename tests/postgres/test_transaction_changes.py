"""What a task's session can ask about its own transaction: counts per table, and samples without secrets."""

from collections.abc import Iterator

import pytest
from journaled import World, rows
from journaled import world as made_world
from servers import Database

CHANGES = "SELECT schema_name, table_name, op, rows FROM sqlguard.transaction_changes()"
SAMPLES = "SELECT table_name, op, key, before, after FROM sqlguard.transaction_samples(%s)"


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with made_world(database) as made:
        made.op.execute(
            """
            CREATE SCHEMA app;
            CREATE TABLE app.parent (id int PRIMARY KEY, n int, secret text);
            CREATE TABLE app.child (a int, b text, p int REFERENCES app.parent ON DELETE CASCADE, PRIMARY KEY (a, b));
            INSERT INTO app.parent VALUES (1, 10, 's'), (2, 20, 's'), (3, 30, 's');
            INSERT INTO app.child VALUES (1, 'x', 1), (2, 'y', 1)
            """
        )
        made.grant()
        made.op.execute(
            "REVOKE SELECT ON app.parent FROM sg_po_tester_1; GRANT SELECT (id, n) ON app.parent TO sg_po_tester_1"
        )
        made.guard("app.parent", "app.child")
        yield made


def test_counts_and_samples_of_the_transaction(world: World) -> None:
    conn = world.task("t").conn
    other = world.task("u").conn
    assert rows(conn, CHANGES) == []
    with conn.transaction():
        conn.execute("SELECT set_config('sqlguard.action', '', true)")
        conn.execute("DELETE FROM app.parent WHERE id = 1")
        conn.execute("UPDATE app.parent SET n = n + 1")
        conn.execute("UPDATE app.parent SET id = 30 WHERE id = 3")
        conn.execute("INSERT INTO app.child VALUES (9, 'z', 2)")
        assert rows(conn, CHANGES) == [
            ("app", "parent", "delete", 1),
            ("app", "child", "delete", 2),
            ("app", "parent", "update", 2),
            ("app", "parent", "rekey", 1),
            ("app", "child", "insert", 1),
        ]
        assert rows(other, CHANGES) == []
        assert rows(conn, SAMPLES, [1]) == [
            ("parent", "delete", ["1"], {"id": 1, "n": 10}, None),
            ("child", "delete", ["1", "x"], {"a": 1, "b": "x", "p": 1}, None),
            ("parent", "update", ["2"], {"id": 2, "n": 20}, {"id": 2, "n": 21}),
            ("parent", "rekey", ["3"], {"id": 3, "n": 31}, {"id": 30, "n": 31}),
            ("child", "insert", ["9", "z"], None, {"a": 9, "b": "z", "p": 2}),
        ]
    assert rows(conn, CHANGES) == []
    assert rows(conn, SAMPLES, [5]) == []


def test_columns_that_the_task_may_not_read_are_not_in_a_sample(world: World) -> None:
    conn = world.task("t").conn
    world.op.execute(
        "REVOKE SELECT ON app.parent FROM sg_po_tester_1; REVOKE SELECT (id, n) ON app.parent FROM sg_po_tester_1"
    )
    with conn.transaction():
        conn.execute("INSERT INTO app.parent VALUES (7, 7, 'mine')")
        assert rows(conn, SAMPLES, [5]) == [("parent", "insert", None, None, None)]


@pytest.mark.parametrize("narrowed", ["", "columns", "rows", "columns and rows"])
def test_columns_of_any_name_are_shown_and_no_row_outside_the_scope(world: World, narrowed: str) -> None:
    world.op.execute(
        """
        CREATE TABLE app.odd (id int PRIMARY KEY, "key" text, "before" text, r text, "sg row" text, "50%" text, h text);
        INSERT INTO app.odd VALUES (1, 'k', 'b', 'r', 's', '%s', 'h'), (2, 'k', 'b', 'r', 's', 'other', 'h');
        CREATE FUNCTION app.changes() RETURNS void LANGUAGE sql SECURITY DEFINER AS $$ UPDATE app.odd SET "before" = 'B' $$
        """
    )
    world.grant()
    world.guard("app.odd")
    if "columns" in narrowed:
        world.op.execute(
            "REVOKE SELECT ON app.odd FROM sg_po_tester_1;"
            ' GRANT SELECT (id, "key", "before", r, "sg row", "50%") ON app.odd TO sg_po_tester_1'
        )
    if "rows" in narrowed:
        world.op.execute(
            "ALTER TABLE app.odd ENABLE ROW LEVEL SECURITY;"
            """CREATE POLICY scope ON app.odd TO sg_po_tester_1 USING ("50%" LIKE '\\%%')"""
        )
    conn = world.task("t").conn
    row = {"id": 1, "key": "k", "before": "b", "r": "r", "sg row": "s", "50%": "%s"}
    row |= {} if "columns" in narrowed else {"h": "h"}
    wanted = [("odd", "update", ["1"], row, row | {"before": "B"})]
    if "rows" not in narrowed:
        other = row | {"id": 2, "50%": "other"}
        wanted.append(("odd", "update", ["2"], other, other | {"before": "B"}))
    with conn.transaction():
        conn.execute("SELECT app.changes()")
        assert sorted(rows(conn, SAMPLES, [5]), key=lambda found: str(found[2])) == wanted
