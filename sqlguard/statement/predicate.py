"""
Whether a write's predicate really narrows it down.

The predicate is folded for the rows of the target (`parts` says into what). What is left decides: nothing
that depends on the row means all rows; all columns of a unique key fixed means few; anything else has to be
measured. What can't be folded is measured too, so a miss here costs a count, not the data.
"""

from typing import TYPE_CHECKING, Any

from sqlguard.statement import sublinks
from sqlguard.statement.comparisons import MIRROR, Comparisons, plainly
from sqlguard.statement.model import Scope
from sqlguard.statement.names import Entry
from sqlguard.statement.parts import (
    FALSE,
    TRUE,
    UNDECIDED,
    All,
    Always,
    Const,
    Link,
    Opaque,
    Part,
    Values,
    both,
    either,
    mentioned,
    negated,
    not_null,
    simple,
)
from sqlguard.statement.regions import of_values, union
from sqlguard.statement.terms import UNKNOWN, boolean, operator_of, value_of

if TYPE_CHECKING:
    from sqlguard.statement.walk import Body, Walk

_ANY_TEXT = frozenset(
    {
        "",
        ".*",
        "(.*)",
        ".*?",
        "(.*?)",
        ".{0,}",
        "[\\s\\S]*",
        "(?s).*",
        "()",
        ".?",
        "^",
        "$",
        "^.*$",
        "^.*",
        ".*$",
    }
)
#: Which IS tests TRUE, FALSE and NULL pass.
_PASSED: dict[bool | None, frozenset[str]] = {
    True: frozenset({"IS_TRUE", "IS_NOT_FALSE", "IS_NOT_UNKNOWN"}),
    False: frozenset({"IS_FALSE", "IS_NOT_TRUE", "IS_NOT_UNKNOWN"}),
    None: frozenset({"IS_UNKNOWN", "IS_NOT_TRUE", "IS_NOT_FALSE"}),
}
_SPELLED = {"!=": "<>"}


def scope(walk: "Walk", where: Any, target: Entry, items: Any = ()) -> Scope:
    """Return how far a WHERE, with the joins of the FROM *items*, narrows a write of *target* down."""
    if where is None:
        return Scope.ALL
    fold = Fold(walk, target)
    part = fold.part(where)
    return fold.scope(both([part, *sublinks.joined(fold, items, [part])]))


def merge_scope(walk: "Walk", join: Any, conditions: list[Any], target: Entry) -> list[Scope]:
    """Return the scope for each of a MERGE's branches; *join* None: rows without a match. A condition may be None."""
    fold = Fold(walk, target)
    joined = TRUE if join is None else fold.part(join)
    return [fold.scope(joined if c is None else both([joined, fold.part(c)])) for c in conditions]


def upsert_scope(walk: "Walk", select: Any, target: Entry) -> Scope:
    """Return how far the source of an INSERT … SELECT … ON CONFLICT DO UPDATE narrows the update down."""
    sources = select.get("fromClause", ())
    if len(sources) != 1 or "RangeVar" not in sources[0] or "limitCount" in select:
        return Scope.MEASURED
    for entry in walk.entries:
        if entry.table is not None and entry.table is target.table:
            return scope(walk, select.get("whereClause"), entry)
    return Scope.MEASURED


#: An AND or OR of more conditions is not followed up: the count decides.
_CONDITIONS = 1_000
#: A CASE with more branches is not followed up.
_BRANCHES = 32


