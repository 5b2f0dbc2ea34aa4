"""
The walk over one statement: it reads FROM before it looks at expressions, and edits where a soft table
shows.

Each visit returns the columns that a query gives, as the agent knows them, so that the level above knows
what it has in FROM. CTEs are a mapping that is passed down; a Scope is made for each level of FROM.
"""

from collections.abc import Callable, Iterable
from typing import Any

from postgast import pg_query_pb2 as pg

from sqlguard.errors import NotUnderstood
from sqlguard.rewrite import dml, ranges, rows
from sqlguard.rewrite.columns import column, field_of_row, row_star, row_text, takes_row, whole_row
from sqlguard.rewrite.labels import label
from sqlguard.rewrite.scope import Columns, Scope
from sqlguard.rewrite.source import OPEN
from sqlguard.rewrite.stars import everything, star
from sqlguard.rewrite.work import Ctes, Work

#: MaxTupleAttributeNumber: PostgreSQL takes no longer list.
_MOST_COLUMNS = 1664
#: Utility statements with a query inside, and the field that holds it.
CONTAINERS = {
    "explain_stmt": "query",
    "prepare_stmt": "query",
    "declare_cursor_stmt": "query",
    "create_table_as_stmt": "query",
    "view_stmt": "query",
}
#: Nodes without anything in them that could be visited, and the values of fields that are no nodes.
_LEAVES = frozenset({"a_const", "string", "integer", "float", "boolean", "bit_string", "param_ref", "a_star"})
_PLAIN = frozenset({str, bytes, int, float, bool})


def statement(work: Work, node: Any) -> None:
    """Visit a whole statement."""
    kind = node.WhichOneof("node")
    if kind in CONTAINERS:
        statement(work, getattr(getattr(node, kind), CONTAINERS[kind]))
    elif kind == "copy_stmt":
        dml.copy(work, node.copy_stmt)
    elif kind in ("select_stmt", *dml.VISITS):
        query(work, node, {}, None)
    else:
        dml.nothing_deleted(work, node)


def query(work: Work, node: Any, ctes: Ctes, outer: Scope | None) -> Columns:
    """Visit anything that can stand in a CTE."""
    kind = node.WhichOneof("node")
    if kind == "select_stmt":
        return select(work, node.select_stmt, ctes, outer)
    return dml.VISITS[kind](work, getattr(node, kind), ctes)


def with_clause(work: Work, clause: Any, ctes: Ctes, outer: Scope | None) -> Ctes:
    """Visit the CTEs of *clause* and return all that are in sight after it."""
    inside = dict(ctes)
    if clause.recursive:
        # A name may be used before its turn; what it gives is not known then.
        inside |= {c.common_table_expr.ctename: Columns(complete=False) for c in clause.ctes}
    for node in clause.ctes:
        cte = node.common_table_expr
        inside[cte.ctename] = _cte(work, cte, inside, outer, recursive=clause.recursive)
    return inside


def _cte(work: Work, cte: Any, ctes: Ctes, outer: Scope | None, *, recursive: bool) -> Columns:
    names = tuple(n.string.sval for n in cte.aliascolnames)
    body = cte.ctequery.select_stmt
    if recursive and cte.ctequery.HasField("select_stmt") and body.op != pg.SETOP_NONE:
        ctes = with_clause(work, body.with_clause, ctes, outer)
        gives = _renamed(select(work, body.larg, ctes, outer), names)
        select(work, body.rarg, {**ctes, cte.ctename: gives}, outer)
        _ends(work, body, Scope(parent=outer), ctes, gives)
    else:
        gives = _renamed(query(work, cte.ctequery, ctes, outer), names)
    made = (cte.search_clause.search_seq_column, cte.cycle_clause.cycle_mark_column)
    more = tuple(n for n in (*made, cte.cycle_clause.cycle_path_column) if n)
    return Columns(gives.names + more, gives.complete)


