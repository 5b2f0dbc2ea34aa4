"""The table walls, with nothing in front of them: a task's own role talks to PostgreSQL directly."""

from collections.abc import Iterator

import pytest
from journaled import Agent, World, rows
from servers import Database
from wall_world import MARK, changes, refused, walled

from sqlguard.errors import GuardError
from sqlguard.postgres.guard_table import guard_table


@pytest.fixture
def walls(database: Database) -> Iterator[World]:
    with walled(database) as made:
        yield made


@pytest.fixture
def agent(walls: World) -> Agent:
    return walls.task("one")


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


def test_reading_is_left_alone_for_everyone_else(walls: World, agent: Agent) -> None:
    agent.conn.execute(f"UPDATE app.customer SET {MARK} WHERE id = 1")
    walls.op.execute(
        "CREATE ROLE sg_reader LOGIN PASSWORD 'x'; GRANT USAGE ON SCHEMA app TO sg_reader;"
        "GRANT SELECT ON app.customer TO sg_reader"
    )
    reader = walls.database.connect(walls.database.dsn_for("sg_reader", "x"))
    assert rows(reader, "SELECT count(*) FROM app.customer") == [(40,)]


def test_autocommit_is_asked_for(walls: World) -> None:
    with (
        walls.database.connect(walls.database.owner_dsn, autocommit=False) as conn,
        pytest.raises(GuardError),
    ):
        guard_table(conn, "app.log")
