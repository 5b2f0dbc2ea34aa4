"""
Which views show deleted rows: those that read a soft table with their owner's rights, without a filter of their own.

Row-level security asks who reads a table. Below a view that is its owner, for whom deleted rows are rows like any
other, whatever stands further down; with `security_invoker` it is the reader. A view is taken for harmless only where
every soft table that its owner reads stands under `deleted_at IS NULL` in its own SELECT: in WHERE, or in the ON of a
join whose rows that condition decides about.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlguard.catalog import DELETED_AT, Catalog, Table
from sqlguard.errors import SqlguardError
from sqlguard.policy.guards import guard_of
from sqlguard.statement.text import parse

Node = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Source:
    """A relation in a FROM list, and the conditions that decide about its rows."""

    body: Node
    conditions: tuple[Node, ...]


def shown_deleted(view: Table, catalog: Catalog) -> Table | None:
    """Return a soft table whose deleted rows *view* shows to its readers; None when it shows none."""
    return _shown(view, catalog, as_owner=False, seen=frozenset())


def _shown(view: Table, catalog: Catalog, *, as_owner: bool, seen: frozenset[int]) -> Table | None:
    if view.definition is None or view.oid in seen:
        return None
    # What an owner reads through a view is read as that owner, also where the inner view says `security_invoker`.
    as_owner = as_owner or not view.security_invoker
    try:
        trees = [p.tree for p in parse(view.definition)]
    except SqlguardError:
        return None  # such a view is refused as not understood
    for select in _selects(trees):
        sources = list(_sources(select.get("fromClause", ()), tuple(_ands(select.get("whereClause")))))
        for source in sources:
            table = catalog.table(source.body.get("schemaname"), source.body["relname"], ())
            if table is None:
                continue
            if table.kind == "v":
                found = _shown(table, catalog, as_owner=as_owner, seen=seen | {view.oid})
            else:
                found = (
                    table if as_owner and _is_open(table, catalog, source, alone=len(sources) == 1) else None
                )
            if found is not None:
                return found
    return None


def _is_open(table: Table, catalog: Catalog, source: _Source, *, alone: bool) -> bool:
    guard = guard_of(table, catalog)
    if guard is None or guard.mode != "soft" or guard.views_accepted:
        return False
    alias = source.body.get("alias", {}).get("aliasname", source.body["relname"])
    return not any(_is_filter(c, alias, alone=alone) for c in source.conditions)


def _is_filter(condition: Node, alias: str, *, alone: bool) -> bool:
    test = condition.get("NullTest")
    if test is None or test.get("nulltesttype") != "IS_NULL" or "ColumnRef" not in test.get("arg", {}):
        return False
    path = [f.get("String", {}).get("sval") for f in test["arg"]["ColumnRef"]["fields"]]
    return path[-1] == DELETED_AT and (path[-2] == alias if len(path) > 1 else alone)


def _selects(node: Any) -> Iterator[Node]:
    """Yield every SELECT in *node*; the arms of a UNION stand in fields of their own, without a name."""
    if isinstance(node, list):
        for item in node:
            yield from _selects(item)
    elif isinstance(node, dict):
        if "targetList" in node or "fromClause" in node:
            yield node
        for value in node.values():
            yield from _selects(value)


def _sources(items: Any, conditions: tuple[Node, ...]) -> Iterator[_Source]:
    """Yield the relations of a FROM list; sub-selects in it are SELECTs of their own."""
    for item in items:
        if "RangeVar" in item:
            yield _Source(item["RangeVar"], conditions)
        elif "RangeTableSample" in item:
            yield from _sources([item["RangeTableSample"]["relation"]], conditions)
        elif "JoinExpr" in item:
            join = item["JoinExpr"]
            kind = join["jointype"]
            # ON decides about the rows of the optional side alone, and about none of a full join's.
            on = tuple(_ands(join.get("quals")))
            left = on if kind in ("JOIN_INNER", "JOIN_RIGHT") else ()
            right = on if kind in ("JOIN_INNER", "JOIN_LEFT") else ()
            yield from _sources([join["larg"]], conditions + left)
            yield from _sources([join["rarg"]], conditions + right)


def _ands(condition: Node | None) -> Iterator[Node]:
    if condition is None:
        return
    both = condition.get("BoolExpr")
    if both is not None and both["boolop"] == "AND_EXPR":
        for part in both["args"]:
            yield from _ands(part)
    else:
        yield condition