def _renamed(gives: Columns, names: tuple[str, ...]) -> Columns:
    return Columns(names + gives.names[len(names) :], gives.complete)


def select(work: Work, node: Any, ctes: Ctes, outer: Scope | None) -> Columns:
    """Visit a SELECT, VALUES, TABLE or a set operation of them."""
    ctes = with_clause(work, node.with_clause, ctes, outer)
    if work.only_deletes:
        return Columns(complete=False)
    scope = Scope(parent=outer)
    if node.op != pg.SETOP_NONE:
        gives = select(work, node.larg, ctes, outer)
        select(work, node.rarg, ctes, outer)
        _ends(work, node, scope, ctes, gives)
        return gives
    if node.values_lists:
        gives = _values(work, node, scope, ctes)
        _ends(work, node, scope, ctes, gives)
        return gives
    ranges.from_clause(work, node.from_clause, ctes, scope)
    gives = _table_command(work, node, scope) or targets(work, node.target_list, scope, ctes)
    expression(work, node.where_clause, scope, ctes)
    for entry in node.group_clause:
        if not _names_output(entry, gives, scope):
            expression(work, entry, scope, ctes)
    for part in (*node.distinct_clause, *node.window_clause):
        if not _is_output(part, gives):
            expression(work, part, scope, ctes)
    expression(work, node.having_clause, scope, ctes)
    _ends(work, node, scope, ctes, gives)
    return gives


def _ends(work: Work, node: Any, scope: Scope, ctes: Ctes, gives: Columns) -> None:
    """Visit ORDER BY, where a bare name means a column of the result first, LIMIT and OFFSET."""
    for entry in node.sort_clause:
        if not _is_output(entry.sort_by.node, gives):
            expression(work, entry.sort_by.node, scope, ctes)
    expression(work, node.limit_count, scope, ctes)
    expression(work, node.limit_offset, scope, ctes)


def _is_output(node: Any, gives: Columns) -> bool:
    fields = list(node.column_ref.fields) if node.WhichOneof("node") == "column_ref" else []
    return len(fields) == 1 and fields[0].string.sval in gives.names


def _names_output(node: Any, gives: Columns, scope: Scope) -> bool:
    """Say whether an entry of GROUP BY is a column of the result: only if no input column is called so."""
    return _is_output(node, gives) and not scope.candidates(node.column_ref.fields[0].string.sval)


def _values(work: Work, node: Any, scope: Scope, ctes: Ctes) -> Columns:
    gives = [entries(work, row.list.items, scope, ctes) for row in node.values_lists]
    width = len(gives[0].names)
    return Columns(tuple(f"column{i + 1}" for i in range(width)), all(g.complete for g in gives))


def _table_command(work: Work, node: Any, scope: Scope) -> Columns | None:
    """Visit `TABLE orders`, which has a star in its tree but not in its text."""
    if len(node.target_list) != 1 or node.target_list[0].res_target.location >= 0:
        return None
    gives, texts = everything(scope)
    if texts is not None:
        index = work.source.at(node.from_clause[0].range_var.location) - 1
        while work.source.kind(index) in (OPEN, pg.ONLY):
            index -= 1
        word = work.source[index]
        work.edits.replace(word.start, word.end, f"SELECT {', '.join(texts)} FROM")
    return gives


def targets(work: Work, nodes: Iterable[Any], scope: Scope, ctes: Ctes) -> Columns:
    """Visit a select list or RETURNING list."""
    names: list[str] = []
    complete = True
    for node in nodes:
        target = node.res_target
        gives = star(work, scope, target.val, target.location)
        if gives is None:
            names.append(label(target))
            expression(work, target.val, scope, ctes)
        else:
            names += gives.names
            complete = complete and gives.complete
            if len(names) > _MOST_COLUMNS:
                # WITH queries that take `*` from each other twice double it each time.
                raise NotUnderstood(
                    f"target lists can have at most {_MOST_COLUMNS} entries",
                    hint="name the columns that are needed in place of *",
                    rules=("text-limits",),
                )
    return Columns(tuple(names), complete)


