"""
FROM: what each item is called, which columns it has and which of them are hidden.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from postgast import pg_query_pb2 as pg

from sqlguard.catalog import Table
from sqlguard.errors import Refused
from sqlguard.rewrite import natural, walk
from sqlguard.rewrite.scope import Column, Columns, Element, Item, Join, Scope, columns, known, nullable
from sqlguard.rewrite.work import Ctes, Work, reads

#: Set-returning built-ins whose columns are known; None: one column, called like the item.
_FUNCTIONS: dict[str, tuple[str, ...] | None] = {
    "generate_series": None,
    "generate_subscripts": None,
    "regexp_split_to_table": None,
    "string_to_table": None,
    "json_object_keys": None,
    "jsonb_object_keys": None,
    "json_array_elements": ("value",),
    "jsonb_array_elements": ("value",),
    "json_array_elements_text": ("value",),
    "jsonb_array_elements_text": ("value",),
    "json_each": ("key", "value"),
    "jsonb_each": ("key", "value"),
    "json_each_text": ("key", "value"),
    "jsonb_each_text": ("key", "value"),
}


def from_clause(work: Work, nodes: Iterable[Any], ctes: Ctes, scope: Scope) -> None:
    """Visit FROM or USING and put what it names into *scope*."""
    if work.only_deletes:
        return
    for node in nodes:
        scope.elements.append(element(work, node, ctes, scope))


def element(work: Work, node: Any, ctes: Ctes, scope: Scope) -> Element:
    """Visit one entry of FROM; *scope* is what stands to the left of it."""
    kind = node.WhichOneof("node")
    value = getattr(node, kind)
    if kind == "join_expr":
        return _join(work, value, ctes, scope)
    if kind == "range_var":
        return relation(work, value, ctes)
    if kind == "range_subselect":
        outer = scope if value.lateral else scope.parent
        return _named(walk.query(work, value.subquery, ctes, outer), value)
    if kind == "range_table_sample":
        for part in (*value.args, value.repeatable):
            walk.expression(work, part, scope, ctes)
        return element(work, value.relation, ctes, scope)
    if kind == "range_function":
        for function in value.functions:
            called = function.list.items[0]
            if called.HasField("func_call"):
                walk.arguments(work, called.func_call, scope, ctes)
            else:
                walk.expression(work, called, scope, ctes)
    else:
        walk.expression(work, value, scope, ctes)
    return _function(work, kind, value)


def relation(work: Work, node: Any, ctes: Ctes) -> Item:
    """Return the item that a table's name in FROM stands for: a CTE before anything else."""
    if not node.schemaname and node.relname in ctes:
        gives = ctes[node.relname]
        named = _named(gives, node)
        return replace(named, name=named.name or node.relname)
    return table_item(work, node, work.tables.resolve(node))


def table_item(work: Work, node: Any, table: Table | None) -> Item:
    """Return the item for *table*, which the RangeVar *node* names; None: a temporary or a system one."""
    alias = node.alias.aliasname if node.HasField("alias") else None
    if table is None:
        temporary = work.tables.temporary(node)
        names = tuple(Column(c) for c in temporary or ())
        item = Item(alias or node.relname, names, known=temporary is not None)
        return replace(item, columns=_aliased(item.columns, node))
    hidden = work.tables.hidden(table)
    found = tuple(Column(c.name, c.name in hidden) for c in table.columns)
    return Item(
        alias or node.relname,
        _aliased(found, node),
        table=None if alias else table,
        anchor=next((c.name for c in table.columns if c.not_null), None) if not node.alias.colnames else None,
        soft=table.oid if work.tables.is_soft(table) else 0,
    )


def _named(gives: Columns, node: Any) -> Item:
    """Return the item for a query's result under the alias that *node* gives it."""
    found = _aliased(tuple(Column(n) for n in gives.names), node)
    name = node.alias.aliasname if node.HasField("alias") else None
    return Item(name, found, known=gives.complete, open=not gives.complete)


def _aliased(found: tuple[Column, ...], node: Any) -> tuple[Column, ...]:
    """Return *found* renamed by the alias's list of columns."""
    names = [n.string.sval for n in node.alias.colnames]
    caught = next((c.name for c in found[: len(names)] if c.hidden), None)
    if caught is not None:
        raise reads(caught, node.alias.aliasname)
    return tuple(Column(n) for n in names) + found[len(names) :]


def _function(work: Work, kind: str, node: Any) -> Item:
    """Return the item for a function, XMLTABLE or JSON_TABLE."""
    name: str | None = node.alias.aliasname if node.HasField("alias") else None
    listed = [n.string.sval for n in node.alias.colnames]
    if kind != "range_function":
        called = "xmltable" if kind == "range_table_func" else "json_table"
        return Item(name or called, tuple(Column(n) for n in listed), known=False, open=True)
    first = node.functions[0].list.items[0]
    names_of = [n.string.sval for n in first.func_call.funcname] or [""]
    called = names_of[-1]
    alone = len(node.functions) == 1 and not node.ordinality
    if node.coldeflist:
        listed = listed or [c.column_def.colname for c in node.coldeflist]
        return Item(name or called or None, tuple(Column(n) for n in listed))
    returned = work.tables.returned_by(names_of)
    if returned is not None:
        return _rows_of(work, node, name or called, returned if alone else None)
    builtin = alone and called in _FUNCTIONS and not work.tables.catalog.functions_named(None, called)
    if builtin:
        names = _FUNCTIONS[called] or (name or called,)
        return Item(name or called, tuple(Column(n) for n in (*listed, *names[len(listed) :])))
    return Item(name or called or None, tuple(Column(n) for n in listed), known=False, open=True)


def _rows_of(work: Work, node: Any, name: str, table: Table | None) -> Item:
    """Return the item for a function that returns rows of the soft *table*, hidden columns included."""
    if table is None:
        raise Refused(
            f"which columns `{name}` returns can't be told here",
            hint="call the function alone, without ROWS FROM and WITH ORDINALITY",
            rules=("function_reads_managed_table",),
        )
    hidden = work.tables.hidden(table)
    return Item(name, _aliased(tuple(Column(c.name, c.name in hidden) for c in table.columns), node))


def _join(work: Work, join: Any, ctes: Ctes, scope: Scope) -> Element:
    left = element(work, join.larg, ctes, scope)
    # LATERAL on the right may look at the left arm.
    scope.elements.append(left)
    right = element(work, join.rarg, ctes, scope)
    scope.elements.pop()
    if join.jointype in (pg.JOIN_LEFT, pg.JOIN_FULL):
        right = nullable(right)
    if join.jointype in (pg.JOIN_RIGHT, pg.JOIN_FULL):
        left = nullable(left)
    merged = tuple(n.string.sval for n in join.using_clause)
    if join.is_natural:
        merged = natural.merged(work, join, left, right)
    for column in (c for arm in (left, right) for c in columns(arm)):
        if column.hidden and column.name in merged and not join.is_natural:
            raise reads(column.name)
    using = None
    if join.HasField("join_using_alias"):
        using = Item(join.join_using_alias.aliasname, tuple(Column(n) for n in merged), bare=False)
    joined = Join(left, right, merged, using)
    if join.HasField("quals"):
        walk.expression(work, join.quals, Scope([Join(left, right)], scope.parent), ctes)
    if not join.HasField("alias"):
        return joined
    return Item(join.alias.aliasname, _aliased(tuple(columns(joined)), join), known=known(joined))
