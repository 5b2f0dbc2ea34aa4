"""WITH RECURSIVE without an end."""

from collections.abc import Iterator

from sqlguard.policy.context import Context
from sqlguard.policy.registry import QUERIES, rule
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.statement.model import Session, Statement


@rule("endless-recursion", QUERIES)
def endless_recursion(statement: Statement, _session: Session, _context: Context) -> Iterator[Finding]:
    """
    Asks before a recursion runs that has no condition to end it.

    ## Why
    It runs until the time-out and fills memory or disk meanwhile.

    ## Finds
        WITH RECURSIVE r AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM r) SELECT count(*) FROM r

    ## Ignores
        WITH RECURSIVE r AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM r WHERE n < 10) SELECT count(*) FROM r

    ## Misses
    Conditions that never come true; statement_timeout ends those.
    """
    name = statement.details.get("endless")
    if name is not None:
        yield Finding(
            "endless-recursion",
            Effect.APPROVE,
            f"nothing ends the recursion of `{name}`",
            "add a WHERE to its recursive part",
        )
