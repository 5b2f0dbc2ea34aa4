"""What a plan's statement writes is bound by its digest as well, where it depends on other rows."""

from collections.abc import Iterator

import pytest
from plan_world import PLAN_ONLY, again, plan_only
from servers import Database

import sqlguard
from sqlguard.embedded import EmbeddedServer
from sqlguard.errors import ApprovalRequired, Drift
from sqlguard.policy import parse_policy
from sqlguard.postgres import plans
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.postgres.tasks import open_task

SHOP = """
CREATE TABLE prices (id integer PRIMARY KEY, price numeric, label text, at timestamptz);
INSERT INTO prices SELECT n, n * 1.5, 'p' || n, '2024-01-01' FROM generate_series(1, 20) n;
CREATE TABLE bills (id integer PRIMARY KEY, price numeric, label text, at timestamptz DEFAULT now(),
                    place text DEFAULT 'Rome', twice numeric GENERATED ALWAYS AS (price * 2) STORED);
CREATE TABLE lines (id serial PRIMARY KEY, price numeric, label text);
CREATE TABLE notes (price numeric, label text);
CREATE TABLE parted (id integer, price numeric, label text, PRIMARY KEY (id)) PARTITION BY RANGE (id);
CREATE TABLE low PARTITION OF parted FOR VALUES FROM (0) TO (10);
CREATE TABLE high (label text, price numeric, id integer PRIMARY KEY);
ALTER TABLE parted ATTACH PARTITION high FOR VALUES FROM (10) TO (100);
INSERT INTO bills (id, price, label) VALUES (101, 1, 'a'), (102, 2, 'b');
CREATE TABLE stamped (id integer PRIMARY KEY, price numeric);
CREATE FUNCTION stamp() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.price := random(); RETURN NEW; END';
CREATE TRIGGER stamp BEFORE INSERT ON stamped FOR EACH ROW EXECUTE FUNCTION stamp();
CREATE TABLE touched (id integer PRIMARY KEY, price numeric);
CREATE FUNCTION touch() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN UPDATE touched SET price = random() WHERE id = NEW.id; RETURN NULL; END';
CREATE TRIGGER touch AFTER INSERT ON touched FOR EACH ROW EXECUTE FUNCTION touch();
CREATE TABLE dated (id integer PRIMARY KEY, price numeric, label text DEFAULT 'a', at timestamptz);
CREATE FUNCTION dated() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.at := clock_timestamp(); RETURN NEW; END';
CREATE TRIGGER dated BEFORE INSERT OR UPDATE ON dated FOR EACH ROW EXECUTE FUNCTION dated();
INSERT INTO dated SELECT n, n FROM generate_series(101, 103) n;
CREATE VIEW bill WITH (security_invoker) AS SELECT id AS number, label AS what, price AS cost FROM bills WHERE price < 1000;
GRANT SELECT, INSERT, UPDATE ON bill TO PUBLIC; -- a policy gives no rights to write through views
CREATE FUNCTION raised(numeric) RETURNS numeric LANGUAGE sql STABLE AS 'SELECT $1 + 1';
CREATE TABLE parents (id integer PRIMARY KEY, label text);
CREATE TABLE children (id integer PRIMARY KEY, parent integer DEFAULT 1 REFERENCES parents ON DELETE SET DEFAULT);
INSERT INTO parents SELECT n FROM generate_series(1, 5) n;
INSERT INTO children SELECT n, n FROM generate_series(1, 5) n;
INSERT INTO notes VALUES (3, 'p3'), (4, 'p4'), (4, 'p4');
"""
GUARDED = [
    "prices", "bills", "lines", "notes", "parted", "stamped", "touched", "dated", "parents", "children",
]  # fmt: skip


@pytest.fixture
def shop(server: EmbeddedServer) -> Iterator[Database]:
    with plan_only(server, SHOP, GUARDED) as database:
        yield database


