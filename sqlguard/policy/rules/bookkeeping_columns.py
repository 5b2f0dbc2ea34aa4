"""The columns that a soft delete uses are written by a soft delete only."""

from collections.abc import Iterator

from sqlguard.catalog import DELETED_AT, DELETED_BY_AGENT
from sqlguard.policy.context import Context
from sqlguard.policy.guards import guard_of
from sqlguard.policy.registry import QUERIES, rule
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.statement.model import Session, Statement


@rule("bookkeeping-columns", QUERIES)
def bookkeeping_columns(statement: Statement, _session: Session, context: Context) -> Iterator[Finding]:
    """
    Refuses writing `deleted_at` and `deleted_by_agent` of a table that is guarded as soft.

    ## Why
    They say who deleted a row and when; an agent that sets them deletes, or brings back, without a trace.

    ## Finds
        UPDATE accounts SET deleted_at = now() WHERE id = 2
        UPDATE v_active_accounts SET deleted_at = now() WHERE id = 2
        INSERT INTO orders (id, deleted_at) VALUES (99, now())

    ## Ignores
        UPDATE accounts SET status = 'x' WHERE id = 2
        SELECT deleted_at FROM accounts

    ## Misses
    INSERT … SELECT * without a column list: the table's trigger sets them right.
    """
    for write in statement.writes:
        table = context.catalog.tables.get(write.table.oid)
        guard = guard_of(table, context.catalog) if table is not None and write.columns else None
        if guard is None or guard.mode != "soft":
            continue
        for column in write.columns or ():
            # Also where the application had such a column before: from now on the database keeps it.
            if column in (DELETED_AT, DELETED_BY_AGENT):
                yield Finding(
                    "bookkeeping-columns",
                    Effect.REFUSE,
                    f"column `{column}` of `{write.table.shown}` is kept by the database",
                    "use DELETE to delete rows; leave the column out of the statement",
                )
