"""
Folding comparisons: of a term with constants, with itself, with another table's columns; IN, BETWEEN, rows.
"""

from typing import TYPE_CHECKING, Any

from sqlguard.statement.names import Entry
from sqlguard.statement.parts import (
    FALSE,
    TRUE,
    UNDECIDED,
    Const,
    Link,
    Opaque,
    Part,
    Values,
    both,
    either,
    negated,
    not_null,
    simple,
)
from sqlguard.statement.regions import Region, compared, of_values
from sqlguard.statement.terms import UNKNOWN, Term, Terms, fit, key, same, value_of

if TYPE_CHECKING:
    from sqlguard.statement.walk import Body, Walk

#: Comparison operators, and what each becomes when its sides are swapped.
MIRROR = {"=": "=", "<>": "<>", "<": ">", ">": "<", "<=": ">=", ">=": "<="}
_OPPOSITE = {"=": "<>", "<>": "=", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
_REFLEXIVE = frozenset({"=", "<=", ">="})


class Comparisons:
    """Folds comparisons for the rows of one target."""

    def __init__(self, walk: "Walk", target: Entry) -> None:
        self.walk = walk
        self.target = target
        self.terms = Terms(walk.owners, target)

    def same_for_all(self, *nodes: "Body") -> Const:
        return Const(any(_parameter(n) for n in nodes), self.others(*nodes))

    def opaque(self, *nodes: "Body", pins: frozenset[str] = frozenset()) -> Opaque:
        return Opaque(pins, self.others(*nodes))

    def others(self, *nodes: "Body") -> frozenset[Entry]:
        return frozenset(e for n in nodes for e in self.terms.mentions(n) if e is not self.target)

    def compare(  # noqa: C901, PLR0911  one return per pair of sides
        self, operator: str, left: "Body", right: "Body"
    ) -> Part:
        """Fold `left <operator> right`."""
        if "RowExpr" in left and "RowExpr" in right:
            return self._rows(operator, left["RowExpr"]["args"], right["RowExpr"]["args"])
        mine, theirs = self.terms.term(left), self.terms.term(right)
        if mine is None and theirs is None:
            return self._constants(operator, left, right)
        if mine is not None and theirs is not None:
            if mine.key == theirs.key:
                return self._itself(operator, mine, theirs)
            return self.opaque(left, right)
        if mine is None:
            operator, mine, right = MIRROR[operator], theirs, left
        if mine is None:
            return self.opaque(left, right)
        if mine.column == "tableoid":
            # The same for every row but those of partitions and children.
            table = self.target.table
            return self.opaque(left, right) if table is None or table.children else TRUE
        value = fit(value_of(right), mine.kind)
        if value is None:
            return UNDECIDED
        if value is not UNKNOWN:
            return self._valued(operator, mine, value, left, right)
        if mine.kind == "time":
            return self._endless(operator, mine, value_of(right)) or self.opaque(left, right)
        return self._joined(operator, mine, right)

    def _valued(self, operator: str, term: Term, value: Any, *nodes: "Body") -> Part:
        try:
            value = value - term.offset if term.offset else value
            true = compared(operator, value)
            false = compared(_OPPOSITE[operator], value)
            return simple(Values(plainly(term), true, false))
        except TypeError:
            return self.opaque(*nodes)

    def _endless(self, operator: str, term: Term, value: Any) -> Part | None:
        """`ts > '-infinity'` and `ts <= 'infinity'` are true for all."""
        ends = {"-infinity": (">", ">="), "infinity": ("<", "<=")}
        if not isinstance(value, str) or operator not in ends.get(value.strip().lower(), ()):
            return None
        return TRUE if term.kind == "time" else None

    def _joined(self, operator: str, term: Term, other: "Body") -> Part:
        """Compare a term with what is no constant: a parameter, a sub-select, another table's column."""
        inner = other.get("ColumnRef")
        entry = self.walk.owners.get(id(inner)) if inner is not None else None
        if operator == "=" and term.column is not None and not term.offset:
            if entry is not None and inner is not None and "String" in inner["fields"][-1]:
                return Link(term.column, entry, inner["fields"][-1]["String"]["sval"])
            if not any(e in self.walk.level.entries for e in self.others(other)):
                # One value for all rows: a parameter, or a sub-select about other tables.
                return Opaque(frozenset({term.column}))
        return self.opaque(other)

    def _itself(self, operator: str, left: Term, right: Term) -> Part:
        if left.offset == right.offset:
            return TRUE if operator in _REFLEXIVE else FALSE
        less = left.offset < right.offset
        return TRUE if operator in (("<", "<=", "<>") if less else (">", ">=", "<>")) else FALSE

    def _constants(self, operator: str, left: "Body", right: "Body") -> Part:
        a, b = value_of(left), value_of(right)
        if a is None or b is None:
            return UNDECIDED
        if a is UNKNOWN or b is UNKNOWN:
            return self.same_for_all(left, right)
        equal = same(a, b)
        if equal is None or (
            not equal and operator not in ("=", "<>") and isinstance(a, str) and isinstance(b, str)
        ):
            return Const()
        try:
            true = {"=": equal, "<>": not equal, "<": a < b, ">": a > b, "<=": a <= b, ">=": a >= b}[operator]
        except TypeError:
            return Const() if operator not in ("=", "<>") else (TRUE if (operator == "=") is equal else FALSE)
        return TRUE if true else FALSE

    def _rows(self, operator: str, left: list["Body"], right: list["Body"]) -> Part:
        if len(left) == len(right) and operator in ("=", "<>"):
            pairs = [self.compare("=", a, b) for a, b in zip(left, right, strict=True)]
            return both(pairs) if operator == "=" else either(negated(p) for p in pairs)
        if all(self.terms.term(n) is None for n in (*left, *right)):
            return self.same_for_all(*left, *right)
        if operator in ("<=", ">=") and key(left, self.walk.owners) == key(right, self.walk.owners):
            return TRUE
        return self.opaque(*left, *right)

    def member(self, operator: str, left: "Body", items: list["Body"]) -> Part:
        term = self.terms.term(left)
        no = operator == "<>"
        if term is not None and "RowExpr" not in left:
            values = [fit(value_of(i), term.kind) for i in items]
            if UNKNOWN not in values and term.column != "tableoid":
                return self._listed(term, values, no=no)
        parts = [self.compare("=", left, i) for i in items]
        if no:
            return both(negated(p) for p in parts)
        found = either(parts)
        if isinstance(found, Opaque) and term is not None and term.column and not self.others(left, *items):
            # A list of parameters: as many values as it has.
            return Opaque(frozenset({term.column})) if not term.offset else found
        return found

    def _listed(self, term: Term, values: list[Any], *, no: bool) -> Part:
        try:
            known = of_values(v - term.offset if term.offset else v for v in values if v is not None)
        except TypeError:
            return Opaque()
        others = Region(known.complement().spans)
        nothing = Region() if None in values else others
        true, false = (nothing, known) if no else (known, nothing)
        return simple(Values(plainly(term), true, false))

    def distinct(self, left: "Body", right: "Body", *, no: bool) -> Part:
        mine, theirs = self.terms.term(left), self.terms.term(right)
        if (
            mine is not None
            and theirs is not None
            and mine.key == theirs.key
            and mine.offset == theirs.offset
        ):
            return TRUE if no else FALSE
        term, other = (mine, right) if mine is not None else (theirs, left)
        if term is None:
            return self.same_for_all(left, right)
        value = fit(value_of(other), term.kind)
        if value is None:
            return not_null(term, want_null=no)
        if value is UNKNOWN or mine is not None is not (theirs is None):
            return self.opaque(left, right)
        equal = of_values((value - term.offset if term.offset else value,))
        rest = equal.complement()
        return simple(Values(plainly(term), equal if no else rest, rest if no else equal))

    def between(self, kind: str, left: "Body", ends: list["Body"]) -> Part:
        def inside(low: "Body", high: "Body") -> list[Part]:
            return [self.compare(">=", left, low), self.compare("<=", left, high)]

        def outside(low: "Body", high: "Body") -> list[Part]:
            return [self.compare("<", left, low), self.compare(">", left, high)]

        low, high = ends
        if kind == "AEXPR_BETWEEN":
            return both(inside(low, high))
        if kind == "AEXPR_NOT_BETWEEN":
            return either(outside(low, high))
        if kind == "AEXPR_BETWEEN_SYM":
            return either([both(inside(low, high)), both(inside(high, low))])
        return both([either(outside(low, high)), either(outside(high, low))])


def plainly(term: Term) -> Term:
    """The term without its offset, which has been taken to the other side."""
    return Term(term.key, term.column, term.kind, term.nullable, term.domain) if term.offset else term


def _parameter(node: Any) -> bool:
    if type(node) is list:
        return any(_parameter(n) for n in node)
    if type(node) is not dict:
        return False
    return "ParamRef" in node or any(_parameter(v) for v in node.values())
