"""
`*`, `t.*` and `(t).*` where they stand for columns: in select lists, RETURNING, ROW(…) and VALUES.
"""

from typing import Any

from sqlguard.errors import NotUnderstood
from sqlguard.rewrite.columns import extent, parts, refuse_new_row, row_star
from sqlguard.rewrite.scope import Columns, Item, Scope, column_text, columns, expand, hides, known, seen
from sqlguard.rewrite.source import CLOSE, OPEN
from sqlguard.rewrite.work import Work


def star(work: Work, scope: Scope, node: Any, outer: int = -1) -> Columns | None:
    """
    Deal with *node* if it is a star in a list of columns and return what it gives, None if it is none.

    *outer* is where the list's entry begins: before the node if it stands in parentheses of its own.
    """
    kind = node.WhichOneof("node")
    if kind == "a_indirection":
        found = row_star(work, scope, node.a_indirection)
        if found is None:
            return None
        item, first, last = found
        level = _level(scope, item)
        _put(work, first, last, [column_text(level, item, c) for c in seen(item)])
        return Columns(item.visible)
    if kind != "column_ref" or not parts(node.column_ref)[1]:
        return None
    names = parts(node.column_ref)[0]
    if not names:
        gives, texts = everything(scope)
        if texts is not None:
            _put(work, *extent(work, node.column_ref), texts)
        return gives
    found_item = scope.find(names[-1], names[-2] if len(names) > 1 else None)
    if found_item is None:
        return Columns(complete=False)
    level, item = found_item
    refuse_new_row(item)
    if item.hides:
        _put(work, *_outer(work, node.column_ref, outer), [column_text(level, item, c) for c in seen(item)])
    return Columns(item.visible, item.known)


def everything(scope: Scope) -> tuple[Columns, list[str] | None]:
    """Return what a bare `*` gives in *scope*, and the text it has to become, None where it may stay."""
    elements = [e for e in scope.elements if not isinstance(e, Item) or e.bare]
    names = tuple(c.name for e in elements for c in columns(e) if not c.hidden)
    gives = Columns(names, all(known(e) for e in elements))
    if not any(hides(e) for e in elements):
        return gives, None
    return gives, [text for e in elements for text in expand(scope, e)]


def _outer(work: Work, ref: Any, outer: int) -> tuple[int, int]:
    """Widen the place of `(t.*)` to its parentheses, in which a list would be one row."""
    source = work.source
    first, last = extent(work, ref)
    while 0 <= outer < source[first].start:
        if source.kind(first - 1) != OPEN or source.kind(last + 1) != CLOSE:
            raise NotUnderstood("a row's columns were not found", rules=("rewrite-not-placed",))
        first, last = first - 1, last + 1
    return first, last


def _level(scope: Scope, item: Item) -> Scope:
    return next((level for level in scope.levels() if any(i is item for i in level.items())), scope)


def _put(work: Work, first: int, last: int, texts: list[str]) -> None:
    source = work.source
    work.edits.replace(source[first].start, source[last].end, ", ".join(texts))
