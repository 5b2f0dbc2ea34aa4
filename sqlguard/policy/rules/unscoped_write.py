"""Writes that would touch every row of a table."""

from collections.abc import Iterator

from sqlguard.policy.context import Context
from sqlguard.policy.registry import QUERIES, rule
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.statement.model import Scope, Session, Statement


@rule("unscoped-write", QUERIES)
def unscoped_write(statement: Statement, _session: Session, context: Context) -> Iterator[Finding]:
    """
    Refuses an UPDATE or DELETE whose condition does not narrow it down (or asks, where the policy says so).

    ## Why
    One forgotten or always true WHERE empties a table.

    ## Finds
        DELETE FROM orders
        UPDATE accounts SET balance = 0 WHERE 1 = 1
        UPDATE accounts SET balance = 0 WHERE id = 5 OR true
        UPDATE accounts SET balance = 0 FROM accounts b WHERE b.id = 1
        MERGE INTO accounts USING (SELECT 1) s ON true WHEN MATCHED THEN UPDATE SET balance = 0

    ## Ignores
        DELETE FROM orders WHERE id = 5
        UPDATE accounts SET balance = 0 WHERE 1 = 1 AND id = 5
        UPDATE accounts SET balance = 0 WHERE status = 'x'

    ## Misses
    Conditions that only the data show to be true for all rows (`id > 0`): the count of the rows that were
    touched decides about those.
    """
    effect = Effect.APPROVE if context.policy.defaults.unscoped == "approve" else Effect.REFUSE
    for write in statement.writes:
        if write.scope is Scope.ALL and write.op in ("update", "delete") and not write.table.temporary:
            verb = write.op.upper()
            yield Finding(
                "unscoped-write",
                effect,
                f"the {verb} would touch every row of `{write.table.shown}`: no condition narrows it down",
                f"name the rows in the WHERE by values of `{write.table.shown}`'s own columns, best by its key",
            )
