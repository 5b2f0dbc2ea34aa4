"""
References to columns and to whole rows: what agents must not see is kept from them, and what they mean is
kept.

A soft table has columns that its statement's author does not know of. So a bare `deleted_at` may suddenly
mean another column than it did, or two: it is qualified with the one it meant. And a whole row would show
them: it becomes a row of the visible columns, under the same name and with the same field names.
"""

from itertools import islice
from typing import Any

from sqlguard.catalog import Table
from sqlguard.errors import NotUnderstood, Refused
from sqlguard.rewrite.scope import HINT, Item, Scope, column_text, seen
from sqlguard.rewrite.source import CLOSE, DOT, OPEN, STAR, quote
from sqlguard.rewrite.work import Work, reads

#: What a marked row has as a new version; of a deleted one PostgreSQL returns the old.
_OF_THE_VERSION = frozenset({"ctid", "xmin", "xmax", "cmin", "cmax"})


def parts(ref: Any) -> tuple[list[str], bool]:
    """Return the names of a ColumnRef and whether it ends in `*`."""
    names = [f.string.sval for f in ref.fields if f.WhichOneof("node") == "string"]
    return names, len(names) < len(ref.fields)


def extent(work: Work, ref: Any) -> tuple[int, int]:
    """Return first and last token of a ColumnRef."""
    first = work.source.at(ref.location)
    last = first
    for _ in range(len(ref.fields) - 1):
        if work.source.kind(last + 1) != DOT:
            raise NotUnderstood("a column's name was not found", rules=("rewrite-not-placed",))
        last += 2
    return first, last


def column(work: Work, scope: Scope, ref: Any) -> None:
    """Deal with a ColumnRef that stands as an expression."""
    names, star = parts(ref)
    if star and not names:
        return
    if not star:
        version_column(scope, names)
    if star or len(names) == 1:
        if not star and _bare(work, scope, ref, names[0]):
            return
        item = whole_row(scope, ref)
        if item is not None:
            first, last = extent(work, ref)
            _replace(work, first, last, row_text(scope, item))
        return
    found = scope.find(*_owner(names))
    if found is not None:
        _check(found[1], names[-1])


def whole_row(scope: Scope, ref: Any) -> Item | None:
    """Return the item with hidden columns whose whole row *ref* is."""
    names, star = parts(ref)
    if not names or (len(names) > 1 and not star):
        return None
    found = scope.find(names[-1], names[-2] if len(names) > 1 else None)
    if found is None or not found[1].hides:
        return None
    item = found[1]
    refuse_new_row(item)
    if not star and any(level.candidates(names[0]) for level in scope.levels()):
        return None
    if not star and _may_be_anything(scope):
        raise Refused(
            f"whether `{names[0]}` is a row or a column can't be told here",
            hint="give the functions in FROM their column names, as in `f() AS f(a, b)`",
            rules=("bookkeeping_column_read",),
        )
    return item


def row_text(scope: Scope, item: Item) -> str:
    """Return a sub-select that gives the row of *item* as the agent knows it, under the same name."""
    name = item.name
    if name is None or name in item.visible or (item.nullable and not item.soft):
        raise Refused(
            "a whole row of that table can't be given here", hint=HINT, rules=("bookkeeping_column_read",)
        )
    level, _ = scope.find(name) or (scope, item)
    fields = ", ".join(column_text(level, item, c) for c in seen(item))
    there = ""
    if item.nullable:
        # A row of nothing but NULLs is not the NULL that an outer join puts for a missing one.
        there = f" WHERE {level.qualifier(item)}.{quote(item.anchor or 'tableoid')} IS NOT NULL"
    # Not executed as it stands: it is spliced into the agent's statement, parsed and proved.
    return f"(SELECT {quote(name)} FROM (SELECT {fields}{there}) AS {quote(name)})"  # noqa: S608


def field_of_row(scope: Scope, indirection: Any) -> bool:
    """Deal with `(row).field`; True if that is what *indirection* is."""
    if indirection.arg.WhichOneof("node") != "column_ref":
        return False
    item = whole_row(scope, indirection.arg.column_ref)
    if item is None or indirection.indirection[0].WhichOneof("node") != "string":
        return False
    _check(item, indirection.indirection[0].string.sval)
    return True


