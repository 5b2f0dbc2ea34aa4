"""
The simple query protocol: one message, one or more statements, one ReadyForQuery.

A write outside a transaction block goes as one message `SET transaction_read_only = off; SET LOCAL
sqlguard.action = …; <statement>`: PostgreSQL's own implicit transaction holds them together, so its errors,
its roll-back and its commit are what the client sees. Several statements of which one writes go one by one
(`several`), writes with an idempotency key too (`repeats`).
"""

from typing import TYPE_CHECKING

from sqlguard import gate as gates
from sqlguard.errors import SqlguardError
from sqlguard.plan import Decision, refused
from sqlguard.policy.verdict import Effect
from sqlguard.proxy import again, control, copies, dry, plans, repeats, several
from sqlguard.proxy.excess import excess
from sqlguard.proxy.likeness import certain, is_alike
from sqlguard.proxy.portals import passes_always
from sqlguard.proxy.report import WRITABLE, around, behind, can_be_approved, claim, nowhere, sqlstate
from sqlguard.wire.messages import Query, ReadyForQuery
from sqlguard.wire.replies import PLAIN, REFUSED_TEXT, Expect, Part, Reply

if TYPE_CHECKING:
    from sqlguard.proxy.session import AgentSession

#: Behind a statement of the client's: a comment in its last line ends here.
END = "\n;"
HEADER_BYTES = 5
_PLAIN_QUERY = (PLAIN[Reply.QUERY],)


class Simple:
    """Handles Query messages of one session."""

    def __init__(self, session: "AgentSession") -> None:
        self._session = session

    def passes(self, data: bytes) -> bool:
        """
        Forward *data* at once if it is one Query that was found to pass as it is; False if it has to be looked at.

        The way of most messages: what was decided for the very same bytes is decided.
        """
        session = self._session
        passing = session.passing
        if passing is None or session.extended.is_open or not (data in passing.texts or passing.passes(data)):
            return False
        passing.hits += 1
        session.books.expect_plainly(_PLAIN_QUERY)
        session.server.write(data)
        return True

    def fast(self, raw: bytes) -> bool:
        """Forward a message of reads or refuse one; False when it has to wait. Raises ProtocolViolation."""
        session = self._session
        text = Query.decode(raw[HEADER_BYTES:]).text
        if session.extended.is_open:
            # Without a Sync between the two PostgreSQL itself loses track of the transaction, and of what it did.
            return False
        decisions = session.decide(text)
        if again.depends_on_answers(session, decisions) or session.newest.is_wanted(decisions):
            return False
        refused = gates.first_refused(decisions)
        if refused is not None:
            self._fail(session.refused(refused))
            return True
        if any(d.needs_read_write or not d.is_settled or control.is_followed(d) for d in decisions):
            return False
        session.operator.metrics.verdicts["allow"] += len(decisions)
        passing = session.passing
        if passing is not None and all(passes_always(d) for d in decisions):
            passing.remember(raw, like=certain(raw) if is_alike(decisions) else None)
        self._forward(text, decisions)
        return True

    async def slow(self, raw: bytes) -> None:
        """Carry out a message that writes or changes the session."""
        session = self._session
        await session.barrier()
        if session.books.is_skipping:
            return
        await session.extended.finish()
        text = raw[HEADER_BYTES:-1]
        # Decided again: what was under way may have changed what the text means.
        decisions = session.decide(text)
        refused = gates.first_refused(decisions)
        if refused is not None:
            self._fail(session.refused(refused))
        elif len(decisions) == 1:
            await self._one(decisions[0])
        else:
            await several.run(session, decisions, text.decode(session.encoding))

    def _fail(self, error: bytes) -> None:
        """Make the server fail, so that a block of the client's is in the state that the client is told of."""
        self._session.send_query(REFUSED_TEXT, Expect(Reply.QUERY, error=error))

    def _forward(self, text: bytes, decisions: tuple[Decision, ...]) -> None:
        session = self._session
        position = None
        if any(d.rewritten for d in decisions):
            text = END.join(d.text for d in decisions).encode(session.encoding)
            position = decisions[0].position if len(decisions) == 1 else nowhere
        tags = tuple(d.tag for d in decisions)
        session.send_query(text, Expect(Reply.QUERY, position=position, tags=tags if any(tags) else ()))

    # --- one statement

    async def _one(self, decision: Decision) -> None:
        session = self._session
        if session.books.status == b"E" and (decision.is_write or not decision.is_settled):
            self._forward(decision.text.encode(session.encoding), (decision,))
            return
        if not decision.is_write:
            await self._read(decision)
            return
        ruling = session.plans.ruling(decision)
        try:
            action = await session.record(decision, None)
        except SqlguardError as unwritten:
            self._fail(session.error(unwritten))
            return
        if ruling is not None and ruling.effect is Effect.REFUSE:
            session.operator.event(action, "failed", {"sqlstate": "SG002"})
            self._fail(session.error(refused(ruling)))
        elif (fault := await excess(session, decision)) is not None:
            session.operator.event(action, "failed", {"sqlstate": fault.sqlstate})
            self._fail(session.error(fault))
        elif session.dry:
            await dry.preview(session, decision, action)
            session.client.write(ReadyForQuery(session.books.status).encode())
        elif session.said(decision).idempotency_key:
            await repeats.simple(session, decision, action)
        elif session.plans.is_staging or session.plans.is_weighed(decision, ruling):
            await plans.write(session, decision, action)
        else:
            await self._write(decision, action)

    async def _read(self, decision: Decision) -> None:
        session = self._session
        if not await plans.may_read(session, decision):
            session.client.write(ReadyForQuery(session.books.status).encode())
        elif decision.needs_read_write and session.books.status == b"I":
            self._lock(decision)
        else:
            await control.carry_out(session, decision)

    def _lock(self, decision: Decision) -> None:
        """Run a query that locks rows: nothing is changed, so nothing is journaled."""
        self._session.send_query(
            f"{WRITABLE}; {decision.text}",
            Expect(
                Reply.QUERY,
                parts=(Part.SWALLOW, Part.PASS),
                tags=(None, decision.tag),
                position=behind([WRITABLE], decision),
            ),
        )

    async def _write(self, decision: Decision, action: int) -> None:
        session = self._session
        own = not session.in_block
        before = [WRITABLE, claim(action)] if own else [claim(action)]
        is_twice = own and not copies.is_copy(decision)
        text, expect = around(
            decision, before, Part.PASS, keep_ready=own, error=self._over_a_cap if is_twice else None
        )
        session.send_query(text, expect)
        await session.barrier()
        if is_twice and expect.failed is not None and can_be_approved(expect.failed):
            # Nothing of it is left. Run again, it may go over the cap as far as an approved plan does.
            await plans.write(session, decision, action)
            return
        self._written(action, expect, own=own)
        if own:
            held = expect.held if expect.failed is None else b""
            session.client.write(held + ReadyForQuery(session.books.status).encode())

    @staticmethod
    def _over_a_cap(error: bytes) -> bytes:
        """Keep the error of a cap back that an approved plan may go over."""
        return b"" if can_be_approved(error) else error

    def _written(self, action: int, expect: Expect, *, own: bool) -> None:
        session = self._session
        detail = {"tag": expect.tag.decode("ascii", "replace")}
        if expect.failed is not None:
            session.operator.event(action, "failed", {"sqlstate": sqlstate(expect.failed)})
        elif own:
            session.operator.event(action, "committed", detail)
        else:
            session.open_actions.append((action, detail))
