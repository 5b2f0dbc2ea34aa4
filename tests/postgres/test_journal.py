"""The journal in a real database: chained, append-only, and only for those who may write it."""

import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from journaled import World, rows
from journaled import world as made_world
from servers import Database

from sqlguard.errors import Frozen, Refused, TaskEnded
from sqlguard.journal import Intent
from sqlguard.postgres import journal
from sqlguard.postgres.reconcile import reconcile

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=30)
OPTIONAL = st.one_of(st.none(), TEXT)


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with made_world(database) as made:
        yield made


def test_an_intent_is_kept_with_every_field(world: World) -> None:
    world.task("t")
    intent = Intent(
        task="t",
        role="sg_tk_t",
        agent="somebody else",
        reason="wrong price",
        confidence=0.9,
        idempotency_key="run-7:3",
        step="3",
        kind="update",
        tier="reversible",
        verdict="rewrite",
        rules=("a", "b"),
        tables=("public.orders",),
        statement="UPDATE orders SET price = $1",
        executed="UPDATE …",
        params=("1.50", None),
        compensation="none",
        via="proxy",
        backend_pid=77,
    )
    number = journal.record_intent(world.op, intent)
    kept = journal.show_action(world.op, number).as_dict()
    wanted = intent.as_record() | {
        "agent": "bot",
        "policy": "tester",
        "policy_version": 1,
        "rules": ["a", "b"],
        "tables": ["public.orders"],
        "params": ["1.50", None],
        "outcome": "unsettled",
        "rows": 0,
    }
    del wanted["statement_hash"]
    assert {k: v for k, v in kept.items() if k in wanted} == wanted
    assert (kept["id"], kept["events"], kept["changes"]) == (number, [], [])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.builds(
            Intent,
            reason=OPTIONAL,
            statement=OPTIONAL,
            step=OPTIONAL,
            confidence=st.floats(0, 1),
            params=st.one_of(st.none(), st.tuples(OPTIONAL)),
            tables=st.tuples(TEXT),
        ),
        max_size=4,
    )
)
def test_what_the_server_hashed_is_what_we_hash(world: World, intents: list[Intent]) -> None:
    if not world.agents:
        world.task("t")
    numbers = journal.record_group(world.op, [replace(i, task="t") for i in intents], [])
    for number in numbers:
        journal.record_event(world.op, number, "committed", {"tag": intents[0].reason, "n": 1.50})
    assert numbers == sorted(numbers)
    assert journal.verify(world.op).faults == ()


def test_a_changed_a_removed_and_a_cut_off_entry_are_found(world: World) -> None:
    for name in ("a", "b", "c", "d"):
        world.task(name)
        for n in range(5):
            action = journal.record_intent(world.op, Intent(task=name, statement=f"s{n}"))
            journal.record_event(world.op, action, "failed")
    third = {
        n: world.database.execute(
            "SELECT id FROM sqlguard.action WHERE task_id = %s ORDER BY id OFFSET 2 LIMIT 1", [n]
        )[0][0]
        for n in "abcd"
    }
    assert journal.verify(world.op).ok
    with world.database.connect() as root:
        # Somebody with all rights, who switches the walls off.
        root.execute("SET session_replication_role = replica")
        root.execute("ALTER TABLE sqlguard.action DISABLE TRIGGER append_only")
        root.execute("ALTER TABLE sqlguard.event DISABLE TRIGGER append_only")
        root.execute("UPDATE sqlguard.action SET reason = 'innocent' WHERE id = %s", [third["a"]])
        root.execute("DELETE FROM sqlguard.action WHERE id = %s", [third["b"]])
        root.execute("DELETE FROM sqlguard.event WHERE action_id > %s AND task_id = 'c'", [third["c"]])
    report = journal.verify(world.op)
    found = {(f.task, f.chain, f.entry) for f in report.faults}
    assert ("a", "action", third["a"]) in found
    assert ("b", "action", third["b"] + 1) in found
    assert ("c", "event", None) in found
    assert not any(f.task == "d" for f in report.faults)
    assert journal.verify(world.op, "d").ok
    assert len(journal.verify(world.op, "a").faults) == 1


