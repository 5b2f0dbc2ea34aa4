"""Updates of primary keys."""

from collections.abc import Iterator

from sqlguard.policy.context import Context
from sqlguard.policy.registry import QUERIES, rule
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.statement.model import Session, Statement


@rule("key-change", QUERIES)
def key_change(statement: Statement, _session: Session, context: Context) -> Iterator[Finding]:
    """
    Asks before a primary key is changed.

    ## Why
    What other tables, other systems and undo know of a row is its key.

    ## Finds
        UPDATE accounts SET id = id + 1000 WHERE id = 11

    ## Ignores
        UPDATE accounts SET status = 'x' WHERE id = 11
        INSERT INTO accounts (id, owner_name) VALUES (12, 'x')

    ## Misses
    Keys that are no primary key.
    """
    for write in statement.writes:
        table = context.catalog.tables.get(write.table.oid)
        if write.op != "update" or table is None or not write.columns:
            continue
        changed = [c for c in table.primary_key if c in write.columns]
        if changed:
            yield Finding(
                "key-change",
                Effect.APPROVE,
                f"`{changed[0]}` is the key of `{write.table.shown}`: changing it makes another row of it",
                "insert a new row, or leave the key as it is",
            )
