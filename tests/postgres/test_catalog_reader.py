"""The catalog reader on a real server: what it reads, as whom, and when the version changes."""

import psycopg
import pytest
from psycopg import sql
from servers import Database

from sqlguard.catalog import Catalog, Table
from sqlguard.postgres.catalog_reader import catalog_version, read_catalog

SCHEMA = """
CREATE SCHEMA shop;
CREATE DOMAIN shop.positive AS int CHECK (VALUE > 0);
CREATE TYPE shop.pair AS (a int, b text);
CREATE TABLE shop.customers (
    id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    email text NOT NULL,
    points shop.positive DEFAULT 1,
    twice int GENERATED ALWAYS AS (2 * 21) STORED,
    gone text,
    UNIQUE NULLS NOT DISTINCT (email)
);
ALTER TABLE shop.customers DROP COLUMN gone;
CREATE UNIQUE INDEX lower_email ON shop.customers (lower(email)) WHERE points > 5;
CREATE TABLE shop.orders (
    id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED,
    customer int REFERENCES shop.customers (id) ON DELETE CASCADE ON UPDATE SET NULL DEFERRABLE INITIALLY DEFERRED
);
CREATE TABLE shop.events (at date) PARTITION BY RANGE (at);
CREATE TABLE shop.events_2024 PARTITION OF shop.events FOR VALUES FROM ('2024-01-01') TO ('2025-01-01');
CREATE FUNCTION shop.touch() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
CREATE TRIGGER touch BEFORE INSERT OR UPDATE ON shop.orders FOR EACH ROW EXECUTE FUNCTION shop.touch();
CREATE TRIGGER silent AFTER DELETE ON shop.orders FOR EACH STATEMENT EXECUTE FUNCTION shop.touch();
ALTER TABLE shop.orders DISABLE TRIGGER silent;
CREATE RULE also AS ON DELETE TO shop.orders DO ALSO UPDATE shop.customers SET points = 1 WHERE id = OLD.customer;
CREATE VIEW shop.mails AS SELECT id, email FROM shop.customers WHERE shop.customers.points > 1;
CREATE FUNCTION shop.total(int, text DEFAULT 'x') RETURNS int LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path = shop, pg_temp AS 'SELECT 1';
CREATE FUNCTION shop.atomic(x int) RETURNS int LANGUAGE sql STABLE BEGIN ATOMIC SELECT x + 1; END;
CREATE FUNCTION shop.step(int, int) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT $1 + $2';
CREATE AGGREGATE shop.adds(int) (SFUNC = shop.step, STYPE = int);
CREATE OPERATOR shop.=== (LEFTARG = int, RIGHTARG = int, FUNCTION = shop.step);
CREATE FUNCTION shop.to_pair(text) RETURNS shop.pair LANGUAGE sql AS 'SELECT ROW(1, $1)::shop.pair';
CREATE CAST (text AS shop.pair) WITH FUNCTION shop.to_pair(text) AS ASSIGNMENT;
"""


@pytest.fixture
def shop(database: Database) -> Database:
    with database.connect() as conn:
        conn.execute(SCHEMA)
    return database


def table(catalog: Catalog, name: str) -> Table:
    found = catalog.table("shop", name, ())
    assert found is not None
    return found


def test_relations_and_what_hangs_on_them(shop: Database) -> None:
    with shop.connect() as conn:
        catalog = read_catalog(conn)
        assert catalog.server_version == conn.info.server_version
    customers = table(catalog, "customers")
    assert [c.name for c in customers.columns] == ["id", "email", "points", "twice"]
    assert [c.identity for c in customers.columns] == ["a", "", "", ""]
    assert [c.generated for c in customers.columns] == [False, False, False, True]
    assert customers.columns[1].not_null
    assert customers.columns[2].has_default
    assert customers.primary_key == ("id",)
    uniques = {u.name: u for u in customers.uniques}
    assert uniques["lower_email"].columns == (None,)
    assert uniques["lower_email"].predicate == "((points)::integer > 5)"
    assert uniques["customers_email_key"].nulls_not_distinct
    orders = table(catalog, "orders")
    assert orders.uniques[0].deferrable
    (trigger,) = orders.triggers
    assert (trigger.name, trigger.timing, trigger.for_each_row) == ("touch", "BEFORE", True)
    assert trigger.events == {"insert", "update"}
    assert not trigger.ours
    (rule,) = orders.rules
    assert (rule.event, rule.instead) == ("delete", False)
    assert "UPDATE shop.customers" in (rule.definition or "")
    (key,) = catalog.references_to(customers.oid)
    assert (key.on_delete, key.on_update, key.deferred, key.ref_columns) == ("c", "n", True, ("id",))
    assert [t.name for t in catalog.descendants(table(catalog, "events").oid)] == ["events_2024"]
    assert table(catalog, "events_2024").is_partition
    # Qualified, whatever the session's search_path is.
    assert "shop.customers" in (table(catalog, "mails").definition or "")


