"""
How the Python door runs what may need an approval: run, weigh, decide; then commit, or roll back and keep a plan.

Theory of operation. The statement is run for real first. What it changed decides: a gate lets it pass and it is
committed; or an approval is needed, and then the very rows that were changed are compared with those of an approved
plan (`redeem`). So a preview, a stop and a commit are one run that ends in three ways, and an approval never decides
how something is run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import psycopg
from psycopg import sql

from sqlguard.errors import SqlguardError
from sqlguard.plan import (
    Decision,
    Draft,
    Stage,
    Step,
    over_the_cap,
    refused,
    ruling_of,
)
from sqlguard.plan_told import approval_required, drift
from sqlguard.policy import Policy, late
from sqlguard.policy.late import Measured, Ruling
from sqlguard.policy.verdict import Effect
from sqlguard.postgres import plans
from sqlguard.postgres.plan_values import keep

#: What PostgreSQL fails on, so that a block of the agent's is failed as by any error.
_FAILS = "sqlguard refused this statement"
#: In the hint of what the table walls refuse and a plan would allow.
_APPROVABLE = "have a preview approved"


@dataclass
class Planner:
    """One per guarded connection. *ledger* stores plans: a session in autocommit, not the one that runs."""

    work: psycopg.Connection[Any]
    ledger: psycopg.Connection[Any]
    role: str
    policy: Policy
    search_path: Callable[[], tuple[str, ...]]
    #: Everything is staged: nothing commits but approved plans.
    plan_only: bool = False

    def ruling(
        self, decision: Decision, confidence: float | None, measured: Measured | None = None
    ) -> Ruling | None:
        """Return what is known before the run, or by its rows; None: it has to be weighed."""
        now = datetime.now(UTC)
        return ruling_of(
            decision, confidence=confidence, now=now, measured=measured, plan_only=self.plan_only
        )

    def weigh(self, decision: Decision, confidence: float | None, action: int) -> Ruling:
        """Return what the rows say. Raises Refused where a gate refuses."""
        share = late.wants_share(decision.verdict.gates)
        measured = plans.weigh(self.work, action, self.policy, share=share)
        return self.judged(decision, confidence, measured)

    def judged(self, decision: Decision, confidence: float | None, measured: Measured) -> Ruling:
        """Return what *measured* rows say. Raises Refused where a gate refuses."""
        found = self.ruling(decision, confidence, measured)
        assert found is not None  # noqa: S101 (everything is known)
        if found.effect is Effect.REFUSE:
            raise refused(found)
        return found

    def measure(self, decision: Decision, params: Sequence[Any] | None) -> None:
        """Count what a write would change, if no approval could let it go over its cap. Raises CapExceeded."""
        if (count := decision.count) is None:
            return
        values = [params[n - 1] for n in count.params] if params else None
        with psycopg.RawCursor(self.work) as cursor:
            found = cursor.execute(count.text.encode(), values).fetchone()
        if found and (fault := over_the_cap(count, found[0])) is not None:
            raise fault

    def step(self, decision: Decision, params: Sequence[Any] | None, action: int) -> Step:
        shown = None if params is None else tuple(None if p is None else str(p) for p in params)
        text = decision.statement.text
        return Step(text, decision.text, action, shown, keep(self.work, params))

    def draft(self, stage: Stage) -> Draft:
        return stage.draft(self.role, self.policy, self.search_path())

    def redeem(self, draft: Draft, only: int | None, plan: int | None = None) -> plans.Redeemed:
        return plans.redeem(self.work, draft, only, plan)

    def stopped(self, draft: Draft, found: plans.RunOutcome, taken: plans.Redeemed) -> SqlguardError:
        """Keep the plan of a run that has been rolled back; return what the agent is told."""
        if taken.plan is None:
            return approval_required(plans.record(self.ledger, draft, found), found.report, draft.reasons)
        fresh = plans.record(self.ledger, draft, found, taken.plan)
        return drift(taken.plan, fresh, taken.report or {}, found.report)

    def fail_block(self) -> None:
        """Fail the open transaction as an error of PostgreSQL's would have."""
        try:
            self.work.execute(sql.SQL(_FAILS))
        except psycopg.Error:
            return


def can_be_approved(fault: BaseException) -> bool:
    """Say whether *fault* is a cap that the policy lets approved plans go over."""
    diagnostics = getattr(fault, "diag", None)
    hint = getattr(diagnostics, "message_hint", None) or getattr(fault, "hint", None) or ""
    return getattr(fault, "sqlstate", None) == "SG006" and _APPROVABLE in hint
