"""
NATURAL JOIN compares all columns that both sides have, so it would compare bookkeeping columns too.

    a NATURAL LEFT JOIN b   becomes   a LEFT JOIN b USING (id)

with the columns that the sides had in common before, or a join without a condition where they had none.
"""

from collections.abc import Iterator
from typing import Any

from postgast import pg_query_pb2 as pg

from sqlguard.errors import NotUnderstood, Refused
from sqlguard.rewrite.scope import Element, columns, hides, items, known
from sqlguard.rewrite.source import COMMA, Source, quote
from sqlguard.rewrite.work import Work

_NEXT = frozenset(
    {
        *(COMMA, pg.JOIN, pg.INNER_P, pg.LEFT, pg.RIGHT, pg.FULL, pg.CROSS, pg.NATURAL, pg.ON, pg.USING),
        *(pg.WHERE, pg.GROUP_P, pg.HAVING, pg.WINDOW, pg.UNION, pg.INTERSECT, pg.EXCEPT, pg.ORDER),
        *(pg.LIMIT, pg.OFFSET, pg.FETCH, pg.FOR, pg.RETURNING, pg.WITH),
    }
)
_SIDES = frozenset({pg.JOIN, pg.INNER_P, pg.LEFT, pg.RIGHT, pg.FULL})


def merged(work: Work, join: Any, left: Element, right: Element) -> tuple[str, ...]:
    """Return the columns that a NATURAL *join* compares, having written them down where that is needed."""
    ours, theirs = columns(left), columns(right)
    seen = {c.name for c in theirs if not c.hidden}
    common = tuple(c.name for c in ours if not c.hidden and c.name in seen)
    if not hides(left) and not hides(right):
        return common
    if not known(left) or not known(right) or any(i.open for e in (left, right) for i in items(e)):
        raise Refused(
            "which columns NATURAL JOIN compares can't be told here",
            hint="write JOIN … USING with the columns",
            rules=("bookkeeping_column_read",),
        )
    every = {c.name for c in theirs}
    if {c.name for c in ours if c.name in every} != set(common):
        _write_down(work, join, common)
    return common


def _write_down(work: Work, join: Any, common: tuple[str, ...]) -> None:
    source, edits = work.source, work.edits
    word = _place(source, join)
    after = word + 1
    while source.kind(after) != pg.JOIN:
        after += 1
    inner = join.jointype == pg.JOIN_INNER
    cross = inner and not common
    if cross:
        edits.replace(source[word].start, source[word].end, "CROSS")
        if source.kind(word + 1) == pg.INNER_P:
            edits.replace(*source.word(word + 1), "")
        return
    edits.replace(*source.word(word), "")
    condition = f"USING ({', '.join(quote(c) for c in common)})" if common else "ON true"
    behind = source[_end(source, after + 1) - 1].end
    edits.insert(behind, f" {condition}{source.gap(behind)}")


def _place(source: Source, join: Any) -> int:
    """Return the index of the word NATURAL, which stands between the places of one arm and of the other."""
    low, high = max(places(join.larg), default=-1), min(places(join.rarg), default=-1)
    found = [
        i
        for i, token in enumerate(source.tokens)
        if token.kind == pg.NATURAL
        and low < token.start < high
        and source.kind(i + 1) in _SIDES
        and not source.is_name(i)
    ]
    if low < 0 or len(found) != 1:
        raise NotUnderstood("a NATURAL JOIN was not found", rules=("rewrite-not-placed",))
    return found[0]


def _end(source: Source, start: int) -> int:
    """Return the index behind the FROM item that starts at *start*."""
    for index in source.level(start):
        ordinality = source.kind(index) == pg.WITH and source.kind(index + 1) == pg.ORDINALITY
        if index > start and source.kind(index) in _NEXT and not source.is_name(index) and not ordinality:
            return index
    return source.stop(start)


def places(node: Any) -> Iterator[int]:
    """Yield every place in the text that *node* and what it contains know of."""
    for descriptor, value in node.ListFields():
        if descriptor.name == "location":
            if value >= 0:
                yield value
        elif hasattr(value, "DESCRIPTOR"):
            yield from places(value)
        elif not isinstance(value, str | bytes | int | float | bool):
            for item in value:
                yield from places(item)
