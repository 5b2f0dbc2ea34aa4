"""
Several statements in one Query message, where one of them writes.

They are run one after another inside a block of ours that stands in for PostgreSQL's implicit transaction:
rows deleted by one statement must be gone for the next, and PostgreSQL's clock for that
(`statement_timestamp`) ticks once per message. The client sees the replies of one message: one
ReadyForQuery, nothing committed unless all of it is.
"""

from typing import TYPE_CHECKING

from sqlguard import gate as gates
from sqlguard.errors import SqlguardError
from sqlguard.plan import Decision
from sqlguard.proxy import packets
from sqlguard.proxy.relay import REFUSED_TEXT, Expect, Part, Reply
from sqlguard.proxy.report import prologue
from sqlguard.statement.model import Kind

if TYPE_CHECKING:
    from sqlguard.proxy.session import AgentSession

_TRANSACTION = frozenset({Kind.BEGIN, Kind.COMMIT, Kind.ROLLBACK})


async def run(session: "AgentSession", decisions: tuple[Decision, ...]) -> None:
    """Carry out a message of several decided statements; the session must be quiet."""
    own = not session.in_block and not any(d.kind in _TRANSACTION for d in decisions)
    if own:
        await session.ask("BEGIN READ WRITE")
    held = b""
    for number, decision in enumerate(decisions):
        last = number == len(decisions) - 1
        expect = await _step(session, decision, hold=own and last)
        if expect.failed is not None:
            if own:
                await session.ask("ROLLBACK")
                session.settle("failed", {})
            _ready(session)
            return
        held = expect.held
    if own:
        await _end(session, held)
    _ready(session)


async def _step(session: "AgentSession", decision: Decision, *, hold: bool) -> Expect:
    before: list[str] = []
    if decision.is_write and session.relay.status != b"E":
        try:
            action = await session.record(decision, None)
        except SqlguardError as fault:
            return await _fail(session, fault)
        before = prologue(action, own=False)
        session.open_actions.append((action, {}))
    text, tag = decision.text, decision.tag
    if decision.kind is Kind.BEGIN:
        text = gates.begin_text(decision)
    elif decision.kind is Kind.COMMIT and session.dry_block:
        text, tag = "ROLLBACK", "COMMIT"
        await session.end_dry_block()
    expect = Expect(
        Reply.QUERY,
        parts=(*(Part.SWALLOW for _ in before), Part.HOLD if hold else Part.PASS),
        tags=(*(None for _ in before), tag),
        # The client counts characters of its whole message; a position that may be wrong is dropped.
        position=lambda _: None,
        keep_ready=True,
    )
    session.relay.expect(expect)
    session.server.write(packets.query("".join([*before, text]).encode(session.encoding)))
    await session.barrier()
    if not decision.is_write:
        session.followed(decision, expect)
    return expect


async def _fail(session: "AgentSession", fault: SqlguardError) -> Expect:
    """Make the server fail, so that a block of the client's is in the state that the client is told of."""
    expect = Expect(Reply.QUERY, error=packets.error(fault, encoding=session.encoding), keep_ready=True)
    session.relay.expect(expect)
    session.server.write(packets.query(REFUSED_TEXT.encode()))
    await session.barrier()
    return expect


async def _end(session: "AgentSession", held: bytes) -> None:
    """Commit the block of ours (roll it back in a dry run) and let the last CommandComplete go."""
    if session.dry:
        await session.end_dry_block()
        await session.ask("ROLLBACK")
        session.settle("previewed", {})
        session.client.write(held)
        return
    commit = await session.ask("COMMIT")
    if commit.failed is not None:
        session.settle("failed", {})
        session.client.write(commit.failed)
    else:
        session.settle("committed", {})
        session.client.write(held)


def _ready(session: "AgentSession") -> None:
    session.client.write(packets.message(b"Z", session.relay.status))
