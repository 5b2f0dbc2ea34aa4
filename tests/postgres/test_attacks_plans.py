"""
What a task's own login might try, without any guard, against plans, approvals, budgets, steps and their undo.

Each test is one attack that once worked, or that would if its wall were taken away.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from plan_world import DELETE, POLICY, SHOP, World, stopped
from psycopg.types.json import Jsonb
from servers import Database, fresh_database

import sqlguard
from sqlguard.embedded import EmbeddedServer
from sqlguard.errors import Refused
from sqlguard.janitor import Janitor
from sqlguard.policy import parse_policy
from sqlguard.postgres import compensate, plans
from sqlguard.postgres.connect import connect
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.journal import show_action
from sqlguard.postgres.migrate import migrate
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.postgres.reconcile import reconcile
from sqlguard.postgres.steps import approve as approve_step
from sqlguard.postgres.sweep import sweep
from sqlguard.postgres.tasks import OpenedTask
from sqlguard.postgres.undo_plan import Scope


@pytest.fixture
def world(server: EmbeddedServer) -> Iterator[World]:
    with fresh_database(server) as database:
        yield made_world(database)


def made_world(database: Database, policy: str = POLICY) -> World:
    migrate(database.owner_dsn)
    owner = database.connect(database.owner_dsn)
    owner.execute(SHOP)
    guard_tables(owner, ["customers", "orders", "late"], mode="soft")
    guard_tables(owner, ["items"], mode="journal")
    apply_policy(owner, parse_policy(policy, "policy"))
    return World(database, owner)


def straight(world: World, opened: OpenedTask) -> psycopg.Connection[Any]:
    """Log in with the direct DSN, ready to write."""
    conn = world.database.connect(world.database.dsn_for(opened.role, opened.password))
    conn.execute("SET default_transaction_read_only = off")
    return conn


def intent(conn: psycopg.Connection[Any], **fields: Any) -> int:
    row = conn.execute("SELECT sqlguard.record_intent(%s)", [Jsonb({"verdict": "allow"} | fields)]).fetchone()
    assert row is not None
    return int(row[0])


def approved_delete(world: World) -> tuple[OpenedTask, int]:
    """Return a task and a plan of it that may be committed: customer 1 with 30 rows below."""
    task = world.task()
    with sqlguard.connect(world.database.owner_dsn, task=task.task.id) as db:
        plan = stopped(db, DELETE, 1, confidence=0.9)
    world.approve_all(plan)
    return task, plan


# --- code with the operator's rights


def test_an_undo_calls_no_function_that_only_the_agent_names(world: World) -> None:
    """What answers a statement is called with the operator's rights, so only the policy says what that is."""
    world.owner.execute(
        "CREATE FUNCTION wreck(t text) RETURNS text LANGUAGE sql"
        " AS 'UPDATE counters SET name = t RETURNING name'"
    )
    task = world.task()
    agent = straight(world, task)
    for name in ("public.wreck(text)", "pg_catalog.pg_reload_conf()"):
        forged = f'[{{"name": "{name}", "kind": "reversal", "where": "sql", "arguments": ["wrecked"]}}]'
        for call in ("record_intent", "begin_step"):
            document = Jsonb({"verdict": "allow", "kind": "select", "compensation": forged})
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                agent.execute(f"SELECT sqlguard.{call}(%s)".encode(), [document])
    compensate.undo(world.owner, Scope(task=task.task.id))
    assert world.value("SELECT name FROM counters") == "orders"


