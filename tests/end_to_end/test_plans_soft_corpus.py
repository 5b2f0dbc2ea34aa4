"""Every handed soft delete case is previewed through the proxy before it is done: announced equals done."""

import json
from collections import Counter
from typing import Any

import psycopg
import pytest
from end_to_end.soft_cases import NARROWED, World, ask, given, world

from sqlguard.embedded import EmbeddedServer

#: Long: run on the newest server only (.ci/run).
pytestmark = pytest.mark.slow
#: What a deferred constraint waits for comes later in the block; the tables are guarded with it.
LATE = {
    "id": "late",
    "setup": "CREATE TABLE parent (id int PRIMARY KEY); CREATE TABLE child (id int PRIMARY KEY,"
    " parent_id int REFERENCES parent DEFERRABLE INITIALLY DEFERRED)",
    "agent": [
        "BEGIN",
        "INSERT INTO child VALUES (1, 7)",
        "INSERT INTO parent VALUES (7)",
        "DELETE FROM child WHERE id = 1",
        "COMMIT",
    ],
    "expect": {"outcome": "allow"},
}
CASES = [
    *(p for p in given("cases") if p.values[0] is None or "agent" in p.values[0]),
    pytest.param(LATE, id=LATE["id"]),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("mode", "door"), [("soft", "extended"), ("journal", "simple")])
def test_announced_equals_done(server: EmbeddedServer, case: dict[str, Any], mode: str, door: str) -> None:
    with world(server, case, mode) as made:
        made.earlier()
        policy = "mirror" if case.get("role") else "everything"
        with made.task("proxy", policy=policy) as (task, conn):
            for run in runs(case):
                check(made, task, conn, run, door)


def runs(case: dict[str, Any]) -> list[list[str]]:
    """The statements of a case, those of a block together, which is always ended."""
    texts = [text.replace(*NARROWED.get(case["id"], ("", ""))) for text in case["agent"]]
    if "BEGIN" not in texts:
        return [[text] for text in texts]
    end = texts.index("COMMIT") + 1 if "COMMIT" in texts else len(texts)
    return [texts[:end], *([text] for text in texts[end:])]


def check(made: World, task: str, conn: psycopg.Connection[Any], run: list[str], door: str) -> None:
    before, done_before, plan_before = made.state(), journaled(made, task), last_plan(conn)
    told: list[dict[str, Any]] = []

    def keep(notice: psycopg.errors.Diagnostic) -> None:
        if (notice.message_primary or "").startswith("dry run"):
            told.append(json.loads(notice.message_detail or "{}"))

    conn.add_notice_handler(keep)
    ask(conn, "SET sqlguard.dry_run = on")
    seen = send(made, conn, run, door)
    ask(conn, "SET sqlguard.dry_run = off")
    conn.remove_notice_handler(keep)
    plan = last_plan(conn)
    assert made.state() == before
    done = send(made, conn, run, door)
    assert seen == done, (seen, done)
    changes = journaled(made, task) - done_before
    # A COPY makes no plan, because its data is gone: it is told.
    report = told[-1] if told and run[0].startswith("COPY") else plan if plan != plan_before else None
    announced = report["affected"] if report is not None else []
    assert Counter({(a["table"], a["op"]): a["rows"] for a in announced}) == changes


def send(made: World, conn: psycopg.Connection[Any], run: list[str], door: str) -> list[str | None]:
    """Return the SQLSTATEs; nothing is sent behind the first error."""
    found: list[str | None] = []
    for text in run:
        answer = ask(conn, text, door, made.case.get("copy_in"))
        found.append(answer.sqlstate)
        if answer.sqlstate is not None:
            break
    conn.rollback()
    return found


def last_plan(conn: psycopg.Connection[Any]) -> dict[str, Any] | None:
    row = conn.execute("SHOW sqlguard.last_plan").fetchone()
    return None if row is None or row[0] is None else dict(json.loads(row[0]))


def journaled(made: World, task: str) -> Counter[tuple[str, str]]:
    rows = made.op.execute(
        "SELECT schema_name || '.' || table_name, op, sum(rows)::integer FROM sqlguard.change_set"
        " WHERE task_id = %s GROUP BY 1, 2",
        [task],
    ).fetchall()
    return Counter({(table, op): count for table, op, count in rows})
