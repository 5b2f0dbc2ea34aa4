"""The table walls, with nothing in front of them: a task's own role talks to PostgreSQL directly."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from journaled import Agent, World, rows, world
from servers import Database

from sqlguard.errors import GuardError
from sqlguard.postgres.guard_table import guard_table

MARK = "deleted_at = pg_catalog.statement_timestamp(), deleted_by_agent = (SELECT sqlguard.agent())"
TABLES = """
CREATE SCHEMA app;
CREATE TABLE app.customer (id int PRIMARY KEY, email text UNIQUE, note text);
CREATE TABLE app.invoice (id int PRIMARY KEY, customer_id int REFERENCES app.customer ON DELETE CASCADE, total numeric);
CREATE TABLE app.log (id int PRIMARY KEY, what text);
CREATE TABLE app.loose (a int, b text);
INSERT INTO app.customer SELECT g, 'e' || g, 'n' FROM generate_series(1, 40) g;
INSERT INTO app.invoice SELECT g, 1 + g % 40, g FROM generate_series(1, 80) g;
INSERT INTO app.log SELECT g, 'x' FROM generate_series(1, 40) g;
INSERT INTO app.loose VALUES (1, 'x'), (1, 'x'), (2, 'y');
CREATE FUNCTION app.purge() RETURNS bigint LANGUAGE sql SECURITY DEFINER
    AS 'WITH d AS (DELETE FROM app.log WHERE id <= 3 RETURNING 1) SELECT count(*) FROM d';
CREATE FUNCTION app.revive() RETURNS void LANGUAGE plpgsql SECURITY DEFINER
    AS 'BEGIN UPDATE app.customer SET deleted_at = NULL, deleted_by_agent = NULL WHERE id = 1; END';
