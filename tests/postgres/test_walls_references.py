"""The walls among foreign keys and the application's own triggers, those that came later too."""

from collections.abc import Iterator

import psycopg
import pytest
from journaled import Agent, World, rows
from servers import Database
from wall_world import MARK, refused, walled

from sqlguard.postgres.guard_table import guard_table


@pytest.fixture
def walls(database: Database) -> Iterator[World]:
    with walled(database) as made:
        yield made


@pytest.fixture
def agent(walls: World) -> Agent:
    return walls.task("one")


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
