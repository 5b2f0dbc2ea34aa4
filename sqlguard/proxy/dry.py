"""
Dry runs by the simple protocol: run, force deferred constraints, read what changed, roll back; then tell.

Outside a block the message is rolled back as a whole. Inside, either the block is a preview (it was begun as
one, and is rolled back at its end), or the statement is rolled back to a savepoint of ours.
"""

from typing import TYPE_CHECKING

from sqlguard.plan import Decision
from sqlguard.proxy.report import WRITABLE, affected, behind, changes, claim, dry_run_notice, sqlstate
from sqlguard.wire.replies import Expect, Part, Reply

if TYPE_CHECKING:
    from sqlguard.proxy.session import AgentSession

#: The policy refuses agents' own savepoints that begin so.
SAVEPOINT = "sqlguard_preview"


def preview(session: "AgentSession", decision: Decision, action: int, *, keep_ready: bool = False) -> Expect:
    """Send one statement as a dry run; with *keep_ready* the caller passes on the report and what is held."""
    before, after = _around(session, action)
    expect = Expect(
        Reply.QUERY,
        parts=(
            *(Part.SWALLOW for _ in before),
            Part.HOLD,
            *(Part.CAPTURE if text == changes(action) else Part.SWALLOW for text in after),
        ),
        tags=(*(None for _ in before), decision.tag),
        position=behind(before, decision),
        before_held=lambda e: dry_run_notice(e.captured, action, session.encoding),
        done=lambda e: _previewed(session, action, e),
        keep_ready=keep_ready,
    )
    session.send_query("; ".join([*before, decision.text]) + "\n;" + "; ".join(after), expect)
    return expect


def _around(session: "AgentSession", action: int) -> tuple[list[str], list[str]]:
    report = ["SET CONSTRAINTS ALL IMMEDIATE", changes(action)]
    if not session.in_block:
        return [WRITABLE, claim(action)], [*report, "ROLLBACK"]
    if session.dry_block:
        return [claim(action)], report
    back = [f"ROLLBACK TO {SAVEPOINT}", f"RELEASE {SAVEPOINT}"]
    return [f"SAVEPOINT {SAVEPOINT}", claim(action)], [*report, *back]


def _previewed(session: "AgentSession", action: int, expect: Expect) -> None:
    if expect.failed is None:
        found = affected(expect.captured, session.encoding)
        session.operator.event(action, "previewed", {"affected": found})
    else:
        session.operator.event(action, "failed", {"sqlstate": sqlstate(expect.failed)})