OTHERS = "UPDATE prices SET price = price + 1 WHERE id = 3"
ELSEWHERE = "UPDATE prices SET price = price + 1 WHERE id = 15"
BILLS = "INSERT INTO bills (id, price, label) SELECT id, price, label FROM prices WHERE id < 10"
LINES = "INSERT INTO lines (price, label) SELECT price, label FROM prices WHERE id < 10"
PARTED = "INSERT INTO parted (id, price) SELECT id, price FROM prices WHERE id BETWEEN 2 AND 12"
NOTES = "INSERT INTO notes SELECT price, label FROM prices WHERE id < 10"
NOTED = "UPDATE notes n SET price = p.price + 100 FROM prices p WHERE p.label = n.label"
FEW = "INSERT INTO bills (id, price, label) SELECT id, price, label FROM prices WHERE id < 10 LIMIT 3"
MERGED = (
    "MERGE INTO bills b USING (SELECT id + 98 AS id, price FROM prices WHERE id < 15) p ON p.id = b.id"
    " WHEN MATCHED THEN UPDATE SET price = p.price WHEN NOT MATCHED THEN INSERT (id, price) VALUES (p.id, p.price)"
)
VIEWED = "INSERT INTO bill (number, cost) SELECT id, price FROM prices WHERE id < 10"
SEEN = "UPDATE bill b SET cost = p.price FROM prices p WHERE p.id = b.number - 98"
JOINED = "UPDATE bills b SET price = p.price FROM prices p WHERE p.id = b.id - 98"


@pytest.mark.parametrize("text", [BILLS, LINES, PARTED, JOINED])
@pytest.mark.parametrize(("meanwhile", "ends"), [(OTHERS, "drift"), (ELSEWHERE, "committed")])
def test_what_is_written_comes_from_other_rows(shop: Database, text: str, meanwhile: str, ends: str) -> None:
    assert again(shop, text, meanwhile) == ends


@pytest.mark.parametrize(
    ("text", "meanwhile", "ends"),
    [
        # A clock and a sequence differ from run to run; what stands beside them is compared all the same.
        ("INSERT INTO bills (id, price, at) SELECT id, price, now() FROM prices", "SELECT 1", "committed"),
        ("INSERT INTO bills (id, price, at) SELECT id, price, now() FROM prices", OTHERS, "drift"),
        (
            "INSERT INTO bills (id, price, label) SELECT id, random(), label FROM prices",
            "SELECT 1",
            "committed",
        ),
        ("INSERT INTO bills (id, price, label) SELECT id, random(), label FROM prices", OTHERS, "committed"),
        ("INSERT INTO bills (id, price) SELECT id, price FROM prices WHERE at < now()", OTHERS, "drift"),
        (
            "INSERT INTO bills (id, price) SELECT id, price FROM prices WHERE at < now()",
            "SELECT 1",
            "committed",
        ),
        # Values changed between rows, not in their number or their sum.
        (BILLS, "UPDATE prices SET price = 7.5 - price WHERE id IN (2, 3)", "drift"),
        # What is not written is not compared.
        (BILLS, "UPDATE prices SET at = now()", "committed"),
        ("INSERT INTO bills SELECT id, price, label FROM prices", OTHERS, "drift"),
        # Triggers that give it other values.
        ("INSERT INTO stamped SELECT id, price FROM prices", "SELECT 1", "committed"),
        ("INSERT INTO touched SELECT id, price FROM prices", "SELECT 1", "committed"),
        # What a trigger fills in beside them is its own.
        ("INSERT INTO dated SELECT id, price FROM prices WHERE id < 10", "SELECT 1", "committed"),
        ("INSERT INTO dated SELECT id, price FROM prices WHERE id < 10", OTHERS, "drift"),
        ("INSERT INTO dated SELECT id, price FROM prices WHERE id < 10", ELSEWHERE, "committed"),
        # Without a key.
        (NOTES, "SELECT 1", "committed"),
        (NOTES, OTHERS, "drift"),
        (NOTES, ELSEWHERE, "committed"),
        (NOTES, "DELETE FROM prices WHERE id = 1", "drift"),
        (NOTED, "SELECT 1", "committed"),
        (NOTED, OTHERS, "drift"),
        (NOTED, ELSEWHERE, "committed"),
        ("INSERT INTO notes SELECT random(), label FROM prices", "SELECT 1", "committed"),
        # Some rows, whichever the server takes.
        (FEW, "SELECT 1", "committed"),
        (FEW, "UPDATE prices SET label = 'new' WHERE label = (SELECT label FROM prices LIMIT 1)", "drift"),
        (FEW, ELSEWHERE, "committed"),
        ("UPDATE bills SET label = 'x' WHERE id IN (SELECT id FROM bills LIMIT 1)", "SELECT 1", "committed"),
        (
            "UPDATE bills SET label = 'x' WHERE id IN (SELECT id FROM bills LIMIT 1)",
            "DELETE FROM bills WHERE id = 101",
            "drift",
        ),
        # MERGE, each of its ways.
        (MERGED, "SELECT 1", "committed"),
        (MERGED, "UPDATE prices SET price = 50 WHERE id = 3", "drift"),
        (MERGED, "UPDATE prices SET price = 50 WHERE id = 12", "drift"),
        (MERGED, ELSEWHERE, "committed"),
        # Through a view.
        (VIEWED, "SELECT 1", "committed"),
        (VIEWED, OTHERS, "drift"),
        (VIEWED, ELSEWHERE, "committed"),
        (SEEN, "SELECT 1", "committed"),
        (SEEN, OTHERS, "drift"),
        (SEEN, ELSEWHERE, "committed"),
        # A key that is changed.
        (
            "UPDATE bills b SET id = p.id, price = p.price FROM prices p WHERE p.id = b.id - 98",
            OTHERS,
            "drift",
        ),
        (
            "UPDATE bills b SET id = p.id, price = p.price FROM prices p WHERE p.id = b.id - 98",
            ELSEWHERE,
            "committed",
        ),
    ],
)
def test_what_can_be_compared(shop: Database, text: str, meanwhile: str, ends: str) -> None:
    assert again(shop, text, meanwhile) == ends


