"""
The columns into which a statement writes what depends on other rows and on nothing else.

What a statement writes is bound by its text, its parameters and the rows that it changes, unless it reads other rows
or is itself read by the session's settings (`'01/02/2024'` is one day or another, by those of now or of when it was
prepared): then a plan has to compare the values themselves. Whatever another clock, another session or another call
would give another value (`now()` and what is volatile, also behind a trigger of the users') can't be compared, column
by column; where it can't be told apart, nothing is. So what is left out here is compared less, never let through
wrongly.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import postgast
from postgast import pg_query_pb2 as pg

from sqlguard.catalog import Catalog, Column, Table
from sqlguard.functions.data import builtins
from sqlguard.rewrite.count import everything
from sqlguard.statement.model import Call, Kind, Statement

#: A table's oid -> the numbers of its columns.
Written = Mapping[int, tuple[int, ...]]
#: Functions that are only stable because of settings of the session that both runs have, as far as that shows.
# fmt: off
_SETTLED = frozenset((
    "array_to_json", "array_to_string", "concat", "concat_ws", "convert", "convert_from",
    "convert_to", "date", "date_add", "date_part", "date_subtract", "date_trunc", "extract",
    "format", "generate_series", "interval_pl_timestamptz", "json_agg", "json_agg_strict",
    "json_build_array", "json_build_object", "json_object_agg", "jsonb_agg", "jsonb_agg_strict",
    "jsonb_build_array", "jsonb_build_object", "jsonb_object_agg", "length", "make_timestamptz",
    "money", "numeric", "overlaps", "quote_literal", "quote_nullable", "row_to_json", "time",
    "timestamp", "timestamptz", "timestamptz_mi_interval", "timestamptz_pl_interval", "timetz",
    "timezone", "to_char", "to_date", "to_json", "to_jsonb", "to_number", "to_timestamp",
    "to_tsquery", "to_tsvector",
))
# fmt: on
#: What the session can set as it likes between two runs: what they say has to be the same, not the text that asks them.
_SESSION = frozenset({"current_schema", "current_schemas", "current_setting", "pg_client_encoding"})
#: What PostgreSQL reads as a time of its own choosing.
_CLOCK = frozenset({"now", "today", "tomorrow", "yesterday"})


#: Types whose values are read and written in one way, whatever the settings.
_PLAIN = (
    "bigint",
    "boolean",
    "character",
    "integer",
    "json",
    "numeric",
    "smallint",
    "text",
    "uuid",
)
_TIMES = ("date", "time")


@dataclass(frozen=True)
class _Targets:
    """What is written into each column, taken out of the statement; `is_ordered` if that may choose the rows, too."""

    columns: Mapping[str, Sequence[Any]]
    is_ordered: bool = False


def steady(statement: Statement, catalog: Catalog) -> Written:
    """Return the columns whose new values are the same as long as the rows that *statement* reads are."""
    writes = [write for write in statement.writes if write.op in ("insert", "update")]
    if statement.kind not in (Kind.INSERT, Kind.UPDATE) or len(writes) != 1:
        return {}
    table = catalog.tables.get(writes[0].table.oid)
    if writes[0].view is not None or writes[0].rule is not None or table is None:
        return {}
    node = _node(statement)
    if _is_changed_on_its_way(table, writes[0].op, catalog):
        return {}
    others = _reads_others(node)
    names = _moving_names(statement, catalog)
    found = _assigned(node) if statement.kind is Kind.UPDATE else _inserted(node, table)
    if not others and all(not _may_vary(c, catalog) for c in statement.calls) and _is_plain(found, table):
        return {}
    if names is None or not _chooses_the_same(node, found, names):
        return {}
    numbers = tuple(
        column.attnum
        for column in table.columns
        if column.name in found.columns
        and not column.generated
        and not any(_varies(value, names, column) for value in found.columns[column.name])
    )
    return {table.oid: numbers} if numbers else {}


def _moving_names(statement: Statement, catalog: Catalog) -> frozenset[str] | None:
    """Return the functions that move, None where the text does not show what they have a part in."""
    moving = [call for call in statement.calls if _moves(call, catalog)]
    is_hidden = any(r.via for r in statement.reads) or any(c.what != "function" for c in moving)
    return None if moving and is_hidden else frozenset(call.name for call in moving)


def _chooses_the_same(node: Any, found: _Targets, names: Container[str]) -> bool:
    """Whether it is the same rows that are written as long as those that are read are the same."""
    if any(_is_moving(part, names) or _is_any_few(part) for part in everything(node)):
        return False
    values = [value for column in found.columns.values() for value in column]
    return not (found.is_ordered and any(_has_moving(value, names) for value in values))


def _node(statement: Statement) -> Any:
    stmt = postgast.parse(statement.text).stmts[0].stmt
    node = stmt.update_stmt if statement.kind is Kind.UPDATE else stmt.insert_stmt
    node.ClearField("returning_clause")
    return node


def _reads_others(node: Any) -> bool:
    """Whether there is a row that it reads and does not change: without one, the text says what it writes."""
    return any(isinstance(part, pg.RangeVar) and part is not node.relation for part in everything(node))


def _is_changed_on_its_way(table: Table, event: str, catalog: Catalog) -> bool:
    return any(
        trigger.for_each_row and trigger.timing != "AFTER" and event in trigger.events and not trigger.ours
        for one in (table, *catalog.descendants(table.oid))
        for trigger in one.triggers
    )


def _assigned(node: Any) -> _Targets:
    """Take the values out of an UPDATE's SET."""
    found = {target.res_target.name: [_copy(target.res_target.val)] for target in node.target_list}
    del node.target_list[:]
    return _Targets(found)


