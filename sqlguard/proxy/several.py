"""
Several statements in one Query message, where one of them writes or changes the session.

They are run one after another inside a block of ours that stands in for PostgreSQL's implicit transaction:
rows deleted by one statement must be gone for the next, and PostgreSQL's clock for that
(`statement_timestamp`) ticks once per message. The client sees the replies of one message: one
ReadyForQuery, nothing committed unless all of it is. A BEGIN among them makes our block the client's, with
what came before it inside, as in PostgreSQL.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from sqlguard import gate as gates
from sqlguard.errors import SqlguardError
from sqlguard.plan import Decision, refused
from sqlguard.policy.verdict import Effect
from sqlguard.proxy import control, dry, plans, repeats
from sqlguard.proxy.report import around, behind, claim
from sqlguard.statement.model import Kind
from sqlguard.wire.messages import CommandComplete, ReadyForQuery
from sqlguard.wire.replies import REFUSED_TEXT, Expect, Part, Reply
from sqlguard.wire.reports import notice_response

if TYPE_CHECKING:
    from sqlguard.proxy.session import AgentSession

_TRANSACTION = frozenset({Kind.BEGIN, Kind.COMMIT, Kind.ROLLBACK})
_IN_BLOCKS_ONLY = frozenset({Kind.SAVEPOINT, Kind.RELEASE, Kind.ROLLBACK_TO, Kind.DECLARE})


async def run(session: "AgentSession", decisions: tuple[Decision, ...], text: str) -> None:
    """Carry out *text*, a message of several decided statements; the session must be quiet."""
    message = _Message(session, text)
    for number, decision in enumerate(decisions):
        is_last = number == len(decisions) - 1
        if not await message.step(decision, is_last=is_last):
            break
    await message.end()


class _Message:
    def __init__(self, session: "AgentSession", text: str) -> None:
        self._session = session
        self._text = text.encode()
        #: The block that is open is ours, not one that the client knows of.
        self._own = False
        #: CommandComplete of the last statement: it waits for our COMMIT.
        self._held = b""
        self._failed = False

    async def step(self, decision: Decision, *, is_last: bool) -> bool:
        """Carry out one statement; False when it failed and the rest is to be skipped."""
        session = self._session
        if decision.kind in _TRANSACTION:
            expect = await self._transaction(decision)
        else:
            if not session.in_block and decision.kind not in _IN_BLOCKS_ONLY:
                await self._open()
            expect = await self._statement(decision, hold=self._own and is_last)
        self._failed = expect.failed is not None
        self._held = expect.held
        return not self._failed

    async def end(self) -> None:
        """Commit our block, let the last CommandComplete go, and say that the session is ready."""
        session = self._session
        if self._own:
            if self._failed:
                await session.ask("ROLLBACK")
                self._over("failed", committed=False)
            else:
                await self._commit()
        session.client.write(ReadyForQuery(session.books.status).encode())

    # --- our block

    async def _open(self) -> None:
        session = self._session
        await session.ask("BEGIN READ WRITE")
        self._own = True
        session.memory.begin()
        session.dry_block = session.memory.settings.dry_run

    async def _commit(self) -> None:
        session = self._session
        failed: bytes | None
        if session.dry_block:
            failed = await dry.end_block(session)
            await session.ask("ROLLBACK")
            kind = "previewed" if failed is None else "failed"
        elif session.plans.is_staging and session.plans.stage.steps:
            failed = await session.plans.end_staged()
            kind = "committed" if failed is None else "previewed"
            failed = (await session.ask("ROLLBACK" if failed else "COMMIT")).failed or failed
        else:
            failed = (await session.ask("COMMIT")).failed
            kind = "committed" if failed is None else "failed"
        self._over(kind, committed=failed is None)
        session.client.write(self._held if failed is None else failed)
        self._held = b""

    def _over(self, kind: str, *, committed: bool) -> None:
        session = self._session
        self._own = False
        session.memory.end(committed=committed, previewed=session.dry_block)
        session.settle(kind, {})
        session.dry_block = False

    # --- the client's statements

    async def _transaction(self, decision: Decision) -> Expect:
        session = self._session
        if not self._own:
            return await control.carry_out(session, decision, keep_ready=True)
        if decision.kind is Kind.BEGIN:
            # Ours becomes the client's. PostgreSQL would warn, if it knew.
            expect = await session.ask(gates.begin_text(decision))
            self._own = False
            session.client.write(expect.failed or CommandComplete(_verb(decision)).encode())
            return expect
        self._warn()
        if decision.kind is Kind.COMMIT:
            self._held = CommandComplete(b"COMMIT").encode()
            await self._commit()
            return Expect(Reply.QUERY)
        expect = await session.ask("ROLLBACK")
        self._over("failed", committed=False)
        session.client.write(CommandComplete(b"ROLLBACK").encode())
        return expect

    def _warn(self) -> None:
        """Say what PostgreSQL says of a COMMIT or ROLLBACK that has no BEGIN."""
        encoding = self._session.encoding
        text = "there is no transaction in progress"
        self._session.client.write(notice_response("WARNING", "25P01", text, encoding=encoding))

    async def _statement(self, decision: Decision, *, hold: bool) -> Expect:
        session = self._session
        was_in_block = session.in_block
        if not decision.is_write and not await plans.may_read(session, decision):
            return Expect(Reply.QUERY, failed=b"")
        if not decision.is_write or session.books.status == b"E":
            expect = self._send(decision, [], hold=hold)
            await session.barrier()
            session.followed(decision, expect, was_in_block=was_in_block)
            return expect
        try:
            action = await session.record(decision, None)
        except SqlguardError as fault:
            return await self._refuse(fault)
        return await self._write(decision, action, hold=hold)

    async def _write(self, decision: Decision, action: int, *, hold: bool) -> Expect:
        session = self._session
        if session.dry and not session.dry_block:
            return await dry.preview(session, decision, action)
        session.open_actions.append((action, {}))
        ruling = session.plans.ruling(decision)
        if ruling is not None and ruling.effect is Effect.REFUSE:
            return await self._refuse(refused(ruling))
        if session.said(decision).idempotency_key and not session.dry:
            return await repeats.inside(session, decision, action, hold=hold)
        if session.plans.is_staging or session.plans.is_weighed(decision, ruling):
            return await plans.inside(session, decision, action, hold=hold)
        expect = self._send(decision, [claim(action)], hold=hold)
        await session.barrier()
        if not hold and expect.failed is None:
            session.client.write(expect.held)
            expect.held = b""
        return expect

    def _send(self, decision: Decision, before: list[str], *, hold: bool) -> Expect:
        session = self._session
        part = Part.HOLD if hold else Part.PASS
        text, expect = around(decision, before, part, position=self._position(before, decision))
        session.send_query(text, expect)
        return expect

    def _position(self, before: list[str], decision: Decision) -> Callable[[int], int | None]:
        """Map an error's position to the client's message, in which the statement does not come first."""
        own = behind(before, decision)
        shift = len(self._text[: decision.statement.start].decode())

        def position(place: int) -> int | None:
            found = own(place)
            return None if found is None else found + shift

        return position

    async def _refuse(self, fault: SqlguardError) -> Expect:
        """Make the server fail, so that a block of the client's is in the state that the client is told of."""
        session = self._session
        expect = Expect(Reply.QUERY, error=session.error(fault), keep_ready=True)
        session.send_query(REFUSED_TEXT, expect)
        await session.barrier()
        return expect


def _verb(decision: Decision) -> bytes:
    started = decision.statement.details.get("what") == "TRANS_STMT_START"
    return b"START TRANSACTION" if started else b"BEGIN"
