"""
Plans in the database: weigh a run, keep what it would have done, take an approval, list, show, decide.

`weigh`, `outcome` and `redeem` are for the task's own session, inside the transaction of the run; `record` for a
connection in autocommit (the operator's, or another one of the task). Decisions are for a person's own login; who
may decide is the database's to say (`sqlguard.decide_plan`), not this module's.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus
from psycopg.types.json import Jsonb

from sqlguard.errors import ApprovalRequired, Refused
from sqlguard.plan import Affected, Draft, classes_of
from sqlguard.plan_told import with_differences
from sqlguard.policy import Policy
from sqlguard.policy.late import Measured
from sqlguard.postgres.journal import translated
from sqlguard.task import ROLE_PREFIX

Connection = psycopg.Connection[Any]
STATES = ("open", "approved", "rejected", "expired", "superseded", "committed")
#: What it takes to weigh what a statement does, before it.
BEGIN = "SELECT sqlguard.begin_plan()"
#: Deferred constraints would fail at COMMIT: a preview has to fail on them too.
FORCE = "SELECT sqlguard.force_constraints()"
#: Of one action, or the whole transaction, with what `plan.steady` says of it.
OUTCOME = "SELECT * FROM sqlguard.plan_outcome(%s, %s::jsonb)"
#: `FORCE`, and that of a run that ends here.
FORCED = "SELECT * FROM sqlguard.forced_outcome(%s, %s::jsonb)"
# Nothing was changed that a crash could make it miss: its commit need not wait for the disk, and what waits for it
# (an approval) has it written too.
_PREVIEWED = (
    "SELECT sqlguard.record_plan(%s, %s, %s, %s), pg_catalog.set_config('synchronous_commit', 'off', true)"
)
_LIST = """
    SELECT sqlguard.plan_document(p) FROM sqlguard.plan p
    WHERE (%(task)s::text IS NULL OR p.task_id = %(task)s)
      AND (%(state)s::text IS NULL OR sqlguard.plan_state(p) = %(state)s)
    ORDER BY p.id DESC LIMIT %(limit)s
"""


@dataclass(frozen=True)
class RunOutcome:
    """What the database says of a run; `text` and `signed` are what `record` wants back."""

    text: str
    signed: str

    @cached_property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.text)["report"]
        return found


@dataclass(frozen=True, slots=True)
class Redeemed:
    """`plan` is None when there is no approval; `report` is the approved plan's when the rows are not its any more."""

    plan: int | None = None
    is_equal: bool = False
    report: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """One plan with its state; `document` has the fields that DESIGN 3.10 promises for JSON."""

    id: int
    state: str
    document: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return with_differences(self.document)


def measured(text: str, policy: Policy) -> Measured:
    """Read what `sqlguard.weigh` says."""
    found = json.loads(text)
    classes = classes_of(found["tables"], policy)
    return Measured(int(found["rows"]), found["share"], tuple(found["excess"]), classes)


def redeemed(text: str) -> Redeemed:
    """Read what `sqlguard.redeem_plan` says."""
    found = json.loads(text)
    return Redeemed(found.get("plan"), bool(found.get("equal")), found.get("report"))


def weigh(conn: Connection, action: int | None, policy: Policy, *, share: bool) -> Measured:
    """Return what *action* (None: the whole transaction) has changed since `BEGIN`."""
    return measured(_one(conn, "SELECT sqlguard.weigh(%s, %s)", [action, share])[0], policy)


def note_sequences(conn: Connection, action: int) -> None:
    """After a statement of a block that becomes one plan: which sequences it moved."""
    conn.execute("SELECT sqlguard.note_sequences(%s)", [action])


def affected(conn: Connection, action: int) -> tuple[Affected, ...]:
    """Return the rows of guarded tables that *action* has changed in the open transaction."""
    found = conn.execute(
        "SELECT schema_name || '.' || table_name, op, sum(rows)::bigint FROM sqlguard.transaction_changes()"
        " WHERE action_id = %s GROUP BY 1, 2 ORDER BY 1, 2",
        [action],
    ).fetchall()
    return tuple(Affected(*row) for row in found)


def outcome_text(action: int | None, known: str | None, *, forced: bool = False) -> str:
    """Return the query for all that a plan says of a run (`OUTCOME` or `FORCED`); *known* as in `plan.steady`."""
    text = (FORCED if forced else OUTCOME).replace("%s", "{}")
    return sql.SQL(text).format(sql.Literal(action), sql.Literal(known)).as_string()


def outcome(conn: Connection, action: int | None, steady: str | None) -> RunOutcome:
    """Return all that a plan has to say of *action*, or of the whole transaction; *steady* as in `plan.steady`."""
    return RunOutcome(*_one(conn, OUTCOME, [action, steady]))


