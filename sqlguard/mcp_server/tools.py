"""What each tool does with a guarded connection. All of them are synchronous; `sessions` gives them a thread."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import JsonValue

from sqlguard.connection import GuardedConnection
from sqlguard.errors import Refused
from sqlguard.mcp_server.models import (
    AffectedRows,
    PlannedStatement,
    Preview,
    QueryResult,
    Status,
    Ticket,
    UndoneTable,
    UndoResult,
    WriteResult,
)
from sqlguard.mcp_server.values import Cut, cut, safe
from sqlguard.plan import Decision, Outcome
from sqlguard.plan_told import with_differences
from sqlguard.statement.model import Kind

_READS = frozenset({Kind.SELECT, Kind.VALUES, Kind.EXPLAIN, Kind.SHOW})
_WRITES = frozenset({Kind.INSERT, Kind.UPDATE, Kind.DELETE, Kind.MERGE, Kind.SELECT, Kind.CALL})
#: Rows of a RETURNING that are passed on.
RETURNED = 100
#: Rows that a preview shows as they were and would be.
_SAMPLES = 10
#: Conflicts of an undo that are named.
_NAMED = 20


def query(db: GuardedConnection, sql: str, params: Sequence[JsonValue], most: int) -> QueryResult:
    decision = _one(db, sql)
    if decision is not None and (decision.kind not in _READS or decision.needs_read_write):
        raise Refused(
            "this statement does not only read",
            hint="use the tool `write` for changes; every call is a transaction of its own, so locks, settings,"
            " cursors and BEGIN mean nothing here",
        )
    outcome = db.execute(_text(sql, params), _params(params), max_rows=most)
    shown = cut(outcome.rows, most, outcome.rowcount, has_more=outcome.has_more)
    return QueryResult(tag=outcome.tag, columns=list(outcome.columns), **_rows(shown))


def preview(db: GuardedConnection, sql: str, params: Sequence[JsonValue]) -> Preview:
    _must_write(_one(db, sql))
    outcome = db.preview(_text(sql, params), _params(params))
    return Preview(**_done(outcome))


def write(  # noqa: PLR0913 (what an agent says about a write)
    db: GuardedConnection,
    sql: str,
    params: Sequence[JsonValue],
    *,
    reason: str,
    confidence: float | None,
    idempotency_key: str | None,
) -> WriteResult:
    _must_write(_one(db, sql))
    outcome = db.execute(
        _text(sql, params),
        _params(params),
        reason=reason,
        confidence=confidence,
        idempotency_key=idempotency_key,
    )
    return WriteResult(committed=outcome.committed, repeats=outcome.repeats, **_done(outcome))


def commit_plan(db: GuardedConnection, plan: int) -> WriteResult:
    outcome = db.commit_plan(plan)
    return WriteResult(committed=outcome.committed, **_done(outcome))


def ticket(db: GuardedConnection, plan: int) -> Ticket:
    found = db.ticket(plan).as_dict()
    named = set(Ticket.model_fields)
    rest = {name: value for name, value in found.items() if name not in named}
    return Ticket(
        **{name: found[name] for name in named - {"report", "statements", "affected"}},
        statements=[
            PlannedStatement(statement=s["statement"], params=s["params"]) for s in found["statements"]
        ],
        affected=[
            AffectedRows(table=a["table"], op=a["op"], rows=a["rows"]) for a in found.get("affected", ())
        ],
        report=_report(rest),
    )


def undo(db: GuardedConnection, action: int | None, *, only_preview: bool) -> UndoResult:
    report = db.undo(action=action, preview=only_preview)
    return UndoResult(
        undo=report.undo,
        preview=report.preview,
        already_undone=report.already_undone,
        stopped=report.stopped,
        rows=report.rows,
        tables=[UndoneTable(table=t.table, op=t.op, rows=t.rows) for t in report.tables],
        conflicts=[str(c) for c in report.conflicts[:_NAMED]],
        conflict_count=report.conflict_count,
        notes=list(report.notes),
    )


def status(db: GuardedConnection) -> Status:
    context = db.context
    task = context.task
    assert task is not None  # noqa: S101 (a guarded connection is a task's)
    return Status(
        task=task.id,
        agent=task.agent,
        policy=task.policy,
        policy_version=task.policy_version,
        purpose=task.purpose,
        params=dict(task.params),
        state=task.state,
        expires_at=task.expires_at,
        seconds_left=max(0, int((task.expires_at - datetime.now(UTC)).total_seconds())),
        budgets=context.policy.budgets.model_dump(mode="json", exclude_none=True),
        can_undo=db.can_undo,
    )


def _report(found: Mapping[str, Any]) -> dict[str, JsonValue]:
    """Return what stands in a report besides `affected`, with as many samples as a model can take in."""
    report = {
        name: value for name, value in found.items() if name != "affected" and value not in ([], {}, None)
    }
    if len(samples := list(report.get("samples", ()))) > _SAMPLES:
        report["samples"] = samples[:_SAMPLES]
        report["samples_note"] = f"CUT: {_SAMPLES} of {len(samples):,} samples"
    return {name: safe(value) for name, value in report.items()}


def _one(db: GuardedConnection, sql: str) -> Decision | None:
    """Return the decision on the one statement of *sql*, None for what is going to be refused anyway."""
    decisions = db.decide(sql)
    if len(decisions) != 1:
        raise Refused(
            f"this text has {len(decisions)} statements",
            hint="send one statement with each call, without BEGIN",
        )
    return decisions[0] if decisions[0].allowed else None


def _must_write(decision: Decision | None) -> None:
    if decision is not None and (decision.kind not in _WRITES or not decision.is_write):
        raise Refused(
            "this statement changes no rows",
            hint="use the tool `query` for reads; every call is a transaction of its own, so locks, settings,"
            " cursors and BEGIN mean nothing here",
        )


def _text(sql: str, params: Sequence[JsonValue]) -> str:
    """Parameters are `$1`, `$2` …; a `%` of the text stays one."""
    return sql.replace("%", "%%") if params else sql


def _params(params: Sequence[JsonValue]) -> list[Any] | None:
    # A document is sent as its text, for PostgreSQL to read as json or jsonb.
    return [json.dumps(p) if isinstance(p, dict) else p for p in params] or None


def _rows(shown: Cut, notices: Sequence[str] = ()) -> dict[str, Any]:
    return {
        "rows": shown.rows,
        "total_rows": shown.total,
        "truncated": shown.truncated,
        "note": "; ".join([*notices, *filter(None, [shown.note])]) or None,
    }


def _done(outcome: Outcome) -> dict[str, Any]:
    return {
        "tag": outcome.tag,
        "verdict": outcome.verdict,
        "tier": outcome.tier,
        "rowcount": outcome.rowcount,
        "affected": [AffectedRows(table=a.table, op=a.op, rows=a.rows) for a in outcome.affected],
        "affected_rows": sum(a.rows for a in outcome.affected),
        "statement": outcome.statement,
        "executed": outcome.executed,
        "action": outcome.action,
        "plan": outcome.plan,
        "report": None if outcome.report is None else _report(with_differences(outcome.report)),
        "columns": list(outcome.columns),
        **_rows(cut(outcome.rows, RETURNED), outcome.notices),
    }
