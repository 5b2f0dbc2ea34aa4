"""Which tables and columns the policy lets a task read."""

from collections.abc import Iterator

from sqlguard.policy.context import Context
from sqlguard.policy.registry import QUERIES, rule
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.statement.model import Relation, Session, Statement


@rule("read-grant", QUERIES)
def read_grant(statement: Statement, _session: Session, context: Context) -> Iterator[Finding]:
    """
    Refuses reading a table or column that the policy does not grant.

    ## Why
    The policy lists what a task is about; everything else in the database is not its business.

    ## Finds
        SELECT * FROM priv.secrets
        SELECT (SELECT token FROM priv.secrets LIMIT 1) FROM accounts
        DELETE FROM orders USING priv.secrets s WHERE s.id = orders.id

    ## Ignores
        SELECT * FROM accounts
        SELECT relname FROM pg_class

    ## Misses
    A view shows what its owner may read: only the view itself has to be granted.
    """
    for relation in statement.reads:
        if relation.system or relation.temporary or relation.via is not None or not relation.oid:
            continue
        finding = _finding(relation, context)
        if finding is not None:
            yield finding


def _finding(relation: Relation, context: Context) -> Finding | None:
    granted = context.policy.table_rule(relation.schema or "", relation.name)
    select = granted.select if granted is not None else False
    if select is True:
        return None
    if not select:
        return Finding(
            "read-grant",
            Effect.REFUSE,
            f"`{relation.shown}` is not among the tables that this task may read",
            "use the tables that the task is about",
        )
    if relation.columns is None:
        return Finding(
            "read-grant",
            Effect.REFUSE,
            f"not every column of `{relation.shown}` may be read",
            f"name the columns: {', '.join(select)}",
        )
    others = [c for c in relation.columns if c not in select]
    if not others:
        return None
    return Finding(
        "read-grant",
        Effect.REFUSE,
        f"column `{others[0]}` of `{relation.shown}` may not be read",
        f"name only the columns {', '.join(select)}",
    )
