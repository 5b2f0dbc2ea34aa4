"""
The simple query protocol: one message, one or more statements, one ReadyForQuery.

A write outside a transaction block goes as one message `SET transaction_read_only = off; SET LOCAL
sqlguard.action = …; <statement>`: PostgreSQL's own implicit transaction holds them together, so its errors,
its roll-back and its commit are what the client sees. Several statements with a soft delete among them go
one by one inside a block of ours, because rows deleted by one statement must be gone for the next, and
PostgreSQL's clock for that (`statement_timestamp`) ticks once per message.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from sqlguard import gate as gates
from sqlguard.errors import SqlguardError
from sqlguard.plan import Decision
from sqlguard.proxy import packets, several
from sqlguard.proxy.relay import REFUSED_TEXT, Expect, Part, Reply
from sqlguard.proxy.report import CHANGES, affected, dry_run_notice, prologue
from sqlguard.statement.model import Kind

if TYPE_CHECKING:
    from sqlguard.proxy.session import AgentSession

_TRANSACTION = frozenset({Kind.BEGIN, Kind.COMMIT, Kind.ROLLBACK})
_SLOW = frozenset(
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
    }
    | _TRANSACTION
)


class Simple:
    """Handles Query messages of one session."""

    def __init__(self, session: "AgentSession") -> None:
        self._session = session

    def fast(self, body: bytes) -> bool:
        """Forward a message of reads or refuse one; False when it has to wait."""
        session = self._session
        text = body[:-1] if body[-1:] == b"\0" else body
        decisions = session.decide(text)
        refused = gates.first_refused(decisions)
        if refused is not None:
            self._refuse(refused)
            return True
        if any(d.is_write or d.kind in _SLOW for d in decisions):
            return False
        self._forward(text, decisions)
        return True

    async def slow(self, body: bytes) -> None:
        """Carry out a message that writes or changes the session."""
        session = self._session
        await session.barrier()
        text = body[:-1] if body[-1:] == b"\0" else body
        # Decided again: what was under way may have changed what the text means.
        decisions = session.decide(text)
        refused = gates.first_refused(decisions)
        if refused is not None:
            self._refuse(refused)
        elif len(decisions) == 1:
            await self._one(decisions[0])
        else:
            await several.run(session, decisions)

    def _refuse(self, refused: Decision) -> None:
        session = self._session
        session.relay.expect(Expect(Reply.QUERY, error=session.refused(refused)))
        session.server.write(packets.query(REFUSED_TEXT.encode()))

    def _forward(self, text: bytes, decisions: tuple[Decision, ...]) -> None:
        session = self._session
        if any(d.rewritten for d in decisions):
            text = ";".join(d.text for d in decisions).encode(session.encoding)
        position = decisions[0].position if len(decisions) == 1 else None
        session.relay.expect(Expect(Reply.QUERY, position=position))
        session.server.write(packets.query(text))

    # --- one statement

    async def _one(self, decision: Decision) -> None:
        session = self._session
        if not decision.is_write:
            await self._control(decision)
        elif session.relay.status == b"E":
            self._forward(decision.text.encode(session.encoding), (decision,))
        elif session.dry:
            await self._dry(decision)
        else:
            await self._write(decision)

    async def _control(self, decision: Decision) -> None:
        """Transaction control and what changes the session: followed once the server has said yes."""
        session = self._session
        text, tags = decision.text, (decision.tag,)
        if decision.kind is Kind.BEGIN:
            text = gates.begin_text(decision)
        elif decision.kind is Kind.COMMIT and session.dry_block:
            text, tags = "ROLLBACK", ("COMMIT",)
            await session.end_dry_block()
        expect = Expect(Reply.QUERY, tags=tags, position=decision.position)
        session.relay.expect(expect)
        session.server.write(packets.query(text.encode(session.encoding)))
        await session.barrier()
        session.followed(decision, expect)

    async def _write(self, decision: Decision) -> None:
        session = self._session
        try:
            action = await session.record(decision, None)
        except SqlguardError as fault:
            self._fail(fault)
            return
        own = not session.in_block
        before = prologue(action, own=own)
        expect = Expect(
            Reply.QUERY,
            parts=(*(Part.SWALLOW for _ in before), Part.PASS),
            tags=(*(None for _ in before), decision.tag),
            position=_behind(before, decision),
            done=lambda e: self._written(action, e, own=own),
        )
        session.relay.expect(expect)
        session.server.write(packets.query("".join([*before, decision.text]).encode(session.encoding)))

    def _written(self, action: int, expect: Expect, *, own: bool) -> None:
        session = self._session
        detail = {"tag": expect.tag.decode("ascii", "replace")}
        if expect.failed is not None:
            fields = packets.error_fields(expect.failed)
            session.operator.event(action, "failed", {"sqlstate": fields.get("C", "")})
        elif own:
            session.operator.event(action, "committed", detail)
        else:
            session.open_actions.append((action, detail))

    def _fail(self, fault: SqlguardError) -> None:
        session = self._session
        session.relay.expect(Expect(Reply.QUERY, error=packets.error(fault, encoding=session.encoding)))
        session.server.write(packets.query(REFUSED_TEXT.encode()))

    async def _dry(self, decision: Decision) -> None:
        """Run, force deferred constraints, read what changed, roll back; then tell."""
        session = self._session
        try:
            action = await session.record(decision, None)
        except SqlguardError as fault:
            self._fail(fault)
            return
        own = not session.in_block
        before = prologue(action, own=own)
        after = ["; SET CONSTRAINTS ALL IMMEDIATE; ", CHANGES]
        parts = [*(Part.SWALLOW for _ in before), Part.HOLD, Part.SWALLOW, Part.CAPTURE]
        if own:
            after.append("; ROLLBACK")
            parts.append(Part.SWALLOW)
        expect = Expect(
            Reply.QUERY,
            parts=tuple(parts),
            tags=(*(None for _ in before), decision.tag),
            position=_behind(before, decision),
            before_held=lambda e: dry_run_notice(e.captured, action, session.encoding),
            done=lambda e: self._previewed(action, e),
        )
        session.relay.expect(expect)
        text = "".join([*before, decision.text.rstrip().rstrip(";"), "\n", *after])
        session.server.write(packets.query(text.encode(session.encoding)))

    def _previewed(self, action: int, expect: Expect) -> None:
        kind = "previewed" if expect.failed is None else "failed"
        self._session.operator.event(action, kind, {"affected": affected(expect.captured)})


def _behind(before: list[str], decision: Decision) -> Callable[[int], int | None]:
    """Map an error position in the message that was sent to the client's own text."""
    shift = sum(map(len, before))

    def position(p: int) -> int | None:
        own = p - shift
        if own < 1:
            return None
        return decision.position(own) if decision.position else own

    return position
