"""
What a plan's digest is told of a statement: which of the columns that it writes hold what another run would write too.

What a statement writes is bound by its text, its parameters, the rows that it changes and the code that has a part in
it, unless it reads other rows or is itself read by the session's settings (`'01/02/2024'` is one day or another, by
those of now or of when it was prepared): then a plan has to compare the values themselves. Whatever another clock,
another session or another call would give another value (`now()` and what is volatile, also behind a trigger of the
users') can't be compared, column by column; where it can't be told apart, nothing is. So what is left out here is
compared less, never let through wrongly. Which rows are taken is no such thing: to take others is not to do what was
seen.
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import postgast
from postgast import pg_query_pb2 as pg

from sqlguard.catalog import Catalog, Column, Table
from sqlguard.functions.data import builtins
from sqlguard.rewrite.count import everything
from sqlguard.rewrite.filled import filled
from sqlguard.statement.expand import base_of
from sqlguard.statement.model import Call, Kind, Session, Statement
from sqlguard.statement.walk import Walk

#: As JSON, for `sqlguard.change_groups` and what reads it.
Told = Mapping[str, Any]
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


#: What says which rows are taken, by the message that it stands in.
_CHOOSING: Mapping[str, frozenset[str]] = {
    "SelectStmt": frozenset(
        {
            "where_clause",
            "having_clause",
            "sort_clause",
            "limit_count",
            "limit_offset",
            "group_clause",
            "distinct_clause",
        }
    ),
    "UpdateStmt": frozenset({"where_clause"}),
    "DeleteStmt": frozenset({"where_clause"}),
    "JoinExpr": frozenset({"quals"}),
    "MergeStmt": frozenset({"join_condition"}),
    "MergeWhenClause": frozenset({"condition"}),
    "OnConflictClause": frozenset({"where_clause", "infer"}),
}
_WRITES = (pg.InsertStmt, pg.UpdateStmt, pg.MergeStmt)
_COMMANDS = {pg.CMD_INSERT: "insert", pg.CMD_UPDATE: "update"}


@dataclass
class _Branch:
    """
    One way in which a statement writes a row: columns that it names, that move, that are left to a default.

    `is_plain`: its values mean the same under all settings, as far as no function in them asks for these.
    """

    op: str
    columns: set[str] = field(default_factory=set)
    moves: set[str] = field(default_factory=set)
    defaults: set[str] = field(default_factory=set)
    is_plain: bool = True


def steady(statement: Statement, catalog: Catalog) -> Told:
    """Return what is known of *statement* before its run: of its table's columns, the views and functions in it."""
    code = sorted({oid for call in statement.calls for oid in call.candidates})
    written = [write.view or write.table for write in statement.writes]
    views = sorted({r.oid for r in written if r.oid in catalog.tables and catalog.tables[r.oid].kind == "v"})
    found: dict[str, Any] = {"code": code} if code else {}
    if views:
        found["views"] = views
    reader = _reader(statement, catalog)
    if reader is not None:
        found["tables"] = {str(reader.table.oid): reader.told()}
    return found


def _reader(statement: Statement, catalog: Catalog) -> "_Reader | None":
    """Return who reads a statement that writes into one table, None for any other."""
    writes = [write for write in statement.writes if write.op in ("insert", "update")]
    oids = {write.table.oid for write in writes}
    table = catalog.tables.get(next(iter(oids))) if len(oids) == 1 else None
    if (
        statement.kind not in (Kind.INSERT, Kind.UPDATE, Kind.MERGE)
        or table is None
        or table.kind not in "rp"
    ):
        return None
    if any(write.rule is not None for write in statement.writes):
        return None
    stmt = postgast.parse(statement.text).stmts[0].stmt
    node = getattr(stmt, stmt.WhichOneof("node"))
    if any(isinstance(part, _WRITES) and part is not node for part in everything(node)):
        return None
    names = {column.name: column.name for column in table.columns}
    if writes[0].view is not None:
        below = base_of(Walk(catalog, Session(search_path=())), catalog.tables[writes[0].view.oid])
        if below is None:
            return None
        names = below[1]
    may_vary = any(_may_vary(call, catalog) for call in statement.calls)
    return _Reader(node, table, catalog, names, _moving_names(statement, catalog), may_vary)