class Fold(Comparisons):
    """Folds the predicates of one statement for one target."""

    # --- the answer ----------------------------------------------------------------------------------------

    def scope(self, part: Part) -> Scope:
        if isinstance(part, Always):
            return Scope.ALL if part.value else Scope.NARROWED
        narrowing = [p for p in self.linked(part) if not isinstance(p, Const | Always)]
        if not narrowing:
            return Scope.ALL
        pins: set[str] = set()
        for each in narrowing:
            if isinstance(each, Opaque):
                pins |= each.pins
            elif (
                isinstance(each, Values)
                and each.term.column is not None
                and each.true.points
                and not each.true.null
            ):
                pins.add(each.term.column)
        table = self.target.table
        unique = table is not None and any(
            u.valid and u.predicate is None and None not in u.columns and pins.issuperset(u.columns)
            for u in table.uniques
            if u.columns
        )
        return Scope.NARROWED if unique else Scope.MEASURED

    def linked(self, part: Part) -> list[Part]:
        """Split an AND, without the links that tie every row to itself."""
        parts: list[Part] = list(part.parts) if isinstance(part, All) else [part]
        own = [isinstance(p, Link) and self._to_itself(p) for p in parts]
        if not any(own):
            return parts
        # A tie is one only while nothing else says which rows of the other side there are.
        others = frozenset().union(*(mentioned(p) for p, tie in zip(parts, own, strict=True) if not tie))
        return [
            p
            for p, tie in zip(parts, own, strict=True)
            if not (tie and isinstance(p, Link) and p.entry not in others)
        ]

    def _to_itself(self, link: Link) -> bool:
        """Whether the other side is the same column of the same table: then every row has a partner."""
        return self.target.table is not None and sublinks.origin(self.walk, link.entry, link.other) == (
            self.target.table.oid,
            link.column,
        )

    # --- predicates ----------------------------------------------------------------------------------------

    def part(self, node: "Body", *, no: bool = False) -> Part:
        """Fold *node*, or NOT *node*."""
        ((kind, body),) = node.items()
        match kind:
            case "BoolExpr":
                return self._bool(body, no=no)
            case "A_Expr":
                found = self._expression(body)
            case "NullTest":
                found = self._null_test(body)
            case "BooleanTest":
                found = self._boolean_test(body)
            case "SubLink":
                found = sublinks.fold(self, body)
            case "CaseExpr" | "CoalesceExpr":
                found = self._case(body) if kind == "CaseExpr" else self._coalesce(node, body)
            case "TypeCast" if body["typeName"]["names"][-1]["String"]["sval"] == "bool":
                found = self._constant(node) or self.part(body["arg"])
            case "CurrentOfExpr":
                found = Opaque(pins=self._key())
            case "FuncCall" if self._starts_with_nothing(body):
                found = TRUE
            case _:
                found = self._constant(node) or self._plain(node)
        return negated(found) if no else found

    def _key(self) -> frozenset[str]:
        table = self.target.table
        return frozenset(table.primary_key) if table is not None else frozenset()

    def _bool(self, body: "Body", *, no: bool) -> Part:
        operator = body["boolop"]
        if operator == "NOT_EXPR":
            return self.part(body["args"][0], no=not no)
        if len(body["args"]) > _CONDITIONS:
            return self._plain({"BoolExpr": body})
        parts = [self.part(a, no=no) for a in body["args"]]
        return both(parts) if (operator == "AND_EXPR") is not no else either(parts)

    def _constant(self, node: "Body") -> Part | None:
        value = boolean(value_of(node))
        return None if value is UNKNOWN else Always(value)

    def _plain(self, node: "Body") -> Part:
        """A boolean column, or an expression that is not followed up."""
        term = self.terms.term(node)
        if term is None:
            return self.same_for_all(node)
        if term.kind == "bool":
            return Values(term, of_values((1,)), of_values((0,)))
        return self.opaque(node)

    def _expression(self, body: "Body") -> Part:  # noqa: PLR0911  one row per kind of A_Expr
        operator = operator_of(body)
        operator = _SPELLED.get(operator, operator)
        left, right = body.get("lexpr"), body.get("rexpr")
        if left is None or right is None:
            return self._plain({"A_Expr": body})
        match body["kind"]:
            case "AEXPR_OP" if operator in MIRROR:
                return self.compare(operator, left, right)
            case "AEXPR_OP" if operator in ("~", "~*", "^@", "!~", "!~*"):
                return self._matches(body, operator, left, right)
            case "AEXPR_LIKE" | "AEXPR_ILIKE" | "AEXPR_SIMILAR":
                return self._matches(body, operator, left, right)
            case "AEXPR_IN":
                return self.member(operator, left, right["List"]["items"])
            case "AEXPR_OP_ANY" | "AEXPR_OP_ALL" if operator in MIRROR:
                return self._array(body["kind"] == "AEXPR_OP_ANY", operator, left, right)
            case "AEXPR_DISTINCT" | "AEXPR_NOT_DISTINCT":
                return self.distinct(left, right, no=body["kind"] == "AEXPR_NOT_DISTINCT")
            case "AEXPR_BETWEEN" | "AEXPR_NOT_BETWEEN" | "AEXPR_BETWEEN_SYM" | "AEXPR_NOT_BETWEEN_SYM":
                return self.between(body["kind"], left, right["List"]["items"])
        return self._plain({"A_Expr": body})

    def _matches(self, body: "Body", operator: str, left: "Body", right: "Body") -> Part:
        """LIKE '%', SIMILAR TO '%', ~ '.*', ^@ '' match every text."""
        term = self.terms.term(left)
        if term is None:
            return self._plain({"A_Expr": body})
        if "FuncCall" in right and right["FuncCall"].get("args"):
            right = right["FuncCall"]["args"][0]
        pattern = value_of(right)
        if pattern is None:
            return UNDECIDED
        everything = isinstance(pattern, str) and (
            pattern in _ANY_TEXT
            if body["kind"] == "AEXPR_OP" and "~" in operator
            else pattern == ""
            if operator == "^@"
            else bool(pattern) and not pattern.strip("%")
        )
        if not everything:
            return self.opaque(left, right)
        return FALSE if operator.startswith("!") else TRUE

    def _starts_with_nothing(self, body: "Body") -> bool:
        args = body.get("args", ())
        name = body["funcname"][-1]["String"]["sval"]
        return name == "starts_with" and len(args) == 2 and value_of(args[1]) == ""  # noqa: PLR2004  text, prefix

    def _array(self, some: bool, operator: str, left: "Body", right: "Body") -> Part:  # noqa: FBT001  ANY or ALL
        if "A_ArrayExpr" in right:
            items = right["A_ArrayExpr"].get("elements", [])
            parts = [self.compare(operator, left, i) for i in items]
            return either(parts) if some else both(parts)
        if "SubLink" in right:
            return sublinks.fold_array(
                self, some=some, operator=operator, left=left, sublink=right["SubLink"]
            )
        return self._plain({"RowExpr": {"args": [left, right]}})

    # --- tests and branches --------------------------------------------------------------------------------

    def _null_test(self, body: "Body") -> Part:
        want_null = body["nulltesttype"] == "IS_NULL"
        argument = body["arg"]
        value = value_of(argument)
        if value is not UNKNOWN:
            return TRUE if (value is None) is want_null else FALSE
        term = self.terms.term(argument)
        if term is None:
            return self.same_for_all(argument)
        if argument.keys() & {"A_Expr", "BoolExpr"}:
            part = self.part(argument)
            if isinstance(part, Values):
                known = union((part.true, part.false))
                true = known.complement() if want_null else known
                return simple(Values(part.term, true, true.complement()))
        if term.column == "*" or (
            term.column is not None and self.target.columns and term.column not in self.target.columns
        ):
            # A whole row: it is neither null nor not null when only some of its columns are.
            return self.opaque(argument)
        return not_null(plainly(term), want_null=want_null)

    def _boolean_test(self, body: "Body") -> Part:
        part = self.part(body["arg"])
        test = body["booltesttype"]
        if isinstance(part, Always):
            return TRUE if test in _PASSED[part.value] else FALSE
        if not isinstance(part, Values):
            return part if isinstance(part, Const) else self.opaque(body["arg"])
        neither = union((part.true, part.false)).complement()
        true = {
            "IS_TRUE": part.true,
            "IS_NOT_TRUE": part.true.complement(),
            "IS_FALSE": part.false,
            "IS_NOT_FALSE": part.false.complement(),
            "IS_UNKNOWN": neither,
            "IS_NOT_UNKNOWN": union((part.true, part.false)),
        }[test]
        return simple(Values(part.term, true, true.complement()))

    def _case(self, body: "Body") -> Part:
        branches = body["args"]
        if len(branches) > _BRANCHES:
            return self._plain({"CaseExpr": body})
        before: list[Part] = []
        chosen: list[Part] = []
        results: list[Part] = []
        for item in branches:
            when = item["CaseWhen"]
            expression = when["expr"]
            condition = self.compare("=", body["arg"], expression) if "arg" in body else self.part(expression)
            results.append(self.part(when["result"]))
            chosen.append(both([*before, condition, results[-1]]))
            before.append(_unless(condition))
        results.append(self.part(body["defresult"]) if "defresult" in body else FALSE)
        chosen.append(both([*before, results[-1]]))
        return TRUE if all(r == TRUE for r in results) else either(chosen)

    def _coalesce(self, node: "Body", body: "Body") -> Part:
        parts = [self.part(a) for a in body["args"]]
        while len(parts) > 1 and parts[0] == UNDECIDED:
            parts.pop(0)
        first, *rest = parts
        if not rest or isinstance(first, Always):
            return first
        if isinstance(first, Values) and all(isinstance(p, Always) for p in rest):
            unknown = union((first.true, first.false)).complement()
            fallback = next((p for p in rest if p != UNDECIDED), UNDECIDED)
            if fallback == UNDECIDED:
                return first
            if fallback == TRUE:
                return simple(Values(first.term, union((first.true, unknown)), first.false))
            return simple(Values(first.term, first.true, union((first.false, unknown))))
        return self._plain(node)


def _unless(condition: Part) -> Part:
    """A CASE goes on where the condition is not true: false or NULL."""
    if isinstance(condition, Values):
        return simple(Values(condition.term, condition.true.complement(), condition.true))
    if isinstance(condition, Always):
        return FALSE if condition.value else TRUE
    return negated(condition)
