"""EXECUTE of what is not known, cursors that outlive their transaction."""

from collections.abc import Iterator

from sqlguard.policy.context import Context
from sqlguard.policy.registry import rule
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.statement.model import Kind, Session, Statement

_OURS = "sqlguard "


@rule("prepared-and-cursors", (Kind.EXECUTE, Kind.DECLARE, Kind.FETCH, Kind.PREPARE))
def prepared_and_cursors(statement: Statement, _session: Session, _context: Context) -> Iterator[Finding]:
    """
    Refuses EXECUTE and FETCH of what this session did not prepare or declare, WITH HOLD, and the guard's own names.

    ## Why
    What they would run was never decided. A cursor WITH HOLD runs its query at COMMIT.

    ## Finds
        EXECUTE unknown_plan
        FETCH ALL FROM unknown_cursor
        DECLARE c CURSOR WITH HOLD FOR SELECT * FROM accounts
        PREPARE "sqlguard own" AS SELECT 1

    ## Ignores
        DECLARE c CURSOR FOR SELECT * FROM accounts
        PREPARE p AS SELECT 1

    ## Misses
    Nothing known.
    """
    if statement.kind is Kind.EXECUTE and statement.inner is None:
        yield Finding(
            "prepared-and-cursors",
            Effect.REFUSE,
            f'prepared statement "{statement.subject}" does not exist',
            "PREPARE it in this session first",
            sqlstate="26000",
        )
    elif statement.kind is Kind.FETCH and statement.inner is None:
        yield Finding(
            "prepared-and-cursors",
            Effect.REFUSE,
            f'cursor "{statement.subject}" does not exist',
            "DECLARE it in this transaction first",
            sqlstate="34000",
        )
    elif statement.kind is Kind.DECLARE and statement.details.get("hold"):
        yield Finding(
            "prepared-and-cursors",
            Effect.REFUSE,
            "a cursor WITH HOLD outlives its transaction",
            "declare it without HOLD, inside BEGIN … COMMIT",
        )
    elif (statement.subject or "").startswith(_OURS):
        yield Finding(
            "prepared-and-cursors", Effect.REFUSE, f"names with `{_OURS}` are taken", "use another name"
        )
