"""Views that would show deleted rows."""

from collections.abc import Iterator

from sqlguard.policy.context import Context
from sqlguard.policy.registry import QUERIES, rule
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.policy.views import shown_deleted
from sqlguard.statement.model import Session, Statement


@rule("deleted-in-view", QUERIES)
def deleted_in_view(statement: Statement, _session: Session, context: Context) -> Iterator[Finding]:
    """
    Refuses reading or writing through a view that would show deleted rows of a table guarded as `soft`.

    ## Why
    A view reads with its owner's rights, and for the owner deleted rows are rows like any other: the agent would see
    what it has deleted, and count it.

    ## Finds
        SELECT * FROM v_account_orders
        SELECT 1 FROM accounts WHERE id IN (SELECT account_id FROM v_account_orders)

    ## Ignores
        SELECT * FROM v_active_accounts
        SELECT * FROM accounts

    ## Misses
    Materialized views, which show what was there when they were refreshed, and functions with their owner's rights.
    """
    for relation in (*statement.reads, *(w.view for w in statement.writes if w.view is not None)):
        view = context.catalog.tables.get(relation.oid)
        if view is None or view.kind != "v" or relation.via is not None:
            continue
        key = ("deleted-in-view", view.oid)
        if key not in context.judged:
            context.judged[key] = shown_deleted(view, context.catalog)
        table = context.judged[key]
        if table is not None:
            yield Finding(
                "deleted-in-view",
                Effect.REFUSE,
                f"`{relation.shown}` reads `{table.qualified}` with its owner's rights and would show deleted rows",
                f"read {table.qualified} itself; the operator can mend the view with `sqlguard guard "
                f"{table.qualified} --fix-views`",
            )
