"""Forms of transaction control that would lead out of what the guard knows."""

from collections.abc import Iterator

from sqlguard.policy.context import Context
from sqlguard.policy.registry import rule
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.statement.model import Kind, Session, Statement

_KINDS = (Kind.BEGIN, Kind.COMMIT, Kind.ROLLBACK, Kind.SAVEPOINT, Kind.RELEASE, Kind.ROLLBACK_TO)
_OURS = "sqlguard_"


@rule("transaction-modes", _KINDS)
def transaction_modes(statement: Statement, _session: Session, context: Context) -> Iterator[Finding]:
    """
    Refuses AND CHAIN, the guard's own savepoints, and all transaction control inside a preview or plan.

    ## Why
    A preview is rolled back: a text that ends its transaction would make it real.

    ## Finds
        COMMIT AND CHAIN
        ROLLBACK AND CHAIN
        RELEASE sqlguard_preview

    ## Ignores
        BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY
        COMMIT
        ROLLBACK TO a

    ## Misses
    Nothing known.
    """
    if context.plan_only:
        yield Finding(
            "transaction-modes",
            Effect.REFUSE,
            "a preview is one transaction: its statements can't begin or end one",
            "leave BEGIN, COMMIT, ROLLBACK and savepoints out",
        )
    elif statement.details.get("chain"):
        yield Finding(
            "transaction-modes",
            Effect.REFUSE,
            "AND CHAIN is not supported here",
            "end the transaction, then BEGIN",
        )
    elif (statement.subject or "").startswith(_OURS):
        yield Finding(
            "transaction-modes",
            Effect.REFUSE,
            f"savepoint names with `{_OURS}` are taken",
            "use another name",
        )