def test_what_runs_by_itself_finds_no_function_of_an_agent_s_in_its_way(world: World) -> None:
    """Where PUBLIC may create in `public`, as in databases from PostgreSQL 14: a better match beats pg_catalog."""
    world.owner.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    agent = straight(world, world.task())
    for arguments in ("integer, smallint", "integer, integer"):
        agent.execute(
            f"CREATE FUNCTION public.pg_try_advisory_lock({arguments}) RETURNS boolean LANGUAGE plpgsql"
            " AS 'BEGIN UPDATE public.counters SET name = current_user; RETURN true; END'".encode()
        )
    with Janitor(world.database.owner_dsn, interval=0.1):
        time.sleep(1)
    # What a person starts keeps to the path, without the schemas where agents may create.
    with connect(world.database.owner_dsn) as operator:
        assert operator.execute("SHOW search_path").fetchone() == ('""',)
        assert not sweep(operator, datetime.now(UTC)).busy
    assert world.value("SELECT name FROM counters") == "orders"
    world.owner.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    with connect(world.database.owner_dsn) as operator:
        assert operator.execute("SHOW search_path").fetchone() == ('"$user", public',)


# --- approvals


def test_a_revoked_approval_is_not_taken_by_an_old_snapshot(world: World) -> None:
    task, plan = approved_delete(world)
    agent = straight(world, task)
    action = intent(agent)
    agent.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    agent.execute("SELECT set_config('sqlguard.action', %s, true), sqlguard.begin_plan()", [str(action)])
    agent.execute(
        "UPDATE customers SET deleted_at = statement_timestamp(), deleted_by_agent = 'tester' WHERE id = 1"
    )
    with world.person("dana") as dana:
        plans.revoke(dana, plan)
    with pytest.raises(psycopg.errors.SerializationFailure):
        agent.execute("SELECT sqlguard.redeem_plan(%s, NULL, %s, %s)", [plan, action, action])


def test_a_person_does_not_wait_for_an_agent_that_holds_a_plan(world: World) -> None:
    task, plan = approved_delete(world)
    agent = straight(world, task)
    agent.execute("BEGIN")
    agent.execute("SELECT sqlguard.redeem_plan(%s, NULL, 1, 1)", [plan])
    with world.person("dana") as dana:
        dana.execute("SET statement_timeout = '20s'")
        with pytest.raises(psycopg.errors.LockNotAvailable) as caught:
            plans.revoke(dana, plan)
        agent.execute("ROLLBACK")
        # The chain of the task is as good as the plan.
        agent.execute("BEGIN")
        intent(agent)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            plans.reject(dana, plan, "no")
    assert caught.value.sqlstate == "55P03"