PLAIN = "INSERT INTO bills (id, price) VALUES (1, 1), (2, 2)"
PLACE = "ALTER TABLE bills ALTER place SET DEFAULT 'Oslo'"
STAMP = "CREATE OR REPLACE FUNCTION stamp() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.price := 0; RETURN NEW; END'"


@pytest.mark.parametrize(
    ("text", "meanwhile", "ends"),
    [
        (PLAIN, PLACE, "drift"),
        (PLAIN, "ALTER TABLE bills ALTER place DROP DEFAULT", "drift"),
        (PLAIN, "ALTER TABLE bills ALTER price SET DEFAULT 7", "committed"),
        (PLAIN, "ALTER TABLE prices ALTER label SET DEFAULT 'x'", "committed"),
        ("INSERT INTO bills (id, place) VALUES (1, DEFAULT), (2, 'x')", PLACE, "drift"),
        ("INSERT INTO bills (id, place) VALUES (1, 'y'), (2, 'x')", PLACE, "committed"),
        ("UPDATE bills SET place = DEFAULT WHERE id = 101", PLACE, "drift"),
        ("UPDATE bills SET label = 'x' WHERE id = 101", PLACE, "committed"),
        (
            "MERGE INTO bills b USING prices p ON p.id = b.id WHEN NOT MATCHED THEN INSERT (id) VALUES (p.id)",
            PLACE,
            "drift",
        ),
        ("DELETE FROM bills WHERE id = 101", PLACE, "committed"),
        (VIEWED, "ALTER VIEW bill ALTER what SET DEFAULT 'y'", "drift"),
        (
            VIEWED,
            "CREATE OR REPLACE VIEW bill WITH (security_invoker) AS SELECT id AS number, place AS what, price AS cost FROM bills",
            "drift",
        ),
        (VIEWED, PLACE, "drift"),
        ("DELETE FROM parents WHERE id = 3", "ALTER TABLE children ALTER parent SET DEFAULT 2", "drift"),
        ("DELETE FROM parents WHERE id = 3", "ALTER TABLE children ALTER parent SET DEFAULT 1", "committed"),
        ("INSERT INTO stamped VALUES (1, 2)", STAMP, "drift"),
        ("UPDATE stamped SET price = 2 WHERE id = 900", STAMP, "committed"),
        ("INSERT INTO stamped VALUES (1, 2)", "ALTER TABLE stamped DISABLE TRIGGER stamp", "drift"),
        ("INSERT INTO stamped VALUES (1, 2)", "DROP TRIGGER stamp ON stamped", "drift"),
        ("INSERT INTO bills (id) VALUES (1)", STAMP, "committed"),
        (
            "INSERT INTO bills (id) VALUES (1)",
            "CREATE TRIGGER stamp BEFORE UPDATE ON bills FOR EACH ROW EXECUTE FUNCTION stamp()",
            "committed",
        ),
        (
            "INSERT INTO bills (id) VALUES (1)",
            "CREATE TRIGGER stamp BEFORE INSERT ON bills FOR EACH ROW EXECUTE FUNCTION stamp()",
            "drift",
        ),
        (
            "INSERT INTO low VALUES (1, 2)",
            "CREATE TRIGGER stamp BEFORE INSERT ON low FOR EACH ROW EXECUTE FUNCTION stamp()",
            "drift",
        ),
        (
            "INSERT INTO parted VALUES (1, 2)",
            "CREATE TRIGGER stamp BEFORE INSERT ON low FOR EACH ROW EXECUTE FUNCTION stamp()",
            "drift",
        ),
        (
            "UPDATE bills SET price = raised(price) WHERE id = 101",
            "CREATE OR REPLACE FUNCTION raised(numeric) RETURNS numeric LANGUAGE sql STABLE AS 'SELECT $1 * 9'",
            "drift",
        ),
        (
            "UPDATE bills SET price = price + 1 WHERE id = 101",
            "CREATE OR REPLACE FUNCTION raised(numeric) RETURNS numeric LANGUAGE sql STABLE AS 'SELECT $1 * 9'",
            "committed",
        ),
    ],
)
def test_what_has_a_part_in_what_is_written(shop: Database, text: str, meanwhile: str, ends: str) -> None:
    """Defaults, triggers, views and functions: the owner changes one that matters, or one that does not."""
    assert again(shop, text, meanwhile) == ends


