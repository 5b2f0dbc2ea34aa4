"""
The handed cases that are an operator's work (restore, undo, purge) and those of two sessions at once.

What agents do goes through the proxy; what the operator does is done by the functions behind the commands.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from end_to_end.soft_cases import Answer, World, ask, given, world

from sqlguard.embedded import EmbeddedServer
from sqlguard.postgres.erase import erase
from sqlguard.postgres.purge import purge
from sqlguard.postgres.restore import restore
from sqlguard.postgres.undo import undo

#: Long enough for a statement that waits for nobody, on a busy machine too.
BLOCKED_SECONDS = 0.5
CASES = [p for p in given("cases") if p.values[0] is not None and "agent" not in p.values[0]]
NOW = timedelta(0)


@pytest.fixture
def played(server: EmbeddedServer, case: dict[str, Any]) -> Any:
    mode = "journal" if case["operator_operation"] == "restore_from_journal" else "soft"
    with world(server, case, mode) as made:
        yield made


@pytest.mark.parametrize("case", CASES or given("cases"))
def test_operation(played: World, case: dict[str, Any]) -> None:
    expect = case["expect"]
    done = STORIES[case["id"]](played)
    if "affected" in expect:
        assert done == expect["affected"]
    for table, rows in expect["visible"].items():
        if table.startswith("sg_"):
            continue
        assert seen(played, table) == sorted((tuple(map(str, r)) for r in rows), key=repr)
    assert {t: played.count(t) for t in expect["physical_rows"]} == expect["physical_rows"]


def seen(made: World, table: str) -> list[tuple[str, ...]]:
    """Return the rows of *table* that an agent sees, each value as the case writes it."""
    with made.task("simple") as (_, conn):
        result = conn.pgconn.exec_(f"SELECT * FROM {table}".encode())
        rows = []
        for row in range(result.ntuples):
            values = [result.get_value(row, column) for column in range(result.nfields)]
            rows.append(tuple("None" if v is None else v.decode() for v in values))
    return sorted(rows, key=repr)


def acts(made: World, *statements: str) -> list[int]:
    """Let an agent do *statements* in a task of its own; return the ids of the actions."""
    with made.task("simple") as (task, conn):
        for text in statements:
            assert ask(conn, text).sqlstate is None, text
    rows = made.op.execute(
        "SELECT id FROM sqlguard.action WHERE task_id = %s AND verdict IN ('allow', 'rewrite') ORDER BY id",
        [task],
    ).fetchall()
    return [row[0] for row in rows]


def with_children(made: World) -> int:
    (action,) = acts(made, "DELETE FROM customer WHERE id = 1")
    assert restore(made.op, action=action, preview=True).as_dict()["rows"] == 3
    return int(restore(made.op, action=action).as_dict()["rows"])


def without_the_earlier(made: World) -> int:
    acts(made, "DELETE FROM invoice WHERE id = 11")
    (action,) = acts(made, "DELETE FROM customer WHERE id = 1")
    return int(restore(made.op, action=action).as_dict()["rows"])


def unique_conflict(made: World) -> None:
    (action,) = acts(made, "DELETE FROM usr WHERE id = 2")
    acts(made, "INSERT INTO usr VALUES (3, 'b@x', 'bea')")
    before = made.state()
    report = restore(made.op, action=action)
    assert report.stopped
    assert "restore_unique_conflict" in str(report.as_dict())
    assert undo(made.op, action=action).stopped
    assert made.state() == before


def under_a_deleted_parent(made: World) -> None:
    (action,) = acts(made, "DELETE FROM invoice WHERE id = 12")
    acts(made, "DELETE FROM customer WHERE id = 2")
    before = made.state()
    report = restore(made.op, action=action)
    assert report.stopped
    assert "restore_parent_is_deleted" in str(report.as_dict())
    assert undo(made.op, action=action).stopped
    assert made.state() == before


def reference_changed_since(made: World) -> None:
    (action,) = acts(made, "DELETE FROM customer WHERE id = 1")
    made.op.execute("UPDATE invoice SET customer_id = 2 WHERE id = 11")
    restore(made.op, action=action)


def update_changed_since(made: World) -> int:
    (action,) = acts(made, "UPDATE orders SET total = 11 WHERE id = 1")
    made.op.execute("UPDATE orders SET total = 99 WHERE id = 1")
    assert undo(made.op, action=action).stopped
    return undo(made.op, action=action, on_conflict="skip").rows


def from_the_journal(made: World) -> None:
    table = made.case["soft_tables"][0]
    (action,) = acts(made, f"DELETE FROM {table} WHERE id = 1")
    assert made.count(table) == made.case["expect"]["physical_rows"][table] - 1
    assert undo(made.op, action=action).rows == 1


def purge_children_first(made: World) -> None:
    acts(made, "DELETE FROM invoice WHERE customer_id = 1", "DELETE FROM customer WHERE id = 1")
    assert purge(made.op, older_than=NOW).rows == 3


def purge_hidden(made: World) -> int:
    acts(made, "DELETE FROM orders WHERE id = 2")
    return purge(made.op, older_than=NOW).rows


def erase_person(made: World) -> None:
    acts(made, "UPDATE usr SET name = 'bobby' WHERE id = 2", "DELETE FROM usr WHERE id = 2")
    erase(made.op, "public.usr", keys=("2",), reason="asked to be forgotten")
    rows = made.op.execute("SELECT r::text FROM sqlguard.row_change r").fetchall()
    assert not any("b@x" in text or "bob" in text for (text,) in rows)


STORIES: dict[str, Callable[[World], Any]] = {
    "SD-S01": with_children,
    "SD-S02": without_the_earlier,
    "SD-S04": unique_conflict,
    "SD-S05": under_a_deleted_parent,
    "SD-S06": reference_changed_since,
    "SD-S09": update_changed_since,
    "SD-S10": from_the_journal,
    "SD-S11": from_the_journal,
    "SD-G02": purge_children_first,
    "SD-G04": purge_hidden,
    "SD-G05": erase_person,
}


# --- values that deleted rows hold


HELD = {
    "setup": "CREATE TABLE t (id int PRIMARY KEY, name text); INSERT INTO t VALUES (1, 'a'), (2, 'b')",
    "soft_tables": ["t"],
    "expect": {},
}


@pytest.mark.parametrize(
    "text",
    [
        "INSERT INTO t VALUES (1, 'new')",
        "INSERT INTO t VALUES (3, 'c'), (1, 'new')",
        "INSERT INTO t VALUES (1, 'new') ON CONFLICT DO NOTHING",
        "INSERT INTO t VALUES (1, 'new') ON CONFLICT (id) DO NOTHING",
        "INSERT INTO t VALUES (1, 'new') ON CONFLICT (id) DO UPDATE SET name = excluded.name",
        "MERGE INTO t USING (VALUES (1)) s (id) ON t.id = s.id WHEN NOT MATCHED THEN INSERT VALUES (s.id, 'new')",
    ],
)
@pytest.mark.parametrize("door", ["simple", "extended", "direct"])
def test_a_key_that_a_deleted_row_holds(server: EmbeddedServer, text: str, door: str) -> None:
    """Refused with that reason; ON CONFLICT DO NOTHING must not skip the row without a word."""
    with world(server, HELD, "soft") as made:
        acts(made, "DELETE FROM t WHERE id = 1")
        before = made.state()
        with made.task(door) as (_, conn):
            if door == "direct":
                ask(conn, "SET default_transaction_read_only = off")
            answer = ask(conn, text, door)
            assert answer.sqlstate == "SG002", answer
            assert "deleted row" in answer.message
            assert (
                ask(conn, "INSERT INTO t VALUES (9, 'free') ON CONFLICT DO NOTHING", door).tag == "INSERT 0 1"
            )
            assert (
                ask(conn, "INSERT INTO t VALUES (2, 'live') ON CONFLICT DO NOTHING", door).tag == "INSERT 0 0"
            )
        assert [r for r in made.state()["t"].splitlines() if not r.startswith("(9")] == before[
            "t"
        ].splitlines()


# --- two sessions at once


@pytest.mark.parametrize("case", given("concurrency_cases"))
@pytest.mark.parametrize("mode", ["soft", "journal"])
def test_two_sessions(server: EmbeddedServer, case: dict[str, Any], mode: str) -> None:
    if "real_steps" not in case:
        with world(server, case, "soft") as made:
            restore_in_flight(made)
        return
    with (
        world(server, case, mode) as made,
        made.task("simple", agent="a") as (first, one),
        made.task("simple", agent="b") as (second, two),
        ThreadPoolExecutor(2) as pool,
    ):
        before = made.state()
        sessions = {"A": one, "B": two}
        waiting: dict[str, tuple[Future[Answer], dict[str, Any]]] = {}
        for step in case["real_steps"]:
            name = step["session"]
            if name in waiting:
                compare(*waiting.pop(name))
            future = pool.submit(ask, sessions[name], step["sql"])
            if step["blocked"]:
                time.sleep(BLOCKED_SECONDS)
                assert not future.done(), (step, future.result())
                waiting[name] = future, step
            else:
                compare(future, step)
        for future, step in waiting.values():
            compare(future, step)
        final = [tuple(row) for rows in case["expect"]["final"].values() for row in rows]
        tables = [t for t in before if not t.startswith("sg_")]
        rows = [row for table in tables for row in ask(one, f"SELECT * FROM {table}").rows or ()]
        assert sorted(tuple(map(str, row)) for row in rows) == sorted(final)
        for conn in sessions.values():
            conn.close()
        for task in (second, first):
            undo(made.op, task=task, on_conflict="skip")
        for task in (first, second):
            undo(made.op, task=task, on_conflict="skip")
        if mode == "soft" or case["group"] == "concurrency":
            lost = [t for t in tables if len(made.state()[t].splitlines()) < len(before[t].splitlines())]
            assert not lost


def compare(future: Future[Answer], step: dict[str, Any]) -> None:
    answer = future.result(20)
    if "error" in step:
        assert answer.sqlstate == step["error"], (step, answer)
        return
    assert answer.sqlstate is None, (step, answer)
    assert answer.tag == step["tag"], (step, answer)
    if "rows" in step:
        assert [list(map(str, row)) for row in answer.rows or ()] == step["rows"]


def restore_in_flight(made: World) -> None:
    """SD-C08: the insert of a value whose holder is being restored waits, and fails when the restore commits."""
    (action,) = acts(made, "DELETE FROM u WHERE id = 1")
    with made.task("simple") as (_, conn), ThreadPoolExecutor(1) as pool:
        with made.op.transaction():
            assert restore(made.op, action=action).as_dict()["rows"] == 1
            future = pool.submit(ask, conn, "INSERT INTO u VALUES (2, 'a')")
            time.sleep(BLOCKED_SECONDS)
            assert not future.done()
        assert future.result(20).sqlstate == "23505"
    assert seen(made, "u") == [("1", "a")]