def test_approving_a_step_does_not_wait_for_its_agent(world: World) -> None:
    agent = straight(world, world.task())
    action = intent(agent, verdict="approve", kind="tool", statement="wipe", tier="irreversible")
    agent.execute("BEGIN")
    intent(agent)
    with world.person("dana") as dana:
        dana.execute("SET statement_timeout = '20s'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            approve_step(dana, action)


def run_of(agent: psycopg.Connection[Any], text: str) -> tuple[int, str, str]:
    """Return an action and the signed outcome of a run that was rolled back."""
    action = intent(agent)
    agent.execute("BEGIN")
    agent.execute("SELECT set_config('sqlguard.action', %s, true), sqlguard.begin_plan()", [str(action)])
    agent.execute(text.encode())
    row = agent.execute("SELECT outcome, signed FROM sqlguard.plan_outcome(%s)", [action]).fetchone()
    agent.execute("ROLLBACK")
    assert row is not None
    return action, row[0], row[1]


def forged(agent: psycopg.Connection[Any], text: str, **said: Any) -> int:
    action, outcome, signed = run_of(agent, text)
    shown = said.pop("shown", text)
    document = {
        "action_id": action,
        "search_path": [],
        "statement_hash": shown,
        "statements": [{"statement": shown, "params": None, "values": []}],
    }
    row = agent.execute(
        "SELECT sqlguard.record_plan(%s, %s, %s)", [Jsonb(document | said), outcome, signed]
    ).fetchone()
    assert row is not None
    return int(row[0])


def test_a_plan_of_the_agent_s_own_making_lives_no_longer_than_the_policy_says(world: World) -> None:
    agent = straight(world, world.task())
    plan = forged(agent, "UPDATE customers SET name = 'x' WHERE id = 3", lifetime="7 days")
    left = world.value(f"SELECT expires_at - made_at FROM sqlguard.plan WHERE id = {plan}")
    assert left <= timedelta(hours=1, seconds=1)


def test_a_plan_does_not_supersede_one_of_another_agent(world: World) -> None:
    other, victim = approved_delete(world)
    agent = straight(world, world.task(agent="mallory"))
    with pytest.raises(psycopg.errors.DatabaseError):
        forged(agent, "UPDATE customers SET name = 'x' WHERE id = 3", drift_of=victim)
    assert other.task.agent != "mallory"
    assert plans.show(world.owner, victim).state == "approved"


def test_whoever_approves_is_told_whose_words_a_plan_is_in(world: World) -> None:
    """The rows are the database's, the text is only the agent's: it may say one thing and have done another."""
    agent = straight(world, world.task())
    plan = forged(
        agent,
        "UPDATE customers SET name = 'pwned' WHERE id = 3",
        shown="UPDATE customers SET name = trim(name) WHERE id = 3",
    )
    document = plans.show(world.owner, plan).document
    assert document["reported_by"] == "task"
    assert document["samples"][0]["after"]["name"] == "pwned"
    with sqlguard.connect(world.database.owner_dsn, task=world.task().task.id) as db:
        honest = stopped(db, DELETE, 1, confidence=0.9)
    assert plans.show(world.owner, honest).document["reported_by"] == "guard"


# --- what can't be read


def test_samples_show_no_keys_of_tables_that_the_task_can_not_read(server: EmbeddedServer) -> None:
    with fresh_database(server) as database:
        blind = POLICY.replace(
            '[tables."public.items"]',
            '[tables."public.items"]\nselect = false\ninsert = false\nupdate = false',
        )
        world = made_world(database, blind)
        task = world.task()
        with sqlguard.connect(world.database.dsn_for(task.role, task.password)) as db:
            shown = db.preview("DELETE FROM orders WHERE id = 1", confidence=0.9).report
    assert shown is not None
    items = [s for s in shown["samples"] if s["table"] == "public.items"]
    assert [(s["key"], s["before"], s["after"]) for s in items] == [(None, None, None)] * len(items)


# --- work that stops others


def test_a_lock_on_one_chain_stops_no_reconciliation_of_others(world: World) -> None:
    first, second = world.task(), world.task()
    agent = straight(world, first)
    intent(agent, backend_pid=1)
    honest = intent(straight(world, second))
    agent.execute("BEGIN")
    intent(agent)
    world.owner.execute("SET statement_timeout = '20s'")
    assert honest in {one.action for one in reconcile(world.owner, after=timedelta(0))}


def test_a_compensation_waits_for_no_lock_that_an_agent_may_keep(world: World) -> None:
    """Locks of the operator's are known by their first half: who holds one of these is ended by the janitor."""
    task = world.task()
    agent = straight(world, task)
    action = intent(agent, kind="tool", statement="charge", tier="compensable")
    lock = f"sqlguard compensation {action}"
    agent.execute("SELECT pg_advisory_lock(hashtextextended(%s, 0))", [lock])
    assert sweep(world.owner, world.value("SELECT now()")).changed == ()
    world.owner.execute("SET statement_timeout = '20s'")
    report = compensate.undo(world.owner, Scope(task=task.task.id))
    assert report.answers[0].state == "pending"
    agent.execute("SELECT pg_advisory_lock(x'73716c67'::int, hashtext(%s))", [lock])
    assert sweep(world.owner, world.value("SELECT now()")).changed == (task.task.id,)


def test_an_undo_does_not_wait_for_ever_for_an_agent_s_rows(world: World) -> None:
    task = world.task()
    agent = straight(world, task)
    agent.execute("UPDATE customers SET name = 'mine' WHERE id = 5")
    agent.execute("BEGIN")
    agent.execute("UPDATE customers SET name = 'still mine' WHERE id = 5")
    world.owner.execute("SET statement_timeout = '60s'")
    with pytest.raises(Refused, match="locked") as caught:
        compensate.undo(world.owner, Scope(task=task.task.id))
    assert task.task.id in (caught.value.hint or "")


def test_a_policy_is_applied_without_a_queue_behind_an_agent_s_open_transaction(world: World) -> None:
    """A statement that waits for ACCESS EXCLUSIVE makes the application's readers wait behind it."""
    agent = straight(world, world.task())
    agent.execute("BEGIN")
    agent.execute("SELECT count(*) FROM orders")
    scoped = POLICY.replace('class = ["financial"]', 'class = ["financial"]\nrows = "customer_id = :c"')
    operator = world.database.connect(world.database.owner_dsn)
    with ThreadPoolExecutor(1) as pool:
        applied = pool.submit(apply_policy, operator, parse_policy(scoped, "p"))
        try:
            world.owner.execute("SET statement_timeout = '1500ms'")
            for _ in range(10):
                world.owner.execute("SELECT count(*) FROM orders")
                time.sleep(0.1)
            assert not applied.done()
        finally:
            agent.execute("ROLLBACK")
        assert applied.result(20).version == 2


# --- what is pinned down


def test_what_a_task_may_call_with_the_operator_s_rights(world: World) -> None:
    """Each of these was looked at with hostile arguments; whoever adds one does so too."""
    role = world.task().role
    found = world.owner.execute(
        "SELECT proname FROM pg_proc WHERE pronamespace = 'sqlguard'::regnamespace AND prosecdef"
        " AND has_function_privilege(%s, oid, 'EXECUTE') AND proname NOT LIKE 'held\\_%%'",
        [role],
    ).fetchall()
    assert {name for (name,) in found} == {
        *("agent", "current_login", "current_task", "task_parameter", "check_children"),
        *("record_intent", "record_event", "begin_step", "step_ticket"),
        *("transaction_changes", "transaction_samples", "find_key", "claim_key", "keep_result"),
        *("claim_key_or_stop", "keep_count", "copy_target"),
        *("begin_plan", "note_sequences", "weigh", "plan_outcome", "record_plan", "redeem_plan"),
        *("ticket", "last_plan", "plan_statements", "lease_own_statements"),
    }
    reachable = world.owner.execute(
        "SELECT DISTINCT c.relname FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0"
        " WHERE c.relnamespace = 'sqlguard'::regnamespace AND c.relkind = 'r'"
        " AND has_column_privilege(%s, c.oid, a.attnum, 'SELECT, INSERT, UPDATE')",
        [role],
    ).fetchall()
    assert reachable == [("guarded_table",)]


def test_no_probing_for_the_values_of_deleted_rows(server: EmbeddedServer) -> None:
    """Who may insert learns that a deleted row keeps a value; nobody else does."""
    with fresh_database(server) as database:
        reader = '[tables."public.customers"]\nselect = true\ninsert = false\n'
        world = made_world(database, POLICY + reader)
        world.owner.execute("UPDATE customers SET deleted_at = now() WHERE id = 60")
        agent = straight(world, world.task())
        name = world.value("SELECT proname FROM pg_proc WHERE proname LIKE 'held\\_public\\_customers%'")
        assert agent.execute(f"SELECT sqlguard.{name}(60)".encode()).fetchone() == (True,)


def test_a_task_s_own_session_does_not_change_how_an_action_ended(world: World) -> None:
    task = world.task()
    with sqlguard.connect(world.database.owner_dsn, task=task.task.id) as db:
        done = db.execute("UPDATE customers SET name = 'x' WHERE id = 3", confidence=0.9)
    agent = straight(world, task)
    for kind in ("failed", "previewed", "committed"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            agent.execute("SELECT sqlguard.record_event(%s, %s)", [done.action, kind])
    assert show_action(world.owner, done.action or 0).action.outcome == "committed"
