"""`SET sqlguard.dry_run = on` in every protocol and inside blocks: everything is told, nothing is changed."""

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from end_to_end.wired import Agent, Wired
from psycopg import pq


class Told:
    """A connection and the reports that it was sent."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self.conn = conn
        self.notices: list[tuple[str, str]] = []
        # A diagnostic is only good while it is handled.
        conn.add_notice_handler(
            lambda n: self.notices.append((n.message_primary or "", n.message_detail or ""))
        )

    def reports(self) -> list[dict[tuple[str, str], int]]:
        found = [
            {(a["table"], a["op"]): a["rows"] for a in json.loads(detail)["affected"]}
            for text, detail in self.notices
            if text.startswith("dry run")
        ]
        self.notices.clear()
        return found


@pytest.fixture
def told(agent: Agent) -> Iterator[Told]:
    with agent.connect() as conn:
        yield Told(conn)


CASCADE = {
    ("public.customers", "soft_delete"): 1,
    ("public.orders", "soft_delete"): 4,
}


@pytest.mark.parametrize("mode", ["simple", "extended", "prepared", "pipeline", "sql"])
def test_a_write_is_told_and_not_done(wired_world: Wired, told: Told, mode: str) -> None:
    before = wired_world.dump()
    conn = told.conn
    conn.execute("SET sqlguard.dry_run = on")
    sql, cursor = "DELETE FROM customers WHERE id = %s RETURNING id", conn.cursor()
    if mode == "simple":
        cursor.execute("DELETE FROM customers WHERE id = 130 RETURNING id")
    elif mode == "pipeline":
        with conn.pipeline():
            cursor.execute(sql, [130])
    elif mode == "sql":
        conn.execute("PREPARE gone(int) AS DELETE FROM customers WHERE id = $1 RETURNING id")
        cursor.execute("EXECUTE gone(130)")
    else:
        cursor.execute(sql, [130], prepare=mode == "prepared")
    assert (cursor.statusmessage, cursor.fetchall()) == ("DELETE 1", [(130,)])
    (report,) = told.reports()
    assert CASCADE.items() <= report.items()
    assert conn.info.transaction_status == pq.TransactionStatus.IDLE
    assert conn.execute("SELECT count(*) FROM customers WHERE id = 130").fetchone() == (1,)
    assert wired_world.dump() == before


def test_a_block_is_one_preview(wired_world: Wired, told: Told) -> None:
    before = wired_world.dump()
    conn = told.conn
    conn.execute("SET sqlguard.dry_run = on")
    with conn.transaction():
        conn.execute("DELETE FROM customers WHERE id = 131")
        conn.execute("UPDATE orders SET note = %s WHERE id = 1", ["x"])
        assert conn.execute("SELECT count(*) FROM customers WHERE id = 131").fetchone() == (0,)
    reports = told.reports()
    assert len(reports) == 3
    assert reports[0].items() >= CASCADE.items()
    assert reports[1] == {("public.orders", "update"): 1}
    assert reports[2].items() >= {**CASCADE, ("public.orders", "update"): 1}.items()
    assert wired_world.dump() == before


@pytest.mark.parametrize("local", ["", "LOCAL "])
@pytest.mark.parametrize("extended", [False, True])
def test_turned_on_inside_a_block(wired_world: Wired, told: Told, local: str, extended: bool) -> None:  # noqa: FBT001
    before = wired_world.dump()
    conn = told.conn
    conn.execute("BEGIN")
    conn.execute(f"SET {local}sqlguard.dry_run = on")
    if extended:
        conn.execute("DELETE FROM customers WHERE id = %s", [132])
    else:
        conn.execute("DELETE FROM customers WHERE id = 132")
    conn.execute("COMMIT")
    assert len(told.reports()) == 2
    assert wired_world.dump() == before
    if local:
        assert conn.execute("UPDATE orders SET note = 'real' WHERE id = 70").statusmessage == "UPDATE 1"
        assert wired_world.value("SELECT note FROM orders WHERE id = 70") == "real"
    else:
        conn.execute("UPDATE orders SET note = 'real' WHERE id = 70")
        assert wired_world.value("SELECT note FROM orders WHERE id = 70") is None


@pytest.mark.parametrize("extended", [False, True])
def test_in_a_block_that_has_written_only_the_statement_is_taken_back(
    wired_world: Wired,
    told: Told,
    extended: bool,  # noqa: FBT001
) -> None:
    conn = told.conn
    conn.execute("BEGIN")
    conn.execute("UPDATE orders SET note = 'real' WHERE id = 71")
    conn.execute("SET sqlguard.dry_run = on")
    if extended:
        cursor = conn.execute("DELETE FROM customers WHERE id = %s RETURNING id", [133])
    else:
        cursor = conn.execute("DELETE FROM customers WHERE id = 133 RETURNING id")
    assert (cursor.statusmessage, cursor.fetchall()) == ("DELETE 1", [(133,)])
    assert conn.execute("SELECT count(*) FROM customers WHERE id = 133").fetchone() == (1,)
    conn.execute("COMMIT")
    (report,) = told.reports()
    assert CASCADE.items() <= report.items()
    assert wired_world.value("SELECT note FROM orders WHERE id = 71") == "real"
    assert wired_world.value("SELECT count(*) FROM customers WHERE id = 133 AND deleted_at IS NULL") == 1


def test_a_message_of_several(wired_world: Wired, told: Told) -> None:
    before = wired_world.dump()
    conn = told.conn
    conn.execute("SET sqlguard.dry_run = on")
    conn.execute("DELETE FROM customers WHERE id = 134; UPDATE orders SET note = 'x' WHERE id = 1; SELECT 1")
    assert len(told.reports()) == 1
    conn.execute("BEGIN; DELETE FROM customers WHERE id = 134; COMMIT")
    assert len(told.reports()) == 1
    conn.execute(
        "SELECT 1; BEGIN; DELETE FROM customers WHERE id = 134; COMMIT; DELETE FROM customers WHERE id = 135"
    )
    assert len(told.reports()) == 2
    conn.execute("BEGIN")
    conn.execute("DELETE FROM customers WHERE id = 134; DELETE FROM customers WHERE id = 135")
    conn.execute("COMMIT")
    assert wired_world.dump() == before


def test_turning_it_off_by_a_roll_back(wired_world: Wired, told: Told) -> None:
    conn = told.conn
    conn.execute("SET sqlguard.dry_run = on")
    conn.execute("BEGIN")
    conn.execute("SET sqlguard.dry_run = off")
    conn.execute("ROLLBACK")
    conn.execute("UPDATE orders SET note = 'x' WHERE id = 72")
    assert wired_world.value("SELECT note FROM orders WHERE id = 72") is None
    conn.execute("SET sqlguard.dry_run = off")
    conn.execute("UPDATE orders SET note = 'x' WHERE id = 72")
    assert wired_world.value("SELECT note FROM orders WHERE id = 72") == "x"


@pytest.mark.parametrize(
    "text",
    [
        "SELECT set_config('sqlguard.dry_run', 'on', false)",
        "SET sqlguard.dry_run TO true",
        "SET SESSION sqlguard.dry_run = 1",
        "SET SQLGUARD.DRY_RUN = 'yes'",
    ],
)
def test_every_way_to_turn_it_on(wired_world: Wired, told: Told, text: str) -> None:
    told.conn.execute(text)
    told.conn.execute("UPDATE orders SET note = 'x' WHERE id = 73")
    assert len(told.reports()) == 1
    assert wired_world.value("SELECT note FROM orders WHERE id = 73") is None


def test_from_the_start_of_the_session(wired_world: Wired, agent: Agent) -> None:
    with agent.connect(options="-c sqlguard.dry_run=on") as conn:
        told = Told(conn)
        for reset in ("SELECT 1", "RESET ALL", "DISCARD ALL", "RESET sqlguard.dry_run"):
            conn.execute(reset)
            conn.execute("UPDATE orders SET note = 'x' WHERE id = 74")
            assert len(told.reports()) == 1, reset
    assert wired_world.value("SELECT note FROM orders WHERE id = 74") is None


def test_errors_of_the_statement_and_of_deferred_constraints(wired_world: Wired, told: Told) -> None:
    conn = told.conn
    wired_world.owner.execute(
        "ALTER TABLE items ALTER CONSTRAINT items_order_id_fkey DEFERRABLE INITIALLY DEFERRED"
    )
    try:
        conn.execute("SET sqlguard.dry_run = on")
        late = "INSERT INTO items (order_id, product_id, quantity, price) VALUES (99999, 1, 1, 1)"
        for _ in range(2):
            with pytest.raises(psycopg.errors.ForeignKeyViolation):
                conn.execute(late)
            with pytest.raises(psycopg.errors.ForeignKeyViolation):
                conn.execute(late.replace("99999", "%s"), [99999])
            with pytest.raises(psycopg.errors.UniqueViolation):
                conn.execute("INSERT INTO staff (id, name) VALUES (%s, 'again')", [1])
            assert conn.execute("SELECT 1").fetchone() == (1,)
        conn.execute("BEGIN")
        with pytest.raises(psycopg.errors.ForeignKeyViolation):
            conn.execute(late)
        conn.execute("ROLLBACK")
    finally:
        wired_world.owner.execute("ALTER TABLE items ALTER CONSTRAINT items_order_id_fkey NOT DEFERRABLE")
    assert conn.info.transaction_status == pq.TransactionStatus.IDLE


def test_the_journal_says_previewed(wired_world: Wired, agent: Agent) -> None:
    with agent.connect() as conn:
        conn.execute("SET sqlguard.dry_run = on")
        conn.execute("UPDATE orders SET note = 'x' WHERE id = 75")
        conn.execute("UPDATE orders SET note = %s WHERE id = 75", ["x"])
        with conn.transaction():
            conn.execute("UPDATE orders SET note = 'x' WHERE id = 75")
    assert wired_world.outcomes(agent) == ["previewed"] * 3