def _inserted(node: Any, table: Table) -> _Targets:
    """Take the values out of an INSERT, where they can be told from the rest of it."""
    select = node.select_stmt.select_stmt
    named = [target.res_target.name for target in node.cols]
    if select.values_lists:
        rows = [[_copy(item) for item in row.list.items] for row in select.values_lists]
        del select.values_lists[:]
    elif select.op == pg.SETOP_NONE and not any(map(_is_star, select.target_list)):
        rows = [[_copy(target.res_target.val) for target in select.target_list]]
        del select.target_list[:]
    else:
        # How many columns there are is not known here: what has a default may have been left to it.
        plain = [c.name for c in table.columns if not (c.has_default or c.identity)]
        return _Targets(dict.fromkeys(named or plain, ()))
    ordered = (
        select.sort_clause,
        select.distinct_clause,
        select.group_clause,
        select.HasField("limit_count"),
    )
    names = named or [column.name for column in sorted(table.columns, key=lambda c: c.attnum)]
    return _Targets(dict(zip(names, zip(*rows, strict=True), strict=False)), any(map(bool, ordered)))


def _is_star(target: Any) -> bool:
    return any(isinstance(part, pg.A_Star) for part in everything(target.res_target.val))


def _copy(value: Any) -> Any:
    """A part that is taken out of a tree is gone with it."""
    return type(value).FromString(value.SerializeToString())


def _is_plain(found: _Targets, table: Table) -> bool:
    """Whether the values mean the same under all settings, as far as no function in them asks for these."""
    types = {column.name: column.type_name.startswith(_PLAIN) for column in table.columns}
    return all(
        types.get(name, False)
        and all(_is_plain_part(part, types) for value in values for part in everything(value))
        for name, values in found.columns.items()
    )


def _is_plain_part(part: Any, types: Mapping[str, bool]) -> bool:
    if isinstance(part, pg.ColumnRef):
        # What is written as text may be a day, or a number.
        return types.get(part.fields[-1].string.sval, False)
    # In a function's arguments a text is of the type that the function asks for.
    return not isinstance(part, pg.TypeCast | pg.FuncCall)


def _moves(call: Call, catalog: Catalog) -> bool:
    """Whether the same arguments may give another value at another time or in another session."""
    return _may_vary(call, catalog) and call.name not in _SETTLED | _SESSION


def _may_vary(call: Call, catalog: Catalog) -> bool:
    users = [catalog.functions.get(oid) for oid in call.candidates]
    if any(function is None or function.volatility != "i" for function in users):
        return True
    if users and not call.builtin:
        return False
    entries = [
        entry
        for entry in builtins().get((call.schema or "pg_catalog", call.name), ())
        if entry.takes(call.arguments)
    ]
    if not entries:
        return call.what == "function" and not users
    return any(entry.volatility != "i" for entry in entries)


def _is_moving(part: Any, names: Container[str]) -> bool:
    if isinstance(part, pg.FuncCall):
        return part.funcname[-1].string.sval in names
    return isinstance(part, pg.SQLValueFunction | pg.SetToDefault)


def _has_moving(value: Any, names: Container[str]) -> bool:
    return any(_is_moving(part, names) for part in everything(value))


def _is_any_few(part: Any) -> bool:
    """Whether it takes some of the rows, whichever come first."""
    return isinstance(part, pg.SelectStmt) and part.HasField("limit_count") and not part.sort_clause


def _varies(value: Any, names: Container[str], column: Column) -> bool:
    parts = list(everything(value))
    is_time = column.type_name.startswith(_TIMES) or any(isinstance(part, pg.TypeCast) for part in parts)
    return any(
        _is_moving(part, names)
        or _is_any_few(part)
        or (is_time and isinstance(part, pg.A_Const) and _says_now(part.sval.sval))
        for part in parts
    )


def _says_now(text: str) -> bool:
    return any(word in _CLOCK for word in text.lower().split())
