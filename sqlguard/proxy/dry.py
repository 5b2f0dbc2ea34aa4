"""
Dry runs by the simple protocol: run, force deferred constraints, read what changed, roll back; keep a plan, and tell.

Outside a block the message is rolled back as a whole. Inside, either the block is a preview (it was begun as
one, and is rolled back at its end), or the statement is rolled back to a savepoint of ours.
"""

from typing import TYPE_CHECKING

from sqlguard.errors import SqlguardError
from sqlguard.plan import Decision
from sqlguard.postgres import plans
from sqlguard.postgres.plans import BEGIN, FORCE
from sqlguard.proxy.plans import note_text, outcome_text
from sqlguard.proxy.report import (
    WRITABLE,
    affected,
    around,
    changes,
    claim,
    dry_run_notice,
    plan_notice,
    sqlstate,
)
from sqlguard.wire.replies import REFUSED_TEXT, Expect, Part

if TYPE_CHECKING:
    from sqlguard.proxy.session import AgentSession

#: The policy refuses agents' own savepoints that begin so.
SAVEPOINT = "sqlguard_preview"


async def preview(session: "AgentSession", decision: Decision, action: int) -> Expect:
    """Send one statement as a dry run and tell what came of it; the caller says ReadyForQuery."""
    before, after = _around(session, decision, action)
    text, expect = around(decision, before, Part.HOLD, after)
    is_alone = not session.dry_block
    session.send_query(text, expect)
    await session.barrier()
    held, expect.held = expect.held, b""
    if expect.failed is not None:
        session.operator.event(action, "failed", {"sqlstate": sqlstate(expect.failed)})
    elif is_alone:
        await _tell(session, decision, action, expect, held)
    else:
        session.plans.add(decision, action)
        found = affected(expect.captured, session.encoding)
        session.operator.event(action, "previewed", {"affected": found})
        session.client.write(dry_run_notice(expect.captured, action, session.encoding) + held)
    return expect


async def end_block(session: "AgentSession") -> bytes | None:
    """
    Tell what a block that was begun as a dry run would have changed; the caller rolls it back.

    Return the ErrorResponse if COMMIT would have failed: a deferred constraint does not hold, or a gate refuses.
    """
    if session.books.status == b"E":
        return None
    report = await session.ask(
        f"{FORCE}; {plans.outcome_text(None, session.plans.stage.steady)}", Part.SWALLOW, Part.CAPTURE
    )
    return report.failed if report.failed is not None else await session.plans.tell_block(report.captured[0])


async def _tell(
    session: "AgentSession", decision: Decision, action: int, expect: Expect, held: bytes
) -> None:
    try:
        plan, report = await session.plans.previewed(decision, action, expect.captured[0])
    except SqlguardError as fault:
        if session.in_block:
            await session.ask(REFUSED_TEXT)
        expect.failed = b""
        session.operator.event(action, "failed", {"sqlstate": fault.sqlstate})
        session.client.write(session.error(fault))
        return
    session.operator.event(action, "previewed", {"affected": report["affected"], "plan": plan})
    session.client.write(plan_notice(report, action, plan, session.encoding) + held)


def _around(
    session: "AgentSession", decision: Decision, action: int
) -> tuple[list[str], list[tuple[str, Part]]]:
    """Return what comes before the statement, and what comes after it: the report is captured."""
    if session.dry_block:
        # Deferred constraints are the block's: a later statement may be what they wait for.
        report = [(changes(action), Part.CAPTURE), (note_text(action), Part.SWALLOW)]
        return [claim(action), *session.plans.begin()], report
    report = [(outcome_text(decision, action), Part.CAPTURE)]
    if not session.in_block:
        return [WRITABLE, claim(action), BEGIN], [*report, ("ROLLBACK", Part.SWALLOW)]
    back = [f"ROLLBACK TO {SAVEPOINT}", f"RELEASE {SAVEPOINT}"]
    return [f"SAVEPOINT {SAVEPOINT}", claim(action), BEGIN], [
        *report,
        *((text, Part.SWALLOW) for text in back),
    ]