def row_star(work: Work, scope: Scope, indirection: Any) -> tuple[Item, int, int] | None:
    """Return item, first and last token of `(row).*`, None if *indirection* is something else."""
    if indirection.arg.WhichOneof("node") != "column_ref" or len(indirection.indirection) != 1:
        return None
    if indirection.indirection[0].WhichOneof("node") != "a_star":
        return None
    item = whole_row(scope, indirection.arg.column_ref)
    if item is None:
        return None
    source = work.source
    first, last = extent(work, indirection.arg.column_ref)
    while source.kind(first - 1) == OPEN and source.kind(last + 1) == CLOSE:
        first, last = first - 1, last + 1
        if source.kind(last + 1) == DOT and source.kind(last + 2) == STAR:
            return item, first, last + 2
    raise NotUnderstood("a row's columns were not found", rules=("rewrite-not-placed",))


def takes_row(work: Work, scope: Scope, call: Any) -> bool:
    """Say whether *call* is of a function made for the rows that it is given, which then stay whole."""
    names = [n.string.sval for n in call.funcname]
    catalog = work.tables.catalog
    known = catalog.functions_named(names[-2] if len(names) > 1 else None, names[-1])
    taken = {t for f in known for t in f.arg_types}
    for arg in call.args:
        if arg.WhichOneof("node") == "column_ref":
            item = whole_row(scope, arg.column_ref)
            if item is not None and taken & _row_types(work, catalog.tables.get(item.soft)):
                return True
    return False


def version_column(scope: Scope, names: list[str]) -> None:
    """Refuse a system column in RETURNING that would be the marked row's and not the deleted one's."""
    if names[-1] not in _OF_THE_VERSION:
        return
    found = scope.find(*_owner(names)) if len(names) > 1 else None
    of = [found[1]] if found is not None else [i for i in scope.items() if len(names) == 1]
    if any(item.role == "deleted" for item in of):
        raise Refused(
            f"`{names[-1]}` of a deleted row can't be returned",
            hint="leave it out of RETURNING",
            rules=("system_column_of_deleted_row",),
        )


def _bare(work: Work, scope: Scope, ref: Any, name: str) -> bool:
    """Deal with a bare name that a bookkeeping column may have caught; True if nothing is left to do."""
    caught = False
    for depth, level in enumerate(scope.levels(), 1):
        found = level.candidates(name)
        if not found:
            continue
        visible = [(i, c) for i, c in found if not c.hidden]
        caught = caught or len(visible) < len(found)
        if len(visible) > 1 or (visible and not caught):
            return True
        if visible:
            if any(i.open for inner in islice(scope.levels(), depth) for i in inner.items()):
                break
            first, last = extent(work, ref)
            _replace(work, first, last, _qualified(scope, level, visible[0][0], name))
            return True
    if caught:
        raise reads(name)
    return False


def _qualified(scope: Scope, level: Scope, item: Item | None, name: str) -> str:
    """Return *name* with the owner that *level* has for it, if that can be named from *scope*."""
    found = scope.find(item.name) if item is not None and item.name is not None else None
    if item is None or found is None or found[0] is not level:
        raise reads(name)
    return column_text(level, item, name)


def _check(item: Item, name: str) -> None:
    refuse_new_row(item)
    if any(c.hidden and c.name == name for c in item.columns):
        raise reads(name, item.name)


def refuse_new_row(item: Item) -> None:
    """Refuse NEW in RETURNING of a DELETE, where PostgreSQL gives NULLs and an UPDATE would give values."""
    if item.role == "new":
        raise Refused(
            "a deleted row has no new version to return",
            hint="name the columns without NEW",
            rules=("new_row_of_delete",),
        )


def _owner(names: list[str]) -> tuple[str, str | None]:
    return names[-2], names[-3] if len(names) > 2 else None  # noqa: PLR2004 - schema.table.column


def _may_be_anything(scope: Scope) -> bool:
    return any(item.open for level in scope.levels() for item in level.items())


def _row_types(work: Work, table: Table | None) -> set[int]:
    """Return the oids of the row types that rows of *table* can be passed as."""
    if table is None:
        return set()
    found = {t.oid for t in work.tables.catalog.types.values() if t.relation == table.oid}
    for oid in table.parents:
        found |= _row_types(work, work.tables.catalog.tables.get(oid))
    return found


def _replace(work: Work, first: int, last: int, text: str) -> None:
    work.edits.replace(work.source[first].start, work.source[last].end, text)
