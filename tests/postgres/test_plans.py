"""Gates, plans and caps by the Python door, and what the database itself holds whoever asks."""

from collections.abc import Iterator

import psycopg
import pytest
from plan_world import DELETE, POLICY, World, plan_world, stopped

import sqlguard
from sqlguard.embedded import EmbeddedServer
from sqlguard.errors import ApprovalRequired, CapExceeded, Drift, Refused
from sqlguard.policy import parse_policy
from sqlguard.postgres import plans
from sqlguard.postgres.journal import show_action, verify
from sqlguard.postgres.policy_apply import apply_policy


@pytest.fixture
def world(server: EmbeddedServer) -> Iterator[World]:
    with plan_world(server) as made:
        yield made


@pytest.fixture(params=["operator", "task"])
def db(world: World, request: pytest.FixtureRequest) -> Iterator[sqlguard.GuardedConnection]:
    task = world.task()
    if request.param == "operator":
        with sqlguard.connect(world.database.owner_dsn, task=task.task.id) as made:
            yield made
    else:
        with sqlguard.connect(world.database.dsn_for(task.role, task.password)) as made:
            yield made


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


def test_a_read_that_needs_an_approval_is_previewed_inside_a_block(
    world: World, db: sqlguard.GuardedConnection
) -> None:
    text = "SELECT count(*) FROM generate_series(1, (SELECT max(id) FROM customers)) n"
    db.execute("BEGIN")
    db.execute("UPDATE customers SET name = 'kept' WHERE id = 9", confidence=0.9)
    seen = db.preview(text, confidence=0.9)
    assert (seen.verdict, seen.rows, seen.committed) == ("approve", (), False)
    assert seen.plan is not None
    assert seen.action is not None
    # The block goes on, with what it has done before.
    db.execute("UPDATE orders SET note = 'kept' WHERE id = 9", confidence=0.9)
    assert db.execute("COMMIT").tag == "COMMIT"
    assert world.value("SELECT count(*) FROM customers WHERE name = 'kept'") == 1
    assert world.value("SELECT count(*) FROM orders WHERE note = 'kept'") == 1
    assert show_action(world.owner, seen.action).action.outcome == "previewed"
    plan = db.ticket(seen.plan)
    assert (plan.state, plan.document["affected_rows"], plan.document["is_block"]) == ("open", 0, False)
    world.approve_all(seen.plan)
    assert db.execute(text, confidence=0.9).rows == ((60,),)
    assert verify(world.owner).ok


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
