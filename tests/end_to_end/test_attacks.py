"""
What an agent might try to act with the operator's rights, or to stop others, through the proxy and straight.

Each test is one attack that once worked, or that would if its wall were taken away; confirmed in the database as its
owner sees it.
"""

import threading
import time
from datetime import UTC, datetime

import psycopg
import pytest
from end_to_end.attack_lab import Lab, soon, straight
from end_to_end.wired import Agent

from sqlguard import annotation
from sqlguard.postgres.sweep import sweep
from sqlguard.postgres.tasks import end_task
from sqlguard.postgres.undo import undo

# --- code that would run with the operator's rights


def test_a_wall_s_trigger_function_runs_on_no_table_of_the_agent_s(lab: Lab, mallory: Agent) -> None:
    """Its casts and row policies would be the agent's code with the operator's rights."""
    with straight(mallory) as agent:
        agent.execute("CREATE TYPE pg_temp.trap AS (a int)")
        agent.execute(
            "CREATE FUNCTION pg_temp.spring(pg_temp.trap) RETURNS text LANGUAGE plpgsql"
            " AS $$ BEGIN DELETE FROM public.loose; RETURN '1'; END $$"
        )
        agent.execute("CREATE CAST (pg_temp.trap AS text) WITH FUNCTION pg_temp.spring(pg_temp.trap)")
        agent.execute(
            "CREATE TEMP TABLE bait (id pg_temp.trap, deleted_at timestamptz, deleted_by_agent text)"
        )
        function = lab.value(
            "SELECT tgfoid::regproc::text FROM pg_trigger"
            " WHERE tgrelid = 'orders'::regclass AND tgname = 'sqlguard_insert'"
        )
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            agent.execute(
                "CREATE TRIGGER t AFTER INSERT ON bait REFERENCING NEW TABLE AS sg_new"
                f" FOR EACH STATEMENT EXECUTE FUNCTION {function}()"
            )
    assert lab.value("SELECT count(*) FROM loose") == 1


def test_no_definer_function_can_be_attached_by_everyone(lab: Lab) -> None:
    found = lab.owner.execute(
        "SELECT p.proname FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace"
        " WHERE n.nspname = 'sqlguard' AND p.prosecdef AND p.prorettype = 'trigger'::regtype"
        " AND has_function_privilege('sqlguard_agent', p.oid, 'EXECUTE')"
    ).fetchall()
    # Owners of partitioned tables need this one; it refuses tables that are not guarded.
    assert found == [("check_children",)]


def test_the_check_of_deferrable_keys_reads_no_table_of_the_agent_s(mallory: Agent) -> None:
    with straight(mallory) as agent:
        agent.execute(
            "CREATE TEMP TABLE bait (id int PRIMARY KEY, above int CONSTRAINT above REFERENCES bait)"
        )
        agent.execute("INSERT INTO bait VALUES (1)")
        agent.execute(
            "CREATE TRIGGER t AFTER UPDATE ON bait FOR EACH ROW"
            " EXECUTE FUNCTION sqlguard.check_children('above')"
        )
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            agent.execute("UPDATE bait SET id = 2")


def test_what_an_agent_leaves_behind_does_not_run_as_the_operator(lab: Lab) -> None:
    """Where PUBLIC may create in a schema, as in databases that come from PostgreSQL 14."""
    first = lab.agent()
    with straight(first) as agent:
        agent.execute(
            "CREATE FUNCTION workshop.parcel() RETURNS void LANGUAGE sql SECURITY DEFINER"
            " AS $$ DELETE FROM public.loose $$"
        )
        agent.execute("CREATE TABLE workshop.notes (t text)")
    end_task(lab.owner, first.task.task.id, "done")
    assert lab.value("SELECT to_regclass('workshop.notes')::text") == "workshop.notes"
    with lab.visit() as second, straight(second) as agent:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            agent.execute("SELECT workshop.parcel()")
    assert lab.value("SELECT count(*) FROM loose") == 1


# --- rights that outlive their task, work that stops others


def test_a_task_ends_although_its_session_locks_its_role(lab: Lab) -> None:
    mallory = lab.agent()
    held = straight(mallory, autocommit=False)
    held.execute("ALTER ROLE CURRENT_USER PASSWORD 'mine'")
    try:
        other = lab.operator()
        assert soon(lambda: end_task(other, mallory.task.task.id, "over"), 20)
        with pytest.raises(psycopg.Error):
            held.execute("SELECT count(*) FROM orders")
        assert lab.value("SELECT count(*) FROM pg_roles WHERE rolname = %s", mallory.task.role) == 0
    finally:
        held.close()


