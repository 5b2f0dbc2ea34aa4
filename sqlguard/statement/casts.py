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
    """Add the calls of casts that the statement can set off."""
    named: set[tuple[str | None, str]] = walk.facts.get("types", set())
    if not walk.index.casts and not named:
        return
    types = [t for schema, name in named for t in _meant(walk, schema, name)]
    for kind in types:
        _domain(walk, kind)
    if not walk.index.casts:
        return
    oids = {t.oid for t in types} | {t.element for t in types if t.element}
    oids |= {c.type_oid for e in walk.entries if e.table is not None for c in e.table.columns}
    oids |= {c.type_oid for w in walk.writes for c in _columns(walk, w.table.oid)}
    for cast in walk.index.casts:
        theirs = [oid for oid in (cast.source, cast.target) if oid in walk.catalog.types]
        if not theirs or any(oid in oids for oid in theirs):
            walk.call(Call(None, "cast", 1, "cast", (cast.function,)))


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
