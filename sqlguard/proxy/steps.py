"""
The slow half of the extended protocol: writes on their way in, dry runs, and what the session must follow.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sqlguard import gate as gates
from sqlguard.errors import Refused, SqlguardError
from sqlguard.plan import Decision, Stage, refused
from sqlguard.policy.late import Ruling, wants_share
from sqlguard.policy.verdict import Effect
from sqlguard.postgres import plans
from sqlguard.proxy import again, copies, own, repeats
from sqlguard.proxy.excess import excess
from sqlguard.proxy.names import Names
from sqlguard.proxy.plans import ask_inside, note_text, outcome_text, weigh_text
from sqlguard.proxy.portals import Portal, Prepared
from sqlguard.proxy.report import (
    WRITABLE,
    affected,
    changes,
    dry_run_notice,
    plan_notice,
    sqlstate,
)
from sqlguard.statement.model import Kind
from sqlguard.wire.reader import text_at
from sqlguard.wire.replies import Expect, Part, Reply

if TYPE_CHECKING:
    from sqlguard.proxy.session import AgentSession

_EXECUTE = ord("E")
_HEADER_BYTES = 5


class Steps(ABC):
    """What `Extended` does when a message has to wait; the attributes are explained there."""

    _session: "AgentSession"
    _portals: Names[Portal]
    _statements: Names[Prepared]
    _plain_statement: Prepared | None
    _writable: bool
    _is_watched: bool
    _failed: bool
    _actions: list[int]
    repeated: dict[int, dict[str, Any]]
    is_open: bool
    ways: dict[int, Callable[[bytes], bool]]

    @abstractmethod
    def _send(self, raw: bytes, expect: Expect) -> None: ...

    @abstractmethod
    def _refuse(self, kind: int, error: bytes) -> None: ...

    @abstractmethod
    def _find_portal(self, name: bytes) -> Portal | None: ...

    @abstractmethod
    def _over(self) -> None: ...

    @abstractmethod
    async def finish(self) -> None: ...

    def prepared(self) -> list[tuple[bytes, str, tuple[int, ...]]]:
        """Return what the server has prepared for the client: names, texts as they were sent, parameter types."""
        there = dict(self._statements.items())
        if self._plain_statement is not None:
            there[b""] = self._plain_statement
        return [(name, sent(item.decision), item.types) for name, item in there.items()]

    def forget(self, name: bytes) -> None:
        """The server has not prepared *name* any more."""
        self._statements.forget(name)
        if not name:
            self._plain_statement = None
        else:
            self._session.memory.deallocated(name.decode(self._session.encoding, "replace"))

    async def slow(self, kind: int, raw: bytes) -> None:
        """Handle a message that `fast` left: a write on its way in, or what the session must follow."""
        session = self._session
        if kind == _EXECUTE:
            await self._execute_slowly(raw)
            return
        await session.barrier()
        # Once all is answered it may pass after all: it only had to be known what it means.
        if session.books.is_skipping or self.ways[kind](raw):
            return
        await self._make_writable()
        if session.books.is_skipping or self.ways[kind](raw):
            return
        # It means what the server says to what we have sent ourselves.
        await session.barrier()
        if not session.books.is_skipping:
            self.ways[kind](raw)

    async def _make_writable(self) -> None:
        """See to it that the transaction that the next message runs in may write."""
        session = self._session
        if not session.in_block:
            # Only reads have run in this implicit transaction: end it, and begin one that may write.
            await self.finish()
            own.send(session, WRITABLE)
            self.is_open = True
        self._writable = self._is_watched = True

    async def _execute_slowly(self, raw: bytes) -> None:
        session = self._session
        name, _ = text_at(raw, _HEADER_BYTES)
        portal = self._find_portal(name)
        assert portal is not None  # noqa: S101 (`fast` has looked)
        if gates.is_session_bound(portal.decision.statement) and not await self._means_the_same(portal):
            return
        if not portal.decision.is_write:
            await session.barrier()
            if not session.books.is_skipping and await self._may_read(portal):
                await self._control(portal.decision, raw)
            return
        if session.books.is_skipping or session.books.status == b"E":
            self._send(raw, Expect(Reply.EXECUTE))
            return
        ruling = session.plans.ruling(portal.decision)
        is_first = portal.action is None
        fault = self._objection(ruling)
        if fault is not None:
            self.refuse_execute(fault)
            return
        if is_first and not await self._journal(portal):
            return
        if session.books.is_skipping:
            # What came before it has failed meanwhile.
            self._failed = True
            return
        if is_first:
            own.send(session, f"SET sqlguard.action = '{portal.action}'")
        await self._run(portal, raw, ruling, is_first=is_first)

    async def _means_the_same(self, portal: Portal) -> bool:
        """Judge a portal that runs something else by its name; False if it can't run, and the client has been told."""
        session = self._session
        await session.barrier()
        if session.books.is_skipping:
            return False
        fault = again.at_execute(session, portal)
        if fault is not None:
            self._refuse(_EXECUTE, fault)
        return fault is None

    def _objection(self, ruling: Ruling | None) -> SqlguardError | None:
        """Return why a write may not be run at all."""
        session = self._session
        if ruling is not None and ruling.effect is Effect.REFUSE:
            return refused(ruling)
        if session.dry and not session.in_block and self._actions:
            # The preview's roll-back would take along what has been done, and been told to the client as done.
            return Refused("a dry run can't follow a write in one batch", hint="send a Sync between the two")
        return None

    async def _run(self, portal: Portal, raw: bytes, ruling: Ruling | None, *, is_first: bool) -> None:
        session = self._session
        if is_first and (fault := await excess(session, portal.decision, portal)) is not None:
            self.refuse_execute(fault)
        elif session.dry:
            await self._dry(portal, raw)
        elif is_first and session.said(portal.decision).idempotency_key:
            await repeats.extended(session, portal, raw)
        elif is_first and session.plans.is_staging:
            await self._stage(portal, raw)
        elif is_first and session.plans.is_weighed(portal.decision, ruling, in_block=True):
            await self._weighed(portal, raw)
        else:
            await self._carry(portal, raw)

    async def _carry(self, portal: Portal, raw: bytes) -> None:
        """Run a write that nothing waits for but what belongs to it."""
        parts = (Part.HOLD,) if portal.decision.after else ()
        expect = await self._sent(portal, raw, Expect(Reply.EXECUTE, parts=parts))
        if expect.held and expect.failed is None:
            self._session.client.write(expect.held)

    async def _sent(self, portal: Portal, raw: bytes, expect: Expect) -> Expect:
        """Send the Execute of a write; a COPY is waited for with what belongs to it: nothing may come between."""
        session, decision = self._session, portal.decision
        for text in decision.before:
            own.send(session, text)
        self.send_execute(portal, raw, expect)
        if not copies.is_copy(decision):
            return expect
        await session.barrier()
        if expect.failed is None:
            behind = [own.send(session, text) for text in decision.after]
            await session.barrier()
            expect.failed = next((e.failed for e in behind if e.failed is not None), None)
        return expect

    def send_execute(self, portal: Portal, raw: bytes, expect: Expect | None = None) -> Expect:
        """Send the Execute of a write, with the tag and positions that the client must see."""
        expect = expect or Expect(Reply.EXECUTE)
        expect.tags = (portal.decision.tag,)
        expect.position = portal.decision.position
        expect.error = copies.error_of(portal.decision)
        self._send(raw, expect)
        return expect

    async def _stage(self, portal: Portal, raw: bytes) -> None:
        """Run a write of a block that is one plan."""
        session = self._session
        for text in session.plans.begin():
            own.send(session, text)
        expect = await self._sent(portal, raw, Expect(Reply.EXECUTE))
        own.send(session, note_text(portal.action or 0))
        await session.barrier()
        if expect.failed is None:
            session.plans.add(portal.decision, portal.action or 0, portal)

    async def _weighed(self, portal: Portal, raw: bytes) -> None:
        """Run a write, see what it changes, and let it go on or fail."""
        session = self._session
        own.send(session, plans.BEGIN)
        held = await self._sent(portal, raw, Expect(Reply.EXECUTE, parts=(Part.HOLD,)))
        fault = await self.weigh(portal, held)
        if fault is not None:
            self.refuse_execute(fault)
        elif held.failed is None:
            session.client.write(held.held)

    async def weigh(self, portal: Portal, held: Expect) -> SqlguardError | None:
        """Decide over a write that was sent; return the error that it is to fail with, if any."""
        session, action = self._session, portal.action or 0
        ruling = session.plans.ruling(portal.decision)
        if not session.in_block and (ruling is None or ruling.effect is Effect.APPROVE):
            own.send(session, plans.FORCE)
        share = wants_share(portal.decision.verdict.gates)
        weight = own.send(session, weigh_text(action, share=share))
        await session.barrier()
        if held.failed is not None or weight.failed is not None:
            return None
        weighed = await session.plans.weigh(portal.decision, action, weight.captured, ask_inside, portal)
        return None if weighed.goes_on else await session.plans.stopped(weighed)

    async def _may_read(self, portal: Portal) -> bool:
        """
        Take the approval of a read that needs one; False if it has none, and the client has been told.

        Nothing of it is run before that: its rows would be shown.
        """
        session, decision = self._session, portal.decision
        is_new = decision.may_take_approval and portal.action is None and session.books.status != b"E"
        ruling = session.plans.ruling(decision) if is_new else None
        if ruling is not None and ruling.effect is Effect.REFUSE:
            self.refuse_execute(refused(ruling))
            return False
        if ruling is not None and ruling.effect is Effect.APPROVE:
            has_written = bool(self._actions)
            if not await self._journal(portal):
                return False
            stage = Stage([session.plans.step(decision, portal.action or 0, portal)], [decision], [ruling])
            weighed = await session.plans.redeem(session.plans.draft(stage), portal.action, ask_inside)
            if not weighed.goes_on:
                self.refuse_execute(await session.plans.stopped(weighed))
                return False
            if not session.in_block and not has_written:
                # It was opened for writing to take the approval, and is a read's from here on.
                own.send(session, "SET transaction_read_only = on")
                self._writable = False
        return True

    def refuse_execute(self, fault: SqlguardError) -> None:
        """Answer an Execute with *fault*."""
        self._refuse(_EXECUTE, self._session.error(fault))

    async def _journal(self, portal: Portal) -> bool:
        """Commit the intent; False when it could not be, and the client has been told."""
        session = self._session
        try:
            portal.action = await session.record(portal.decision, portal.params(session.encoding))
        except SqlguardError as fault:
            self.refuse_execute(fault)
            return False
        if session.in_block:
            session.open_actions.append((portal.action, {}))
        else:
            self._actions.append(portal.action)
        return True

    async def _control(self, decision: Decision, raw: bytes) -> None:
        session = self._session
        was_in_block = session.in_block
        expect = Expect(Reply.EXECUTE, tags=(decision.tag,))
        if decision.kind is Kind.COMMIT and session.dry_block and session.books.status == b"T":
            expect.tags = ("COMMIT",)
            if not await self._end_preview():
                return
            own.send(session, "ROLLBACK", execute=expect)
        elif decision.kind is Kind.COMMIT and session.plans.is_staging and session.plans.stage.steps:
            failed = await session.plans.end_staged(ask_inside)
            if failed is not None:
                self._refuse(_EXECUTE, failed)
                return
            self._send(raw, expect)
        else:
            self._send(raw, expect)
        await session.barrier()
        if expect.failed is None:
            self._note_status(decision, expect)
            # They end the implicit transaction of a pipeline as well, with what it has done so far.
            was_in_block = was_in_block or decision.kind in (Kind.COMMIT, Kind.ROLLBACK)
        if was_in_block and not session.in_block:
            session.open_actions += [(action, self.repeated.pop(action, {})) for action in self._actions]
            self._actions.clear()
            self._portals.clear()
            self._over()
        session.followed(decision, expect, was_in_block=was_in_block)
        self._is_watched = self._is_watched or (session.memory.is_open and not session.in_block)

    def _note_status(self, decision: Decision, expect: Expect) -> None:
        """Follow the transaction's state: in a pipeline the ReadyForQuery that tells it comes only later."""
        books = self._session.books
        if decision.kind is Kind.BEGIN:
            books.status = b"T"
        elif decision.kind in (Kind.COMMIT, Kind.ROLLBACK):
            books.status = b"I"
        elif decision.kind is Kind.ROLLBACK_TO and expect.tag == b"ROLLBACK":
            books.status = b"T"

    async def _end_preview(self) -> bool:
        """Tell what a block of a dry run would have changed; False if its COMMIT would have failed."""
        session = self._session
        own.send(session, plans.FORCE)
        report = own.send(session, plans.outcome_text(None, session.plans.stage.steady))
        await session.barrier()
        if report.failed is not None:
            return False
        if (failed := await session.plans.tell_block(report.captured[0], ask_inside)) is not None:
            self._refuse(_EXECUTE, failed)
        return failed is None

    async def _dry(self, portal: Portal, raw: bytes) -> None:
        """Run, force deferred constraints, read what changed, roll back; then tell."""
        session = self._session
        await session.barrier()
        action, savepoint = portal.action or 0, session.in_block and not session.dry_block
        if savepoint:
            own.send(session, "SAVEPOINT sqlguard_preview")
        for text in session.plans.begin() if session.dry_block else (plans.BEGIN,):
            own.send(session, text)
        held = await self._sent(portal, raw, Expect(Reply.EXECUTE, parts=(Part.HOLD,)))
        # Deferred constraints are the block's: a later statement may be what they wait for.
        if is_part := session.dry_block:
            report = own.send(session, changes(action))
            own.send(session, note_text(action))
        else:
            report = own.send(session, outcome_text(portal.decision, action))
        if savepoint:
            own.send(session, "ROLLBACK TO sqlguard_preview")
            own.send(session, "RELEASE sqlguard_preview")
        elif not session.in_block:
            own.send(session, "ROLLBACK")
        await session.barrier()
        self._forget(action)
        if report.failed is not None:
            session.operator.event(action, "failed", {"sqlstate": sqlstate(held.failed or report.failed)})
            return
        if not session.in_block:
            # Our ROLLBACK has ended the implicit transaction.
            self._over()
            self._portals.clear()
        notice = await self._tell(portal, report, is_part=is_part)
        if notice is not None:
            session.client.write(notice + held.held)

    async def _tell(self, portal: Portal, report: Expect, *, is_part: bool) -> bytes | None:
        """Return the report of a dry run, its plan kept unless it is part of a block's; None: a gate refuses it."""
        session, action = self._session, portal.action or 0
        if is_part:
            session.plans.add(portal.decision, action, portal)
            found = affected(report.captured, session.encoding)
            session.operator.event(action, "previewed", {"affected": found})
            return dry_run_notice(report.captured, action, session.encoding)
        try:
            plan, told = await session.plans.previewed(portal.decision, action, report.captured[0], portal)
        except SqlguardError as fault:
            self.refuse_execute(fault)
            return None
        session.operator.event(action, "previewed", {"affected": told["affected"], "plan": plan})
        return plan_notice(told, action, plan, session.encoding)

    def _forget(self, action: int) -> None:
        """*action* does not end with the transaction."""
        self._actions = [other for other in self._actions if other != action]
        self._session.open_actions = [a for a in self._session.open_actions if a[0] != action]


def sent(decision: Decision) -> str:
    return gates.begin_text(decision) if decision.kind is Kind.BEGIN else decision.text
