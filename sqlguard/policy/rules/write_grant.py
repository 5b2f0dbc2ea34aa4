"""Which tables and columns the policy lets a task write."""

from collections.abc import Iterator

from sqlguard.policy.context import Context
from sqlguard.policy.guards import guard_of
from sqlguard.policy.registry import QUERIES, rule
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.statement.model import Relation, Session, Statement, Write


@rule("write-grant", QUERIES)
def write_grant(statement: Statement, _session: Session, context: Context) -> Iterator[Finding]:
    """
    Refuses an INSERT or UPDATE of a table or column that the policy does not grant, or that nothing guards.

    ## Why
    A task may change what its policy lists, however the statement is written: in a WITH query, a MERGE
    branch, an upsert, through a view. Where no guard keeps what a write destroys, the task's role has no right to
    write either, and PostgreSQL's own refusal would not say what is missing.

    ## Finds
        INSERT INTO audit_log (what) VALUES ('x')
        WITH w AS (UPDATE audit_log SET what = 'x' WHERE id = 1 RETURNING 1) SELECT 1
        INSERT INTO pg_catalog.pg_auth_members SELECT 1, 2, 3, false

    ## Ignores
        UPDATE accounts SET status = 'x' WHERE id = 1
        INSERT INTO kv VALUES ('a', 'b')

    ## Misses
    What triggers write is not looked at here: the capture triggers record it.
    """
    for write in statement.writes:
        if write.op in ("insert", "update") and not write.table.temporary:
            for relation in (write.view, write.table):
                if relation is not None and (relation.oid or relation.system):
                    yield from _findings(relation, write, context)


def _findings(relation: Relation, write: Write, context: Context) -> Iterator[Finding]:
    rule_ = None if relation.system else context.policy.table_rule(relation.schema or "", relation.name)
    granted = getattr(rule_, write.op) if rule_ is not None else False
    if granted and relation is write.table and not _is_guarded(relation, context):
        yield Finding(
            "write-grant",
            Effect.REFUSE,
            f"`{relation.shown}` is not guarded, so nothing may be written to it",
            f"ask the operator to run `sqlguard guard {relation.schema}.{relation.name}`; other tables can be written",
        )
        return
    if granted is True:
        return
    verb = write.op.upper()
    if not granted:
        yield Finding(
            "write-grant",
            Effect.REFUSE,
            f"this task may not {verb} `{relation.shown}`",
            "write to the tables that the task is about",
        )
        return
    if relation is write.view:
        # Its columns have other names than the table's, which are looked at by themselves.
        return
    others = ["…"] if write.columns is None else [c for c in write.columns if c not in granted]
    if write.columns is None:
        yield Finding(
            "write-grant",
            Effect.REFUSE,
            f"not every column of `{relation.shown}` may be written",
            f"name the columns: {', '.join(granted)}",
        )
    elif others:
        yield Finding(
            "write-grant",
            Effect.REFUSE,
            f"column `{others[0]}` of `{relation.shown}` may not be written",
            f"set only the columns {', '.join(granted)}",
        )


def _is_guarded(relation: Relation, context: Context) -> bool:
    table = context.catalog.tables.get(relation.oid)
    return table is None or guard_of(table, context.catalog) is not None
