"""Every handed statement that may write: a preview's rows are those that the statement then changes."""

from datetime import timedelta
from typing import Any

import psycopg
import pytest
from end_to_end.test_guard_corpus import Corpus, cases
from end_to_end.test_guard_corpus import corpus as corpus

import sqlguard
from sqlguard.errors import ApprovalRequired, SqlguardError
from sqlguard.postgres import plans
from sqlguard.postgres.tasks import end_task, open_task
from sqlguard.postgres.undo import undo

WRITES = ("INSERT", "UPDATE", "DELETE", "MERGE", "WITH", "EXPLAIN")


def entries() -> list[Any]:
    found = []
    for case in cases():
        entry = case.values[0]
        if entry is None:
            return [case]
        text = entry["sql"]
        if entry["expected"] not in ("allow", "rewrite", "needs_approval") or not isinstance(text, str):
            continue
        if text.lstrip().upper().startswith(WRITES) and "$1" not in text:
            found.append(case)
    return found


def approve(corpus: Corpus, plan: int) -> None:
    """As a person who has nothing to do with the task."""
    owner = corpus.owner
    if not owner.execute("SELECT FROM pg_roles WHERE rolname = 'sg_dana'").rowcount:
        owner.execute("CREATE ROLE sg_dana LOGIN PASSWORD 'secret' IN ROLE sqlguard_approver")
    with psycopg.connect(corpus.database.dsn_for("sg_dana", "secret"), autocommit=True) as dana:
        plans.approve(dana, plan, plans.show(dana, plan).document["digest"])


@pytest.mark.slow
@pytest.mark.parametrize("entry", entries())
def test_announced_equals_done(corpus: Corpus, entry: dict[str, Any]) -> None:
    opened = open_task(corpus.owner, agent="corpus", policy="corpus", ttl=timedelta(minutes=5))
    task = opened.task.id
    before = corpus.state()
    try:
        with sqlguard.connect(corpus.database.dsn, task=task) as db:
            try:
                seen = db.preview(entry["sql"])
            except (psycopg.Error, SqlguardError) as fault:
                with pytest.raises(type(fault)):
                    db.execute(entry["sql"])
                return
            after = corpus.state()
            assert {k: v for k, v in after.items() if k not in ("sequences", "roles")} == {
                k: v for k, v in before.items() if k not in ("sequences", "roles")
            }
            try:
                done = db.execute(entry["sql"])
            except ApprovalRequired:
                assert seen.plan is not None
                approve(corpus, seen.plan)
                if seen.tag is None:
                    return  # a read, which is not run before it is approved
                done = db.commit_plan(seen.plan)
            assert {(a.table, a.op, a.rows) for a in seen.affected} == {
                (a.table, a.op, a.rows) for a in done.affected
            }
            if done.action is not None:
                assert seen.report is not None
                assert {(a["table"], a["op"], a["rows"]) for a in seen.report["affected"]} == {
                    (a.table, a.op, a.rows) for a in done.affected
                }
    finally:
        report = undo(corpus.owner, task=task, on_conflict="skip")
        end_task(corpus.owner, task, "case done")
        lost = {k for k, v in corpus.state().items() if v != before[k]} - {"roles", "sequences"}
        if lost and report.conflicts:
            # Rows of the schema that refer to one that was deleted before: no undo makes such rows.
            corpus.owner.execute("SET session_replication_role = replica")
            corpus.repair(before, lost & set(corpus.relations))
            corpus.owner.execute("RESET session_replication_role")
