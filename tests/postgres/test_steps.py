"""Tools in the same saga as rows: one order, keys passed on, crashes taken up again, nothing called twice without a key."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from journaled import PASSWORD, Agent, World
from saga_world import Bank, note, outcomes, saga_world, states, steps_of, undo, write
from servers import Database

from sqlguard.errors import ApprovalRequired, Frozen, Refused, TaskEnded
from sqlguard.postgres import compensate, journal
from sqlguard.postgres.reconcile import reconcile
from sqlguard.postgres.steps import Steps, approve, waiting
from sqlguard.postgres.undo_plan import Scope
from sqlguard.steps import NotDone


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with saga_world(database) as made:
        yield made


@pytest.fixture
def bank() -> Bank:
    return Bank()


def test_rows_and_calls_are_answered_in_one_order(world: World, bank: Bank) -> None:
    before = world.contents("app.item")
    seen: list[Any] = []
    refund = bank.guard.compensations["refund"]
    bank.guard.compensations["refund"] = lambda done: (seen.append((done.result, note(world))), refund(done))[
        1
    ]
    with steps_of(world) as steps, bank.guard.on(steps), bank.guard.because("a test"):
        write(world, "a")
        bank.charge(5)
        write(world, "b")
        bank.charge(7, idempotency_key="run-1:2")
        write(world, "c")
    report = undo(world, bank)
    assert seen == [("receipt 7", "b"), ("receipt 5", "a")]
    assert bank.log[2:] == [
        ("refund", "receipt 7", True, "run-1:2:compensation"),
        ("refund", "receipt 5", True, "t:2:compensation"),
    ]
    assert (report.is_complete, states(report)) == (True, ["charge: compensated", "charge: compensated"])
    assert world.contents("app.item") == before
    assert [(t.table, t.op, t.rows) for t in report.rows.tables] == [("app.item", "update", 3)]
    assert outcomes(world) == ["undone", "compensated", "undone", "compensated", "undone"]
    assert journal.verify(world.op).ok
    again = undo(world, bank)
    assert again.rows.already_undone
    assert len(bank.log) == 4
    # The redo is of rows alone, part by part, oldest first.
    for part in reversed(report.parts):
        compensate.undo(world.op, Scope(undo=part.undo))
    assert note(world) == "c"
    assert len(bank.log) == 4


def test_a_conflict_stops_it_before_anything_is_called(world: World, bank: Bank) -> None:
    with steps_of(world) as steps, bank.guard.on(steps):
        write(world, "a")
        bank.charge(5)
    world.op.execute("UPDATE app.item SET note = 'the owner' WHERE id = 1")
    report = undo(world, bank)
    assert (report.rows.stopped, report.rows.conflict_count, len(bank.log)) == (True, 1, 1)
    preview = undo(world, bank, preview=True)
    assert (states(preview), len(bank.log)) == (["charge: would be called"], 1)
    skipped = undo(world, bank, on_conflict="skip")
    assert (states(skipped), note(world)) == (["charge: compensated"], "the owner")


def test_a_compensation_that_fails_holds_up_what_is_older_and_is_tried_again(
    world: World, bank: Bank
) -> None:
    with steps_of(world) as steps, bank.guard.on(steps):
        write(world, "a")
        bank.charge(5)
        write(world, "b")
    bank.fails = 1
    report = undo(world, bank)
    assert (states(report), report.is_complete) == (["charge: failed"], False)
    assert (report.answers[0].problem, note(world)) == ("TimeoutError: no answer", "a")
    report = undo(world, bank)
    assert (states(report), report.is_complete, note(world)) == (["charge: compensated"], True, "n1")
    assert [call[-1] for call in bank.log[1:]] == ["t:2:compensation"] * 2


def test_a_crash_in_between_is_taken_up_with_the_same_key(world: World, bank: Bank) -> None:
    with steps_of(world) as steps, bank.guard.on(steps):
        write(world, "a")
        bank.charge(5)
        bank.charge(6)
    bank.guard.compensations["refund"] = lambda done: (
        bank.log.append(done.idempotency_key),
        (_ for _ in ()).throw(KeyboardInterrupt) if len(bank.log) == 4 else None,
    )[0]
    with pytest.raises(KeyboardInterrupt):
        undo(world, bank)
    assert outcomes(world) == ["committed", "compensating", "compensated"]
    assert undo(world, bank).is_complete
    assert bank.log[2:] == ["t:3:compensation", "t:2:compensation", "t:2:compensation"]
    assert undo(world, bank).rows.already_undone
    assert len(bank.log) == 5


def test_without_its_registry_a_compensation_stays_pending(world: World, bank: Bank) -> None:
    with steps_of(world) as steps, bank.guard.on(steps):
        write(world, "a")
        bank.charge(5)
        write(world, "b", "id = 2")
    report = undo(world, None)
    assert (states(report), report.is_complete) == (["charge: pending"], False)
    assert "--tools" in (report.answers[0].problem or "")
    assert (note(world), note(world, 2)) == ("a", "n2")
    assert undo(world, bank).is_complete
    assert note(world) == "n1"


def test_a_mail_is_made_up_for_and_never_taken_back(world: World, bank: Bank) -> None:
    with steps_of(world) as steps, bank.guard.on(steps):
        bank.mail("ada@shop.example", password="hunter2")
    report = undo(world, bank)
    assert [(a.state, a.kind) for a in report.answers] == [("mitigated", "mitigation")]
    assert outcomes(world) == ["mitigated"]
    assert bank.log[-1] == ("sorry", "ada@shop.example")
    (action,) = journal.list_actions(world.op)
    assert action.params == {"to": "ada@shop.example", "password": "***"}
    assert undo(world, bank).rows.already_undone


def test_calls_that_failed_or_never_ended(world: World, bank: Bank) -> None:
    with steps_of(world) as steps, bank.guard.on(steps):
        with pytest.raises(NotDone):
            bank.charge(0)
        with pytest.raises(TimeoutError):
            bank.charge(-3)
        steps.ended = lambda *_: None  # type: ignore[method-assign]  # as if the process had died
        bank.charge(4)
    assert outcomes(world) == ["failed", "failed", "unsettled"]
    report = undo(world, bank)
    assert bank.log[2:] == [
        ("refund", None, False, "t:3:compensation"),
        ("refund", None, False, "t:2:compensation"),
    ]
    assert [a.action for a in report.answers] == [3, 2]


def test_reconciliation_does_not_guess_what_happened_outside(world: World, bank: Bank) -> None:
    with steps_of(world) as steps, bank.guard.on(steps):
        steps.ended = lambda *_: None  # type: ignore[method-assign]
        bank.charge(4)
        world.op.execute("SELECT pg_sleep(0.01)")
    (settled,) = reconcile(world.op, after=timedelta())
    assert settled.outcome == "unknown"
    assert outcomes(world) == ["unknown"]
    assert undo(world, bank).is_complete
    assert bank.log[-1][:3] == ("refund", None, False)


def test_a_key_is_called_once_for_the_same_call_only(world: World, bank: Bank) -> None:
    with steps_of(world) as steps, bank.guard.on(steps):
        assert bank.charge(5, idempotency_key="k") == bank.charge(5, idempotency_key="k") == "receipt 5"
        with pytest.raises(Refused, match="used for another call"):
            bank.charge(6, idempotency_key="k")
    world.task("renewed")
    with Steps.connect(world.database.dsn_for("sg_tk_renewed", PASSWORD)) as steps, bank.guard.on(steps):
        assert bank.charge(5, idempotency_key="k") == "receipt 5"
    assert len(bank.log) == 1
    assert [a.action for a in undo(world, bank).answers] == [1]


def test_an_irreversible_call_needs_an_approval_for_each(world: World, bank: Bank) -> None:
    with steps_of(world) as steps, bank.guard.on(steps):
        with pytest.raises(ApprovalRequired, match="approve the call") as caught:
            bank.wipe("sda")
        (ticket,) = waiting(world.op)
        assert caught.value.detail == f"action {ticket.action}"
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            world.agents[0].conn.execute("SELECT sqlguard.decide_step(%s, 'approve')", [ticket.action])
        with world.database.connect() as dana:
            dana.execute("CREATE ROLE sg_step_dana LOGIN IN ROLE sqlguard_approver")
            dana.execute("SET SESSION AUTHORIZATION sg_step_dana")
            assert waiting(dana) == [ticket]
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                dana.execute("SELECT FROM sqlguard.action")
            approve(dana, ticket.action, "seen")
            dana.execute("RESET SESSION AUTHORIZATION")
            dana.execute("DROP ROLE sg_step_dana")
        with pytest.raises(ApprovalRequired):
            bank.wipe("sdb")
        bank.wipe("sda")
        with pytest.raises(ApprovalRequired):
            bank.wipe("sda")
        with pytest.raises(Refused, match="was used"):
            approve(world.op, ticket.action)
    assert bank.log == [("wipe", "sda")]
    report = undo(world, bank)
    assert [(a.state, a.problem) for a in report.answers] == [
        ("pending", "nothing answers it: it can't be taken back")
    ]


def test_a_frozen_or_ended_task_calls_nothing(world: World, bank: Bank) -> None:
    with steps_of(world) as steps, bank.guard.on(steps):
        world.op.execute("INSERT INTO sqlguard.freeze (reason) VALUES ('audit')")
        with pytest.raises(Frozen):
            bank.charge(5)
        world.op.execute("UPDATE sqlguard.freeze SET thawed_at = now()")
        world.op.execute("UPDATE sqlguard.task SET state = 'ended'")
        with pytest.raises(TaskEnded):
            bank.charge(5)
    assert bank.log == []


def test_an_operators_connection_names_the_task(world: World, bank: Bank) -> None:
    with Steps.connect(world.database.owner_dsn, task="t") as steps, bank.guard.on(steps):
        bank.charge(5)
    assert undo(world, bank, scope=Scope(action=1)).is_complete
    assert agent_task(world.agents[0]) == "t"


def agent_task(agent: Agent) -> str:
    return agent.task
