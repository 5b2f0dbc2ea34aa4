"""What a preview's report says of all that a statement reaches: cascades, triggers, functions, guarded or not."""

from collections.abc import Iterator
from typing import Any

import pytest
from servers import Database, fresh_database

import sqlguard
from sqlguard.embedded import EmbeddedServer
from sqlguard.errors import ApprovalRequired, Refused
from sqlguard.policy import parse_policy
from sqlguard.postgres import plans
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.migrate import migrate
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.postgres.tasks import open_task

WORLD = """
CREATE TABLE customers (id serial PRIMARY KEY, name text);
CREATE TABLE orders (id serial PRIMARY KEY, customer_id integer REFERENCES customers ON DELETE CASCADE, n integer);
CREATE TABLE audit (id serial PRIMARY KEY, what text, at timestamptz DEFAULT now());
CREATE TABLE parted (id integer, v integer) PARTITION BY RANGE (id);
CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (1000);
CREATE UNLOGGED TABLE unlogged (x integer);
CREATE SEQUENCE tickets;
INSERT INTO customers (name) SELECT 'c' || n FROM generate_series(1, 10) n;
INSERT INTO orders (customer_id, n) SELECT 1 + n % 10, n FROM generate_series(1, 50) n;
CREATE FUNCTION audited() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    INSERT INTO audit (what) VALUES (TG_OP);
    INSERT INTO parted VALUES (1, 2);
    INSERT INTO unlogged VALUES (1);
    PERFORM nextval('tickets');
    RETURN NULL;
END $$;
CREATE TRIGGER audited AFTER UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION audited();
CREATE FUNCTION shift(n integer) RETURNS integer LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    UPDATE customers SET name = name || '!' WHERE id <= n;
    INSERT INTO audit (what) SELECT 'f' FROM generate_series(1, n);
    DELETE FROM audit WHERE what = 'f' AND id % 2 = 0;
    RETURN n;
END $$;
"""
POLICY = """
name = "any"
[defaults]
max_rows = 100
max_share = 1.0
[tables."public.*"]
select = true
insert = true
update = true
[tables."public.orders"]
delete = "journal"
class = ["financial"]
[tables."public.customers"]
delete = "journal"
class = ["pii"]
[functions."public.shift(integer)"]
tier = "compensable"
"""


@pytest.fixture
def shop(server: EmbeddedServer) -> Iterator[Database]:
    with fresh_database(server) as database:
        migrate(database.owner_dsn)
        with database.connect(database.owner_dsn) as owner:
            owner.execute(WORLD)
            guard_tables(owner, ["customers", "orders"], mode="journal")
            apply_policy(owner, parse_policy(POLICY, "policy"))
        yield database


@pytest.fixture
def db(shop: Database) -> Iterator[sqlguard.GuardedConnection]:
    with shop.connect(shop.owner_dsn) as owner:
        task = open_task(owner, agent="tester", policy="any").task.id
    with sqlguard.connect(shop.owner_dsn, task=task) as made:
        yield made


def previewed(db: sqlguard.GuardedConnection, text: str) -> dict[str, Any]:
    plan = db.preview(text).plan
    assert plan is not None
    return dict(db.ticket(plan).document)


def rows(found: dict[str, Any]) -> dict[str, tuple[str, int, bool]]:
    return {c["table"]: (c["op"], c["rows"], c["nested"]) for c in found["affected"]}


def unguarded(found: dict[str, Any]) -> dict[str, tuple[int, int, int]]:
    return {c["table"]: (c["inserted"], c["updated"], c["deleted"]) for c in found["unguarded"]}


def test_a_cascade(db: sqlguard.GuardedConnection) -> None:
    found = previewed(db, "DELETE FROM customers WHERE id = 1")
    assert rows(found) == {"public.customers": ("delete", 1, False), "public.orders": ("delete", 5, True)}
    assert (found["unguarded"], found["sequences"]) == ([], [])
    # Of the tables that it reaches, not just of the one that it names.
    assert found["classes"] == ["financial", "pii"]
    assert {lock["table"] for lock in found["locks"]} == {"public.customers", "public.orders"}


def test_a_trigger_that_writes_elsewhere(db: sqlguard.GuardedConnection) -> None:
    found = previewed(db, "UPDATE orders SET n = n + 1 WHERE id <= 3")
    assert rows(found) == {"public.orders": ("update", 3, False)}
    three = (3, 0, 0)
    assert unguarded(found) == {"public.audit": three, "public.parted_1": three, "public.unlogged": three}
    assert found["sequences"] == ["public.audit_id_seq", "public.tickets"]
    action = found["statements"][0]["action"]
    assert found["sequences_by_action"] == [{"action": action, "sequences": found["sequences"]}]
    assert {"table": "public.audit", "mode": "RowExclusiveLock"} in found["locks"]


