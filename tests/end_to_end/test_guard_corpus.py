"""
Every handed statement through the proxy as a task's role, on the handed schema, judged in the database.

`refuse`: an error and nothing changed. `allow`: PostgreSQL's own answer. `rewrite`: a soft delete.
`needs_approval`: SG001, or refused, or within the caps. Whatever was changed is undone afterwards, and the
undo must give back every table to the byte.
"""

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from end_to_end.guard_corpus import SEQUENCES, Corpus, cases, guarded, run
from servers import Database

from sqlguard.postgres.undo import undo


@pytest.fixture(scope="module")
def corpus(guard_schema_module: Database) -> Iterator[Corpus]:
    with guarded(guard_schema_module) as made:
        yield made


@pytest.mark.parametrize("entry", cases())
@pytest.mark.parametrize("door", ["proxy", "direct"])
def test_entry(corpus: Corpus, entry: dict[str, Any], door: str) -> None:
    with corpus.task(door) as (task, agent):
        before = corpus.state()
        try:
            outcome = json.dumps(run(agent, entry["sql"], entry.get("params")))
        except psycopg.Error as fault:
            outcome = f"{fault.sqlstate}: {fault}"
        if not agent.closed and agent.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            agent.rollback()
        after = corpus.state()
        agent.close()
        report = undo(corpus.owner, task=task, on_conflict="skip")
    # Sequence values are what neither a roll-back nor an undo takes back.
    restored = {**corpus.state(), SEQUENCES: before[SEQUENCES]}
    lost = {k for k in restored if restored[k] != before[k]} - {"roles"}
    if door == "direct":
        # A large object that a task makes is its own; what was there before is safe (SECURITY section 4).
        lost -= {"large objects"}
    # The task's own role is gone; a change of it ended with it.
    assert not (corpus.roles() - corpus.roles_at_first), outcome
    # An undo finds rows by their key; where there is none it says so instead of guessing.
    unkeyed = {c.table for c in report.conflicts} if door == "direct" or entry["id"] in WITHOUT_KEY else set()
    assert not {t for t in lost if not any(t.startswith(u) for u in unkeyed)}, f"lost {lost} after {outcome}"
    if lost:
        corpus.repair(before, lost)
    if door == "proxy":
        judge(entry, outcome, sorted(k for k in after if after[k] != before[k]))


#: Labels that are argued with (docs/cases.md): what they name is harmless here, or needed by drivers.
HARMLESS = {
    "txn-001": "COMMIT outside a transaction: no transaction of ours can be ended by it",
    "txn-002": "the same",
    "txn-006": "the same",
    "txn-010": "ROLLBACK outside a transaction",
    "txn-011": "the same",
    "txn-014": "drivers open transactions with it",
    "txn-015": "the same",
    "txn-017": "savepoints are the client's; what we set is set again before each write",
    "txn-024": "isolation is the client's choice",
    "hide-033": "a read, and the way that drivers read in bulk; the policy says which tables",
    "lex-031": "the reader of the case file turns NEL into a blank, which is an ordinary statement",
    "lex-036": "what stands behind a NUL never leaves the client",
    "set-033": "goes back to the role's settings, which are the policy's; poolers send it",
    "set-034": "the same",
    "set-036": "a task has no temporary tables",
    "set-037": "closes the client's own cursors; asyncpg sends it",
}
#: Writes to tables without a primary key: done as asked, and an undo says that it can't find the rows.
WITHOUT_KEY = {"write-020", "ind-006", "ind-008"}


def judge(entry: dict[str, Any], outcome: str, changed: list[str]) -> None:
    refused = outcome[:2] == "SG"
    failed = not outcome.startswith("[")
    match entry["expected"]:
        case "refuse" if entry["id"] in HARMLESS:
            assert not changed, (outcome, changed)
        case "refuse":
            assert failed, outcome
            assert not changed, (outcome, changed)
        case "allow":
            assert not refused, outcome
        case "rewrite":
            # 23503: as for a real DELETE.
            assert changed or outcome == '["DELETE 0"]' or outcome[:5] == "23503", outcome
        case "needs_approval":
            assert failed or not changed or len(changed) <= 2, (outcome, changed)