def _moving_names(statement: Statement, catalog: Catalog) -> frozenset[str] | None:
    """Return the functions that move, None where the text does not show what they have a part in."""
    moving = [call for call in statement.calls if _moves(call, catalog)]
    is_hidden = any(r.via for r in statement.reads) or any(c.what != "function" for c in moving)
    return None if moving and is_hidden else frozenset(call.name for call in moving)


@dataclass
class _Reader:
    """`names` are the table's columns by the names that the statement uses, in order; `moving` functions that move."""

    node: Any
    table: Table
    catalog: Catalog
    names: Mapping[str, str]
    moving: frozenset[str] | None
    #: Whether it calls what is not IMMUTABLE, settled or not.
    may_vary: bool

    def told(self) -> dict[str, Any]:
        node = self.node
        node.ClearField("returning_clause")
        reads_others = any(isinstance(p, pg.RangeVar) and p is not node.relation for p in everything(node))
        branches = list(self._branches())
        is_compared = reads_others or self.may_vary or not all(branch.is_plain for branch in branches)
        if self.moving is None or any(_is_moving(part, self.moving) for part in _data(node)):
            for branch in branches:
                branch.moves |= branch.columns
        found: dict[str, Any] = {"given": sorted(self._given(branches)), "compared": is_compared}
        for op in ("insert", "update"):
            of_op = [branch for branch in branches if branch.op == op]
            if of_op:
                found[op] = self._written(op, of_op)
        return found

    def _written(self, op: str, branches: list[_Branch]) -> dict[str, list[str]]:
        every = {column.name for column in self.table.columns}
        made = {column.name for column in self.table.columns if column.generated}
        by_triggers = filled(self.table, op, self.catalog)
        moves = (
            set.union(*(b.moves for b in branches)) | (every if by_triggers is None else by_triggers) | made
        )
        # What one way of an UPDATE leaves alone is as it was; of an INSERT it has a default.
        columns = [branch.columns for branch in branches]
        lasts = (set.union(*columns) if op == "update" else set.intersection(*columns)) - moves
        return {"lasts": sorted(lasts), "moves": sorted(moves)}

    def _given(self, branches: list[_Branch]) -> set[str]:
        """Return the columns whose defaults have no part in it."""
        every = {column.name for column in self.table.columns if not column.generated}
        by_keys = {
            name
            for key in self.catalog.references_from(self.table.oid)
            if "d" in (key.on_delete, key.on_update)
            for name in key.columns
        }
        left = (b.defaults if b.op == "update" else b.defaults | (every - b.columns) for b in branches)
        return every - by_keys - set().union(*left)

    # --- the ways in which it writes; what they take from the tree is gone from it

    def _branches(self) -> Iterator[_Branch]:
        node = self.node
        if isinstance(node, pg.UpdateStmt):
            yield self._assigned("update", node.target_list)
        elif isinstance(node, pg.MergeStmt):
            for item in node.merge_when_clauses:
                yield from self._when(item.merge_when_clause)
        else:
            inserted = self._inserted(node)
            yield inserted
            if node.on_conflict_clause.action == pg.ONCONFLICT_UPDATE:
                changed = self._assigned("update", node.on_conflict_clause.target_list, inserted)
                yield changed

    def _when(self, clause: Any) -> Iterator[_Branch]:
        op = _COMMANDS.get(clause.command_type)
        if op == "update":
            yield self._assigned(op, clause.target_list)
        elif op == "insert":
            named = [target.res_target.name for target in clause.target_list]
            yield self._filled(named or list(self.names), [list(clause.values)] if clause.values else [])
            del clause.values[:]

    def _assigned(self, op: str, targets: Any, inserted: _Branch | None = None) -> _Branch:
        """Read a SET; in ON CONFLICT it may take what was to be *inserted*."""
        branch = _Branch(op)
        for target in targets:
            value = target.res_target.val
            self._add(branch, target.res_target.name, value)
            taken = _excluded(value) if inserted is not None else ()
            if inserted is not None and any(
                self.names.get(name, name) not in inserted.columns - inserted.moves for name in taken
            ):
                branch.moves.add(self.names.get(target.res_target.name, target.res_target.name))
        del targets[:]
        return branch

    def _inserted(self, node: Any) -> _Branch:
        """Read an INSERT's values, where they can be told from the rest of it."""
        select = node.select_stmt.select_stmt
        named = [target.res_target.name for target in node.cols]
        if not node.HasField("select_stmt"):
            return _Branch("insert")
        if select.values_lists:
            branch = self._filled(
                named or list(self.names), [list(row.list.items) for row in select.values_lists]
            )
            del select.values_lists[:]
        elif select.op == pg.SETOP_NONE and not any(map(_is_star, select.target_list)):
            row = [target.res_target.val for target in select.target_list]
            branch = self._filled(named or list(self.names), [row])
            del select.target_list[:]
        else:
            # How many columns there are is not known here: what has a default may have been left to it.
            plain = [c.name for c in self.table.columns if not (c.has_default or c.identity)]
            branch = _Branch("insert", {self.names.get(n, n) for n in named} if named else set(plain))
        return branch

    def _filled(self, names: list[str], rows: list[list[Any]]) -> _Branch:
        branch = _Branch("insert")
        for row in rows:
            for name, value in zip(names, row, strict=False):
                self._add(branch, name, value)
        return branch

    def _add(self, branch: _Branch, name: str, value: Any) -> None:
        name = self.names.get(name, name)
        column = self.table.column(name)
        branch.columns.add(name)
        if value.WhichOneof("node") == "set_to_default":
            branch.defaults.add(name)
        if column is None or _varies(value, self.moving or (), column):
            branch.moves.add(name)
        branch.is_plain = branch.is_plain and column is not None and _is_plain(value, column, self.table)


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


