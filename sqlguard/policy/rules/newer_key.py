"""Foreign keys to soft tables that are newer than the guard."""

from collections.abc import Iterator

from sqlguard.catalog import Catalog, ForeignKey, Table, live_parent_trigger
from sqlguard.policy.context import Context
from sqlguard.policy.registry import QUERIES, rule
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.statement.model import Session, Statement, Write


@rule("newer-key", QUERIES)
def newer_key(statement: Statement, _session: Session, context: Context) -> Iterator[Finding]:
    """
    Refuses to write a reference by a foreign key that was made after its parent was guarded as `soft`.

    ## Why
    To PostgreSQL a deleted row of a soft table is there, so the key itself lets a new child have it as its
    parent. The trigger that sees live parents only is made by `sqlguard guard`.

    ## Finds
        INSERT INTO order_items (id, order_id) VALUES (1, 2)
        UPDATE order_items SET order_id = 3 WHERE id = 1

    ## Ignores
        INSERT INTO orders (id, account_id) VALUES (1, 2)
        INSERT INTO order_items (id) VALUES (1)
        UPDATE order_items SET qty = 3 WHERE id = 1

    ## Misses
    What others than agents write, until the table is guarded again.
    """
    for write in statement.writes:
        table = context.catalog.tables.get(write.table.oid)
        if write.op not in ("insert", "update") or table is None:
            continue
        key = next(_unguarded(write, table, context.catalog), None)
        if key is not None:
            parent = context.catalog.soft[key.references].qualified
            yield Finding(
                "newer-key",
                Effect.REFUSE,
                f"`{write.table.shown}` refers to `{parent}` by a foreign key that is newer than the guard: it could"
                " get a deleted parent",
                f"leave {', '.join(key.columns)} out, or ask the operator to run `sqlguard guard {parent}`",
            )


def _unguarded(write: Write, table: Table, catalog: Catalog) -> Iterator[ForeignKey]:
    """Yield the keys that *write* may set and that no trigger of the guard stands behind."""
    triggers = {trigger.name for trigger in table.triggers}
    keys = [key for key in _keys(table, catalog) if key.references in catalog.soft]
    # A partitioned table's keys have a twin, under another name, for every partition on either side.
    safe = {_what(key, catalog) for key in keys if live_parent_trigger(key.name, "insert") in triggers}
    for key in keys:
        sets = write.columns is None or any(column in write.columns for column in key.columns)
        if sets and _what(key, catalog) not in safe:
            yield key


def _keys(table: Table, catalog: Catalog) -> Iterator[ForeignKey]:
    yield from catalog.references_from(table.oid)
    if table.is_partition:
        for oid in table.parents:
            if oid in catalog.tables:
                yield from _keys(catalog.tables[oid], catalog)


def _what(key: ForeignKey, catalog: Catalog) -> tuple[tuple[str, ...], int]:
    return key.columns, catalog.soft[key.references].oid
