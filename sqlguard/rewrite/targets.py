"""
What a DELETE may be aimed at: a soft table can be reached by ways that a rewrite can't follow.
"""

from collections.abc import Iterator
from typing import Any

import postgast

from sqlguard.catalog import Table
from sqlguard.errors import Refused
from sqlguard.rewrite.names import SoftTables
from sqlguard.rewrite.source import parts


def refuse_unless_deletable(tables: SoftTables, table: Table | None, relation: Any) -> None:
    """Refuse a DELETE that would remove rows of a soft table for good: through a view or from above."""
    if table is None or tables.is_soft(table):
        return
    if table.kind == "v":
        below = next(tables_of_view(tables, table), None)
        rule = "instead_of_trigger" if table.triggers else "unmanaged_table"
    else:
        below = next(tables.below(table), None) if relation.inh else None
        rule = "unmanaged_table"
    if below is not None:
        raise Refused(
            f"a DELETE on `{table.name}` would remove rows of `{below.name}` for good",
            hint=f"send the DELETE to `{below.name}` itself",
            rules=(rule,),
        )


def tables_of_view(tables: SoftTables, view: Table, seen: frozenset[int] = frozenset()) -> Iterator[Table]:
    """Yield the soft tables that *view* shows, directly or through other views."""
    if view.definition is None or view.oid in seen:
        return
    for node in _relations(postgast.parse(view.definition)):
        path = (view.schema, *tables.session.search_path)
        table = tables.catalog.table(node.schemaname or None, node.relname, path)
        if table is None:
            continue
        if tables.is_soft(table):
            yield table
        yield from tables_of_view(tables, table, seen | {view.oid})


def _relations(node: Any) -> Iterator[Any]:
    if node.DESCRIPTOR.name == "RangeVar":
        yield node
    for part in parts(node):
        yield from _relations(part)