def redeem(conn: Connection, draft: Draft, only: int | None, plan: int | None) -> Redeemed:
    """Take the approval of *plan*, or of the newest for the same statements; used up when this commits."""
    hashed = None if plan is not None else draft.statement_hash
    values = [plan, hashed, only, draft.steps[0].action, draft.steady]
    return redeemed(_one(conn, "SELECT sqlguard.redeem_plan(%s, %s, %s, %s, %s::jsonb)", values)[0])


def record(conn: Connection, draft: Draft, found: RunOutcome, drift_of: int | None = None) -> int:
    """Store a plan and tell approvers; return its id."""
    values = [Jsonb(draft.document(found.report, drift_of)), found.text, found.signed]
    return _recorded(conn, "SELECT sqlguard.record_plan(%s, %s, %s)", values)


def record_previewed(conn: Connection, draft: Draft, found: RunOutcome, detail: Mapping[str, Any]) -> int:
    """Store the plan of a preview, and that its action came to no more than that, with *detail*; return its id."""
    values = [Jsonb(draft.document(found.report)), found.text, found.signed, Jsonb(dict(detail))]
    return _recorded(conn, _PREVIEWED, values)


def _recorded(conn: Connection, text: str, values: list[Any]) -> int:
    # A task's own session is read only by default.
    read_only = conn.info.parameter_status("default_transaction_read_only") == "on"
    if not read_only or conn.info.transaction_status != TransactionStatus.IDLE:
        return int(_one(conn, text, values)[0])
    with conn.transaction():
        conn.execute("SET TRANSACTION READ WRITE")
        return int(_one(conn, text, values)[0])


def statements(conn: Connection, plan: int) -> tuple[list[dict[str, Any]], bool]:
    """
    Return what *plan* is made of, for a session of its agent, and whether it is a whole block.

    Raises ApprovalRequired while nobody has approved it, Refused when it can't be committed.
    """
    row = conn.execute("SELECT sqlguard.plan_statements(%s)", [plan]).fetchone()
    found = row[0] if row else None
    if found is None:
        raise Refused(f"this task has no plan {plan}", hint="preview the statement again")
    if found["state"] == "open":
        hint = f"ask a person to run `sqlguard approve {plan}`"
        raise ApprovalRequired(f"plan {plan} is not approved yet", hint=hint)
    if found["state"] != "approved":
        raise Refused(f"plan {plan} is {found['state']}", hint="preview the statement again")
    return found["statements"], found["is_block"]


def show(conn: Connection, plan: int) -> Plan:
    """Return *plan*: any for operator and approvers, its agent's own for a task. Raises Refused if there is none."""
    text = (
        "SELECT sqlguard.ticket(%s)"
        if conn.info.user.startswith(ROLE_PREFIX)
        else "SELECT sqlguard.plan_document(p) FROM sqlguard.plan p WHERE p.id = %s"
    )
    row = conn.execute(text, [plan]).fetchone()
    if row is None or row[0] is None:
        raise Refused(f"there is no plan {plan}", hint="see `sqlguard plan list`")
    return _plan(row[0])


def list_plans(
    conn: Connection, *, state: str | None = None, task: str | None = None, limit: int = 100
) -> list[Plan]:
    """Return the newest *limit* plans that fit, oldest first."""
    rows = conn.execute(_LIST, {"state": state, "task": task, "limit": limit}).fetchall()
    return [_plan(row[0]) for row in reversed(rows)]


def approve(conn: Connection, plan: int, digest: str, reason: str | None = None) -> str:
    """
    Approve *plan* as the login of *conn*, which has looked at *digest*; return the state that it has now.

    Raises psycopg's InsufficientPrivilege for who may not, Refused, Drift.
    """
    return _decide(conn, plan, "approve", digest, reason)


def reject(conn: Connection, plan: int, reason: str) -> str:
    """Reject *plan* for good; the agent reads *reason*."""
    return _decide(conn, plan, "reject", None, reason)


def revoke(conn: Connection, plan: int, reason: str | None = None) -> str:
    """Take back the approvals of *plan*, if it has not been committed yet."""
    return _decide(conn, plan, "revoke", None, reason)


def _decide(conn: Connection, plan: int, decision: str, digest: str | None, reason: str | None) -> str:
    with translated():
        row = conn.execute(
            "SELECT sqlguard.decide_plan(%s, %s, %s, %s)", [plan, decision, digest, reason]
        ).fetchone()
    assert row is not None  # noqa: S101 (a SELECT without FROM has one row)
    return str(row[0])


def _one(conn: Connection, text: str, values: list[Any]) -> tuple[Any, ...]:
    with translated():
        row = conn.execute(text.encode(), values).fetchone()
    assert row is not None  # noqa: S101 (each of these has one row)
    return tuple(row)


def _plan(document: Mapping[str, Any]) -> Plan:
    return Plan(int(document["plan"]), str(document["state"]), document)
