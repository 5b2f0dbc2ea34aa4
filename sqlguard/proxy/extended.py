"""
The extended query protocol: Parse, Bind, Describe, Execute, Close, Flush, Sync, in pipelines of any shape.

Decided at Parse, journaled at Execute. Messages keep their names and their order. Outside a block the
messages up to a Sync are one implicit transaction, and it can be made writable only before anything has run in it: so
the SET goes in front of its first message. What we put in between runs under the name `_OURS`, is closed at
once, and its replies are swallowed.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlguard import gate as gates
from sqlguard.errors import NotUnderstood, ProtocolViolation, SqlguardError
from sqlguard.plan import Decision
from sqlguard.policy.verdict import Effect, Verdict
from sqlguard.proxy import packets
from sqlguard.proxy.relay import REFUSED_TEXT, Expect, Part, Reply
from sqlguard.proxy.report import CHANGES, affected, dry_run_notice
from sqlguard.statement.model import Kind

if TYPE_CHECKING:
    from sqlguard.proxy.session import AgentSession

_OURS = b"sqlguard"
_FOLLOWED = frozenset(
    {
        Kind.SET,
        Kind.RESET,
        Kind.DISCARD,
        Kind.PREPARE,
        Kind.DEALLOCATE,
        Kind.DECLARE,
        Kind.CLOSE,
        Kind.CREATE_TEMP,
        Kind.DROP_TEMP,
        Kind.BEGIN,
        Kind.COMMIT,
        Kind.ROLLBACK,
    }
)
PARSE, BIND, DESCRIBE, EXECUTE, CLOSE, FLUSH, SYNC, CALL, TERMINATE = b"PBDECHSFX"


@dataclass(slots=True)
class Portal:
    decision: Decision
    params: list[str | None]
    #: Set by the first Execute; a suspended portal is not journaled twice.
    action: int | None = None


class Extended:
    """Handles the extended protocol's messages of one session."""

    def __init__(self, session: "AgentSession") -> None:
        self._session = session
        self._prepared: dict[bytes, Decision] = {}
        self._pending: dict[bytes, Decision] = {}
        self._portals: dict[bytes, Portal] = {}
        #: Nothing has been sent since the last Sync, so the implicit transaction has not begun.
        self._fresh = True
        self._writable = False

    # --- the fast way

    def fast(self, kind: int, body: bytes) -> bool:
        """Forward a message that needs no waiting; False for one that does. Raises ProtocolViolation."""
        match kind:
            case _ if kind == PARSE:
                return self._fast_parse(body)
            case _ if kind == BIND:
                return self._fast_bind(body)
            case _ if kind == EXECUTE:
                return self._fast_execute(body)
            case _ if kind == DESCRIBE:
                self._send(kind, body, Expect(Reply.DESCRIBE))
            case _ if kind == CLOSE:
                self._close(body)
            case _ if kind == FLUSH:
                self._session.server.write(packets.FLUSH)
            case _ if kind == SYNC:
                self._sync()
            case _ if kind == CALL:
                self._refuse_call()
            case _ if kind == TERMINATE:
                self._session.close()
            case _:
                raise ProtocolViolation(f"message type {kind!r} is not expected here")
        return True

    def _send(self, kind: int, body: bytes, expect: Expect) -> None:
        self._session.relay.expect(expect)
        self._session.server.write(packets.message(bytes([kind]), body))
        self._fresh = False

    def _fast_parse(self, body: bytes) -> bool:
        name, text, types = packets.split_parse(body)
        decisions = self._session.decide(text)
        refused = gates.first_refused(decisions)
        if refused is not None:
            error = self._session.refused(refused)
            self._send(PARSE, b"\0" + REFUSED_TEXT.encode() + b"\0\0\0", Expect(Reply.PARSE, error=error))
            return True
        if len(decisions) == 1 and decisions[0].is_write and not self._writable:
            return False
        self._parse(name, text, types, decisions)
        return True

    def _parse(self, name: bytes, text: bytes, types: bytes, decisions: tuple[Decision, ...]) -> None:
        if len(decisions) != 1:
            # PostgreSQL takes one statement here and says so itself; nothing of it can run.
            self._send(PARSE, name + b"\0" + text + b"\0" + types, Expect(Reply.PARSE))
            return
        decision = decisions[0]
        if decision.kind is Kind.BEGIN:
            text = gates.begin_text(decision).encode(self._session.encoding)
        elif decision.rewritten:
            text = decision.text.encode(self._session.encoding)
        self._pending[name] = decision
        expect = Expect(
            Reply.PARSE, position=decision.position, done=lambda e: self._parsed(name, decision, e)
        )
        self._send(PARSE, name + b"\0" + text + b"\0" + types, expect)

    def _parsed(self, name: bytes, decision: Decision, expect: Expect) -> None:
        if self._pending.get(name) is decision:
            del self._pending[name]
        if expect.failed is None:
            self._prepared[name] = decision

    def _lookup(self, name: bytes) -> Decision | None:
        """Return what a statement name means to the server when this message reaches it."""
        if name in self._pending:
            return self._pending[name]
        if name in self._prepared:
            return self._prepared[name]
        inner = self._session.state.prepared.get(name.decode(self._session.encoding, "replace"))
        return Decision(inner, Verdict(Effect.ALLOW), inner.text) if inner else None

    def _fast_bind(self, body: bytes) -> bool:
        portal, name, values, formats = packets.split_bind(body)
        decision = self._lookup(name)
        if decision is not None and decision.is_write and not self._writable:
            return False
        self._bind(body, portal, decision, _texts(values, formats, self._session.encoding))
        return True

    def _bind(self, body: bytes, portal: bytes, decision: Decision | None, params: list[str | None]) -> None:
        if decision is not None:
            self._portals[portal] = Portal(decision, params)
        else:
            self._portals.pop(portal, None)
        self._send(BIND, body, Expect(Reply.BIND))

    def _fast_execute(self, body: bytes) -> bool:
        name, _ = packets.cstring(body, 0)
        portal = self._portals.get(name)
        if portal is not None and (portal.decision.is_write or portal.decision.kind in _FOLLOWED):
            return False
        self._send(EXECUTE, body, Expect(Reply.EXECUTE))
        return True

    def _close(self, body: bytes) -> None:
        name, _ = packets.cstring(body, 1)
        if body[:1] == b"S":
            self._prepared.pop(name, None)
            self._pending.pop(name, None)
        else:
            self._portals.pop(name, None)
        self._send(CLOSE, body, Expect(Reply.CLOSE))

    def _sync(self) -> None:
        self._session.relay.expect(Expect(Reply.SYNC, done=self._synced))
        self._session.server.write(packets.SYNC)
        self._fresh, self._writable = True, False

    def _synced(self, expect: Expect) -> None:
        session = self._session
        self._pending.clear()
        if not session.in_block:
            session.settle("committed" if expect.failed is None and not self._failed else "failed", {})
            self._portals.clear()
        self._failed = False

    _failed = False

    def _refuse_call(self) -> None:
        """The fast-path call runs any function by its number, with no text to judge (WIRE section 3)."""
        fault = NotUnderstood("the fast-path function call is not accepted", hint="call functions in SQL")
        error = packets.error(fault, encoding=self._session.encoding)
        self._session.relay.expect(Expect(Reply.QUERY, error=error))
        self._session.server.write(packets.query(REFUSED_TEXT.encode()))

    def follow(self, decision: Decision) -> None:
        """Forget statements that SQL has deallocated."""
        if decision.kind is Kind.DISCARD or (
            decision.kind is Kind.DEALLOCATE and not decision.statement.subject
        ):
            self._prepared.clear()
        elif decision.kind is Kind.DEALLOCATE and decision.statement.subject:
            self._prepared.pop(decision.statement.subject.encode(self._session.encoding), None)

    # --- the slow way

    async def slow(self, kind: int, body: bytes) -> None:
        """Handle a message that `fast` left: a write on its way in, or what the session must follow."""
        session = self._session
        await session.barrier()
        if kind == EXECUTE:
            await self._execute(body)
            return
        await self._make_writable()
        if not self.fast(kind, body):
            raise ProtocolViolation("the message could not be handled")

    async def _make_writable(self) -> None:
        """See to it that the transaction that the next message runs in may write."""
        session = self._session
        self._writable = True
        if session.in_block or session.relay.skipping:
            return
        if not self._fresh:
            # Only reads have run in this implicit transaction: end it, and begin one that may write.
            session.relay.expect(Expect(Reply.SYNC, swallow=True))
            session.server.write(packets.SYNC)
            await session.barrier()
        self._ours(b"SET transaction_read_only = off")

    def _ours(self, text: bytes, *, execute: Expect | None = None) -> Expect:
        """Run a statement of ours in the pipeline; its replies are swallowed but for what *execute* says."""
        session = self._session
        execute = execute or Expect(Reply.EXECUTE, swallow=True)
        session.relay.expect(Expect(Reply.PARSE, swallow=True))
        session.relay.expect(Expect(Reply.BIND, swallow=True))
        session.relay.expect(execute)
        session.relay.expect(Expect(Reply.CLOSE, swallow=True))
        session.relay.expect(Expect(Reply.CLOSE, swallow=True))
        session.server.write(packets.utility(_OURS, text))
        self._fresh = False
        return execute

    async def _execute(self, body: bytes) -> None:
        session = self._session
        name, _ = packets.cstring(body, 0)
        portal = self._portals.get(name)
        if (
            portal is None
            or session.relay.skipping
            or (portal.decision.is_write and session.relay.status == b"E")
        ):
            self._send(EXECUTE, body, Expect(Reply.EXECUTE))
            return
        decision = portal.decision
        if not decision.is_write:
            await self._control(decision, body)
            return
        if portal.action is None and not await self._journal(portal):
            return
        if session.dry:
            await self._dry(portal, body)
            return
        expect = Expect(Reply.EXECUTE, tags=(decision.tag,), position=decision.position, done=self._executed)
        self._send(EXECUTE, body, expect)

    async def _journal(self, portal: Portal) -> bool:
        """Commit the intent and tell the capture triggers its number; False when it could not be."""
        session = self._session
        try:
            portal.action = await session.record(portal.decision, portal.params)
        except SqlguardError as fault:
            error = packets.error(fault, encoding=session.encoding)
            self._send(PARSE, b"\0" + REFUSED_TEXT.encode() + b"\0\0\0", Expect(Reply.PARSE, error=error))
            return False
        session.open_actions.append((portal.action, {}))
        self._ours(b"SET sqlguard.action = '%d'" % portal.action)
        return True

    def _executed(self, expect: Expect) -> None:
        if expect.failed is not None:
            self._failed = True

    async def _control(self, decision: Decision, body: bytes) -> None:
        session = self._session
        expect = Expect(Reply.EXECUTE, tags=(decision.tag,))
        if decision.kind is Kind.COMMIT and session.dry_block:
            expect.tags = ("COMMIT",)
            await session.end_dry_block()
            self._ours(b"ROLLBACK", execute=expect)
        else:
            self._send(EXECUTE, body, expect)
        await session.barrier()
        if expect.failed is None and decision.kind in (Kind.BEGIN, Kind.COMMIT, Kind.ROLLBACK):
            # In a pipeline the ReadyForQuery that says so comes only after the next messages.
            chained = decision.statement.details.get("chain")
            session.relay.status = b"T" if decision.kind is Kind.BEGIN or chained else b"I"
        session.followed(decision, expect)

    async def _dry(self, portal: Portal, body: bytes) -> None:
        """Run, force deferred constraints, read what changed, roll back; then tell."""
        session = self._session
        decision = portal.decision
        held = Expect(Reply.EXECUTE, parts=(Part.HOLD,), tags=(decision.tag,), position=decision.position)
        self._send(EXECUTE, body, held)
        self._ours(b"SET CONSTRAINTS ALL IMMEDIATE")
        report = self._ours(CHANGES.encode(), execute=Expect(Reply.EXECUTE, parts=(Part.CAPTURE,)))
        if not session.in_block:
            self._ours(b"ROLLBACK")
        await session.barrier()
        action = portal.action or 0
        session.open_actions = [a for a in session.open_actions if a[0] != action]
        if held.failed is not None or report.failed is not None:
            session.operator.event(action, "failed", {})
            return
        session.operator.event(action, "previewed", {"affected": affected(report.captured)})
        session.client.write(dry_run_notice(report.captured, action, session.encoding) + held.held)


def _texts(values: list[bytes | None], formats: list[int], encoding: str) -> list[str | None]:
    """Return parameters as the journal keeps them: text as it is, binary as `\\x…`."""
    return [
        None if value is None else value.decode(encoding, "replace") if form == 0 else "\\x" + value.hex()
        for value, form in zip(values, formats, strict=False)
    ]
