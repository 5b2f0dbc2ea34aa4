"""Functions of the database that others answer, and single columns, in the saga of rows and tools."""

from collections.abc import Iterator

import pytest
from journaled import World, rows
from saga_world import Bank, note, saga_world, states, steps_of, undo, write
from servers import Database
from task_world import POLICY, shop

from sqlguard.connection import connect
from sqlguard.errors import Refused
from sqlguard.journal import Intent
from sqlguard.postgres import compensate, journal
from sqlguard.postgres.compensate import resolve
from sqlguard.postgres.undo_plan import Scope
from sqlguard.steps import Answer, answers_text


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with saga_world(database) as made:
        yield made


@pytest.fixture
def bank() -> Bank:
    return Bank()


BACK = "app.back(integer,text)"


def call_function(world: World, *arguments: str | None, known: bool = True) -> int:
    """Journal a statement that calls a function which the policy says is answered by app.back."""
    answers = (Answer(BACK, where="sql", arguments=arguments if known else None),)
    action = journal.record_intent(
        world.op, Intent(task="t", kind="select", statement="SELECT f()", compensation=answers_text(answers))
    )
    journal.record_event(world.op, action, "committed")
    return action


def test_functions_of_the_database_are_answered_in_the_same_order_exactly_once(
    world: World, bank: Bank
) -> None:
    with steps_of(world) as steps, bank.guard.on(steps):
        call_function(world, "5", "first")
        write(world, "a")
        call_function(world, "\\x00000007", "last")
        bank.charge(1)
    report = undo(world, bank)
    assert states(report) == ["charge: compensated", "SELECT f(): compensated", "SELECT f(): compensated"]
    assert rows(world.op, "SELECT what FROM app.refunds") == [("7last",), ("5first",)]
    assert [a.result for a in report.answers] == ["refunded", "7last", "5first"]
    assert note(world) == "n1"
    assert undo(world, bank).rows.already_undone
    assert rows(world.op, "SELECT count(*) FROM app.refunds") == [(2,)]


def test_what_can_not_be_answered_by_itself_waits_and_says_why(world: World) -> None:
    write(world, "a")
    unknown = call_function(world, known=False)
    report = undo(world, None)
    assert report.answers[0].problem == "the statement does not tell the call's arguments"
    assert (report.is_complete, note(world)) == (False, "a")
    wrong = call_function(world, "five", "x")
    (answer,) = undo(world, None, scope=Scope(action=wrong)).answers
    assert (answer.state, answer.problem) == (
        "failed",
        'invalid input syntax for type integer: "five"',
    )
    resolve(world.op, unknown, "called app.back by hand")
    resolve(world.op, wrong, "nothing had happened")
    report = undo(world, None)
    assert (report.is_complete, note(world)) == (True, "n1")
    with pytest.raises(Refused, match="nothing to resolve"):
        resolve(world.op, unknown, "again")


def test_a_call_through_the_guard_is_answered_on_undo(database: Database) -> None:
    policy = POLICY + (
        '[functions."public.refund(integer)"]\ntier = "compensable"\ncompensation = "public.back(integer)"\n'
    )
    with shop(database) as made:
        made.op.execute("CREATE TABLE backs (n int)")
        made.op.execute(
            "CREATE FUNCTION back(n int) RETURNS int LANGUAGE sql AS 'INSERT INTO backs VALUES (n) RETURNING n'"
        )
        made.op.execute("ALTER FUNCTION refund VOLATILE")
        made.apply(policy)
        opened = made.task()
        with connect(database.dsn_for(opened.role, opened.password)) as db:
            db.execute("UPDATE orders SET status = 'x' WHERE id = 1")
            db.execute("SELECT refund(%s)", [7])
            db.execute("SELECT refund(8)", dry_run=True)
        report = compensate.undo(made.op, Scope(task=opened.task.id))
        assert [(a.state, a.result) for a in report.answers] == [("compensated", "7")]
        assert made.value("SELECT status FROM orders WHERE id = 1") == "new"
        assert made.value("SELECT array_agg(n) FROM backs") == [7]


def test_of_a_row_in_conflict_only_the_named_columns_go_back(world: World) -> None:
    world.op.execute(
        "ALTER TABLE app.item ADD COLUMN state text DEFAULT 'new', ADD COLUMN price int DEFAULT 1"
    )
    state = "SELECT id, note, state, price FROM app.item WHERE id < 4 ORDER BY 1"
    world.act(world.agents[0], "UPDATE app.item SET note = 'a', state = 'x', price = 9 WHERE id < 4")
    world.op.execute("UPDATE app.item SET price = 100 WHERE id = 2")
    world.act(world.agents[0], "UPDATE app.item SET note = 'b' WHERE id IN (2, 3)")
    world.op.execute("UPDATE app.item SET price = 200 WHERE id = 3")
    done = rows(world.op, state)
    assert undo(world, None).rows.conflict_count == 3
    report = undo(world, None, columns=["note", "state"], on_conflict="force")
    assert (report.rows.conflicts, report.is_complete) == ((), True)
    assert rows(world.op, state) == [(1, "n1", "new", 1), (2, "n2", "new", 100), (3, "n3", "new", 200)]
    compensate.undo(world.op, Scope(undo=report.rows.undo))
    assert rows(world.op, state) == done
