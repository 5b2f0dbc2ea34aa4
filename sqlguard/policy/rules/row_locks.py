"""SELECT … FOR UPDATE and its kin."""

from collections.abc import Iterator

from sqlguard.policy.context import Context
from sqlguard.policy.registry import QUERIES, rule
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.statement.model import Scope, Session, Statement


@rule("row-locks", QUERIES)
def row_locks(statement: Statement, _session: Session, context: Context) -> Iterator[Finding]:
    """
    Lets a task lock rows of tables that it may update; asks before it locks all of them.

    ## Why
    Locked rows make every other client wait until the transaction ends.

    ## Finds
        SELECT * FROM accounts FOR UPDATE
        SELECT * FROM audit_log WHERE id = 1 FOR UPDATE

    ## Ignores
        SELECT * FROM accounts WHERE id = 1 FOR UPDATE
        SELECT * FROM accounts ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED

    ## Misses
    A condition that most rows meet.
    """
    for relation, scope in statement.details.get("locks", ()):
        granted = context.policy.table_rule(relation.schema or "", relation.name)
        if relation.system or granted is None or not granted.update:
            yield Finding(
                "row-locks",
                Effect.REFUSE,
                f"rows of `{relation.shown}` may not be locked",
                "leave FOR UPDATE out",
            )
        elif scope is Scope.ALL:
            yield Finding(
                "row-locks",
                Effect.APPROVE,
                f"the statement would lock every row of `{relation.shown}`",
                "name the rows in the WHERE, or use LIMIT",
            )
