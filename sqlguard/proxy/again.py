"""
Statements that are judged a second time, because what they mean may have changed since.

EXECUTE, FETCH and the like run what the session has prepared or declared by then: so they are judged when all
that came before them is answered, and by the extended protocol, which may run them much later, at their Execute
too. What was prepared before the catalog changed is judged again when it is bound. And what names something
unknown is judged by the newest catalog before it is refused: somebody may have made it a moment ago.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sqlguard import gate as gates
from sqlguard.plan import Decision
from sqlguard.statement.model import Kind
from sqlguard.wire.reports import error_response

if TYPE_CHECKING:
    from sqlguard.proxy.operator import Operator
    from sqlguard.proxy.portals import Portal, Prepared
    from sqlguard.proxy.session import AgentSession

#: What PostgreSQL says when a relation, column, function, type or schema is not there.
_NOT_THERE = frozenset({"42P01", "42703", "42883", "42704", "3F000"})


class Newest:
    """Has a session's message wait for the newest catalog: once, if it names what the one at hand does not know."""

    def __init__(self, operator: "Operator") -> None:
        self._operator = operator
        self._is_wanted = False
        #: The message that is handled just now has waited for it.
        self.is_here = False

    def is_wanted(self, decisions: Sequence[Decision]) -> bool:
        """Say whether the message has to wait before it is refused."""
        refused = gates.first_refused(decisions)
        if refused is None or self.is_here or not self._operator.may_look_now:
            return False
        self._is_wanted = any(f.sqlstate in _NOT_THERE for f in refused.verdict.findings)
        return self._is_wanted

    async def read(self) -> None:
        """Wait for the catalog, if the message wants that."""
        if self._is_wanted:
            self._is_wanted = False
            await self._operator.look_now()
            self.is_here = True


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
