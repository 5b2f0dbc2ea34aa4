"""A guarded shop whose policy has gates, and people who approve: what the tests of plans start from."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from psycopg import sql
from servers import Database, fresh_database

import sqlguard
from sqlguard.embedded import EmbeddedServer
from sqlguard.errors import ApprovalRequired, Drift
from sqlguard.policy import parse_policy
from sqlguard.postgres import plans
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.migrate import migrate
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.postgres.tasks import OpenedTask, open_task

SHOP = """
CREATE TABLE customers (id integer PRIMARY KEY, name text NOT NULL, city text DEFAULT 'Rome');
CREATE TABLE orders (id serial PRIMARY KEY, customer_id integer REFERENCES customers ON DELETE CASCADE, note text);
CREATE TABLE items (id serial PRIMARY KEY, order_id integer REFERENCES orders ON DELETE CASCADE, quantity integer);
CREATE TABLE counters (name text, n integer);
CREATE TABLE late (id integer PRIMARY KEY, customer_id integer REFERENCES customers DEFERRABLE INITIALLY DEFERRED);
INSERT INTO counters VALUES ('orders', 0);
INSERT INTO customers SELECT n, 'Customer ' || n FROM generate_series(1, 60) n;
INSERT INTO orders (customer_id, note) SELECT 1 + (n - 1) / 10, 'x' FROM generate_series(1, 600) n;
INSERT INTO items (order_id, quantity) SELECT 1 + (n - 1) / 2, 1 FROM generate_series(1, 1200) n;
CREATE FUNCTION count_orders() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
    BEGIN UPDATE counters SET n = n + 1 WHERE name = 'orders'; RETURN NULL; END $$;
CREATE TRIGGER counting AFTER INSERT ON orders FOR EACH ROW EXECUTE FUNCTION count_orders();
"""
#: Everything waits for a plan.
PLAN_ONLY = """
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
POLICY = """
name = "shop"

[defaults]
max_rows = 100
max_share = 1.0
on_excess = "approve"

[tables."public.*"]
select = true
insert = true
update = true
delete = "soft"

[tables."public.items"]
delete = "journal"

[tables."public.orders"]
class = ["financial"]

[[gates]]
when = { table = "public.customers", kind = "delete" }
then = "approve"
[[gates]]
when = { kind = "update", rows = ">20" }
then = "refuse"
[[gates]]
when = { class = "financial", rows = ">3" }
then = "approve"
approvals = 2
[[gates]]
when = { confidence = "<0.5" }
then = "approve"
"""
DELETE = "DELETE FROM customers WHERE id = %s"


@dataclass
class World:
    database: Database
    owner: psycopg.Connection[Any]
    people: dict[str, str] = field(default_factory=dict)

    def person(self, name: str, *, approver: bool = True) -> psycopg.Connection[Any]:
        role = f"sg_{name}"
        if role not in self.people:
            with self.database.connect() as admin:
                admin.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'secret'").format(sql.Identifier(role)))
                if approver:
                    admin.execute(sql.SQL("GRANT sqlguard_approver TO {}").format(sql.Identifier(role)))
            self.people[role] = role
        return self.database.connect(self.database.dsn_for(role, "secret"))

    def task(self, **options: Any) -> OpenedTask:
        return open_task(self.owner, **{"agent": "tester", "policy": "shop", **options})

    def approve(self, plan: int, name: str = "dana") -> str:
        with self.person(name) as who:
            return plans.approve(who, plan, plans.show(who, plan).document["digest"])

    def approve_all(self, plan: int) -> None:
        """What a task's own session has reported needs as many people as any gate of its policy wants."""
        if self.approve(plan) == "open":
            assert self.approve(plan, "eve") == "approved"

    def value(self, text: str) -> Any:
        row = self.owner.execute(text.encode()).fetchone()
        return row[0] if row else None

    def states(self) -> list[str]:
        return [p.state for p in plans.list_plans(self.owner)]


@contextmanager
def plan_only(server: EmbeddedServer, schema: str, guarded: Sequence[str]) -> Iterator[Database]:
    """A database of *schema* in which everything waits for a plan."""
    with fresh_database(server) as database:
        migrate(database.owner_dsn)
        with database.connect(database.owner_dsn) as owner:
            owner.execute(schema.encode())
            guard_tables(owner, guarded, mode="journal")
            apply_policy(owner, parse_policy(PLAN_ONLY, "policy"))
        with approver(database):
            yield database


@contextmanager
def plan_shop(server: EmbeddedServer) -> Iterator[tuple[Database, psycopg.Connection[Any]]]:
    """Yield a guarded shop with the policy applied, and its owner's connection."""
    with fresh_database(server) as database:
        migrate(database.owner_dsn)
        owner = database.connect(database.owner_dsn)
        owner.execute(SHOP)
        guard_tables(owner, ["customers", "orders", "late"], mode="soft")
        guard_tables(owner, ["items"], mode="journal")
        apply_policy(owner, parse_policy(POLICY, "policy"))
        yield database, owner


@contextmanager
def plan_world(server: EmbeddedServer) -> Iterator[World]:
    with plan_shop(server) as (database, owner):
        yield World(database, owner)


def stopped(db: sqlguard.GuardedConnection, text: str, *params: Any, **said: Any) -> int:
    """Run what needs an approval; return the plan."""
    with pytest.raises(ApprovalRequired) as caught:
        db.execute(text, list(params) or None, **said)
    assert caught.value.detail is not None
    assert caught.value.hint is not None
    return int(caught.value.detail.split(":")[0].removeprefix("plan "))


@contextmanager
def approver(database: Database) -> Iterator[None]:
    """Have the person there by whom `again` lets things pass."""
    with database.connect() as admin:
        admin.execute("CREATE ROLE sg_written LOGIN PASSWORD 'secret' IN ROLE sqlguard_approver")
    try:
        yield
    finally:
        with database.connect() as admin:
            admin.execute("DROP OWNED BY sg_written; DROP ROLE sg_written")


def again(database: Database, text: str, meanwhile: str) -> str:
    """Preview, approve, let the owner do something, send it again; return how that ended."""
    with database.connect(database.owner_dsn) as owner:
        task = open_task(owner, agent="tester", policy="shop").task.id
        with sqlguard.connect(database.owner_dsn, task=task) as db:
            plan = plans.show(owner, stopped(db, text))
            with database.connect(database.dsn_for("sg_written", "secret")) as who:
                assert plans.approve(who, plan.id, plan.document["digest"]) == "approved"
            owner.execute(meanwhile.encode())
            try:
                assert db.execute(text).plan == plan.id
            except Drift:
                return "drift"
            return "committed"