def test_a_block_compares_what_each_of_its_statements_writes(shop: Database) -> None:
    with shop.connect(shop.owner_dsn) as owner:
        task = open_task(owner, agent="tester", policy="shop").task.id
        with sqlguard.connect(shop.owner_dsn, task=task) as db:

            def block() -> str:
                db.execute("BEGIN")
                db.execute("INSERT INTO notes VALUES (1, 'x')")
                db.execute(BILLS)
                return str(db.execute("COMMIT").tag)

            for meanwhile in (OTHERS, ELSEWHERE):
                with pytest.raises(ApprovalRequired):
                    block()
                plan = plans.list_plans(owner)[-1]
                with shop.connect(shop.dsn_for("sg_written", "secret")) as who:
                    plans.approve(who, plan.id, plan.document["digest"])
                owner.execute(meanwhile.encode())
                if meanwhile == OTHERS:
                    with pytest.raises(Drift):
                        block()
                    plans.reject(shop.connect(shop.dsn_for("sg_written", "secret")), plan.id, "over")
                else:
                    assert block() == "COMMIT"


def test_a_block_goes_on_with_what_was_approved(shop: Database) -> None:
    """Over a cap, with an approval, and then the same transaction changes the rows again."""
    with shop.connect(shop.owner_dsn) as owner:
        policy = PLAN_ONLY.replace("plan_only = true", "").replace("max_rows = 1000", "max_rows = 5")
        apply_policy(owner, parse_policy(policy, "policy"))
        task = open_task(owner, agent="tester", policy="shop").task.id
        with sqlguard.connect(shop.owner_dsn, task=task) as db:
            with pytest.raises(ApprovalRequired):
                db.execute(BILLS)
            (plan,) = plans.list_plans(owner)
            with shop.connect(shop.dsn_for("sg_written", "secret")) as who:
                plans.approve(who, plan.id, plan.document["digest"])
            db.execute("BEGIN")
            db.execute(BILLS)
            db.execute("UPDATE bills SET label = 'changed' WHERE id = 3")
            assert db.execute("COMMIT").tag == "COMMIT"
