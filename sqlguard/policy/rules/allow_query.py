"""Queries and writes are what agents are for; the other rules object to the ones that do harm."""

from collections.abc import Iterator

from sqlguard.policy.context import Context
from sqlguard.policy.registry import rule
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.statement.model import Kind, Session, Statement

_KINDS = (
    Kind.EMPTY,
    Kind.SELECT,
    Kind.VALUES,
    Kind.INSERT,
    Kind.UPDATE,
    Kind.DELETE,
    Kind.MERGE,
    Kind.COPY_OUT,
    Kind.COPY_IN,
    Kind.EXPLAIN,
    Kind.SHOW,
)
_ALLOW = (Finding("allow-query", Effect.ALLOW, "a query or a write"),)


@rule("allow-query", _KINDS)
def allow_query(_statement: Statement, _session: Session, _context: Context) -> Iterator[Finding]:
    """
    Speaks for SELECT, VALUES, TABLE, INSERT, UPDATE, DELETE, MERGE, COPY, EXPLAIN and SHOW.

    ## Why
    A statement that no rule speaks for is refused; these kinds pass unless another rule objects.

    ## Finds
        SELECT id FROM accounts
        UPDATE accounts SET status = 'x' WHERE id = 1
        EXPLAIN SELECT 1

    ## Ignores
        DROP TABLE accounts
        BEGIN

    ## Misses
    Nothing: whether such a statement does harm is for the other rules to say.
    """
    return iter(_ALLOW)
