"""Rewrite rules and INSTEAD OF triggers: what is written is not what the statement says."""

from collections.abc import Iterator

from sqlguard.policy.context import Context
from sqlguard.policy.registry import QUERIES, rule
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.statement.model import Session, Statement


@rule("indirect-write", QUERIES)
def indirect_write(statement: Statement, _session: Session, _context: Context) -> Iterator[Finding]:
    """
    Refuses writes of relations whose INSTEAD rules or INSTEAD OF triggers do something else, and rules that
    delete rows which would have to be marked.

    ## Why
    The statement that PostgreSQL runs then is another one than the one that was decided. What other rules
    add is decided as if it stood in the statement.

    ## Finds
        DELETE FROM v_account_orders WHERE order_id = 1

    ## Ignores
        UPDATE v_active_accounts SET balance = 1 WHERE id = 2

    ## Misses
    Ordinary triggers do more, not something else; the capture triggers keep what they change.
    """
    for name, op in statement.details.get("instead", ()):
        yield Finding(
            "indirect-write",
            Effect.REFUSE,
            f"a rule or trigger decides what {op.upper()} on `{name}` does",
            "write to the tables below it",
        )
