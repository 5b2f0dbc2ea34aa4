"""
Casts and types: what runs when a value changes its type.

Most casts of users' types are text in and text out; those that a function carries out, and domains with
checks, are calls like any other. An implicit or assignment cast leaves no trace in the tree: it may run
wherever a value of its types is at hand.
"""

from sqlguard.catalog import Column, Type
from sqlguard.statement.model import Call, Session
from sqlguard.statement.text import parse
from sqlguard.statement.walk import Walk


def note(walk: Walk) -> None:
    """Add the calls of casts, and of operators on users' types, that the statement can set off."""
    named: set[tuple[str | None, str]] = walk.facts.get("types", set())
    if not walk.index.casts and not walk.operators and not named:
        return
    types = [t for schema, name in named for t in _meant(walk, schema, name)]
    for kind in types:
        _domain(walk, kind)
    if not walk.index.casts and not walk.operators:
        return
    at_hand = _types_at_hand(walk, types)
    known = walk.catalog.types
    for operator in walk.operators:
        if any(oid in at_hand for oid in (operator.left, operator.right) if oid in known):
            walk.call(Call(operator.schema, operator.name, 2, "operator", (operator.function,)))
    for cast in walk.index.casts:
        theirs = [oid for oid in (cast.source, cast.target) if oid in known]
        if not theirs or any(oid in at_hand for oid in theirs):
            walk.call(Call(None, "cast", 1, "cast", (cast.function,)))


def _types_at_hand(walk: Walk, named: list[Type]) -> set[int]:
    """Return the users' types of which the statement can have a value: all of them, once a row hides some."""
    known = walk.catalog.types
    found = {t.oid for t in named}
    found |= {c.type_oid for e in walk.entries if e.table is not None for c in e.table.columns}
    found |= {c.type_oid for w in walk.writes for c in _columns(walk, w.table.oid)}
    called = (walk.catalog.functions.get(oid) for call in walk.calls for oid in call.candidates)
    found |= {f.return_type for f in called if f is not None}
    open_ = [known[oid] for oid in found if oid in known]
    while open_:
        kind = open_.pop()
        if kind.kind == "c":
            return set(known)
        for oid in (kind.element, kind.base):
            if oid in known and oid not in found:
                found.add(oid)
                open_.append(known[oid])
    return found


def _columns(walk: Walk, oid: int) -> tuple[Column, ...]:
    table = walk.catalog.tables.get(oid)
    return table.columns if table is not None else ()


def _meant(walk: Walk, schema: str | None, name: str) -> tuple[Type, ...]:
    some = walk.index.type_named(schema, name)
    if schema is None:
        some = tuple(t for t in some if t.schema in walk.session.search_path)
    return some


def _domain(walk: Walk, kind: Type) -> None:
    """Walk the checks of a domain as if they stood in the statement."""
    for check in kind.checks:
        inner = Walk(walk.catalog, Session(search_path=()))
        inner.node(parse(f"SELECT {_expression(check)}")[0].tree)
        for call in inner.calls:
            walk.call(call)
    below = walk.catalog.types.get(kind.base)
    if kind.kind == "d" and below is not None:
        _domain(walk, below)


def _expression(check: str) -> str:
    """`CHECK ((value > 0))` as pg_get_constraintdef prints it -> the expression."""
    text = check.strip()
    if text.upper().startswith("CHECK"):
        text = text[5:].strip()
    for ending in ("NOT VALID", "NO INHERIT"):
        text = text.removesuffix(ending).strip()
    return text
