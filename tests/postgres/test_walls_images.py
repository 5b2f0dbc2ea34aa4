"""What the walls write down of a task's changes: whose they are, every row once, as it was before."""

from collections.abc import Iterator

import pytest
from journaled import Agent, World, rows
from servers import Database
from wall_world import MARK, changes, images, walled


@pytest.fixture
def walls(database: Database) -> Iterator[World]:
    with walled(database) as made:
        yield made


@pytest.fixture
def agent(walls: World) -> Agent:
    return walls.task("one")


def test_a_definer_function_is_captured(walls: World, agent: Agent) -> None:
    assert rows(agent.conn, "SELECT app.purge()") == [(3,)]
    assert changes(walls) == [("log", "delete", 3)]
    assert images(walls) == [(["1"], None, "(1,x)"), (["2"], None, "(2,x)"), (["3"], None, "(3,x)")]


def test_set_role_does_not_escape(walls: World, agent: Agent) -> None:
    agent.conn.execute("SET ROLE sg_po_tester_1")
    agent.conn.execute("UPDATE app.log SET what = 'y' WHERE id = 9")
    assert changes(walls) == [("log", "update", 1)]


def test_the_owner_is_not_captured(walls: World) -> None:
    walls.op.execute(
        "UPDATE app.log SET what = 'mine'; DELETE FROM app.customer WHERE id > 20; TRUNCATE app.log"
    )
    assert changes(walls) == []


def test_another_task_s_action_is_not_taken(walls: World, agent: Agent) -> None:
    other = walls.task("two")
    action = walls.act(other, "UPDATE app.log SET what = 'two' WHERE id = 1")
    agent.conn.execute(f"SET sqlguard.action = '{action}'")
    agent.conn.execute("UPDATE app.log SET what = 'one' WHERE id = 2")
    agent.conn.execute("SET sqlguard.action = 'no number'")
    agent.conn.execute("UPDATE app.log SET what = 'one' WHERE id = 3")
    assert rows(walls.op, "SELECT task_id, action_id FROM sqlguard.change_set ORDER BY id") == [
        ("two", action),
        ("one", None),
        ("one", None),
    ]


def test_keys_that_change_are_paired(walls: World, agent: Agent) -> None:
    agent.conn.execute("UPDATE app.log SET id = id + 100 WHERE id <= 3")
    assert changes(walls) == [("log", "rekey", 3)]
    assert images(walls) == [
        (["1"], ["101"], "(1,x)"),
        (["2"], ["102"], "(2,x)"),
        (["3"], ["103"], "(3,x)"),
    ]


def test_partitions_are_one_table(walls: World, agent: Agent) -> None:
    """Addressed through the root or directly, also rows that move, and partitions with another column order."""
    agent.conn.execute("UPDATE app.tree SET kind = 'b' WHERE id IN (2, 4)")
    agent.conn.execute("UPDATE app.tree_b SET v = 'w' WHERE id = 2")
    agent.conn.execute(f"UPDATE app.tree SET {MARK} WHERE id = 6")
    agent.conn.execute(f"UPDATE app.tree_b SET {MARK} WHERE id = 1")
    assert changes(walls) == [
        ("tree", "rekey", 2),
        ("tree_b", "update", 1),
        ("tree", "soft_delete", 1),
        ("tree_b", "soft_delete", 1),
    ]
    assert images(walls)[:3] == [
        (["2", "a"], ["2", "b"], "(2,a,v,,)"),
        (["4", "a"], ["4", "b"], "(4,a,v,,)"),
        (["2", "b"], None, "(v,b,2,,)"),
    ]
    assert rows(agent.conn, "SELECT id FROM app.tree ORDER BY 1") == [(2,), (3,), (4,), (5,), (7,), (8,)]


def test_inheritance_keeps_the_columns_of_children(walls: World, agent: Agent) -> None:
    agent.conn.execute("UPDATE app.base SET v = 'changed'")
    assert sorted(images(walls)) == [
        (["1"], None, "(1,b,,)"),
        (["2"], None, '(2,s,,,"only here")'),
    ] or sorted(images(walls)) == [(["1"], None, "(1,b,,)"), (["2"], None, '(2,s,"only here",,)')]
    agent.conn.execute(f"UPDATE app.base SET {MARK}")
    assert rows(agent.conn, "SELECT count(*) FROM app.base") == [(0,)]


def test_rows_without_a_key_keep_their_image(walls: World, agent: Agent) -> None:
    agent.conn.execute("DELETE FROM app.loose WHERE a = 1")
    assert images(walls) == [(None, None, "(1,x)"), (None, None, "(1,x)")]


def test_an_image_knows_the_columns_it_was_written_with(walls: World, agent: Agent) -> None:
    agent.conn.execute("UPDATE app.log SET what = 'y' WHERE id = 1")
    walls.op.execute("ALTER TABLE app.log ADD COLUMN more int DEFAULT 7, ALTER COLUMN what TYPE varchar(9)")
    agent.conn.execute("UPDATE app.log SET what = 'z' WHERE id = 1")
    found = rows(
        walls.op,
        "SELECT s.columns, s.types, r.before FROM sqlguard.change_set c JOIN sqlguard.shape s ON s.id = c.shape_id"
        " JOIN sqlguard.row_change r ON r.change_set_id = c.id ORDER BY c.id",
    )
    assert found == [
        (["id", "what"], ["integer", "text"], "(1,x)"),
        (["id", "what", "more"], ["integer", "character varying(9)", "integer"], "(1,y,7)"),
    ]


def test_images_do_not_follow_the_session_s_settings(walls: World, agent: Agent) -> None:
    walls.op.execute(
        "CREATE TABLE app.odd (id int PRIMARY KEY, t timestamptz, i interval, f float8, b bytea, text text);"
        "INSERT INTO app.odd VALUES (1, '2024-03-31 01:30+00', '1 mon 2 days', 0.1, '\\x00ff', 'x')"
    )
    walls.guard("app.odd")
    walls.grant()
    agent.conn.execute(
        "SET DateStyle = 'German'; SET TimeZone = 'Asia/Kolkata'; SET IntervalStyle = 'iso_8601';"
        "SET extra_float_digits = -15; SET bytea_output = 'escape'"
    )
    agent.conn.execute("DELETE FROM app.odd")
    assert images(walls) == [(["1"], None, r'(1,"2024-03-31 01:30:00+00","1 mon 2 days",0.1,"\\x00ff",x)')]


def test_merge_deletes_and_changes_in_one_statement(walls: World, agent: Agent) -> None:
    agent.conn.execute(
        "MERGE INTO app.customer c USING (VALUES (1), (2), (3)) AS s (id) ON c.id = s.id"
        f" WHEN MATCHED AND c.id < 3 THEN UPDATE SET {MARK}"
        " WHEN MATCHED THEN UPDATE SET note = 'kept'"
    )
    assert changes(walls) == [
        ("customer", "soft_delete", 2),
        ("invoice", "soft_delete", 4),
        ("customer", "update", 1),
    ]
