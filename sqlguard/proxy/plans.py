"""
Statements that may need an approval: run, weighed by what they changed, then let go on or stopped with a plan.

The same as `postgres.plan_run` for the Python door. Nothing is decided by an approval before the run: the statement
is run in its transaction, the rows decide, and if they ask for an approval it is taken in that very transaction.
"""

from base64 import b64encode
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sqlguard.errors import SqlguardError
from sqlguard.plan import (
    Decision,
    Draft,
    Stage,
    Step,
    may_go_over,
    measured_of,
    refused,
    ruling_of,
    steady,
)
from sqlguard.plan_told import approval_required, drift
from sqlguard.policy import late
from sqlguard.policy.late import Measured, Ruling
from sqlguard.policy.verdict import Effect
from sqlguard.postgres import plans
from sqlguard.postgres.plans import Redeemed, RunOutcome
from sqlguard.proxy import copies, own
from sqlguard.proxy.report import around, claim, plan_notice, sqlstate
from sqlguard.wire.messages import DataRow, ReadyForQuery
from sqlguard.wire.replies import REFUSED_TEXT, Expect, Part
from sqlguard.wire.reports import fields_of

if TYPE_CHECKING:
    from sqlguard.proxy.portals import Portal
    from sqlguard.proxy.session import AgentSession

_HEADER_BYTES = 5
_REDEEM = "SELECT sqlguard.redeem_plan(NULL, $1::text, $2::bigint, $3::bigint, $4::jsonb)"
Ask = Callable[..., Awaitable[Expect]]


def weigh_text(action: int, *, share: bool) -> str:
    return f"SELECT sqlguard.weigh({action:d}, {'true' if share else 'false'})"


def outcome_text(decision: Decision, action: int) -> str:
    """Return the query for all that a plan says of one statement's run, which ends with it."""
    return plans.outcome_text(action, steady([(action, decision)]), forced=True)


def note_text(action: int) -> str:
    """Return what notes the sequences that a statement of a block has moved."""
    return f"SELECT sqlguard.note_sequences({action:d})"


@dataclass(frozen=True)
class Weighed:
    """What came of a run: it goes on (with the plan whose approval it took), or is stopped."""

    plan: int | None = None
    #: Why it is stopped: an error that is known, or what there is to store once it has been rolled back.
    fault: SqlguardError | None = None
    draft: Draft | None = None
    found: RunOutcome | None = None
    taken: Redeemed = field(default_factory=Redeemed)

    @property
    def goes_on(self) -> bool:
        return self.fault is None and self.found is None