def test_functions_operators_casts_and_types(shop: Database) -> None:
    with shop.connect() as conn:
        catalog = read_catalog(conn)
    (total,) = catalog.functions_named("shop", "total")
    assert (total.signature, total.defaults, total.volatility) == ("shop.total(integer,text)", 1, "s")
    assert total.security_definer
    assert total.settings == ("search_path=shop, pg_temp",)
    (atomic,) = catalog.functions_named("shop", "atomic")
    assert "BEGIN ATOMIC" in atomic.source
    (adds,) = catalog.functions_named("shop", "adds")
    (step,) = catalog.functions_named("shop", "step")
    assert (adds.kind, adds.calls) == ("a", (step.oid,))
    (operator,) = [o for o in catalog.operators if o.name == "==="]
    assert operator.function == step.oid
    pair = next(t for t in catalog.types.values() if (t.schema, t.name) == ("shop", "pair"))
    (cast,) = [c for c in catalog.casts if c.target == pair.oid]
    assert cast.context == "a"
    positive = next(t for t in catalog.types.values() if t.name == "positive")
    assert positive.kind == "d"
    assert positive.checks == ("CHECK ((VALUE > 0))",)
    assert not any(t.schema == "pg_catalog" for t in catalog.tables.values())


def test_a_role_with_no_rights_reads_the_same(shop: Database) -> None:
    with shop.connect(autocommit=True) as conn:
        whole = read_catalog(conn)
        conn.execute("CREATE ROLE sg_reader")
        conn.execute("SET ROLE sg_reader")
        assert read_catalog(conn) == whole


def test_the_session_is_left_as_it_was(shop: Database) -> None:
    with shop.connect() as conn:
        conn.autocommit = False
        conn.execute("SET search_path = shop, public")
        conn.commit()
        read_catalog(conn)
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        assert conn.execute("SHOW search_path").fetchone() == ("shop, public",)
        read_catalog(conn)
        assert conn.execute("SHOW search_path").fetchone() == ("shop, public",)
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS


CHANGES = [
    "CREATE TABLE shop.more (id int)",
    "ALTER TABLE shop.customers ADD COLUMN note text",
    "ALTER TABLE shop.customers ALTER COLUMN email DROP NOT NULL",
    "ALTER TABLE shop.customers DROP COLUMN points CASCADE",
    "ALTER TABLE shop.customers RENAME TO clients",
    "ALTER TABLE shop.customers ENABLE ROW LEVEL SECURITY",
    "DROP INDEX shop.lower_email",
    "CREATE OR REPLACE FUNCTION shop.step(int, int) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT $1'",
    "ALTER FUNCTION shop.total(int, text) SECURITY INVOKER",
    "CREATE OR REPLACE VIEW shop.mails AS SELECT id, email FROM shop.customers",
    "DROP RULE also ON shop.orders",
    "ALTER TABLE shop.orders DISABLE TRIGGER touch",
    "ALTER TABLE shop.events DETACH PARTITION shop.events_2024",
    "DROP CAST (text AS shop.pair)",
    "DROP OPERATOR shop.=== (int, int)",
    "ALTER DOMAIN shop.positive ADD CHECK (VALUE < 100)",
    "ALTER TABLE shop.orders DROP CONSTRAINT orders_customer_fkey",
    "CREATE SCHEMA other",
]


@pytest.mark.parametrize("change", CHANGES)
def test_the_version_changes_with_whatever_a_decision_depends_on(shop: Database, change: str) -> None:
    with shop.connect(autocommit=True) as conn:
        before = catalog_version(conn)
        assert catalog_version(conn) == before
        conn.execute(sql.SQL(change))
        assert catalog_version(conn) != before


def test_the_version_does_not_change_with_the_data(shop: Database) -> None:
    with shop.connect(autocommit=True) as conn, shop.connect(autocommit=True) as other:
        before = catalog_version(conn)
        other.execute("INSERT INTO shop.customers (email) VALUES ('a'), ('b')")
        other.execute("CREATE TEMP TABLE scratch (id int)")
        other.execute("ANALYZE shop.customers")
        assert catalog_version(conn) == before
