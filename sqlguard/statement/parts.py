"""
What a predicate comes to for the rows of one target, and how AND and OR join it.

    TRUE, FALSE   the same for every row; so is UNDECIDED, which is NULL and chooses no row either
    Const         the same for every row, but the text alone does not tell which
    Values        the rows whose term has one of some values
    Link          the rows that have a partner with the same value in another FROM item
    Opaque        depends on the row in a way that is not followed up

A comparison of a term with itself counts as TRUE although NULLs fail it: nothing is narrowed down by it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from sqlguard.statement.names import Entry
from sqlguard.statement.regions import NULL, Region, intersection, union
from sqlguard.statement.terms import Term


@dataclass(frozen=True, slots=True)
class Always:
    """TRUE, FALSE, or NULL (None)."""

    value: bool | None


TRUE = Always(value=True)
FALSE = Always(value=False)
UNDECIDED = Always(value=None)


@dataclass(frozen=True, slots=True)
class Const:
    """`parameter`: it depends on the client's parameters."""

    parameter: bool = False
    mentions: frozenset[Entry] = frozenset()


@dataclass(frozen=True, slots=True)
class Values:
    """`true` are the values it is true for, `false` those it is false for; for the rest it is NULL."""

    term: Term
    true: Region
    false: Region
    #: It only asks for NULL or not: to choose all that is not NULL is then meant.
    null_test: bool = False

    @property
    def everything(self) -> bool:
        if not self.true.covers(self.term.domain):
            return False
        return not self.term.nullable or self.true.null or not self.null_test

    @property
    def nothing(self) -> bool:
        return not self.true.spans and not (self.true.null and self.term.nullable)


@dataclass(frozen=True, slots=True)
class Link:
    column: str
    entry: Entry
    other: str


@dataclass(frozen=True, slots=True)
class Opaque:
    """`pins` are columns of which it allows one value at most."""

    pins: frozenset[str] = frozenset()
    mentions: frozenset[Entry] = frozenset()


@dataclass(frozen=True, slots=True)
class All:
    """Parts that must all hold; at least two."""

    parts: tuple["Part", ...] = field(default=())


Part = Always | Const | Values | Link | Opaque | All


def simple(part: Values) -> Part:
    if part.everything:
        return TRUE
    return FALSE if part.nothing else part


def both(parts: Iterable[Part]) -> Part:
    """Return the AND of *parts*."""
    values: dict[str, list[Values]] = {}
    others: list[Part] = []
    for part in _flat(parts):
        if part == FALSE:
            return FALSE
        if isinstance(part, Values):
            values.setdefault(part.term.key, []).append(part)
        elif part != TRUE:
            others.append(part)
    for some in values.values():
        part = simple(_joined(some, every=True))
        if part == FALSE:
            return FALSE
        if part != TRUE:
            others.append(part)
    if UNDECIDED in others:
        return UNDECIDED
    if not others:
        return TRUE
    return others[0] if len(others) == 1 else All(tuple(others))


def _flat(parts: Iterable[Part]) -> Iterable[Part]:
    for part in parts:
        if isinstance(part, All):
            yield from _flat(part.parts)
        else:
            yield part


def _joined(some: list[Values], *, every: bool) -> Values:
    """Join what is said about one term: all of it must hold, or one of it; all at once, as there may be thousands."""
    first = some[0]
    if len(some) == 1:
        return first
    true, false = [p.true for p in some], [p.false for p in some]
    null_test = all(p.null_test for p in some)
    if every:
        return Values(first.term, intersection(true), union(false), null_test)
    return Values(first.term, union(true), intersection(false), null_test)


def either(parts: Iterable[Part]) -> Part:
    """Return the OR of *parts*."""
    values: dict[str, list[Values]] = {}
    others: list[Part] = []
    for part in parts:
        if part == TRUE:
            return TRUE
        if isinstance(part, Values):
            values.setdefault(part.term.key, []).append(part)
        elif part != FALSE:
            others.append(part)
    for some in values.values():
        part = simple(_joined(some, every=False))
        if part == TRUE:
            return TRUE
        if part != FALSE:
            others.append(part)
    return _alternatives(others)


def _alternatives(others: list[Part]) -> Part:
    decided = [p for p in others if p != UNDECIDED]
    if not decided:
        return UNDECIDED if others else FALSE
    others = decided
    if len(others) == 1:
        return others[0]
    constants = [p for p in others if isinstance(p, Const)]
    if any(not c.parameter for c in constants):
        # `id = 5 OR <something about no row>`: all rows, once that something is true.
        return constants[0]
    return Opaque(mentions=frozenset().union(*(mentioned(p) for p in others)))


def negated(part: Part) -> Part:
    """Return NOT of a part that is no All (those are negated piece by piece)."""
    match part:
        case Always():
            return UNDECIDED if part.value is None else FALSE if part.value else TRUE
        case Values():
            return simple(Values(part.term, part.false, part.true, part.null_test))
        case Link():
            return Opaque(mentions=frozenset({part.entry}))
        case All():
            return Opaque(mentions=mentioned(part))
        case Opaque():
            return Opaque(mentions=part.mentions)
        case _:
            return part


def mentioned(part: Part) -> frozenset[Entry]:
    """Return the FROM items other than the target that *part* speaks of."""
    match part:
        case Link():
            return frozenset({part.entry})
        case Const() | Opaque():
            return part.mentions
        case All():
            return frozenset().union(*(mentioned(p) for p in part.parts))
        case _:
            return frozenset()


def not_null(term: Term, *, want_null: bool) -> Part:
    """Return IS NULL or IS NOT NULL of a term."""
    everything = Region(NULL.complement().spans)
    true, false = (NULL, everything) if want_null else (everything, NULL)
    return simple(Values(term, true, false, null_test=True))
