"""What a plan's statement writes is bound by its digest as well, where it depends on other rows."""

from collections.abc import Iterator

import pytest
from servers import Database, fresh_database

import sqlguard
from sqlguard.embedded import EmbeddedServer
from sqlguard.errors import ApprovalRequired, Drift
from sqlguard.policy import parse_policy
from sqlguard.postgres import plans
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.migrate import migrate
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
"""
POLICY = """
name = "shop"
[defaults]
max_rows = 1000
max_share = 1.0
plan_only = true
[tables."public.*"]
select = true
insert = true
update = true
delete = "journal"
"""
GUARDED = ["prices", "bills", "lines", "notes", "parted", "stamped", "touched"]


@pytest.fixture
def shop(server: EmbeddedServer) -> Iterator[Database]:
    with fresh_database(server) as database:
        migrate(database.owner_dsn)
        with database.connect(database.owner_dsn) as owner:
            owner.execute(SHOP)
            guard_tables(owner, GUARDED, mode="journal")
            apply_policy(owner, parse_policy(POLICY, "policy"))
        with database.connect() as admin:
            admin.execute("CREATE ROLE sg_written LOGIN PASSWORD 'secret' IN ROLE sqlguard_approver")
        yield database
        with database.connect() as admin:
            admin.execute("DROP OWNED BY sg_written; DROP ROLE sg_written")


def again(shop: Database, text: str, meanwhile: str) -> str:
    """Preview, approve, let the owner do something, send it again; return how that ended."""
    with shop.connect(shop.owner_dsn) as owner:
        task = open_task(owner, agent="tester", policy="shop").task.id
        with sqlguard.connect(shop.owner_dsn, task=task) as db:
            with pytest.raises(ApprovalRequired):
                db.execute(text)
            (plan,) = plans.list_plans(owner)
            with shop.connect(shop.dsn_for("sg_written", "secret")) as who:
                assert plans.approve(who, plan.id, plan.document["digest"]) == "approved"
            owner.execute(meanwhile.encode())
            try:
                assert db.execute(text).plan == plan.id
            except Drift:
                return "drift"
            return "committed"


OTHERS = "UPDATE prices SET price = price + 1 WHERE id = 3"
ELSEWHERE = "UPDATE prices SET price = price + 1 WHERE id = 15"
BILLS = "INSERT INTO bills (id, price, label) SELECT id, price, label FROM prices WHERE id < 10"
LINES = "INSERT INTO lines (price, label) SELECT price, label FROM prices WHERE id < 10"
PARTED = "INSERT INTO parted (id, price) SELECT id, price FROM prices WHERE id BETWEEN 2 AND 12"
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
        ("INSERT INTO bills (id, price) SELECT id, price FROM prices WHERE at < now()", OTHERS, "committed"),
        # Values changed between rows, not in their number or their sum.
        (BILLS, "UPDATE prices SET price = 7.5 - price WHERE id IN (2, 3)", "drift"),
        # What is not written is not compared.
        (BILLS, "UPDATE prices SET at = now()", "committed"),
        ("INSERT INTO bills SELECT id, price, label FROM prices", OTHERS, "drift"),
        # Triggers that give it other values.
        ("INSERT INTO stamped SELECT id, price FROM prices", "SELECT 1", "committed"),
        ("INSERT INTO touched SELECT id, price FROM prices", "SELECT 1", "committed"),
        # Without a key only the number of rows is known.
        ("INSERT INTO notes SELECT price, label FROM prices", OTHERS, "committed"),
        ("INSERT INTO notes SELECT price, label FROM prices", "DELETE FROM prices WHERE id = 1", "drift"),
    ],
)
def test_what_can_be_compared(shop: Database, text: str, meanwhile: str, ends: str) -> None:
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
        policy = POLICY.replace("plan_only = true", "").replace("max_rows = 1000", "max_rows = 5")
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
