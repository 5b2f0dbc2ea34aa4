"""
A preview by the Python door: the run that a write has, rolled back, and all of it sent at once.

Nothing in it waits for an answer but a count that may forbid the run (`Planner.measure`): so what a preview costs
beyond its statement is what the server does, not how often it is spoken to.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from sqlguard.budget import ResultLimits
from sqlguard.errors import SqlguardError
from sqlguard.journal import Intent
from sqlguard.plan import Affected, Decision, Draft, Outcome, Stage, affected_of, measured_of, steady
from sqlguard.postgres import plans
from sqlguard.postgres.plan_run import Planner
from sqlguard.postgres.result_limits import keep_to

#: The policy refuses agents' own savepoints that begin so.
_INSIDE = ("SAVEPOINT sqlguard_preview", "ROLLBACK TO sqlguard_preview")
_OUTSIDE = ("BEGIN READ WRITE", "ROLLBACK")
#: Says to the walls which action the changes to come belong to, for the transaction.
CLAIM = "SELECT pg_catalog.set_config('sqlguard.action', %s, true)"
#: The same, and what is there before is counted.
_CLAIM_AND_COUNT = f"{CLAIM}, sqlguard.begin_plan()"


@dataclass(frozen=True)
class Run:
    """One statement that is carried out: its intent is journaled as *action*."""

    decision: Decision
    params: list[Any] | None
    intent: Intent
    action: int
    dry_run: bool
    #: Of a read's rows so many are kept.
    most: int | None = None


def preview(run: Run, planner: Planner, limits: ResultLimits | None) -> tuple[Outcome, dict[str, Any]]:
    """
    Run a write, say what it changed, roll it back and keep its plan; return what the journal is to know, too.

    Raises psycopg's errors untouched, Refused where a gate refuses, CapExceeded.
    """
    conn = planner.work
    own = conn.info.transaction_status == TransactionStatus.IDLE
    try:
        outcome, found = _tried(run, planner, own=own)
        keep_to(limits, outcome)
        ruling = planner.judged(
            run.decision, run.intent.confidence, measured_of(found.report, planner.policy)
        )
    except BaseException as fault:
        if own and conn.info.transaction_status != TransactionStatus.IDLE:
            conn.execute("ROLLBACK")
        elif not own and isinstance(fault, SqlguardError):
            planner.fail_block()
        raise
    step = planner.step(run.decision, run.params, run.action)
    draft = planner.draft(Stage([step], [run.decision], [ruling]))
    return recorded(run, planner, outcome_of(run.decision, outcome), draft, found)


def recorded(
    run: Run, planner: Planner, outcome: Outcome, draft: Draft, found: plans.RunOutcome
) -> tuple[Outcome, dict[str, Any]]:
    """Keep the plan of what was previewed; return its outcome and what the journal knows of it."""
    done, details = ended(run, outcome, affected_of(found.report), committed=False)
    plan = plans.record_previewed(planner.ledger, draft, found, details)
    return replace(done, plan=plan, report=found.report), {**details, "plan": plan}


def ended(
    run: Run, outcome: Outcome, changed: tuple[Affected, ...], *, committed: bool
) -> tuple[Outcome, dict[str, Any]]:
    """Return the outcome of a run that has changed so much, and what the journal knows of it."""
    done = replace(
        outcome,
        affected=changed,
        action=run.action,
        tier=run.decision.verdict.tier,
        committed=committed,
    )
    return done, {"tag": outcome.tag, "affected": [a.as_dict() for a in changed]}


def _tried(run: Run, planner: Planner, *, own: bool) -> tuple[psycopg.Cursor[Any], plans.RunOutcome]:
    """Run the statement and take it back; return its answer, and what the database says of it."""
    conn = planner.work
    opening, closing = _OUTSIDE if own else _INSIDE
    with together(conn):
        conn.execute(opening.encode())
        planner.measure(run.decision, run.params)
        conn.execute(_CLAIM_AND_COUNT.encode(), [str(run.action)])
        answer = psycopg.RawCursor(conn).execute(run.decision.text.encode(), run.params)
        said = conn.execute(plans.FORCED, [run.action, steady([(run.action, run.decision)])])
        conn.execute(closing.encode())
    row = said.fetchone()
    assert row is not None  # noqa: S101 (the function gives one row)
    return answer, plans.RunOutcome(*row)


@contextmanager
def together(conn: psycopg.Connection[Any]) -> Iterator[None]:
    """Send all that is executed inside without waiting; the first error is raised at the end of it."""
    with conn.pipeline() if psycopg.Pipeline.is_supported() else nullcontext():
        yield


def outcome_of(decision: Decision, cursor: psycopg.Cursor[Any]) -> Outcome:
    """Read what the server answered, with the command tag that the client must see."""
    tag = cursor.statusmessage
    if tag and decision.tag:
        tag = " ".join([decision.tag, *tag.split(" ")[1:]])
    columns = tuple(c.name for c in cursor.description) if cursor.description else ()
    rows = tuple(tuple(row) for row in cursor.fetchall()) if cursor.description else ()
    return Outcome(
        verdict=str(decision.verdict.effect),
        tag=tag,
        rowcount=max(cursor.rowcount, 0),
        columns=columns,
        rows=rows,
        tier=decision.verdict.tier,
        committed=True,
        statement=decision.statement.text,
        executed=decision.text,
    )
