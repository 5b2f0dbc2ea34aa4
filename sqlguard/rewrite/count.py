"""
The query that counts what an UPDATE or DELETE of one table would change, without changing anything.

Made on the tree: the statement's table and its WHERE in a SELECT. Where the rows that are changed are not just those
that the WHERE finds (joins, cursors, several writes), or looking twice is not the same as looking once (volatile and
users' functions), there is none.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import postgast
from postgast import pg_query_pb2 as pg

from sqlguard.functions.data import builtins
from sqlguard.rewrite.source import parts
from sqlguard.statement.model import Call, Kind, Statement

_NODES = {Kind.UPDATE: ("update_stmt", "from_clause"), Kind.DELETE: ("delete_stmt", "using_clause")}


@dataclass(frozen=True, slots=True)
class Count:
    """`most` is the cap; `params` are the statement's parameters, from 1 on, that are `$1`, `$2` … of `text`."""

    text: str
    most: int
    table: str
    params: tuple[int, ...] = ()


def counting(statement: Statement, most: int) -> Count | None:
    """Return how to count what *statement* would change, None where that would not be the same."""
    if statement.kind not in _NODES or len(statement.writes) != 1 or statement.writes[0].rule is not None:
        return None
    if not all(map(_is_repeatable, statement.calls)):
        return None
    name, joined = _NODES[statement.kind]
    parsed = postgast.parse(statement.text)
    node = getattr(parsed.stmts[0].stmt, name)
    if getattr(node, joined) or any(isinstance(part, pg.CurrentOfExpr) for part in everything(node)):
        return None
    select = _select(node)
    numbers: dict[int, int] = {}
    for part in everything(select):
        if isinstance(part, pg.ParamRef):
            part.number = numbers.setdefault(part.number, len(numbers) + 1)
    made = pg.ParseResult(version=parsed.version)
    made.stmts.add().stmt.select_stmt.CopyFrom(select)
    return Count(postgast.deparse(made), most, statement.writes[0].table.shown, tuple(numbers))


def _select(node: Any) -> pg.SelectStmt:
    select = pg.SelectStmt(limit_option=pg.LIMIT_OPTION_DEFAULT, op=pg.SETOP_NONE)
    count = select.target_list.add().res_target.val.func_call
    for name in ("pg_catalog", "count"):
        count.funcname.add().string.sval = name
    count.agg_star = True
    select.from_clause.add().range_var.CopyFrom(node.relation)
    for name in ("where_clause", "with_clause"):
        if node.HasField(name):
            getattr(select, name).CopyFrom(getattr(node, name))
    return select


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
