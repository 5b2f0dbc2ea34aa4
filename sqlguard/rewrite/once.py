"""
Sub-selects with LIMIT or row locks are executed once, before the first row is marked.

    id IN (SELECT id FROM jobs ORDER BY id LIMIT 2 FOR UPDATE SKIP LOCKED)
    id IN (WITH sqlguard_once AS MATERIALIZED (SELECT …) SELECT * FROM sqlguard_once WHERE <all of it was read>)

PostgreSQL may execute such a sub-select again for every row of the table, and then it passes over the rows that the
statement has changed by now: DELETE … LIMIT 2 goes on to the last row. Whether it does is the planner's choice, which
depends on how many rows it expects. Of a soft table with few live rows it expects fewer than of the plain one, so a
statement that deletes two rows there would delete all of them here. What is written here leaves no choice.

Scalar sub-selects, ARRAY(…), EXISTS(…) and WITH queries that lock are executed once in any case.
"""

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any

from postgast import pg_query_pb2 as pg

from sqlguard.errors import NotUnderstood
from sqlguard.rewrite.edits import Edits
from sqlguard.rewrite.placeless import without_places
from sqlguard.rewrite.source import Source, parse, parts

_NAME = "sqlguard_once"
BEFORE = f"WITH {_NAME} AS MATERIALIZED ("
#: Counting reads the last row before the first one is given; PostgreSQL would read them one by one.
_ALL_READ = f"(SELECT pg_catalog.count(*) FROM {_NAME}) IS NOT NULL"  # noqa: S608 - constants of ours
BEHIND = f") SELECT * FROM {_NAME} WHERE {_ALL_READ}"  # noqa: S608
_WORDS = frozenset({pg.LIMIT, pg.OFFSET, pg.FETCH, pg.FOR})


def keep(source: Source, edits: Edits, statement: Any) -> None:
    """Write every sub-select of *statement*, some rows of which are marked, so that it is executed once."""
    if _WORDS.isdisjoint(token.kind for token in source.tokens):
        return
    for select in _changing(statement, locked=False):
        if next(_places(select), None) is None:
            continue  # `SELECT LIMIT 1` reads nothing
        first, last = _parentheses(source, select)
        edits.insert(source[first].end, BEFORE)
        edits.insert(source[last].start, BEHIND)


def kept(node: Any) -> Any | None:
    """Return what *node*, a tree without places, executes once; None where it is written in another way."""
    select = node.select_stmt
    if len(select.with_clause.ctes) != 1:
        return None
    frame = type(node)()
    frame.CopyFrom(_frame())
    frame.select_stmt.with_clause.ctes[0].common_table_expr.ctequery.CopyFrom(_inside(select))
    return _inside(select) if frame == node else None


def _inside(select: Any) -> Any:
    return select.with_clause.ctes[0].common_table_expr.ctequery


@cache
def _frame() -> Any:
    return without_places(parse(f"{BEFORE}SELECT{BEHIND}"))


def _changing(node: Any, *, locked: bool) -> Iterator[Any]:
    """
    Yield the sub-selects below *node* that may be executed more than once with more than one result.

    A SELECT … FOR UPDATE locks what the sub-selects in its FROM read, too, but not what WITH queries read: those
    stay as they are.
    """
    kind = node.DESCRIPTOR.name
    if kind == "SubLink" and node.sub_link_type in (pg.ANY_SUBLINK, pg.ALL_SUBLINK):
        if _changes(node.subselect):
            yield node.subselect
    elif kind == "RangeSubselect" and not locked and _changes(node.subquery):
        yield node.subquery
    locked = locked or (kind == "SelectStmt" and bool(node.locking_clause))
    for part in parts(node):
        yield from _changing(part, locked=locked)


def _changes(select: Any) -> bool:
    own = select.select_stmt
    return own.HasField("limit_count") or own.HasField("limit_offset") or _locks(select)


def _locks(node: Any) -> bool:
    return node.DESCRIPTOR.name == "LockingClause" or any(map(_locks, parts(node)))


def _parentheses(source: Source, select: Any) -> tuple[int, int]:
    """Return the tokens around *select*: the innermost parentheses with just this between them."""
    wanted = without_places(select)
    for first in source.around(source.at(min(_places(select)))):
        last = source.close(first)
        between = source.bytes[source[first].end : source[last].start].decode()
        with suppress(NotUnderstood):
            if without_places(parse(between)) == wanted:
                return first, last
    raise NotUnderstood("a sub-select was not found in the text", rules=("rewrite-not-placed",))


def _places(node: Any) -> Iterator[int]:
    """Yield where the parts of *node* stand; a sub-select is never at the start of a text."""
    if getattr(node, "location", 0) > 0:
        yield node.location
    for part in parts(node):
        yield from _places(part)
