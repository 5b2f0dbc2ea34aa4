"""SET CONSTRAINTS … DEFERRED."""

from collections.abc import Iterator

from sqlguard.policy.context import Context
from sqlguard.policy.registry import rule
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.statement.model import Kind, Session, Statement


@rule("constraint-timing", (Kind.CONSTRAINTS,))
def constraint_timing(statement: Statement, _session: Session, _context: Context) -> Iterator[Finding]:
    """
    Refuses deferring constraints.

    ## Why
    It moves failures to COMMIT, where a preview, which is rolled back, never sees them.

    ## Finds
        SET CONSTRAINTS ALL DEFERRED

    ## Ignores
        SET CONSTRAINTS ALL IMMEDIATE

    ## Misses
    Constraints that are declared INITIALLY DEFERRED.
    """
    if statement.details.get("deferred"):
        yield Finding(
            "constraint-timing",
            Effect.REFUSE,
            "constraints can't be deferred here",
            "order the statements so that each one leaves the data valid",
        )
