"""Approvals of plans: who decides, how often it counts, for whom, and what approvers are told."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from plan_world import DELETE, POLICY, World, plan_world, stopped
from psycopg import sql

import sqlguard
from sqlguard.embedded import EmbeddedServer
from sqlguard.errors import ApprovalRequired, Drift, Refused
from sqlguard.policy import parse_policy
from sqlguard.postgres import feed, plans
from sqlguard.postgres.journal import show_action, verify
from sqlguard.postgres.policy_apply import apply_policy


@pytest.fixture
def world(server: EmbeddedServer) -> Iterator[World]:
    with plan_world(server) as made:
        yield made


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


def test_approvers_are_told(world: World) -> None:
    listening = world.database.connect()
    listening.execute("LISTEN sqlguard_plans")
    with sqlguard.connect(world.database.owner_dsn, task=world.task().task.id) as db:
        plan = stopped(db, DELETE, 1, confidence=0.9)
    world.approve(plan)
    told = [n.payload for n in listening.notifies(timeout=5, stop_after=2)]
    assert told == [str(plan), str(plan)]
