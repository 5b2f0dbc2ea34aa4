"""What no approval can let over its cap: counted before it is run, by either protocol."""

from typing import TYPE_CHECKING

from sqlguard.errors import SqlguardError
from sqlguard.plan import Decision, over_the_cap
from sqlguard.proxy import own
from sqlguard.wire.messages import DataRow

if TYPE_CHECKING:
    from sqlguard.proxy.portals import Portal
    from sqlguard.proxy.session import AgentSession

_HEADER_BYTES = 5


async def excess(
    session: "AgentSession", decision: Decision, portal: "Portal | None" = None
) -> SqlguardError | None:
    """Count what a write would change, if no approval could let it go over its cap; return why it may not run."""
    # To make the count costs a good part of what a decision does.
    if session.said(decision).idempotency_key or decision.count is None:
        return None
    asked = own.count(session, decision.count, portal)
    if portal is None:
        own.sync(session)
    await session.barrier()
    if asked.failed is not None or not asked.captured:
        return None
    rows = DataRow.decode(asked.captured[0][_HEADER_BYTES:]).values[0]
    return over_the_cap(decision.count, int(rows or 0))