class Plans:
    """What a session has to do with plans. `stage` is the block that is staged or previewed."""

    def __init__(self, session: "AgentSession") -> None:
        self._session = session
        login = session.login
        self.policy = login.policy
        self.plan_only = login.task.plan_only or login.policy.defaults.plan_only
        self.stage = Stage()

    # --- what is known before

    def ruling(self, decision: Decision, measured: Measured | None = None) -> Ruling | None:
        """Return what is to be done with *decision*; None: run it and see."""
        said = self._session.said(decision)
        now = datetime.now(UTC)
        ruling = ruling_of(
            decision, confidence=said.confidence, now=now, measured=measured, plan_only=self.plan_only
        )
        return copies.ruled(ruling, said.idempotency_key) if copies.is_copy(decision) else ruling

    def is_weighed(self, decision: Decision, ruling: Ruling | None, *, in_block: bool | None = None) -> bool:
        """Say whether a write has to be looked at before it may be committed; *in_block* None: as it is now."""
        if ruling is None or ruling.effect is Effect.APPROVE:
            return True
        if copies.is_copy(decision):
            return False
        return (self._session.in_block if in_block is None else in_block) and may_go_over(
            decision, self.policy
        )

    @property
    def is_staging(self) -> bool:
        """Whether the open block is one plan: a preview, or all of a task that may only plan."""
        session = self._session
        return session.in_block and (session.dry_block or self.plan_only)

    def begin(self) -> list[str]:
        """Return what comes before a write of a block that is staged."""
        return [] if self.stage.steps else [plans.BEGIN]

    def add(self, decision: Decision, action: int, portal: "Portal | None" = None) -> None:
        """A write of the block that is staged was run."""
        ruling = self.ruling(decision) or Ruling(Effect.ALLOW)
        self.stage.add(self.step(decision, action, portal), decision, ruling)

    def step(self, decision: Decision, action: int, portal: "Portal | None") -> Step:
        text = decision.statement.text
        if portal is None or portal.bind is None or not portal.bind.values:
            return Step(text, decision.text, action)
        bind, params = portal.bind, portal.params(self._session.encoding)
        formats = bind.formats or (0,)
        formats = formats * len(bind.values) if len(formats) == 1 else formats
        types = portal.types + (0,) * (len(bind.values) - len(portal.types))
        values = tuple(
            (oid, form, None if value is None else b64encode(value).decode("ascii"))
            for oid, form, value in zip(types, formats, bind.values, strict=False)
        )
        return Step(text, decision.text, action, None if params is None else tuple(params), values)

    def draft(self, stage: Stage) -> Draft:
        session = self._session
        return stage.draft(session.login.role, self.policy, session.memory.state.search_path)

    # --- what the rows say

    async def weigh(
        self,
        decision: Decision,
        action: int,
        weight: Sequence[bytes],
        ask: Ask,
        portal: "Portal | None" = None,
    ) -> Weighed:
        """Decide over a write that was run; *ask* runs a statement of ours in its transaction."""
        measured = plans.measured(self._text(weight[0]), self.policy)
        ruling = self.ruling(decision, measured)
        assert ruling is not None  # noqa: S101 (everything is known)
        if ruling.effect is Effect.REFUSE:
            return Weighed(fault=refused(ruling))
        if ruling.effect is Effect.ALLOW:
            return Weighed()
        stage = Stage([self.step(decision, action, portal)], [decision], [ruling])
        return await self.redeem(self.draft(stage), action, ask)

    async def redeem(self, draft: Draft, only: int | None, ask: Ask) -> Weighed:
        """Take an approval for what was run; if there is none for these rows, read what the run is."""
        first, one = str(draft.steps[0].action), None if only is None else str(only)
        asked = await ask(self._session, _REDEEM, draft.statement_hash, one, first, draft.steady)
        if asked.failed is not None:
            return Weighed(fault=self._failed(asked))
        taken = plans.redeemed(self._text(asked.captured[0]))
        if taken.is_equal:
            return Weighed(plan=taken.plan, taken=taken)
        asked = await ask(self._session, plans.outcome_text(only, draft.steady))
        if asked.failed is not None:
            return Weighed(fault=self._failed(asked))
        return Weighed(draft=draft, found=self.outcome(asked.captured[0]), taken=taken)

    async def stopped(self, weighed: Weighed) -> SqlguardError:
        """Store the plan of a run that was rolled back; return what the agent is told."""
        draft, found, taken = weighed.draft, weighed.found, weighed.taken
        if weighed.fault is not None or draft is None or found is None:
            return weighed.fault or SqlguardError("the run could not be weighed")
        try:
            plan = await self._session.operator.plan(draft, found, taken.plan)
        except SqlguardError as fault:
            return fault
        if taken.plan is None:
            return approval_required(plan, found.report, draft.reasons)
        return drift(taken.plan, plan, taken.report or {}, found.report)

    async def previewed(
        self, decision: Decision, action: int, row: bytes, portal: "Portal | None" = None
    ) -> tuple[int | None, dict[str, Any]]:
        """Store the plan of a statement that was run for show; return its id and its report. Raises Refused."""
        found = self.outcome(row)
        ruling = self.ruling(decision, measured_of(found.report, self.policy))
        assert ruling is not None  # noqa: S101 (everything is known)
        if ruling.effect is Effect.REFUSE:
            raise refused(ruling)
        if copies.is_copy(decision):
            return None, found.report
        stage = Stage([self.step(decision, action, portal)], [decision], [ruling])
        return await self._session.operator.plan(self.draft(stage), found, None), found.report

    async def tell_block(self, row: bytes, ask: Ask = own.ask) -> bytes | None:
        """Keep the plan of a block that was run for show and tell of it, or return why not."""
        session = self._session
        stage, self.stage = self.stage, Stage()
        found = self.outcome(row)
        plan = None
        if stage.steps and not any(map(copies.is_copy, stage.decisions)):
            if (failed := await self._judged(stage, ask)) is not None:
                return failed
            plan = await session.operator.plan(self.draft(stage), found, None)
            session.operator.event(stage.steps[0].action, "previewed", {"plan": plan})
        session.client.write(plan_notice(found.report, None, plan, session.encoding))
        return None

    async def end_staged(self, ask: Ask = own.ask) -> bytes | None:
        """Decide over a staged block at its COMMIT: None, or the error with which it is to be rolled back."""
        session = self._session
        stage, self.stage = self.stage, Stage()
        forced = await ask(session, plans.FORCE)
        failed = forced.failed if forced.failed is not None else await self._judged(stage, ask)
        if failed is not None:
            return failed
        weighed = await self.redeem(self.draft(stage), None, ask)
        return None if weighed.goes_on else session.error(await self.stopped(weighed))

    async def _judged(self, stage: Stage, ask: Ask) -> bytes | None:
        """Have the gates that wait for rows decide over each write of a block; return the error if one refuses."""
        session = self._session
        for number, (step, decision) in enumerate(zip(stage.steps, stage.decisions, strict=True)):
            if self.ruling(decision) is not None:
                continue
            asked = await ask(
                session, weigh_text(step.action, share=late.wants_share(decision.verdict.gates))
            )
            if asked.failed is not None:
                return asked.failed
            ruling = self.ruling(decision, plans.measured(self._text(asked.captured[0]), self.policy))
            assert ruling is not None  # noqa: S101 (everything is known)
            if ruling.effect is Effect.REFUSE:
                return session.error(refused(ruling))
            stage.rulings[number] = ruling
        return None

    def outcome(self, row: bytes) -> RunOutcome:
        text, signed = [self._decoded(value) for value in DataRow.decode(row[_HEADER_BYTES:]).values]
        return RunOutcome(text, signed)

    def _text(self, row: bytes) -> str:
        return self._decoded(DataRow.decode(row[_HEADER_BYTES:]).values[0])

    def _decoded(self, value: bytes | None) -> str:
        return (value or b"").decode(self._session.encoding)

    def _failed(self, asked: Expect) -> SqlguardError:
        """Return an error of PostgreSQL's as one of ours: the transaction has failed, and the client must know."""
        fields = fields_of(asked.failed) if asked.failed else {}
        encoding = self._session.encoding
        fault = SqlguardError(fields.get(b"M", b"the plan could not be made").decode(encoding, "replace"))
        fault.sqlstate = fields.get(b"C", b"XX000").decode("ascii", "replace")
        return fault


