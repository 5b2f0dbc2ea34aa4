"""
Carries out decisions on a psycopg connection that is logged in as a task's own role.

The order is fixed: intent committed through the journal's own connection, then the write in a transaction of
its own, then the outcome. A preview is the same run, rolled back, with deferred constraints forced first
(STYLE rule 8), and so is what needs an approval and has none (`plan_run`); what a roll-back does not take back is
on the page `docs/plans.md`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from sqlguard import gate
from sqlguard.annotation import Annotation
from sqlguard.budget import ResultLimits
from sqlguard.errors import ApprovalRequired, Drift, SqlguardError
from sqlguard.journal import Intent
from sqlguard.plan import (
    PLANNED_READS,
    Decision,
    Draft,
    Outcome,
    Stage,
    may_go_over,
    refused,
)
from sqlguard.policy.late import Ruling
from sqlguard.policy.verdict import Effect
from sqlguard.postgres import idempotency, plans
from sqlguard.postgres.placeholders import Params as Params
from sqlguard.postgres.placeholders import number_placeholders as number_placeholders
from sqlguard.postgres.plan_run import Planner, can_be_approved
from sqlguard.postgres.preview_run import CLAIM, Run, ended, outcome_of, preview, recorded
from sqlguard.postgres.result_limits import first_rows, keep_to
from sqlguard.statement.model import Kind


@dataclass(frozen=True)
class _End:
    """How a run ends: `found` is what is kept of one that is rolled back, `taken` the approval that was there."""

    draft: Draft | None = None
    found: plans.RunOutcome | None = None
    taken: plans.Redeemed = field(default_factory=plans.Redeemed)


@dataclass
class Executor:
    """
    `record` commits one intent and returns its action id; it must raise when it can't, and then nothing runs.

    *settled* is told how each action ended (`committed`, `failed`, `previewed`) with details for the journal.
    """

    connection: psycopg.Connection[Any]
    record: Callable[[Intent], int]
    settled: Callable[[int, str, Mapping[str, Any]], None]
    planner: Planner
    #: The open block, if everything in it is staged.
    stage: Stage | None = None
    #: What one answer may hold.
    limits: ResultLimits | None = None

    @property
    def in_transaction(self) -> bool:
        return self.connection.info.transaction_status != TransactionStatus.IDLE

    def run(
        self,
        decision: Decision,
        params: list[Any] | None,
        annotation: Annotation,
        *,
        dry_run: bool = False,
        most: int | None = None,
    ) -> Outcome:
        """
        Carry out *decision*; of what a read shows keep *most* rows and count the others.

        Raises psycopg's errors untouched, ApprovalRequired or Drift where it is stopped.
        """
        ruling = self.planner.ruling(decision, annotation.confidence)
        if not decision.is_write and ruling is not None and ruling.effect is Effect.ALLOW:
            return self._followed(decision, params, most)
        intent = gate.intent(decision, params, annotation, via="preview" if dry_run else "connection")
        action = self.record(intent)
        try:
            if ruling is not None and ruling.effect is Effect.REFUSE:
                raise refused(ruling)
            run = Run(decision, params, intent, action, dry_run, most)
            outcome, details = self._write(run, ruling) if decision.is_write else self._read(run, ruling)
        except (ApprovalRequired, Drift):
            raise  # the journal says `planned`
        except (psycopg.Error, SqlguardError) as fault:
            self.settled(action, "failed", {"sqlstate": fault.sqlstate})
            raise
        if not dry_run and not self.in_transaction:
            self.settled(action, "committed", details)
        return outcome

    # --- what needs no weighing

    def _followed(self, decision: Decision, params: list[Any] | None, most: int | None) -> Outcome:
        """Carry out what changes no rows, and follow what it means for a block that is staged."""
        stage = self.stage
        if stage is not None and decision.kind is Kind.COMMIT and stage.steps:
            return self._commit_stage(decision, stage)
        outcome = self._plain(decision, params, most)
        if decision.kind is Kind.BEGIN and self.planner.plan_only and stage is None:
            self.stage = Stage()
        elif stage is not None:
            stage.follow(decision)
        if not self.in_transaction:
            self.stage = None
        return outcome

    def _plain(self, decision: Decision, params: list[Any] | None, most: int | None = None) -> Outcome:
        text = gate.begin_text(decision) if decision.kind is Kind.BEGIN else decision.text
        if decision.needs_read_write and not self.in_transaction:
            with self.connection.transaction():
                self.connection.execute("SET TRANSACTION READ WRITE")
                return self._answer(decision, text, params, most)
        return self._answer(decision, text, params, most)

    def _answer(
        self, decision: Decision, text: str, params: list[Any] | None, most: int | None = None
    ) -> Outcome:
        if most is not None and not decision.is_write and decision.kind in PLANNED_READS:
            return first_rows(self.connection, decision, text, params, most=most, limits=self.limits)
        with self._cursor() as cursor:
            cursor.execute(text, params)
            keep_to(self.limits, cursor)
            return outcome_of(decision, cursor)

    # --- one write

    def _write(self, run: Run, ruling: Ruling | None) -> tuple[Outcome, dict[str, Any]]:
        """Return the outcome, and what the journal is to know of it."""
        if run.dry_run:
            return preview(run, self.planner, self.limits)
        own = not self.in_transaction
        weighed = (
            ruling is None
            or ruling.effect is Effect.APPROVE
            or (not own and may_go_over(run.decision, self.planner.policy))
        )
        try:
            return self._attempt(run, weighed=weighed)
        except psycopg.Error as fault:
            if weighed or not own or not can_be_approved(fault):
                raise
        return self._attempt(run, weighed=True)

    def _attempt(self, run: Run, *, weighed: bool) -> tuple[Outcome, dict[str, Any]]:
        own = not self.in_transaction
        if own:
            self.connection.execute("BEGIN READ WRITE")
        end = _End()
        try:
            self._claim_changes(run.action)
            kept = self._claim(run.intent, run.action)
            if kept is not None:
                outcome = idempotency.repeated(self.connection, run.decision, kept)
            else:
                # A block that is staged is counted from its first write on.
                if weighed and (self.stage is None or not self.stage.steps):
                    self.connection.execute(plans.BEGIN)
                outcome = self._carry_out(run, force=weighed and own)
                end = self._weigh(run) if weighed else end
            changed = plans.affected(self.connection, run.action)
        except BaseException as fault:
            if own:
                self.connection.execute("ROLLBACK")
            elif isinstance(fault, SqlguardError):
                self.planner.fail_block()
            raise
        done, details = ended(run, outcome, changed, committed=own)
        if kept is not None:
            details["repeats"] = kept.action
        plan = self._end(end, own=own)
        return replace(done, plan=plan), details if plan is None else {**details, "plan": plan}

    def _claim_changes(self, action: int) -> None:
        self.connection.execute(CLAIM, [str(action)])

    def _weigh(self, run: Run) -> "_End":
        """Decide by the rows how the run ends. Raises Refused."""
        ruling = self.planner.weigh(run.decision, run.intent.confidence, run.action)
        if ruling.effect is Effect.ALLOW and self.stage is None:
            return _End()
        step = self.planner.step(run.decision, run.params, run.action)
        if self.stage is not None:
            self.stage.add(step, run.decision, ruling)
            plans.note_sequences(self.connection, run.action)
            return _End()
        return self._redeemed(self.planner.draft(Stage([step], [run.decision], [ruling])), run.action)

    def _redeemed(self, draft: Draft, only: int | None, plan: int | None = None) -> "_End":
        """Take an approval; if there is none for these rows, say what the run is that has to be rolled back."""
        taken = self.planner.redeem(draft, only, plan)
        return _End(
            draft, None if taken.is_equal else plans.outcome(self.connection, only, draft.steady), taken
        )

    def _end(self, end: "_End", *, own: bool) -> int | None:
        """Commit and return the plan that this was; or roll back, and raise ApprovalRequired or Drift."""
        if own:
            self.connection.execute("COMMIT" if end.found is None else "ROLLBACK")
        elif end.found is not None:
            self.planner.fail_block()
        if end.found is None or end.draft is None:
            return end.taken.plan
        raise self.planner.stopped(end.draft, end.found, end.taken)

    # --- a read that a person has to let pass

    def _read(self, run: Run, ruling: Ruling | None) -> tuple[Outcome, dict[str, Any]]:
        """Nothing of it is run before it is approved: its rows would be shown."""
        own = not self.in_transaction
        step = self.planner.step(run.decision, run.params, run.action)
        draft = self.planner.draft(Stage([step], [run.decision], [ruling] if ruling else []))
        outcome = Outcome("approve", statement=step.statement)
        if run.dry_run:
            found = plans.outcome(self.connection, run.action, None)
            return recorded(run, self.planner, outcome, draft, found)
        if own:
            self.connection.execute("BEGIN READ WRITE")
        try:
            end = self._redeemed(draft, run.action)
            if end.found is None:
                if own:
                    self.connection.execute("SET TRANSACTION READ ONLY")
                outcome = self._answer(run.decision, run.decision.text, run.params, run.most)
        except BaseException:
            if own:
                self.connection.execute("ROLLBACK")
            raise
        plan = self._end(end, own=own)
        return replace(outcome, action=run.action, plan=plan), {"plan": plan}

    # --- a block that was staged, a plan that is committed

    def _commit_stage(self, decision: Decision, stage: Stage) -> Outcome:
        """Commit a block if its plan is approved, else roll it back and keep that. Raises ApprovalRequired, Drift."""
        self.stage = None
        draft = self.planner.draft(stage)
        try:
            self.connection.execute(plans.FORCE)
            end = self._redeemed(draft, None)
        except BaseException:
            self.connection.execute("ROLLBACK")
            raise
        if end.found is None:
            return replace(self._plain(decision, None), plan=end.taken.plan)
        self.connection.execute("ROLLBACK")
        raise self.planner.stopped(draft, end.found, end.taken)

    def commit_plan(
        self, plan: int, again: Sequence[tuple[Decision, list[Any] | None]], *, is_block: bool
    ) -> Outcome:
        """
        Run the approved *plan* *again* and commit it if its rows are still the same.

        Raises Drift with a fresh plan, ApprovalRequired when the approval is gone.
        """
        via = f"plan {plan}"
        actions = [self.record(gate.intent(d, values, Annotation(), via=via)) for d, values in again]
        try:
            outcome, end = self._run_again(plan, again, actions, is_block=is_block)
        except BaseException as fault:
            for action in actions:
                self.settled(action, "failed", {"plan": plan, "sqlstate": getattr(fault, "sqlstate", None)})
            raise
        if end.found is not None and end.draft is not None:
            raise self.planner.stopped(end.draft, end.found, end.taken)
        for action in actions:
            self.settled(action, "committed", {"plan": plan})
        return replace(outcome, action=actions[0], plan=plan, committed=True)

    def _run_again(
        self,
        plan: int,
        again: Sequence[tuple[Decision, list[Any] | None]],
        actions: list[int],
        *,
        is_block: bool,
    ) -> tuple[Outcome, "_End"]:
        stage, outcome = Stage(), Outcome("allow")
        reads = [(d, values) for d, values in again if not d.is_write]
        self.connection.execute("BEGIN READ WRITE")
        try:
            self.connection.execute(plans.BEGIN)
            for (decision, values), action in zip(again, actions, strict=True):
                self._claim_changes(action)
                if decision.is_write:
                    outcome = self._answer(decision, decision.text, values)
                    # It was approved whatever it is about; a gate may refuse it by now.
                    self.planner.weigh(decision, None, action)
                ruling = self.planner.ruling(decision, None) or Ruling(Effect.APPROVE)
                stage.add(self.planner.step(decision, values, action), decision, ruling)
                if is_block:
                    plans.note_sequences(self.connection, action)
            self.connection.execute(plans.FORCE)
            end = self._redeemed(self.planner.draft(stage), None if is_block else actions[0], plan)
            for decision, values in reads if end.found is None else ():
                outcome = self._answer(decision, decision.text, values)
            affected = tuple(a for action in actions for a in plans.affected(self.connection, action))
            self.connection.execute("COMMIT" if end.found is None else "ROLLBACK")
        except BaseException:
            self.connection.execute("ROLLBACK")
            raise
        return replace(outcome, affected=affected), end

    # --- parts

    def _carry_out(self, run: Run, *, force: bool) -> Outcome:
        key = run.intent.idempotency_key
        self.planner.measure(run.decision, run.params)
        with self._cursor() as cursor:
            cursor.execute(run.decision.text, run.params)
            keep_to(self.limits, cursor)
            columns, rows = idempotency.described(cursor) if key else (None, None)
            outcome = outcome_of(run.decision, cursor)
        if force:
            self.connection.execute(plans.FORCE)
        if key:
            idempotency.keep(self.connection, key, outcome.tag or "", columns, rows)
        return outcome

    def _claim(self, intent: Intent, action: int) -> idempotency.Kept | None:
        if not intent.idempotency_key:
            return None
        return idempotency.claim(self.connection, intent.idempotency_key, intent.statement_hash, action)

    def _cursor(self) -> psycopg.RawCursor[Any]:
        return psycopg.RawCursor(self.connection)
