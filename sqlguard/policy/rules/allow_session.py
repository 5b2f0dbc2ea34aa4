"""Transactions, prepared statements, cursors and what clients send to tidy up a session."""

from collections.abc import Iterator

from sqlguard.policy.context import Context
from sqlguard.policy.registry import rule
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.statement.model import Kind, Session, Statement

_KINDS = (
    Kind.BEGIN,
    Kind.COMMIT,
    Kind.ROLLBACK,
    Kind.SAVEPOINT,
    Kind.RELEASE,
    Kind.ROLLBACK_TO,
    Kind.PREPARE,
    Kind.EXECUTE,
    Kind.DEALLOCATE,
    Kind.DECLARE,
    Kind.FETCH,
    Kind.CLOSE,
    Kind.UNLISTEN,
    Kind.CONSTRAINTS,
    Kind.DISCARD,
    Kind.DROP_TEMP,
)
_ALLOW = (Finding("allow-session", Effect.ALLOW, "belongs to the session"),)


@rule("allow-session", _KINDS)
def allow_session(_statement: Statement, _session: Session, _context: Context) -> Iterator[Finding]:
    """
    Speaks for transaction control, PREPARE, EXECUTE, cursors, UNLISTEN and DISCARD.

    ## Why
    Drivers and poolers send these by themselves; they have the meaning that PostgreSQL gives them, and what
    they carry out is decided like any other statement.

    ## Finds
        BEGIN
        SAVEPOINT a
        DISCARD ALL
        UNLISTEN *

    ## Ignores
        SELECT 1
        LISTEN news

    ## Misses
    Nothing: other rules object to single forms of them.
    """
    return iter(_ALLOW)