# --- the simple protocol


async def write(session: "AgentSession", decision: Decision, action: int) -> None:
    """Carry out a Query of one write that has to be weighed."""
    if session.in_block:
        session.open_actions.append((action, {}))
        await inside(session, decision, action)
        session.client.write(ReadyForQuery(session.books.status).encode())
        return
    before = ["BEGIN READ WRITE", claim(action), plans.BEGIN]
    share = late.wants_share(decision.verdict.gates)
    expect = await _run(session, decision, before, [plans.FORCE, weigh_text(action, share=share)])
    if expect.failed is not None:
        await session.ask("ROLLBACK")
        session.operator.event(action, "failed", {"sqlstate": sqlstate(expect.failed)})
    else:
        weighed = await session.plans.weigh(decision, action, expect.captured, own.ask)
        await _end(session, action, weighed, expect)
    session.client.write(ReadyForQuery(session.books.status).encode())


async def _end(session: "AgentSession", action: int, weighed: Weighed, expect: Expect) -> None:
    """Commit what goes on, roll back and keep what does not, and tell the client."""
    if weighed.goes_on:
        commit = await session.ask("COMMIT")
        session.client.write(commit.failed or expect.held)
        detail = {"tag": expect.tag.decode("ascii", "replace"), "plan": weighed.plan}
        kind = "committed" if commit.failed is None else "failed"
        session.operator.event(action, kind, detail)
        return
    await session.ask("ROLLBACK")
    session.client.write(session.error(await session.plans.stopped(weighed)))
    if weighed.fault is not None:
        session.operator.event(action, "failed", {"sqlstate": weighed.fault.sqlstate})


