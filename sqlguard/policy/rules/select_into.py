"""SELECT … INTO makes a table."""

from collections.abc import Iterator

from sqlguard.policy.context import Context
from sqlguard.policy.registry import QUERIES, rule
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.statement.model import Session, Statement


@rule("select-into", QUERIES)
def select_into(statement: Statement, _session: Session, _context: Context) -> Iterator[Finding]:
    """
    Refuses SELECT … INTO.

    ## Why
    It is CREATE TABLE AS in other words.

    ## Finds
        SELECT * INTO scratch FROM orders
        SELECT 1 AS a INTO TEMP scratch

    ## Ignores
        INSERT INTO kv SELECT 'a', 'b'

    ## Misses
    Nothing known.
    """
    if "into" in statement.details:
        yield Finding(
            "select-into", Effect.REFUSE, "SELECT … INTO makes a table", "use INSERT … SELECT or a WITH query"
        )