def test_what_a_trigger_takes_back_itself_is_not_announced(
    shop: Database, db: sqlguard.GuardedConnection
) -> None:
    with shop.connect(shop.owner_dsn) as owner:
        owner.execute(
            """
            CREATE FUNCTION tries() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
            BEGIN
                INSERT INTO audit (what) VALUES ('tried');
                RAISE 'no';
            EXCEPTION WHEN raise_exception THEN
                RETURN NULL;
            END $$;
            CREATE TRIGGER tries AFTER UPDATE ON customers FOR EACH ROW EXECUTE FUNCTION tries()
            """
        )
    for text in (
        "UPDATE customers SET name = 'x' WHERE id <= 3",
        "UPDATE customers SET name = 'y' WHERE id <= 2",
    ):
        assert unguarded(previewed(db, text)) == {}


def test_a_function_that_writes(db: sqlguard.GuardedConnection) -> None:
    found = previewed(db, "SELECT shift(3)")
    assert rows(found) == {"public.customers": ("update", 3, True)}
    assert unguarded(found)["public.audit"][0] == 3
    assert unguarded(found)["public.audit"][2] > 0
    assert (found["sequences"], found["classes"], found["tier"]) == (
        ["public.audit_id_seq"],
        ["pii"],
        "compensable",
    )


def test_sequences_of_inserted_rows(db: sqlguard.GuardedConnection) -> None:
    found = previewed(db, "INSERT INTO customers (name) VALUES ('x'), ('y')")
    assert rows(found) == {"public.customers": ("insert", 2, False)}
    assert found["sequences"] == ["public.customers_id_seq"]


def test_sequences_of_each_statement_of_a_block(shop: Database) -> None:
    with shop.connect(shop.owner_dsn) as owner:
        task = open_task(owner, agent="tester", policy="any", plan_only=True).task.id
    with sqlguard.connect(shop.owner_dsn, task=task) as db:
        db.execute("BEGIN")
        db.execute("INSERT INTO customers (name) VALUES ('x')")
        db.execute("UPDATE customers SET name = 'y' WHERE id = 1")
        db.execute("UPDATE orders SET n = 0 WHERE id = 1")
        db.execute("INSERT INTO customers (name) VALUES ('z')")
        with pytest.raises(ApprovalRequired):
            db.execute("COMMIT")
        (plan,) = plans.list_plans(db._ledger)
    steps = {s["action"]: s["statement"].split("(")[0] for s in plan.document["statements"]}
    assert [(steps[m["action"]], m["sequences"]) for m in plan.document["sequences_by_action"]] == [
        ("INSERT INTO customers ", ["public.customers_id_seq"]),
        ("UPDATE orders SET n = 0 WHERE id = 1", ["public.audit_id_seq", "public.tickets"]),
        ("INSERT INTO customers ", ["public.customers_id_seq"]),
    ]


GATED = (
    POLICY
    + """
[[gates]]
when = { class = "financial", kind = "delete" }
then = "refuse"
[[gates]]
when = { class = "legal" }
then = "approve"
[tables."public.audit"]
class = ["legal"]
[tables."public.parted"]
class = ["by_partition"]
[[gates]]
when = { class = "by_partition" }
then = "refuse"
"""
)


def test_a_gate_sees_the_classes_of_all_tables_that_are_reached(shop: Database) -> None:
    with shop.connect(shop.owner_dsn) as owner:
        owner.execute(
            "CREATE FUNCTION parts() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS"
            " 'BEGIN INSERT INTO parted VALUES (3, 4); RETURN NULL; END';"
            "CREATE TRIGGER parts AFTER UPDATE ON customers FOR EACH STATEMENT"
            " WHEN (pg_trigger_depth() = 0) EXECUTE FUNCTION parts();"
            "DELETE FROM orders WHERE customer_id = 2"
        )
        apply_policy(owner, parse_policy(GATED, "policy"))
        task = open_task(owner, agent="tester", policy="any").task.id
    with sqlguard.connect(shop.owner_dsn, task=task) as db:
        # By a cascade; and one that the same cascade does not reach.
        for run in (db.execute, db.preview):
            with pytest.raises(Refused, match="class `financial`"):
                run("DELETE FROM customers WHERE id = 1")
        assert db.execute("DELETE FROM customers WHERE id = 2").committed
        # By a trigger, in an unguarded table.
        with pytest.raises(ApprovalRequired, match="class `legal`"):
            db.execute("UPDATE orders SET n = 0 WHERE id = 2")
        assert db.execute("INSERT INTO orders (customer_id, n) VALUES (1, 1)").committed
        # A partition has the class of its table.
        with pytest.raises(Refused, match="class `by_partition`"):
            db.execute("UPDATE customers SET name = 'n' WHERE id = 1")
        # By a function.
        with pytest.raises((Refused, ApprovalRequired)):
            db.execute("SELECT shift(3)")
