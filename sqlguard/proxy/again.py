"""
Statements that are judged a second time, because what they mean may have changed since.

EXECUTE, FETCH and the like run what the session has prepared or declared by then: so they are judged when all
that came before them is answered, and by the extended protocol, which may run them much later, at their Execute
too. What was prepared before the catalog changed is judged again when it is bound.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sqlguard import gate as gates
from sqlguard.plan import Decision
from sqlguard.statement.model import Kind
from sqlguard.wire.reports import error_response

if TYPE_CHECKING:
    from sqlguard.proxy.portals import Portal, Prepared
    from sqlguard.proxy.session import AgentSession


def depends_on_answers(session: "AgentSession", decisions: Iterable[Decision]) -> bool:
    """Say whether what is under way may change what one of the statements means."""
    return not session.books.is_quiet and any(gates.is_session_bound(d.statement) for d in decisions)


def at_bind(session: "AgentSession", prepared: "Prepared") -> bytes | None:
    """
    Judge what was prepared before the catalog changed; return the error if it can't run as prepared.

    A statement that would now be another text has to be prepared again, as PostgreSQL says it of a changed
    result type, and drivers know what to do.
    """
    if prepared.decision.kind is Kind.EMPTY:
        return None
    now = _judged(session, prepared.decision, prepared.types)
    return now if isinstance(now, bytes) else None


def at_execute(session: "AgentSession", portal: "Portal") -> bytes | None:
    """Judge what runs something else by its name; return the error if that is not what was bound."""
    now = _judged(session, portal.decision, portal.types)
    if isinstance(now, bytes):
        return now
    portal.decision = now
    return None


def _judged(session: "AgentSession", then: Decision, types: tuple[int, ...]) -> Decision | bytes:
    now = session.gate.decide(then.statement.text, session.memory.state, types)
    refused = gates.first_refused(now)
    if refused is not None:
        return session.refused(refused)
    if len(now) == 1 and (now[0].text, now[0].is_write) == (then.text, then.is_write):
        return now[0]
    text = "cached plan must not change result type"
    return error_response(
        "ERROR", "0A000", text, hint="prepare the statement again", encoding=session.encoding
    )