CREATE TABLE app.tree (id int, kind text, v text, PRIMARY KEY (id, kind)) PARTITION BY LIST (kind);
CREATE TABLE app.tree_a PARTITION OF app.tree FOR VALUES IN ('a');
CREATE TABLE app.tree_b (v text, kind text NOT NULL, id int NOT NULL);
ALTER TABLE app.tree ATTACH PARTITION app.tree_b FOR VALUES IN ('b');
INSERT INTO app.tree SELECT g, CASE WHEN g % 2 = 0 THEN 'a' ELSE 'b' END, 'v' FROM generate_series(1, 8) g;
CREATE TABLE app.base (id int PRIMARY KEY, v text);
CREATE TABLE app.sub (extra text, PRIMARY KEY (id)) INHERITS (app.base);
INSERT INTO app.base VALUES (1, 'b'); INSERT INTO app.sub VALUES (2, 's', 'only here');
"""


@pytest.fixture
def walls(database: Database) -> Iterator[World]:
    with world(database) as made:
        made.op.execute(TABLES)
        made.guard("app.customer", "app.tree", "app.base", mode="soft")
        made.guard("app.log", "app.loose", mode="journal")
        made.op.execute("UPDATE sqlguard.policy_table SET max_rows = 20, max_share = 0.5")
        made.grant()
        made.op.execute("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA app TO PUBLIC")
        yield made


@pytest.fixture
def agent(walls: World) -> Agent:
    return walls.task("one")


def refused(agent: Agent, text: str) -> str | None:
    with pytest.raises(psycopg.Error) as caught:
        agent.conn.execute(text.encode())
    return caught.value.sqlstate


def changes(walls: World) -> list[tuple[Any, ...]]:
    return rows(walls.op, "SELECT table_name, op, rows FROM sqlguard.change_set ORDER BY id")


def images(walls: World) -> list[tuple[Any, ...]]:
    return rows(
        walls.op,
        "SELECT r.key, r.new_key, r.before FROM sqlguard.row_change r ORDER BY r.change_set_id, r.key, r.id",
    )


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


@pytest.mark.parametrize(
    "text",
    [
        "UPDATE app.customer SET deleted_at = now() WHERE id = 2",
        f"UPDATE app.customer SET {MARK}, note = 'smuggled' WHERE id = 2",
        "UPDATE app.customer SET deleted_at = statement_timestamp(), deleted_by_agent = 'someone' WHERE id = 2",
        "UPDATE app.customer SET deleted_by_agent = 'someone' WHERE id = 2",
        "UPDATE app.customer SET deleted_at = NULL, deleted_by_agent = 'x' WHERE id = 2",
        "INSERT INTO app.customer (id, deleted_at) VALUES (99, now())",
        "INSERT INTO app.customer (id, deleted_by_agent) VALUES (99, 'x')",
        "SELECT app.revive()",
        "TRUNCATE app.log",
        "TRUNCATE app.customer CASCADE",
    ],
)
def test_bookkeeping_can_t_be_forged(walls: World, agent: Agent, text: str) -> None:
    agent.conn.execute(f"UPDATE app.customer SET {MARK} WHERE id = 1")
    before = walls.copy("app.customer")
    assert refused(agent, text) in ("SG002", "42501")
    assert walls.copy("app.customer") == before


def test_an_agent_is_named_by_the_database(walls: World, agent: Agent) -> None:
    agent.conn.execute(f"UPDATE app.customer SET {MARK} WHERE id = 1")
    assert rows(walls.op, "SELECT deleted_by_agent FROM app.customer WHERE id = 1") == [("bot",)]
    assert rows(agent.conn, "SELECT count(*) FROM app.customer") == [(39,)]


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("SELECT id FROM app.customer WHERE email = 'e7'", "customer_email_key"),
        ("SELECT id FROM app.customer WHERE email > 'e7' ORDER BY email", "customer_email_key"),
        ("SELECT c.id FROM app.log l JOIN app.customer c ON c.email = l.what", "customer_email_key"),
        ("SELECT id FROM app.customer WHERE note = 'n'", "live_note"),
        ("UPDATE app.customer SET note = 'x' WHERE email = 'e7'", "customer_email_key"),
        (f"UPDATE app.customer SET {MARK} WHERE email = 'e7'", "customer_email_key"),
    ],
)
def test_indexes_of_live_rows_are_used(walls: World, agent: Agent, text: str, index: str) -> None:
    if index == "live_note":
        walls.op.execute("CREATE INDEX live_note ON app.customer (note) WHERE deleted_at IS NULL")
    agent.conn.execute("SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off")
    plan = "\n".join(row[0] for row in rows(agent.conn, f"EXPLAIN {text}"))
    assert index in plan
    # Its condition is inferred, not left to be tried as one of two.
    assert "statement_timestamp" not in plan or text.startswith(f"UPDATE app.customer SET {MARK}")


def test_a_statement_executed_by_name_may_mark_rows(walls: World, agent: Agent) -> None:
    agent.conn.execute(f"PREPARE gone AS UPDATE app.customer SET {MARK} WHERE email = 'e7' RETURNING id")
    agent.conn.execute("EXPLAIN EXECUTE gone")
    assert rows(agent.conn, "EXECUTE gone") == [(7,)]
    assert rows(agent.conn, "EXECUTE gone") == []
    assert rows(agent.conn, "SELECT count(*) FROM app.customer WHERE email = 'e7'") == [(0,)]


def test_a_plan_kept_from_before_is_right(walls: World, agent: Agent) -> None:
    agent.conn.prepare_threshold = 0
    text = f"UPDATE app.customer SET {MARK} WHERE id = 3 RETURNING id"
    agent.conn.execute("BEGIN READ ONLY")
    assert refused(agent, text) == "25006"
    agent.conn.execute("ROLLBACK")
    assert rows(agent.conn, text) == [(3,)]
    assert rows(agent.conn, text) == []


def test_a_policy_without_soft_delete_can_t(walls: World, agent: Agent) -> None:
    walls.op.execute("UPDATE sqlguard.policy_table SET delete_mode = 'refuse'")
    assert refused(agent, f"UPDATE app.customer SET {MARK} WHERE id = 1") == "42501"


def test_caps_count_cascades(walls: World, agent: Agent) -> None:
    """12 customers with 2 invoices each are 36 rows; 20 are allowed."""
    walls.op.execute("UPDATE sqlguard.policy_table SET max_share = 1")
    assert refused(agent, f"UPDATE app.customer SET {MARK} WHERE id <= 12") == "SG006"
    agent.conn.execute(f"UPDATE app.customer SET {MARK} WHERE id <= 6")
    assert changes(walls) == [("customer", "soft_delete", 6), ("invoice", "soft_delete", 12)]


def test_caps_count_a_share_of_the_live_rows(walls: World, agent: Agent) -> None:
    walls.op.execute("UPDATE sqlguard.policy_table SET max_rows = NULL")
    assert refused(agent, "DELETE FROM app.log WHERE id <= 21") == "SG006"
    agent.conn.execute("DELETE FROM app.log WHERE id <= 20")
    assert refused(agent, "UPDATE app.log SET what = 'y'") == "SG006"
    agent.conn.execute("INSERT INTO app.log SELECT g, 'n' FROM generate_series(100, 200) g")


def test_an_approval_alone_lifts_no_cap(walls: World, agent: Agent) -> None:
    """A plan does, for its own rows: tests/postgres/test_plans.py."""
    action = walls.op.execute(
        "INSERT INTO sqlguard.action (task_id, role, agent, policy, policy_version)"
        " VALUES ('one', 'sg_tk_one', 'bot', 'tester', 1) RETURNING id"
    ).fetchone()
    assert action is not None
    agent.conn.execute(f"SET sqlguard.action = '{action[0]}'")
    walls.op.execute("INSERT INTO sqlguard.event (action_id, kind) VALUES (%s, 'approved')", [action[0]])
    assert refused(agent, "DELETE FROM app.log") == "SG006"
    agent.conn.execute("SET sqlguard.plan = 'on'")
    assert refused(agent, "DELETE FROM app.log") == "SG006"


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


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
def test_a_freeze_stops_open_transactions_too(walls: World, agent: Agent, level: str) -> None:
    agent.conn.execute(f"BEGIN ISOLATION LEVEL {level}")
    agent.conn.execute("UPDATE app.log SET what = 'y' WHERE id = 1")
    walls.op.execute("INSERT INTO sqlguard.freeze (reason) VALUES ('release')")
    assert refused(agent, "UPDATE app.log SET what = 'y' WHERE id = 2") == (
        "SG005" if level == "READ COMMITTED" else "40001"
    )
    agent.conn.execute("ROLLBACK")
    assert refused(agent, "UPDATE app.log SET what = 'y' WHERE id = 2") == "SG005"
    walls.op.execute("UPDATE sqlguard.freeze SET thawed_at = now()")
    agent.conn.execute("UPDATE app.log SET what = 'y' WHERE id = 2")


def test_a_freeze_of_one_table(walls: World, agent: Agent) -> None:
    walls.op.execute("INSERT INTO sqlguard.freeze (reason, tables) VALUES ('release', '{app.tree}')")
    agent.conn.execute("UPDATE app.log SET what = 'y' WHERE id = 2")
    assert refused(agent, "UPDATE app.tree_a SET v = 'y' WHERE id = 2") == "SG005"


@pytest.mark.parametrize(
    "ending",
    [
        "UPDATE sqlguard.task SET state = 'ended'",
        "UPDATE sqlguard.lease SET state = 'ending'",
        "UPDATE sqlguard.task SET expires_at = now()",
        "DELETE FROM sqlguard.lease",
    ],
)
def test_an_ended_task_can_t_write(walls: World, agent: Agent, ending: str) -> None:
    walls.op.execute(ending.encode())
    assert refused(agent, "UPDATE app.log SET what = 'y' WHERE id = 1") == "SG004"
    assert refused(agent, "UPDATE app.log SET what = 'y' WHERE false") == "SG004"


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


def test_checks_wait_for_cascades_that_were_there_first(walls: World, agent: Agent) -> None:
    """A restricting reference among rows that the same delete takes away does not hinder it."""
    walls.op.execute(
        "CREATE TABLE app.a (id int PRIMARY KEY);"
        "CREATE TABLE app.b (id int PRIMARY KEY, a int REFERENCES app.a ON DELETE CASCADE);"
        "CREATE TABLE app.c (id int PRIMARY KEY, a int REFERENCES app.a ON DELETE CASCADE,"
        " b int REFERENCES app.b ON DELETE RESTRICT);"
        "INSERT INTO app.a VALUES (1); INSERT INTO app.b VALUES (1, 1); INSERT INTO app.c VALUES (1, 1, 1)"
    )
    walls.guard("app.a", mode="soft")
    walls.grant()
    agent.conn.execute(f"UPDATE app.a SET {MARK} WHERE id = 1")
    assert rows(agent.conn, "SELECT (SELECT count(*) FROM app.b), (SELECT count(*) FROM app.c)") == [(0, 0)]


def test_a_trigger_of_the_application_can_t_change_a_row_while_it_is_deleted(
    walls: World, agent: Agent
) -> None:
    walls.op.execute(
        "CREATE FUNCTION app.touch() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN NEW.b := 'touched'; RETURN NEW; END$$;"
        "CREATE TABLE app.touched (id int PRIMARY KEY, b text); INSERT INTO app.touched VALUES (1, 'as it was');"
        "CREATE TRIGGER touch BEFORE UPDATE ON app.touched FOR EACH ROW EXECUTE FUNCTION app.touch()"
    )
    walls.guard("app.touched", mode="soft")
    walls.grant()
    agent.conn.execute(f"UPDATE app.touched SET {MARK} WHERE id = 1")
    assert rows(walls.op, "SELECT b, deleted_by_agent FROM app.touched") == [("as it was", "bot")]


def test_deferred_checks_follow_set_constraints(walls: World, agent: Agent) -> None:
    walls.op.execute(
        "CREATE TABLE app.p (id int PRIMARY KEY);"
        "CREATE TABLE app.ch (id int PRIMARY KEY, p int CONSTRAINT ch_p REFERENCES app.p DEFERRABLE);"
        "INSERT INTO app.p VALUES (1); INSERT INTO app.ch VALUES (1, 1)"
    )
    walls.guard("app.p", "app.ch", mode="soft")
    walls.grant()
    assert refused(agent, f"UPDATE app.p SET {MARK} WHERE id = 1") == "23503"
    with agent.conn.transaction():
        agent.conn.execute("SET CONSTRAINTS app.ch_p DEFERRED")
        agent.conn.execute(f"UPDATE app.p SET {MARK} WHERE id = 1")
        agent.conn.execute(f"UPDATE app.ch SET {MARK} WHERE id = 1")
    assert rows(walls.op, "SELECT count(*) FROM app.p WHERE deleted_at IS NOT NULL") == [(1,)]


def test_the_application_can_t_add_children_to_a_deleted_parent(walls: World, agent: Agent) -> None:
    agent.conn.execute(f"UPDATE app.customer SET {MARK} WHERE id = 1")
    for text in (
        "INSERT INTO app.invoice VALUES (999, 1, 1)",
        "UPDATE app.invoice SET customer_id = 1 WHERE id = 5",
    ):
        with pytest.raises(psycopg.errors.ForeignKeyViolation) as caught:
            walls.op.execute(text.encode())
        assert caught.value.diag.constraint_name == "invoice_customer_id_fkey"


def test_reading_is_left_alone_for_everyone_else(walls: World, agent: Agent) -> None:
    agent.conn.execute(f"UPDATE app.customer SET {MARK} WHERE id = 1")
    walls.op.execute(
        "CREATE ROLE sg_reader LOGIN PASSWORD 'x'; GRANT USAGE ON SCHEMA app TO sg_reader;"
        "GRANT SELECT ON app.customer TO sg_reader"
    )
    reader = walls.database.connect(walls.database.dsn_for("sg_reader", "x"))
    assert rows(reader, "SELECT count(*) FROM app.customer") == [(40,)]


def test_a_table_that_is_reached_is_guarded_too(walls: World) -> None:
    assert rows(
        walls.op,
        "SELECT table_name, mode FROM sqlguard.guarded_table WHERE table_name IN ('customer', 'invoice')",
    ) == [("invoice", "soft"), ("customer", "soft")]


def test_a_cascade_into_an_unguarded_table_is_refused(walls: World, agent: Agent) -> None:
    """A key that was added after guarding."""
    walls.op.execute(
        "CREATE TABLE app.late (id int PRIMARY KEY, customer int REFERENCES app.customer ON DELETE CASCADE);"
        "INSERT INTO app.late VALUES (1, 1)"
    )
    assert refused(agent, f"UPDATE app.customer SET {MARK} WHERE id = 1") == "SG002"
    guard_table(walls.op, "app.customer")
    agent.conn.execute(f"UPDATE app.customer SET {MARK} WHERE id = 1")


def test_autocommit_is_asked_for(walls: World) -> None:
    with (
        walls.database.connect(walls.database.owner_dsn, autocommit=False) as conn,
        pytest.raises(GuardError),
    ):
        guard_table(conn, "app.log")


def test_a_trigger_that_came_after_the_guard_is_found(walls: World, agent: Agent) -> None:
    walls.op.execute(
        "CREATE FUNCTION app.touch() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN NEW.note := ''touched''; RETURN NEW; END';"
        "CREATE TRIGGER touch BEFORE UPDATE ON app.customer FOR EACH ROW EXECUTE FUNCTION app.touch()"
    )
    text = f"UPDATE app.customer SET {MARK} WHERE id = 1"
    assert refused(agent, text) == "SG002"
    walls.guard("app.customer", mode="soft")
    agent.conn.execute(text.encode())
    assert rows(walls.op, "SELECT note FROM app.customer WHERE id = 1") == [("n",)]


def test_keys_that_came_after_the_guard_hold(walls: World, agent: Agent) -> None:
    """What is looked up when rows are deleted is right at once; the checks of new children come with the next guard."""
    walls.op.execute(
        "CREATE TABLE app.visit (id int PRIMARY KEY, customer_id int REFERENCES app.customer ON DELETE RESTRICT);"
        "CREATE TABLE app.stay (id int PRIMARY KEY, customer_id int"
        " REFERENCES app.customer DEFERRABLE INITIALLY DEFERRED);"
        "CREATE TABLE app.trip (id int PRIMARY KEY, customer_id int REFERENCES app.customer ON DELETE CASCADE);"
        "INSERT INTO app.visit VALUES (1, 1); INSERT INTO app.stay VALUES (1, 2); INSERT INTO app.trip VALUES (1, 3)"
    )
    for customer, state in ((1, "23503"), (2, "23503"), (3, "SG002"), (4, None)):
        text = f"UPDATE app.customer SET {MARK} WHERE id = {customer}"
        if state is None:
            agent.conn.execute(text.encode())
        else:
            assert refused(agent, text) == state
    walls.guard("app.customer", mode="soft")
    with pytest.raises(psycopg.errors.ForeignKeyViolation):
        walls.op.execute("INSERT INTO app.visit VALUES (2, 4)")
    agent.conn.execute(f"UPDATE app.customer SET {MARK} WHERE id = 3".encode())
    assert rows(walls.op, "SELECT deleted_by_agent FROM app.trip") == [("bot",)]
    agent.conn.execute("BEGIN")
    agent.conn.execute(f"UPDATE app.customer SET {MARK} WHERE id = 2".encode())
    assert refused(agent, "COMMIT") == "23503"