def test_a_lock_on_a_task_s_chain_stops_nobody_else(lab: Lab, mallory: Agent) -> None:
    with lab.visit() as honest, honest.connect() as victim, straight(mallory, autocommit=False) as agent:
        agent.execute("""SELECT sqlguard.record_intent('{"verdict": "refuse"}')""")
        with mallory.connect() as accomplice:
            stuck = threading.Thread(
                target=lambda: soon(lambda: accomplice.execute("UPDATE orders SET note = 'a' WHERE id = 60"))
            )
            stuck.start()
            time.sleep(0.3)
            assert soon(lambda: victim.execute("UPDATE orders SET note = 'b' WHERE id = 61"))
            agent.rollback()
            stuck.join()


@pytest.mark.parametrize("number", [2, 3, 4])
def test_an_agent_that_takes_the_operator_s_locks_is_ended(lab: Lab, number: int) -> None:
    """With them it would keep the janitor from ending tasks, tasks from being opened, and every undo waiting."""
    mallory = lab.agent()
    other = lab.operator()
    with lab.visit() as honest, straight(mallory) as agent:
        agent.execute("SELECT pg_advisory_lock(x'73716c67'::int, %s)", [number])
        found = sweep(other, datetime.now(UTC))
        assert not found.busy
        assert found.changed == (mallory.task.task.id,)
        with pytest.raises(psycopg.Error):
            agent.execute("SELECT 1")
        assert soon(lambda: undo(other, task=honest.task.task.id))


@pytest.mark.parametrize("ended_by", ["operator", "janitor"])
def test_a_prepared_transaction_stops_no_undo(lab: Lab, ended_by: str) -> None:
    """Where max_prepared_transactions is not 0, its default, a lock needs no session that could be ended."""
    mallory = lab.agent()
    other = lab.operator()
    with straight(mallory) as agent:
        agent.execute("BEGIN READ WRITE")
        agent.execute("SELECT pg_advisory_xact_lock(x'73716c67'::int, n) FROM generate_series(3, 4) n")
        agent.execute("UPDATE orders SET note = 'mine for good' WHERE id = 59")
        agent.execute("ALTER ROLE CURRENT_USER PASSWORD 'mine'")
        agent.execute("PREPARE TRANSACTION 'squatter'")
    if ended_by == "operator":
        assert soon(lambda: end_task(other, mallory.task.task.id, "over"), 20)
    else:
        assert sweep(other, datetime.now(UTC)).changed == (mallory.task.task.id,)
    assert lab.value("SELECT count(*) FROM pg_prepared_xacts") == 0
    assert lab.value("SELECT count(*) FROM pg_roles WHERE rolname = %s", mallory.task.role) == 0
    with lab.visit() as honest:
        with honest.connect() as agent:
            agent.execute("UPDATE orders SET note = 'honest' WHERE id = 59")
        assert soon(lambda: undo(other, task=honest.task.task.id))


def test_an_undo_waits_for_no_prepared_transaction_s_advisory_lock(lab: Lab, mallory: Agent) -> None:
    with straight(mallory) as agent:
        agent.execute("BEGIN")
        agent.execute("SELECT pg_advisory_xact_lock(x'73716c67'::int, 4)")
        agent.execute("PREPARE TRANSACTION 'squatter'")
        other = lab.operator()
        assert soon(lambda: undo(other, task=mallory.task.task.id), 3)
        agent.execute("ROLLBACK PREPARED 'squatter'")


def test_text_that_would_keep_the_judge_busy(mallory: Agent) -> None:
    """One proxy serves everyone: no text of a few kilobytes may hold it up."""
    doubling = ", ".join(
        f"c{n} AS (SELECT * FROM {'orders' if n == 0 else f'c{n - 1} a, c{n - 1} b'})" for n in range(40)
    )
    before = time.monotonic()
    with mallory.connect() as agent, pytest.raises(psycopg.Error):
        agent.execute(f"WITH {doubling} SELECT * FROM c39".encode())
    annotation.read("SELECT 1 /*" + ",".join(["a='b'"] * 150_000) + "*/")
    assert time.monotonic() - before < 3


def test_deep_text_is_an_answer_and_no_broken_session(mallory: Agent) -> None:
    deep = "SELECT * FROM " + "(SELECT * FROM " * 60 + "orders" + ") a" * 60
    with mallory.connect() as agent:
        try:
            agent.execute(deep.encode())
        except psycopg.Error as fault:
            assert fault.sqlstate == "SG007"
        assert agent.execute("SELECT 1").fetchone() == (1,)
