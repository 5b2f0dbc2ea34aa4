"""
Casts and types: what runs when a value changes its type.

Most casts of users' types are text in and text out; those that a function carries out, and domains with
checks, are calls like any other. An implicit or assignment cast leaves no trace in the tree: it may run
wherever a value of its types is at hand.
"""

from collections.abc import Iterator

from sqlguard.catalog import Column, Function, Type
from sqlguard.statement.model import Call, Session
from sqlguard.statement.names import Entry
from sqlguard.statement.text import parse
from sqlguard.statement.walk import Walk

#: Context of a cast that PostgreSQL takes by itself.
_IMPLICIT = "i"


def note(walk: Walk) -> None:
    """Add the calls of casts, domains' checks, and operators on users' types, that the statement can set off."""
    index = walk.index
    if not index.casts and not walk.operators and not index.checked:
        return
    types = {*named(walk), *walk.session.parameters}
    if index.checked:
        for oid in _made(walk, types):
            for call in _input(walk, oid):
                walk.call(call)
    if not index.casts and not walk.operators:
        return
    known = walk.catalog.types
    at_hand = _types_at_hand(walk, types) | {c.target for c in walk.catalog.casts if c.context == _IMPLICIT}
    for operator in walk.operators:
        if any(oid in at_hand for oid in (operator.left, operator.right) if oid in known):
            walk.call(Call(operator.schema, operator.name, 2, "operator", (operator.function,)))
    at_hand = _types_at_hand(walk, types)
    for cast in index.casts:
        theirs = [oid for oid in (cast.source, cast.target) if oid in known]
        if not theirs or any(oid in at_hand for oid in theirs):
            walk.call(Call(None, "cast", 1, "cast", (cast.function,)))


def named(walk: Walk) -> tuple[int, ...]:
    """Return the users' types that the statement names."""
    return tuple(t.oid for schema, name in walk.facts.get("types", ()) for t in _meant(walk, schema, name))


def _made(walk: Walk, given: set[int]) -> set[int]:
    """
    Return the users' types of which the statement may make a value.

    Those it names; what functions take and give; and what a constant becomes that meets a column: an array, a range
    or a row of a domain, but no plain domain, unless an array is made of it or a function takes any type.
    """
    known = walk.catalog.types
    found = given | {oid for f in _called(walk) for oid in (*f.types, *f.arg_types, f.return_type)}
    for column in (c for entry in walk.entries for c in _read(entry)):
        kind = known.get(column.type_oid)
        if kind is not None and (kind.kind != "d" or "arrays" in walk.facts):
            found.add(kind.oid)
    return found & known.keys()


def _input(walk: Walk, oid: int) -> tuple[Call, ...]:
    """Return what making a value of a type may call: the checks of the domains that it is, or is made of."""
    known = walk.index.expansions
    key = ("type", oid)
    kind = walk.catalog.types.get(oid)
    if kind is None:
        return ()
    if key not in known:
        # A type that contains itself has nothing to add.
        known[key] = ()
        calls = dict.fromkeys(_checked(walk, kind))
        for part in (kind.base, kind.element, *kind.parts):
            calls.update(dict.fromkeys(_input(walk, part)))
        known[key] = tuple(calls)
    return known[key]  # type: ignore[no-any-return]


def _checked(walk: Walk, kind: Type) -> Iterator[Call]:
    """Walk the checks of a domain as if they stood in the statement."""
    for check in kind.checks:
        inner = Walk(walk.catalog, Session(search_path=()))
        inner.node(parse(f"SELECT {_expression(check)}")[0].tree)
        note(inner)
        yield from inner.calls


def _called(walk: Walk) -> list[Function]:
    functions = walk.catalog.functions
    return [functions[oid] for call in walk.calls for oid in call.candidates if oid in functions]


def _types_at_hand(walk: Walk, given: set[int]) -> set[int]:
    """Return the users' types of which the statement can have a value, parts of others included."""
    known = walk.catalog.types
    found = set(given)
    found |= {c.type_oid for entry in walk.entries for c in _read(entry)}
    found |= {c.type_oid for w in walk.writes for c in _columns(walk, w.table.oid)}
    # What a function takes an argument may be cast to without a word.
    found |= {oid for f in _called(walk) for oid in (*f.arg_types, f.return_type)}
    open_ = [known[oid] for oid in found if oid in known]
    while open_:
        kind = open_.pop()
        for oid in (kind.element, kind.base, *kind.parts):
            if oid in known and oid not in found:
                found.add(oid)
                open_.append(known[oid])
    return found


def _read(entry: Entry) -> Iterator[Column]:
    """Yield the columns of a table that the statement reads."""
    if entry.table is not None:
        yield from (c for c in entry.table.columns if entry.star or c.name in entry.used)


def _columns(walk: Walk, oid: int) -> tuple[Column, ...]:
    table = walk.catalog.tables.get(oid)
    return table.columns if table is not None else ()


def _meant(walk: Walk, schema: str | None, name: str) -> tuple[Type, ...]:
    some = walk.index.type_named(schema, name)
    if schema is None:
        some = tuple(t for t in some if t.schema in walk.session.search_path)
    return some


def _expression(check: str) -> str:
    """`CHECK ((value > 0))` as pg_get_constraintdef prints it -> the expression."""
    text = check.strip()
    if text.upper().startswith("CHECK"):
        text = text[5:].strip()
    for ending in ("NOT VALID", "NO INHERIT"):
        text = text.removesuffix(ending).strip()
    return text
