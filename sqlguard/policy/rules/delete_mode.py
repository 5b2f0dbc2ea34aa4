"""What a DELETE of a row becomes: marked, kept, or refused."""

from collections.abc import Iterator

from sqlguard.catalog import Guard
from sqlguard.policy.context import Context
from sqlguard.policy.guards import guard_of
from sqlguard.policy.registry import QUERIES, rule
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.statement.model import Session, Statement, Write


@rule("delete-mode", QUERIES)
def delete_mode(statement: Statement, _session: Session, context: Context) -> Iterator[Finding]:
    """
    Rewrites a DELETE on a table guarded as `soft`, lets it run on one guarded as `journal`, refuses others.

    ## Why
    A row that is gone can't be brought back. On a guarded table it is marked, or its old version is kept.

    ## Finds
        DELETE FROM orders WHERE id = 5
        DELETE FROM docs WHERE id = 1
        MERGE INTO orders USING (SELECT 5 AS id) s ON orders.id = s.id WHEN MATCHED THEN DELETE
        DELETE FROM v_active_accounts WHERE id = 1

    ## Ignores
        UPDATE orders SET status = 'x' WHERE id = 5

    ## Misses
    What a trigger deletes: the capture triggers keep it.
    """
    for write in statement.writes:
        if write.op == "delete" and not write.table.temporary:
            finding = _finding(write, context)
            if finding is not None:
                yield finding


def _finding(write: Write, context: Context) -> Finding | None:
    shown = write.table.shown
    table = context.catalog.tables.get(write.table.oid)
    if table is None:
        if not write.table.system:
            return None
        return _refuse(f"`{shown}` belongs to the server", "leave it alone")
    granted = context.policy.table_rule(table.schema, table.name)
    if granted is None or granted.delete == "refuse":
        # A policy that does not speak of deleting is a role without DELETE: PostgreSQL's own SQLSTATE.
        silent = granted is not None and "delete" not in granted.model_fields_set
        return Finding(
            "delete-mode",
            Effect.REFUSE,
            f"this task may not delete rows of `{shown}`",
            "mark the rows with an UPDATE if the table has a column for that, or leave them",
            sqlstate="42501" if silent else "SG002",
        )
    if write.view is not None:
        return _refuse(
            f"`{write.view.shown}` is a view: rows are deleted from its table",
            f"name {shown} instead, with a condition on its own columns",
        )
    guard = guard_of(table, context.catalog)
    if guard is not None and guard.mode != granted.delete and write.rule is None:
        # No DELETE is granted then: PostgreSQL would refuse it without a word about why.
        return Finding(
            "delete-mode",
            Effect.REFUSE,
            f"this task may not delete rows of `{shown}`: its policy says {granted.delete}, the guard {guard.mode}",
            "leave the rows, or ask the operator to make the policy's `delete` and the guard's mode the same",
            sqlstate="42501",
        )
    return _by_guard(write, guard)


def _by_guard(write: Write, guard: Guard | None) -> Finding | None:
    shown = write.table.shown
    if guard is None:
        return _refuse(
            f"deleted rows of `{shown}` could not be brought back: the table is not guarded",
            f"leave the rows, or ask the operator to guard the table (`sqlguard guard {shown}`)",
        )
    if guard.mode != "soft":
        return None
    if write.rule is not None:
        return _refuse(
            f"a rule on the table deletes rows of `{shown}`, which can't be brought back then",
            "write to a table without such a rule",
        )
    return Finding("delete-mode", Effect.REWRITE, f"rows of `{shown}` are marked as deleted")


def _refuse(message: str, hint: str) -> Finding:
    return Finding("delete-mode", Effect.REFUSE, message, hint)