@pytest.mark.parametrize(
    ("table", "column"),
    [("action", "reason"), ("event", "detail"), ("change_set", "rows"), ("row_change", "before")],
)
@pytest.mark.parametrize("who", ["owner", "superuser"])
def test_the_journal_only_grows(world: World, table: str, column: str, who: str) -> None:
    conn = world.op if who == "owner" else world.database.connect()
    for statement in (
        f"UPDATE sqlguard.{table} SET {column} = NULL",
        f"DELETE FROM sqlguard.{table}",
        f"TRUNCATE sqlguard.{table}",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute(statement)


def test_a_task_writes_for_itself_only(world: World) -> None:
    mine, other = world.task("mine"), world.task("other")
    number = journal.record_intent(mine.conn, Intent(statement="s", role="forged", agent="forged"))
    kept = journal.show_action(world.op, number).action
    assert (kept.task_id, kept.role, kept.agent) == ("mine", "sg_tk_mine", "bot")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        journal.record_intent(mine.conn, Intent(task="other"))
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        journal.record_event(other.conn, number, "committed")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        journal.record_event(mine.conn, number, "approved")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        mine.conn.execute("SELECT * FROM sqlguard.action")


def test_a_read_only_session_can_still_journal(world: World) -> None:
    agent = world.task("t")
    world.op.execute("ALTER ROLE sg_tk_t SET default_transaction_read_only = on")
    with world.database.connect(world.database.dsn_for(agent.role, "a lease of this test")) as conn:
        assert journal.record_intent(conn, Intent(statement="s"))


def test_an_ended_task_and_a_freeze_stop_writes_but_not_the_record_of_refusals(world: World) -> None:
    world.task("t")
    write = Intent(task="t", tables=("public.orders",))
    world.op.execute("INSERT INTO sqlguard.freeze (tables, reason) VALUES ('{public.items}', 'stocktaking')")
    assert journal.record_intent(world.op, write)
    world.op.execute("INSERT INTO sqlguard.freeze (tables, reason) VALUES (NULL, 'release')")
    with pytest.raises(Frozen, match="writes are frozen: release"):
        journal.record_intent(world.op, write)
    world.op.execute("UPDATE sqlguard.freeze SET thawed_at = now()")
    world.op.execute("UPDATE sqlguard.task SET state = 'ended'")
    with pytest.raises(TaskEnded, match="task `t` has ended"):
        journal.record_intent(world.op, write)
    with pytest.raises(TaskEnded):
        journal.record_group(world.op, [write, write], [])
    assert journal.record_intent(world.op, replace(write, verdict="refuse"))
    with pytest.raises(TaskEnded, match="there is no task `nobody`"):
        journal.record_intent(world.op, Intent(task="nobody"))


def test_lists_are_filtered_and_say_what_came_of_each(world: World) -> None:
    world.task("a")
    world.task("b", agent="other")
    one = journal.record_intent(world.op, Intent(task="a", tables=("public.orders",)))
    two = journal.record_intent(world.op, Intent(task="a", tables=("shop.items",), verdict="refuse"))
    three = journal.record_intent(world.op, Intent(task="b", tables=("shop.orders",)))
    journal.record_event(world.op, one, "started")
    journal.record_event(world.op, three, "failed", {"sqlstate": "23505"})

    def ids(**wanted: object) -> list[int]:
        return [a.id for a in journal.list_actions(world.op, **wanted)]  # type: ignore[arg-type]

    assert ids() == [one, two, three]
    assert ids(task="a") == [one, two]
    assert ids(agent="other") == [three]
    assert ids(table="orders") == [one, three]
    assert ids(table="shop.orders") == [three]
    assert ids(limit=2) == [two, three]
    assert ids(since=journal.show_action(world.op, two).action.at) == [two, three]
    assert [a.outcome for a in journal.list_actions(world.op)] == ["unsettled", "refused", "failed"]
    with pytest.raises(Refused, match="there is no action 999"):
        journal.show_action(world.op, 999)


def test_retention_leaves_chains_that_verify(world: World) -> None:
    for name in ("old", "new"):
        world.task(name)
        action = journal.record_intent(world.op, Intent(task=name))
        journal.record_event(world.op, action, "failed")
    world.op.execute(
        "UPDATE sqlguard.task SET state = 'ended', ended_at = now() - interval '1y' WHERE id = 'old'"
    )
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        world.op.execute("SELECT sqlguard.retire(now())")
    with world.database.connect() as root:
        root.execute("SET ROLE sqlguard_retention")
        assert rows(root, "SELECT sqlguard.retire(now() - interval '30 days')") == [(1,)]
    assert [a.task_id for a in journal.list_actions(world.op)] == ["new"]
    report = journal.verify(world.op)
    assert (report.ok, report.tasks, report.entries) == (True, 2, 2)


def test_unsettled_actions_are_settled_by_evidence_only(world: World) -> None:
    agent = world.task("t")
    ended = journal.record_intent(world.op, Intent(task="t"))
    journal.record_event(world.op, ended, "committed")
    idle = journal.record_intent(world.op, Intent(task="t", role=agent.role, backend_pid=1))
    done = journal.record_intent(world.op, Intent(task="t"))
    world.op.execute(
        "INSERT INTO sqlguard.change_set (action_id, task_id, relid, schema_name, table_name, op, rows, shape_id)"
        " VALUES (%s, 't', 0, 'public', 'orders', 'update', 3, 0)",
        [done],
    )
    at_work = journal.record_intent(
        world.op, Intent(task="t", role=agent.role, backend_pid=agent.conn.info.backend_pid)
    )
    refused = journal.record_intent(world.op, Intent(task="t", verdict="refuse"))
    assert reconcile(world.op) == []
    with agent.conn.transaction():
        agent.conn.execute("SELECT 1")
        found = {s.action: (s.outcome, s.rows, s.statuses) for s in reconcile(world.op, after=timedelta(0))}
    assert found == {idle: ("no changes", 0, []), done: ("committed", 3, ["committed"])}
    assert refused not in found
    assert [s.action for s in reconcile(world.op, after=timedelta(0))] == [at_work]
    assert reconcile(world.op, after=timedelta(0)) == []
    outcomes = {a.id: a.outcome for a in journal.list_actions(world.op)}
    assert outcomes == {
        ended: "committed",
        idle: "no changes",
        done: "committed",
        at_work: "no changes",
        refused: "refused",
    }


@pytest.mark.slow
def test_an_intent_costs_well_under_a_millisecond(world: World) -> None:
    world.task("t")
    intents = [Intent(task="t", statement="UPDATE t SET a = 1 WHERE id = 7")] * 500
    started = time.perf_counter()
    journal.record_group(world.op, intents, [])
    assert (time.perf_counter() - started) / len(intents) < 0.002


def test_a_group_is_written_together_or_not_at_all(world: World) -> None:
    world.task("t")
    world.task("v")
    first, second = journal.record_group(
        world.op, [Intent(task="v", statement="1"), Intent(task="t", statement="2")], []
    )
    third = journal.record_group(
        world.op,
        [Intent(task="t", statement="3")],
        [(first, "committed", {"tag": "INSERT 0 1"}), (second, "failed", {"sqlstate": "23505"})],
    )
    assert journal.record_group(world.op, [], [(third[0], "committed", {})]) == []
    assert [(a.statement, a.outcome) for a in journal.list_actions(world.op)] in (
        [("1", "committed"), ("2", "failed"), ("3", "committed")],
        [("2", "failed"), ("1", "committed"), ("3", "committed")],
    )
    with pytest.raises(TaskEnded):
        journal.record_group(world.op, [Intent(task="gone"), Intent(task="t")], [(first, "failed", {})])
    assert len(journal.list_actions(world.op)) == 3
    assert journal.verify(world.op).ok