def _data(message: Any) -> Iterator[Any]:
    """Yield *message* and what is in it, but not what only says which rows are taken."""
    yield message
    choosing = _CHOOSING.get(type(message).__name__, ())
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None and descriptor.name not in choosing:
            for part in value if descriptor.is_repeated else (value,):
                yield from _data(part)


def _is_plain(value: Any, column: Column, table: Table) -> bool:
    if not column.type_name.startswith(_PLAIN):
        return False
    if value.WhichOneof("node") == "a_const":
        return True
    return all(_is_plain_part(part, table) for part in everything(value))


def _is_plain_part(part: Any, table: Table) -> bool:
    if isinstance(part, pg.ColumnRef):
        # What is written as text may be a day, or a number.
        column = table.column(part.fields[-1].string.sval)
        return column is not None and column.type_name.startswith(_PLAIN)
    # In a function's arguments a text is of the type that the function asks for.
    return not isinstance(part, pg.TypeCast | pg.FuncCall)


def _is_star(target: Any) -> bool:
    return any(isinstance(part, pg.A_Star) for part in everything(target.res_target.val))


def _excluded(value: Any) -> Iterable[str]:
    for part in everything(value):
        if (
            isinstance(part, pg.ColumnRef)
            and len(part.fields) > 1
            and part.fields[0].string.sval == "excluded"
        ):
            yield part.fields[-1].string.sval


def _is_moving(part: Any, names: Container[str]) -> bool:
    if isinstance(part, pg.FuncCall):
        return part.funcname[-1].string.sval in names
    return isinstance(part, pg.SQLValueFunction | pg.SetToDefault)


def _varies(value: Any, names: Container[str], column: Column) -> bool:
    is_time = column.type_name.startswith(_TIMES)
    if not is_time and value.WhichOneof("node") == "a_const":
        return False
    parts = list(everything(value))
    is_time = is_time or any(isinstance(part, pg.TypeCast) for part in parts)
    return any(
        _is_moving(part, names) or (is_time and isinstance(part, pg.A_Const) and _says_now(part.sval.sval))
        for part in parts
    )


def _says_now(text: str) -> bool:
    return any(word in _CLOCK for word in text.lower().split())
