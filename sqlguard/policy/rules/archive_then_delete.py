"""Moving rows by deleting them in a WITH query and inserting what it returns."""

from collections.abc import Iterator
from typing import Any

from sqlguard.policy.context import Context
from sqlguard.policy.guards import guard_of
from sqlguard.policy.registry import QUERIES, rule
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.statement.model import Session, Statement


@rule("archive-then-delete", QUERIES)
def archive_then_delete(statement: Statement, _session: Session, context: Context) -> Iterator[Finding]:
    """
    Asks when a statement deletes rows of a soft table and inserts only parts of them elsewhere.

    ## Why
    It is a move that leaves columns behind: the archive can't stand for the rows. A move of whole rows
    (`RETURNING *`) does what it says, and the deleted rows are kept besides.

    ## Finds
        WITH gone AS (DELETE FROM orders WHERE id = 5 RETURNING id, status) INSERT INTO kv (k, v) SELECT id::text, status FROM gone

    ## Ignores
        DELETE FROM orders WHERE id = 5
        WITH gone AS (DELETE FROM orders WHERE id = 5 RETURNING *) SELECT count(*) FROM gone
        WITH gone AS (DELETE FROM orders WHERE id = 5 RETURNING *) INSERT INTO kv (k, v) SELECT id::text, status FROM gone

    ## Misses
    Moves made of two statements.
    """  # noqa: E501  a statement of one line
    if not any(w.op == "insert" for w in statement.writes) or not _hands_on_parts(statement):
        return
    for write in statement.writes:
        table = context.catalog.tables.get(write.table.oid)
        guard = guard_of(table, context.catalog) if table is not None and write.op == "delete" else None
        if guard is not None and guard.mode == "soft":
            yield Finding(
                "archive-then-delete",
                Effect.APPROVE,
                f"only some columns of the deleted rows of `{write.table.shown}` are handed on",
                "move whole rows with RETURNING *, or delete them in a statement of its own",
            )


def _hands_on_parts(statement: Statement) -> bool:
    """Whether a write in a WITH query returns anything but whole rows."""
    ((_, body),) = (statement.tree or {"": {}}).items()
    for cte in body.get("withClause", {}).get("ctes", ()):
        ((_, query),) = cte["CommonTableExpr"]["ctequery"].items()
        returned = query.get("returningClause", {}).get("exprs", ())
        if returned and not any(_is_star(item) for item in returned):
            return True
    return False


def _is_star(item: dict[str, Any]) -> bool:
    fields = item["ResTarget"].get("val", {}).get("ColumnRef", {}).get("fields", ({},))
    return "A_Star" in fields[-1]
