"""
The query that counts what a write would change, without changing anything.

Made on the tree: the rows of the statement's table that its WHERE and its joins find, or the rows of its SELECT, are
put into a SELECT. Where looking twice is not the same as looking once (volatile and users' functions), or what is found
is not what is changed (cursors, several writes, ON CONFLICT, triggers that may leave rows out), there is none. Of a
MERGE those are counted that it matches and acts upon: what it inserts comes on top.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import postgast
from postgast import pg_query_pb2 as pg

from sqlguard.catalog import Catalog
from sqlguard.functions.data import builtins
from sqlguard.rewrite.source import parts
from sqlguard.statement.model import Call, Kind, Statement

#: What is counted is grafted into these.
_ROWS = "SELECT pg_catalog.count(*) FROM x"
_OF_QUERY = "SELECT pg_catalog.count(*) FROM (SELECT) AS sg_rows"
_EXISTS = "SELECT WHERE EXISTS (SELECT FROM x)"
_MATCHED = "SELECT pg_catalog.count(*) FROM x JOIN x ON true WHERE CASE WHEN true THEN true ELSE false END"
_ACTS = (pg.CMD_UPDATE, pg.CMD_DELETE)


@dataclass(frozen=True, slots=True)
class Count:
    """`most` is the cap; `params` are the statement's parameters, from 1 on, that are `$1`, `$2` … of `text`."""

    text: str
    most: int
    table: str
    params: tuple[int, ...] = ()


def counting(statement: Statement, most: int, catalog: Catalog) -> Count | None:
    """Return how to count what *statement* would change, None where that would not be the same."""
    tables = {write.table.oid for write in statement.writes}
    if len(tables) != 1 or (len(statement.writes) != 1 and statement.kind is not Kind.MERGE):
        return None
    if any(write.rule is not None for write in statement.writes) or statement.locks_rows:
        return None
    if _may_leave_out(statement, catalog) or not all(map(_is_repeatable, statement.calls)):
        return None
    parsed = postgast.parse(statement.text)
    select = _counted(statement.kind, parsed.stmts[0].stmt)
    if select is None or any(isinstance(part, pg.CurrentOfExpr) for part in everything(select)):
        return None
    numbers: dict[int, int] = {}
    for part in everything(select):
        if isinstance(part, pg.ParamRef):
            part.number = numbers.setdefault(part.number, len(numbers) + 1)
    made = pg.ParseResult(version=parsed.version)
    made.stmts.add().stmt.select_stmt.CopyFrom(select)
    return Count(postgast.deparse(made), most, statement.writes[0].table.shown, tuple(numbers))


def _counted(kind: Kind, stmt: Any) -> pg.SelectStmt | None:
    match kind:
        case Kind.UPDATE:
            return _found(stmt.update_stmt, stmt.update_stmt.from_clause)
        case Kind.DELETE:
            return _found(stmt.delete_stmt, stmt.delete_stmt.using_clause)
        case Kind.INSERT:
            return _selected(stmt.insert_stmt)
        case Kind.MERGE:
            return _matched(stmt.merge_stmt)
    return None


def _select(template: str, node: Any) -> pg.SelectStmt:
    select: pg.SelectStmt = postgast.parse(template).stmts[0].stmt.select_stmt
    if node.HasField("with_clause"):
        select.with_clause.CopyFrom(node.with_clause)
    return select


def _found(node: Any, joined: Any) -> pg.SelectStmt:
    """Rows of one table; with a join each of them counts once, however many rows it meets."""
    select = _select(_ROWS, node)
    select.from_clause[0].range_var.CopyFrom(node.relation)
    inner = select
    if joined:
        select.where_clause.CopyFrom(postgast.parse(_EXISTS).stmts[0].stmt.select_stmt.where_clause)
        inner = select.where_clause.sub_link.subselect.select_stmt
        del inner.from_clause[:]
        inner.from_clause.extend(joined)
    if node.HasField("where_clause"):
        inner.where_clause.CopyFrom(node.where_clause)
    return select


def _selected(node: Any) -> pg.SelectStmt | None:
    """Rows of a SELECT; those of a VALUES can be counted by whoever reads it, and DEFAULT VALUES is one."""
    if node.HasField("on_conflict_clause") or not node.HasField("select_stmt"):
        return None
    if node.select_stmt.select_stmt.values_lists:
        return None
    select = _select(_OF_QUERY, node)
    select.from_clause[0].range_subselect.subquery.CopyFrom(node.select_stmt)
    return select


def _matched(node: Any) -> pg.SelectStmt | None:
    """Pairs of rows upon which the first clause whose condition holds acts."""
    clauses = [c.merge_when_clause for c in node.merge_when_clauses]
    clauses = [c for c in clauses if c.match_kind == pg.MERGE_WHEN_MATCHED]
    if not any(clause.command_type in _ACTS for clause in clauses):
        return None
    select = _select(_MATCHED, node)
    join, case = select.from_clause[0].join_expr, select.where_clause.case_expr
    join.larg.range_var.CopyFrom(node.relation)
    join.rarg.CopyFrom(node.source_relation)
    join.quals.CopyFrom(node.join_condition)
    when = case.args.pop()
    for clause in clauses:
        made = case.args.add()
        made.CopyFrom(when)
        if clause.HasField("condition"):
            made.case_when.expr.CopyFrom(clause.condition)
        made.case_when.result.a_const.boolval.boolval = clause.command_type in _ACTS
    return select


def _may_leave_out(statement: Statement, catalog: Catalog) -> bool:
    """Whether a trigger of the users' may keep rows from being changed."""
    events = {write.op for write in statement.writes}
    table = catalog.tables.get(statement.writes[0].table.oid)
    return table is not None and any(
        trigger.for_each_row and trigger.timing != "AFTER" and not trigger.ours and events & trigger.events
        for one in (table, *catalog.descendants(table.oid))
        for trigger in one.triggers
    )


def _is_repeatable(call: Call) -> bool:
    if call.candidates:
        return False
    found = builtins().get((call.schema or "pg_catalog", call.name), ())
    return all(entry.volatility != "v" for entry in found)


def everything(message: Any) -> Iterator[Any]:
    """Yield *message* and all messages in it."""
    yield message
    for part in parts(message):
        yield from everything(part)
