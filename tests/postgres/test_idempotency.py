"""A key seen before answers with the stored result, however the retries race and whatever died in between."""

import threading
from collections.abc import Iterator
from datetime import timedelta

import psycopg
import pytest
from journaled import PASSWORD, Agent, World, rows
from journaled import world as made_world
from servers import Database

from sqlguard.errors import Refused
from sqlguard.journal import Intent, statement_hash
from sqlguard.postgres import idempotency, journal

INSERT = "INSERT INTO app.charge (amount) VALUES (5) RETURNING id"
HASH = statement_hash(INSERT, None)


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with made_world(database) as made:
        made.op.execute(
            "CREATE SCHEMA app; CREATE TABLE app.charge (id int GENERATED ALWAYS AS IDENTITY, amount int)"
        )
        made.grant()
        yield made


def charge(conn: psycopg.Connection[object], key: str, hash: str = HASH) -> tuple[str | None, object]:
    """Do what the page of the module says an executor does; return tag and rows."""
    with conn.transaction() as transaction:
        kept = idempotency.claim(conn, key, hash, None)
        if kept is not None:
            raise psycopg.Rollback(transaction)
        found = conn.execute(INSERT)
        answer = (found.statusmessage, [list(row) for row in found.fetchall()])
        idempotency.keep(conn, key, answer[0] or "", ["id"], answer[1])
        return answer
    assert kept is not None
    return kept.tag, kept.rows


def charges(world: World) -> int:
    return int(rows(world.op, "SELECT count(*) FROM app.charge")[0][0])


def test_a_repeat_gets_the_stored_answer_and_changes_nothing(world: World) -> None:
    agent = world.task("t")
    assert idempotency.find(agent.conn, "k", HASH) is None
    first = charge(agent.conn, "k")
    assert first == ("INSERT 0 1", [[1]])
    assert charge(agent.conn, "k") == first
    kept = idempotency.find(agent.conn, "k", HASH)
    assert kept is not None
    assert (kept.tag, kept.columns, kept.rows) == ("INSERT 0 1", ["id"], [[1]])
    assert charge(agent.conn, "other") == ("INSERT 0 1", [[2]])
    assert charges(world) == 2


def test_another_statement_under_the_same_key_is_refused(world: World) -> None:
    agent = world.task("t")
    charge(agent.conn, "k")
    other = statement_hash(INSERT, ("1",))
    for attempt in (idempotency.find, lambda c, k, h: idempotency.claim(c, k, h, None)):
        with pytest.raises(Refused, match="used for another statement") as caught:
            attempt(agent.conn, "k", other)
        assert caught.value.sqlstate == "SG002"
    with pytest.raises(Refused, match="used for another statement"):
        journal.record_intent(world.op, Intent(task="t", statement="DELETE FROM x", idempotency_key="k"))
    assert journal.record_intent(world.op, Intent(task="t", statement=INSERT, idempotency_key="k"))


def test_twins_that_race_have_one_effect_and_one_answer(world: World) -> None:
    agent = world.task("t")
    twins = [world.database.connect(world.database.dsn_for(agent.role, PASSWORD)) for _ in range(8)]
    start = threading.Barrier(len(twins))
    answers: list[tuple[str | None, object]] = []

    def work(conn: psycopg.Connection[object], number: int) -> None:
        for n in range(20):
            start.wait()
            answers.append((str(n), charge(conn, f"run:{n}")))

    threads = [threading.Thread(target=work, args=(conn, n)) for n, conn in enumerate(twins)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 160
    assert len({repr(a) for a in answers}) == 20
    assert charges(world) == 20


def test_a_transaction_that_died_leaves_the_key_free(world: World) -> None:
    agent = world.task("t")
    dying = world.database.connect(world.database.dsn_for(agent.role, PASSWORD), autocommit=False)
    assert idempotency.claim(dying, "k", HASH, None) is None
    dying.execute(INSERT)
    waiting: list[tuple[str | None, object]] = []
    twin = threading.Thread(target=lambda: waiting.append(charge(agent.conn, "k")))
    twin.start()
    twin.join(0.3)
    assert waiting == []
    world.database.execute("SELECT pg_terminate_backend(%s)", [dying.info.backend_pid])
    twin.join(10)
    assert waiting == [("INSERT 0 1", [[2]])]
    assert charges(world) == 1


def test_an_answer_lost_after_the_commit_is_found_by_the_next_lease_and_the_next_task(world: World) -> None:
    first = world.task("one")
    answer = charge(first.conn, "k")
    first.conn.close()
    assert charge(world.lease("one", "sg_tk_one_b").conn, "k") == answer
    assert charge(world.task("two").conn, "k") == answer
    assert charges(world) == 1


@pytest.mark.parametrize("change", [{"agent": "another"}, {"params": {"customer_id": "2"}}])
def test_keys_do_not_cross_agents_or_parameters(world: World, change: dict[str, object]) -> None:
    charge(world.task("one").conn, "k")
    other = world.task("two", **change)  # type: ignore[arg-type]
    assert idempotency.find(other.conn, "k", "another statement") is None
    charge(other.conn, "k")
    assert charges(world) == 2


def test_a_key_can_be_used_again_when_its_time_is_over(world: World) -> None:
    agent = world.task("t")
    with agent.conn.transaction():
        assert idempotency.claim(agent.conn, "k", HASH, 1, timedelta(seconds=-1)) is None
        idempotency.keep(agent.conn, "k", "INSERT 0 1")
    assert idempotency.find(agent.conn, "k", HASH) is None
    with agent.conn.transaction():
        assert idempotency.claim(agent.conn, "k", "another", 2, timedelta(seconds=-1)) is None
        idempotency.keep(agent.conn, "k", "INSERT 0 1")
    assert idempotency.expire(world.op) == 1


def test_only_the_claiming_transaction_can_keep_a_result(world: World) -> None:
    agent = world.task("t")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        idempotency.keep(agent.conn, "k", "INSERT 0 1")
    charge(agent.conn, "k")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        idempotency.keep(agent.conn, "k", "INSERT 0 999")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        idempotency.claim(world.op, "k", HASH, None)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        agent.conn.execute("SELECT * FROM sqlguard.idempotency")


def test_stored_text_comes_back_as_it_was(world: World) -> None:
    agent: Agent = world.task("t")
    values = [["é\t\\ \u2028", None, "", "{1,2}"]]
    with agent.conn.transaction():
        idempotency.claim(agent.conn, "k", HASH, None)
        idempotency.keep(agent.conn, "k", "UPDATE 1", [{"name": "a", "type": 25}], values)
    kept = idempotency.find(agent.conn, "k", HASH)
    assert kept is not None
    assert (kept.columns, kept.rows) == ([{"name": "a", "type": 25}], values)