async def inside(session: "AgentSession", decision: Decision, action: int, *, hold: bool = False) -> Expect:
    """
    Carry out one write in an open block, which fails if the write is stopped; the caller says ReadyForQuery.

    In a block that is staged it only becomes part of the plan.
    """
    planner = session.plans
    if planner.is_staging:
        expect = await _run(session, decision, [claim(action), *planner.begin()], [note_text(action)])
        if expect.failed is None:
            planner.add(decision, action)
        return _let_go(session, expect, hold=hold)
    share = late.wants_share(decision.verdict.gates)
    expect = await _run(session, decision, [claim(action), plans.BEGIN], [weigh_text(action, share=share)])
    if expect.failed is not None:
        return expect
    weighed = await planner.weigh(decision, action, expect.captured, own.ask)
    if weighed.goes_on:
        return _let_go(session, expect, hold=hold)
    await stop_block(session, weighed)
    expect.failed, expect.held = b"", b""
    return expect


async def stop_block(session: "AgentSession", weighed: Weighed) -> None:
    """Fail the open block, which frees what it has locked, keep the plan and tell the client."""
    await session.ask(REFUSED_TEXT)
    session.client.write(session.error(await session.plans.stopped(weighed)))


def _let_go(session: "AgentSession", expect: Expect, *, hold: bool) -> Expect:
    if not hold and expect.failed is None:
        session.client.write(expect.held)
        expect.held = b""
    return expect


async def _run(session: "AgentSession", decision: Decision, before: list[str], after: list[str]) -> Expect:
    """Send one write among statements of ours; its CommandComplete is held, the last row of ours captured."""
    parts = [(text, Part.CAPTURE if text is after[-1] else Part.SWALLOW) for text in after]
    text, expect = around(decision, before, Part.HOLD, parts)
    session.send_query(text, expect)
    await session.barrier()
    return expect


async def may_read(session: "AgentSession", decision: Decision) -> bool:
    """
    Take the approval of what is no write, if it needs one, in a transaction of its own; say whether it may run.

    Nothing of it is run before that: its rows would be shown. If not, the client has been told; the caller says
    ReadyForQuery.
    """
    ruling = None if decision.is_settled or session.books.status == b"E" else session.plans.ruling(decision)
    if ruling is None or ruling.effect <= Effect.REWRITE:
        return True
    try:
        action = await session.record(decision, None)
    except SqlguardError as fault:
        await _refuse(session, fault)
        return False
    if ruling.effect is Effect.REFUSE:
        session.operator.event(action, "failed", {"sqlstate": "SG002"})
        await _refuse(session, refused(ruling))
        return False
    is_own = not session.in_block
    if is_own:
        await session.ask(f"BEGIN READ WRITE; {claim(action)}")
    stage = Stage([session.plans.step(decision, action, None)], [decision], [ruling])
    weighed = await session.plans.redeem(session.plans.draft(stage), action, own.ask)
    if weighed.goes_on:
        if is_own:
            await session.ask("COMMIT")
        session.operator.event(action, "committed", {"plan": weighed.plan})
        return True
    if is_own:
        await session.ask("ROLLBACK")
        session.client.write(session.error(await session.plans.stopped(weighed)))
    else:
        await stop_block(session, weighed)
    return False


async def _refuse(session: "AgentSession", fault: SqlguardError) -> None:
    await session.ask(REFUSED_TEXT)
    session.client.write(session.error(fault))


# --- the extended protocol


async def ask_inside(session: "AgentSession", text: str, *values: str | None) -> Expect:
    """Run one statement of ours in a pipeline of the client's, without ending its transaction."""
    expect = own.send(session, text, *values)
    await session.barrier()
    return expect
