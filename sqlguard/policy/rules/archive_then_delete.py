"""Moving rows by deleting them in a WITH query and inserting what it returns."""

from collections.abc import Iterator

from sqlguard.policy.context import Context
from sqlguard.policy.guards import guard_of
from sqlguard.policy.registry import QUERIES, rule
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.statement.model import Session, Statement


@rule("archive-then-delete", QUERIES)
def archive_then_delete(statement: Statement, _session: Session, context: Context) -> Iterator[Finding]:
    """
    Asks when a statement deletes rows of a soft table and inserts others.

    ## Why
    A soft delete keeps the row: what was meant as a move leaves it there twice.

    ## Finds
        WITH gone AS (DELETE FROM orders WHERE id = 5 RETURNING id, status) INSERT INTO kv (k, v) SELECT id::text, status FROM gone

    ## Ignores
        DELETE FROM orders WHERE id = 5
        WITH gone AS (DELETE FROM orders WHERE id = 5 RETURNING *) SELECT count(*) FROM gone

    ## Misses
    Moves made of two statements.
    """  # noqa: E501  a statement of one line
    if not any(w.op == "insert" for w in statement.writes):
        return
    for write in statement.writes:
        table = context.catalog.tables.get(write.table.oid)
        guard = guard_of(table, context.catalog) if table is not None and write.op == "delete" else None
        if guard is not None and guard.mode == "soft":
            yield Finding(
                "archive-then-delete",
                Effect.APPROVE,
                f"deleted rows of `{write.table.shown}` stay in the table, so the moved ones exist twice",
                "copy the rows, or delete them, in a statement of its own",
            )
