"""Rewrite rules and INSTEAD OF triggers: what is written is not what the statement says."""

from collections.abc import Iterator

from sqlguard.policy.context import Context
from sqlguard.policy.registry import QUERIES, rule
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.statement.model import Session, Statement


@rule("indirect-write", QUERIES)
def indirect_write(statement: Statement, _session: Session, _context: Context) -> Iterator[Finding]:
    """
    Refuses writes of relations whose rules or INSTEAD OF triggers do something else.

    ## Why
    The statement that PostgreSQL runs then is another one than the one that was decided.

    ## Finds
        UPDATE notes SET body = 'x' WHERE id = 1
        DELETE FROM v_account_orders WHERE order_id = 1

    ## Ignores
        UPDATE v_active_accounts SET balance = 1 WHERE id = 2

    ## Misses
    Ordinary triggers do more, not something else; the capture triggers keep what they change.
    """
    for name, _rule in statement.details.get("rules", ()):
        yield Finding(
            "indirect-write",
            Effect.REFUSE,
            f"`{name}` has a rewrite rule: other rows than the named ones would change",
            "write to a table without rules",
        )
    for name, op in statement.details.get("instead", ()):
        yield Finding(
            "indirect-write",
            Effect.REFUSE,
            f"a trigger decides what {op.upper()} on view `{name}` does",
            "write to the tables below the view",
        )
