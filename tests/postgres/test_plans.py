"""Gates, plans and approvals by the Python door, and what the database itself holds whoever asks."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from psycopg import sql
from servers import Database, fresh_database

import sqlguard
from sqlguard.embedded import EmbeddedServer
from sqlguard.errors import ApprovalRequired, CapExceeded, Drift, Refused
from sqlguard.policy import parse_policy
from sqlguard.postgres import feed, plans
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.journal import show_action, verify
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


@pytest.fixture
def world(server: EmbeddedServer) -> Iterator[World]:
    with plan_shop(server) as (database, owner):
        yield World(database, owner)


@pytest.fixture(params=["operator", "task"])
def db(world: World, request: pytest.FixtureRequest) -> Iterator[sqlguard.GuardedConnection]:
    task = world.task()
    if request.param == "operator":
        with sqlguard.connect(world.database.owner_dsn, task=task.task.id) as made:
            yield made
    else:
        with sqlguard.connect(world.database.dsn_for(task.role, task.password)) as made:
            yield made


def stopped(db: sqlguard.GuardedConnection, text: str, *params: Any, **said: Any) -> int:
    """Run what needs an approval; return the plan."""
    with pytest.raises(ApprovalRequired) as caught:
        db.execute(text, list(params) or None, **said)
    assert caught.value.detail is not None
    assert caught.value.hint is not None
    return int(caught.value.detail.split(":")[0].removeprefix("plan "))


def test_a_stopped_write_has_a_plan_and_is_done_once_it_is_approved(
    world: World, db: sqlguard.GuardedConnection
) -> None:
    plan = stopped(db, DELETE, 1, confidence=0.9)
    assert world.value("SELECT count(*) FROM customers WHERE deleted_at IS NULL") == 60
    shown = plans.show(world.owner, plan)
    assert shown.document["affected_rows"] == 31
    assert {(a["table"], a["rows"]) for a in shown.document["affected"]} == {
        ("public.customers", 1),
        ("public.orders", 10),
        ("public.items", 20),
    }
    assert stopped(db, DELETE, 1, confidence=0.9) == plan
    world.approve_all(plan)
    done = db.execute(DELETE, [1], confidence=0.9)
    assert (done.plan, done.committed, sum(a.rows for a in done.affected)) == (plan, True, 31)
    assert plans.show(world.owner, plan).state == "committed"
    assert world.value("SELECT count(*) FROM customers WHERE deleted_at IS NULL") == 59
    assert show_action(world.owner, done.action or 0).action.outcome == "committed"
    assert verify(world.owner).ok
    # Used up.
    with pytest.raises(Refused):
        db.commit_plan(plan)


def test_what_a_gate_asks_is_measured(world: World, db: sqlguard.GuardedConnection) -> None:
    touch = "UPDATE orders SET note = 'y' WHERE id <= %s"
    assert db.execute(touch, [3], confidence=0.9).committed
    plan = stopped(db, touch, 4, confidence=0.9)
    assert plans.show(world.owner, plan).document["approvals_needed"] == 2
    assert "4 rows" in plans.show(world.owner, plan).document["reasons"][0]
    with pytest.raises(Refused, match="21 rows"):
        db.execute(touch, [21], confidence=0.9)
    # What comes first decides: twenty-one customers are refused, four of them need nobody.
    name = "UPDATE customers SET name = 'y' WHERE id <= %s"
    with pytest.raises(Refused):
        db.execute(name, [21], confidence=0.9)
    assert db.execute(name, [4], confidence=0.9).committed
    # A confidence that is not said is none.
    stopped(db, name, 1)
    stopped(db, name, 1, confidence=0.4)
    assert world.value("SELECT count(*) FROM customers WHERE name = 'y'") == 4


def test_two_people_approve_what_wants_two(world: World) -> None:
    task = world.task()
    with sqlguard.connect(world.database.owner_dsn, task=task.task.id) as db:
        plan = stopped(db, "UPDATE orders SET note = 'z' WHERE id <= 4", confidence=0.9)
        assert world.approve(plan) == "open"
        with pytest.raises(Refused, match="approved plan"):
            world.approve(plan)
        stopped(db, "UPDATE orders SET note = 'z' WHERE id <= 4", confidence=0.9)
        assert world.approve(plan, "eve") == "approved"
        assert db.commit_plan(plan).committed
    assert world.value("SELECT count(*) FROM orders WHERE note = 'z'") == 4


def test_rows_that_have_changed(world: World, db: sqlguard.GuardedConnection) -> None:
    plan = stopped(db, DELETE, 1, confidence=0.9)
    world.approve_all(plan)
    world.owner.execute("UPDATE orders SET note = 'by the owner' WHERE id = 11")  # another customer's
    world.owner.execute("UPDATE items SET quantity = 7 WHERE id = 1")
    with pytest.raises(Drift) as caught:
        db.execute(DELETE, [1], confidence=0.9)
    assert caught.value.sqlstate == "SG003"
    assert world.value("SELECT count(*) FROM customers WHERE deleted_at IS NULL") == 60
    fresh = plans.list_plans(world.owner)[-1]
    assert fresh.document["drift_of"] == plan
    with pytest.raises(Drift):
        db.commit_plan(plan)
    world.approve_all(fresh.id)
    world.owner.execute("UPDATE orders SET note = 'by the owner' WHERE id = 12")
    done = db.commit_plan(fresh.id)
    assert sum(a.rows for a in done.affected) == 31
    assert world.value("SELECT count(*) FROM customers WHERE deleted_at IS NULL") == 59


def test_an_approval_is_taken_once(world: World) -> None:
    task = world.task()
    dsn = world.database.owner_dsn
    with (
        sqlguard.connect(dsn, task=task.task.id) as first,
        sqlguard.connect(dsn, task=task.task.id) as second,
        ThreadPoolExecutor(2) as pool,
    ):
        rename = "UPDATE customers SET name = name || '!' WHERE id = 7"
        plan = stopped(first, rename, confidence=0.1)
        world.approve(plan)

        def attempt(db: sqlguard.GuardedConnection) -> str:
            try:
                db.execute(rename, confidence=0.1)
            except ApprovalRequired:
                return "stopped"
            return "done"

        assert sorted(pool.map(attempt, (first, second))) == ["done", "stopped"]
    assert world.value("SELECT name FROM customers WHERE id = 7") == "Customer 7!"
    assert sorted(world.states()) == ["committed", "open"]


def test_over_a_cap_with_an_approval(world: World, db: sqlguard.GuardedConnection) -> None:
    delete = "DELETE FROM items WHERE id <= 150"
    plan = stopped(db, delete, confidence=0.9)
    assert plans.show(world.owner, plan).document["affected_rows"] == 150
    assert "more than the 100" in plans.show(world.owner, plan).document["reasons"][0]
    preview = db.preview(delete, confidence=0.9)
    assert (preview.as_dict()["affected_rows"], preview.plan) == (150, plan)
    assert world.value("SELECT count(*) FROM items") == 1200
    world.approve_all(plan)
    assert db.execute(delete, confidence=0.9).committed
    assert world.value("SELECT count(*) FROM items") == 1050


def test_a_cap_is_not_lifted_for_what_nobody_approved(world: World) -> None:
    task = world.task()
    with world.database.connect(world.database.dsn_for(task.role, task.password)) as agent:
        action = agent.execute('SELECT sqlguard.record_intent(\'{"verdict": "allow"}\')').fetchone()
        assert action is not None
        agent.execute("BEGIN")
        agent.execute("SELECT set_config('sqlguard.action', %s, true)", [str(action[0])])
        agent.execute("SELECT sqlguard.begin_plan()")
        agent.execute("UPDATE items SET quantity = 2 WHERE id <= 150")
        agent.execute("SELECT sqlguard.force_constraints()")
        with pytest.raises(psycopg.DatabaseError) as caught:
            agent.execute("COMMIT")
        assert caught.value.sqlstate == "SG006"
    assert world.value("SELECT count(*) FROM items WHERE quantity = 2") == 0


def test_on_excess_refuse_stays_a_cap(world: World) -> None:
    apply_policy(
        world.owner, parse_policy(POLICY.replace('on_excess = "approve"', 'on_excess = "refuse"'), "p")
    )
    task = world.task()
    with sqlguard.connect(world.database.owner_dsn, task=task.task.id) as db:
        for run in (db.execute, db.preview):
            with pytest.raises(CapExceeded, match="1200 rows"):
                run("DELETE FROM items WHERE id > 0", confidence=0.9)
            with pytest.raises(CapExceeded, match=r"1200 rows.*nothing was run"):
                run("DELETE FROM items USING orders o WHERE o.id = order_id", confidence=0.9)
            with pytest.raises(CapExceeded, match=r"1200 rows.*nothing was run"):
                run("INSERT INTO items (order_id) SELECT order_id FROM items", confidence=0.9)
            # What it runs into last is the wall: whoever looks twice may find other rows.
            with pytest.raises(CapExceeded, match="1200 rows"):
                run("DELETE FROM items WHERE id > 0 AND random() >= 0", confidence=0.9)
        world.owner.execute(
            "CREATE FUNCTION told() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''it was run''; END';"
            "CREATE TRIGGER told BEFORE UPDATE ON items EXECUTE FUNCTION told()"
        )
        with pytest.raises(CapExceeded, match=r"600 rows.*nothing was run"):
            db.execute("UPDATE items SET quantity = %s WHERE order_id <= %s", [7, 300], confidence=0.9)
        with pytest.raises(CapExceeded, match=r"600 rows.*nothing was run"):
            db.execute(
                "UPDATE items SET quantity = %s FROM orders o WHERE o.id = order_id AND o.id <= %s",
                [7, 300],
                confidence=0.9,
            )
    assert world.states() == []


def test_inside_a_block(world: World, db: sqlguard.GuardedConnection) -> None:
    db.execute("BEGIN")
    db.execute("UPDATE customers SET name = 'kept?' WHERE id = 9", confidence=0.9)
    plan = stopped(db, DELETE, 1, confidence=0.9)
    with pytest.raises(psycopg.errors.InFailedSqlTransaction):
        db.execute("SELECT 1")
    db.execute("ROLLBACK")
    world.approve_all(plan)
    db.execute("BEGIN")
    db.execute("UPDATE customers SET name = 'kept?' WHERE id = 9", confidence=0.9)
    db.execute(DELETE, [1], confidence=0.9)
    db.execute("ROLLBACK")
    assert plans.show(world.owner, plan).state == "approved"  # a roll-back gives it back
    assert db.execute(DELETE, [1], confidence=0.9).plan == plan


def test_plan_only(world: World) -> None:
    task = world.task(plan_only=True)
    name = "UPDATE customers SET name = 'staged' WHERE id = %s"
    with sqlguard.connect(world.database.owner_dsn, task=task.task.id) as db:

        def block() -> sqlguard.Outcome:
            db.execute("BEGIN")
            db.execute(name, [1], confidence=0.9)
            db.execute("SAVEPOINT a")
            db.execute(name, [2], confidence=0.9)
            db.execute("ROLLBACK TO a")
            db.execute("DELETE FROM items WHERE id = 1", confidence=0.9)
            return db.execute("COMMIT")

        stopped(db, name, 1, confidence=0.9)
        with pytest.raises(ApprovalRequired):
            block()
        assert world.value("SELECT count(*) FROM customers WHERE name = 'staged'") == 0
        plan = plans.list_plans(world.owner)[-1]
        assert len(plan.document["statements"]) == 2
        assert plan.document["affected_rows"] == 2
        world.approve(plan.id)
        world.owner.execute("UPDATE customers SET city = 'Bern' WHERE id = 1")
        with pytest.raises(Drift):
            block()
        fresh = plans.list_plans(world.owner)[-1].id
        world.approve(fresh)
        assert block().plan == fresh
        again = plans.list_plans(world.owner)[-1]
        assert again.state == "committed"
        with pytest.raises(ApprovalRequired):
            block()
        last = plans.list_plans(world.owner)[-1].id
        world.approve(last)
        assert db.commit_plan(last).committed
    assert world.value("SELECT count(*) FROM customers WHERE name = 'staged'") == 1


def test_a_feed_of_what_approvers_have_to_know(world: World) -> None:
    told: list[dict[str, Any]] = []
    follower = feed.Feed(world.owner, "approvers", approvals=True)
    follower.create()
    with sqlguard.connect(world.database.owner_dsn, task=world.task(purpose="tidy").task.id) as db:
        db.preview("UPDATE customers SET name = 'new' WHERE id = 5", confidence=0.9)
        plan = stopped(db, DELETE, 1, confidence=0.9)
        assert follower.deliver(told.extend) > 1
        world.approve(plan)
        db.execute(DELETE, [1], confidence=0.9)
    follower.deliver(told.extend)
    assert [e["type"] for e in told] == ["dev.sqlguard.event.planned", "dev.sqlguard.event.approved"]
    waiting, decided = (e["data"]["plan"] for e in told)
    assert (waiting["plan"], waiting["state"], waiting["affected_rows"]) == (plan, "open", 31)
    assert (waiting["purpose"], waiting["statements"][0]["params"]) == ("tidy", ["1"])
    assert decided["approved_by"] == ["sg_dana"]


def test_other_tasks_policies_and_purposes(world: World) -> None:
    dsn = world.database.owner_dsn
    with sqlguard.connect(dsn, task=world.task(purpose="a").task.id) as db:
        plan = stopped(db, DELETE, 1, confidence=0.9)
    world.approve(plan)
    for other in (
        {"purpose": "b"},
        {"purpose": "a", "agent": "another"},
        {"purpose": "a", "params": {"x": "1"}},
    ):
        with sqlguard.connect(dsn, task=world.task(**other).task.id) as db:
            assert stopped(db, DELETE, 1, confidence=0.9) != plan
            with pytest.raises(Refused):
                db.commit_plan(plan)
    apply_policy(world.owner, parse_policy(POLICY.replace("max_rows = 100", "max_rows = 99"), "p"))
    with sqlguard.connect(dsn, task=world.task(purpose="a").task.id) as db:
        assert stopped(db, DELETE, 1, confidence=0.9) != plan
    # The old version's own task finds it.
    apply_policy(world.owner, parse_policy(POLICY, "p"))
    assert plans.show(world.owner, plan).state == "approved"


def test_reject_revoke_and_expiry(world: World) -> None:
    with sqlguard.connect(world.database.owner_dsn, task=world.task().task.id) as db:
        plan = stopped(db, DELETE, 1, confidence=0.9)
        with world.person("dana") as dana:
            with pytest.raises(Refused, match="reason"):
                plans.reject(dana, plan, " ")
            world.approve(plan)
            assert plans.revoke(dana, plan) == "open"
            stopped(db, DELETE, 1, confidence=0.9)
            world.approve(plan)
            assert plans.reject(dana, plan, "ask the customer first") == "rejected"
        assert plans.show(world.owner, plan).document["rejected_because"] == "ask the customer first"
        with pytest.raises(Refused, match="rejected"):
            world.approve(plan)
        late = stopped(db, DELETE, 2, confidence=0.9)
        world.owner.execute("UPDATE sqlguard.plan SET expires_at = now() WHERE id = %s", [late])
        with pytest.raises(Refused, match="expired"):
            world.approve(late)
    kinds = [
        e["kind"] for e in show_action(world.owner, plans.show(world.owner, plan).document["action"]).events
    ]
    assert kinds == ["planned", "approved", "revoked", "approved", "rejected"]
    assert verify(world.owner).ok


def test_nobody_but_an_approver_decides(world: World) -> None:
    task = world.task()
    with sqlguard.connect(world.database.owner_dsn, task=task.task.id) as db:
        plan = stopped(db, DELETE, 1, confidence=0.9)
    digest = plans.show(world.owner, plan).document["digest"]
    agent = world.database.connect(world.database.dsn_for(task.role, task.password))
    outsider = world.person("mallory", approver=False)
    attempts = [
        "SELECT sqlguard.decide_plan(%s, 'approve', %s, NULL)",
        "INSERT INTO sqlguard.plan_decision (plan_id, decision, digest) VALUES (%s, 'approve', %s)",
        "UPDATE sqlguard.plan SET approvals = 0 WHERE id = %s AND digest = %s",
        "UPDATE sqlguard.plan SET committed_at = NULL WHERE id = %s AND digest = %s",
    ]
    for who in (agent, outsider):
        for text in attempts:
            who.execute("SET default_transaction_read_only = off")
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                who.execute(text.encode(), [plan, digest])
        for text in (
            "SET ROLE sqlguard_approver",
            "SET SESSION AUTHORIZATION sg_dana",
            "GRANT sqlguard_approver TO CURRENT_USER",
            "SELECT sqlguard.append_event(1, 'approved', '{}')",
            "SELECT * FROM sqlguard.plan_secret",
            "SELECT * FROM sqlguard.plan",
        ):
            with pytest.raises(psycopg.DatabaseError):
                who.execute(text.encode())
    # Not even somebody who was made an approver by mistake of being the task's opener.
    with world.database.connect() as admin:
        # Who made the role is a member without any right since PostgreSQL 16; that alone does not count.
        options = " WITH INHERIT TRUE" if admin.info.server_version >= 160000 else ""
        admin.execute(f"GRANT sqlguard_approver TO app_owner{options}".encode())
        try:
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match="opened the task"):
                plans.approve(world.owner, plan, digest)
            admin.execute(sql.SQL("GRANT sqlguard_approver TO {}").format(sql.Identifier(task.role)))
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match="no approver"):
                plans.approve(agent, plan, digest)
        finally:
            admin.execute("REVOKE sqlguard_approver FROM app_owner")
    with world.person("dana") as dana, pytest.raises(Drift):
        plans.approve(dana, plan, "another digest")
    assert plans.show(world.owner, plan).state == "open"


def test_a_forged_report_is_no_plan(world: World) -> None:
    task = world.task()
    agent = world.database.connect(world.database.dsn_for(task.role, task.password))
    action = agent.execute('SELECT sqlguard.record_intent(\'{"verdict": "allow"}\')').fetchone()
    assert action is not None
    agent.execute("BEGIN")
    made = agent.execute("SELECT outcome, signed FROM sqlguard.plan_outcome(NULL)").fetchone()
    assert made is not None
    agent.execute("ROLLBACK")
    document = f'{{"action_id": {action[0]}, "statements": [], "statement_hash": "x", "search_path": []}}'
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        agent.execute(
            "SELECT sqlguard.record_plan(%s, %s, %s)", [document, made[0].replace("true", "false"), made[1]]
        )
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        agent.execute("SELECT sqlguard.record_plan(%s, %s, %s)", [document, made[0], "0" * 64])


def test_what_is_not_guarded_and_what_a_roll_back_leaves(world: World) -> None:
    with sqlguard.connect(world.database.owner_dsn, task=world.task().task.id) as db:
        outcome = db.preview("INSERT INTO orders (customer_id) VALUES (1)", confidence=0.9)
        assert outcome.report is not None
        assert outcome.report["unguarded"] == [
            {"table": "public.counters", "inserted": 0, "updated": 1, "deleted": 0}
        ]
        assert outcome.report["sequences"] == ["public.orders_id_seq"]
        with pytest.raises(psycopg.errors.ForeignKeyViolation):
            db.preview("INSERT INTO late VALUES (1, 4711)", confidence=0.9)
        report = db.preview("UPDATE customers SET name = 'new' WHERE id = 5", confidence=0.9).as_dict()[
            "report"
        ]
        assert report["samples"][0]["changed"] == {"name": ["Customer 5", "new"]}
        assert report["shares"] == [
            {"table": "public.customers", "rows": 1, "of": 60, "share": pytest.approx(0.0167)}
        ]
    assert world.value("SELECT n FROM counters") == 0
    assert world.value("SELECT count(*) FROM sqlguard.plan_run") == 0


def test_approvers_are_told(world: World) -> None:
    listening = world.database.connect()
    listening.execute("LISTEN sqlguard_plans")
    with sqlguard.connect(world.database.owner_dsn, task=world.task().task.id) as db:
        plan = stopped(db, DELETE, 1, confidence=0.9)
    world.approve(plan)
    told = [n.payload for n in listening.notifies(timeout=5, stop_after=2)]
    assert told == [str(plan), str(plan)]
