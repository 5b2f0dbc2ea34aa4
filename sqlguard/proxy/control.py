"""Transaction control and what changes the session, by the simple protocol: followed once the server said yes."""

from typing import TYPE_CHECKING

from sqlguard import gate as gates
from sqlguard.plan import Decision
from sqlguard.proxy import dry
from sqlguard.proxy.memory import sets_ours
from sqlguard.statement.model import Kind
from sqlguard.wire.messages import ReadyForQuery
from sqlguard.wire.replies import Expect, Reply

if TYPE_CHECKING:
    from sqlguard.proxy.session import AgentSession

#: These change what later statements mean or how they are carried out.
FOLLOWED = gates.CHANGES_SESSION | {
    Kind.BEGIN,
    Kind.COMMIT,
    Kind.ROLLBACK,
    Kind.SAVEPOINT,
    Kind.RELEASE,
    Kind.ROLLBACK_TO,
}


def is_followed(decision: Decision) -> bool:
    return decision.kind in FOLLOWED or sets_ours(decision.statement)


async def carry_out(session: "AgentSession", decision: Decision, *, keep_ready: bool = False) -> Expect:
    """Send a statement that is followed, and follow it; with *keep_ready* the caller says ReadyForQuery."""
    text, verb = decision.text, decision.tag
    was_in_block = session.in_block
    if decision.kind is Kind.BEGIN:
        text = gates.begin_text(decision)
    elif decision.kind is Kind.COMMIT and session.dry_block:
        failed = await dry.end_block(session)
        if failed is not None:
            return await _failed_commit(session, decision, failed, keep_ready=keep_ready)
        text, verb = "ROLLBACK", None if session.books.status == b"E" else "COMMIT"
    elif decision.kind is Kind.COMMIT and session.plans.is_staging and session.books.status == b"T":
        failed = await session.plans.end_staged() if session.plans.stage.steps else None
        if failed is not None:
            return await _failed_commit(session, decision, failed, keep_ready=keep_ready)
    expect = Expect(Reply.QUERY, tags=(verb,), position=decision.position, keep_ready=keep_ready)
    session.send_query(text, expect)
    await session.barrier()
    session.followed(decision, expect, was_in_block=was_in_block)
    return expect


async def _failed_commit(
    session: "AgentSession", decision: Decision, failed: bytes, *, keep_ready: bool
) -> Expect:
    """Answer the COMMIT of a preview with the error that a real one would have had."""
    expect = await session.ask("ROLLBACK")
    expect.failed = failed
    session.client.write(failed)
    session.followed(decision, expect, was_in_block=True)
    if not keep_ready:
        session.client.write(ReadyForQuery(session.books.status).encode())
    return expect