def entries(work: Work, nodes: Iterable[Any], scope: Scope, ctes: Ctes) -> Columns:
    """Visit a list of expressions in which a star stands for columns: ROW(…) and VALUES."""
    names: list[str] = []
    complete = True
    for node in nodes:
        gives = star(work, scope, node)
        if gives is None:
            names.append("")
            expression(work, node, scope, ctes)
        else:
            names += gives.names
            complete = complete and gives.complete
    return Columns(tuple(names), complete)


def expression(work: Work, node: Any, scope: Scope, ctes: Ctes) -> None:
    """Visit an expression, or any message that holds some."""
    if work.only_deletes:
        return
    kind = node.DESCRIPTOR.name
    if kind == "Node":
        which = node.WhichOneof("node")
        if which is not None and which not in _LEAVES:
            expression(work, getattr(node, which), scope, ctes)
    elif kind == "ColumnRef":
        column(work, scope, node)
    elif kind in _SPECIAL:
        _SPECIAL[kind](work, node, scope, ctes)
    else:
        _children(work, node, scope, ctes)


def _function(work: Work, node: Any, scope: Scope, ctes: Ctes) -> None:
    rows.refuse_call(work, node)
    arguments(work, node, scope, ctes)


def _indirection(work: Work, node: Any, scope: Scope, ctes: Ctes) -> None:
    if field_of_row(scope, node):
        for part in list(node.indirection)[1:]:
            expression(work, part, scope, ctes)
    elif not _row_in_parentheses(work, scope, node):
        _children(work, node, scope, ctes)


def _assignment(work: Work, node: Any, scope: Scope, ctes: Ctes) -> None:
    # The tree repeats the one source for each column.
    if node.colno <= 1:
        _children(work, node, scope, ctes)


def _type_cast(work: Work, node: Any, scope: Scope, ctes: Ctes) -> None:
    rows.refuse_cast(work, node)
    _children(work, node, scope, ctes)


def arguments(work: Work, call: Any, scope: Scope, ctes: Ctes) -> None:
    """Visit what a function is called with; a function of the table's own rows gets them as they are."""
    if not takes_row(work, scope, call):
        _children(work, call, scope, ctes)
        return
    rest = [a for a in call.args if not _is_row(scope, a)]
    for part in (*rest, *call.agg_order, call.agg_filter, call.over):
        expression(work, part, scope, ctes)


def _children(work: Work, node: Any, scope: Scope, ctes: Ctes) -> None:
    for _, value in node.ListFields():
        if type(value) in _PLAIN:
            continue
        if hasattr(value, "DESCRIPTOR"):
            expression(work, value, scope, ctes)
        else:
            for item in value:
                if hasattr(item, "DESCRIPTOR"):
                    expression(work, item, scope, ctes)


def _is_row(scope: Scope, node: Any) -> bool:
    return node.WhichOneof("node") == "column_ref" and whole_row(scope, node.column_ref) is not None


def _row_in_parentheses(work: Work, scope: Scope, node: Any) -> bool:
    """Deal with `(o).*` as one value, as in `row_to_json((o).*)`."""
    found = row_star(work, scope, node)
    if found is None:
        return False
    item, first, last = found
    work.edits.replace(work.source[first].start, work.source[last].end, row_text(scope, item))
    return True


_SPECIAL: dict[str, Callable[[Work, Any, Scope, Ctes], object]] = {
    "A_Indirection": _indirection,
    "FuncCall": _function,
    "MultiAssignRef": _assignment,
    "RowExpr": lambda work, node, scope, ctes: entries(work, node.args, scope, ctes),
    "SelectStmt": lambda work, node, scope, ctes: select(work, node, ctes, scope),
    "TypeCast": _type_cast,
}
