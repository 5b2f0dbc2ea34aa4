"""
Constants and terms of a predicate.

A term is an expression over the target's columns, told apart by a key that spelling does not change: `id`,
`a.id`, `(id + 0)::bigint` and `coalesce(id, id)` are one term. A constant is a value the text alone tells.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from enum import Enum
from typing import Any, Final

from sqlguard.catalog import Column
from sqlguard.statement.names import Entry
from sqlguard.statement.regions import ANYTHING, HIGHEST, Region, after, before

Body = dict[str, Any]


class _Marker(Enum):
    UNKNOWN = "unknown"


UNKNOWN: Final = _Marker.UNKNOWN

_INTS = {21: 2**15, 23: 2**31, 20: 2**63}
_KINDS = {
    16: "bool", 21: "int", 23: "int", 20: "int", 1700: "number", 700: "number", 701: "number",
    25: "text", 1043: "text", 1042: "text", 19: "text", 1082: "time", 1114: "time", 1184: "time",
}  # fmt: skip
_BOOL = Region(((before(0), after(1)),))
_NATURAL = Region(((before(0), HIGHEST),))
_NOT_NEGATIVE = frozenset({"length", "char_length", "character_length", "octet_length", "bit_length", "abs"})
_WIDER = {
    "int": {"int2", "int4", "int8", "numeric"},
    "number": {"numeric", "float8"},
    "text": {"text", "varchar"},
}
_WIDER["bool"] = {"bool"}
SYSTEM = frozenset({"ctid", "xmin", "xmax", "cmin", "cmax", "tableoid"})
_TRUE = frozenset({"t", "tr", "tru", "true", "y", "ye", "yes", "on", "1"})
_FALSE = frozenset({"f", "fa", "fal", "fals", "false", "n", "no", "of", "off", "0"})


@dataclass(frozen=True, slots=True)
class Term:
    """`column` is the target's column when the term is just that; `domain` all values but NULL that it can have."""

    key: str
    column: str | None = None
    kind: str = "other"
    nullable: bool = True
    domain: Region = ANYTHING
    #: The term is this much more than its key says: `id + 1` is `id` with offset 1.
    offset: int | Decimal = 0


def name_of(body: Body) -> str:
    """Return a type's own name."""
    names = body.get("names", [{}])
    return str(names[-1].get("String", {}).get("sval", ""))


def operator_of(body: Body) -> str:
    return str(body["name"][-1]["String"]["sval"])


# --- constants ---------------------------------------------------------------------------------------------


def value_of(node: Body) -> Any:
    """Return the value of a constant (None is NULL), else UNKNOWN."""
    ((kind, body),) = node.items()
    if kind == "A_Const":
        return _literal(body)
    if kind == "TypeCast":
        return cast(value_of(body["arg"]), name_of(body["typeName"]))
    if kind == "CollateClause" and "arg" in body:
        return value_of(body["arg"])
    if kind == "A_Expr" and body["kind"] == "AEXPR_OP" and "rexpr" in body:
        return _operate(operator_of(body), body)
    return UNKNOWN


def _literal(body: Body) -> Any:
    if body.get("isnull"):
        return None
    if "ival" in body:
        return body["ival"].get("ival", 0)
    if "boolval" in body:
        return bool(body["boolval"].get("boolval", False))
    if "sval" in body:
        return body["sval"].get("sval", "")
    if "fval" in body:
        return number(body["fval"]["fval"])
    return UNKNOWN


def number(text: str) -> Any:
    try:
        value = Decimal(text.strip().replace("_", ""))
    except InvalidOperation:
        return UNKNOWN
    if not value.is_finite() or abs(value.adjusted()) > 100:  # noqa: PLR2004  beyond any type's range
        return UNKNOWN
    return int(value) if value == value.to_integral_value() else value


def cast(value: Any, target: str) -> Any:
    if value is UNKNOWN or value is None:
        return value
    if target == "bool":
        return boolean(value)
    if target in ("int2", "int4", "int8", "numeric", "float4", "float8"):
        if isinstance(value, str):
            value = number(value)
        if value is UNKNOWN:
            return UNKNOWN
        value = int(value) if isinstance(value, bool) else value
        return value if target in ("numeric", "float4", "float8") or isinstance(value, int) else UNKNOWN
    if target in ("text", "varchar", "name") and isinstance(value, str | int) and not isinstance(value, bool):
        return str(value)
    return value if target in ("date", "timestamp", "timestamptz") and isinstance(value, str) else UNKNOWN


def boolean(value: Any) -> Any:
    """Read a value as PostgreSQL reads a boolean."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value != 0
    if isinstance(value, str):
        text = value.strip().lower()
        return True if text in _TRUE else False if text in _FALSE else UNKNOWN
    return UNKNOWN


def _operate(operator: str, body: Body) -> Any:  # noqa: PLR0911  one return per operator
    right = value_of(body["rexpr"])
    left = value_of(body["lexpr"]) if "lexpr" in body else 0
    if right is UNKNOWN or left is UNKNOWN:
        return UNKNOWN
    if right is None or left is None:
        return None
    if operator == "||" and isinstance(left, str) and isinstance(right, str):
        return left + right
    if isinstance(left, bool | str) or isinstance(right, bool | str):
        return UNKNOWN
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
    return UNKNOWN


def fit(value: Any, kind: str) -> Any:  # noqa: PLR0911  one return per kind
    """Return a constant as a value of a term's kind, UNKNOWN when it can't be compared."""
    if value is UNKNOWN or value is None:
        return value
    if kind == "bool":
        found = boolean(value)
        return found if found is UNKNOWN else int(found)
    if kind in ("int", "number"):
        if isinstance(value, str):
            return number(value)
        return UNKNOWN if isinstance(value, bool) else value
    if kind == "text":
        return value if isinstance(value, str) else UNKNOWN
    if kind == "time":
        # ISO dates and times order as texts do.
        return value if isinstance(value, str) and value[:4].isdigit() and value[4:5] == "-" else UNKNOWN
    return UNKNOWN if isinstance(value, bool) else value


def same(left: Any, right: Any) -> bool | None:
    """Whether two constants are equal; None when that can't be told."""
    if isinstance(left, str) != isinstance(right, str):
        left, right = (number(v) if isinstance(v, str) else v for v in (left, right))
        if UNKNOWN in (left, right):
            return None
    return bool(left == right)


# --- terms -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Terms:
    """Reads the terms of one target; `owners` says which entry each column belongs to."""

    owners: dict[int, Entry]
    target: Entry

    def mentions(self, node: Any) -> Iterator[Entry]:
        """Yield the entries whose columns occur in *node*; one that is in the sub-selects of it, too."""
        stack = [node]
        while stack:
            here = stack.pop()
            if type(here) is list:
                stack.extend(here)
            elif type(here) is dict:
                if "ColumnRef" in here:
                    owner = self.owners.get(id(here["ColumnRef"]))
                    if owner is not None:
                        yield owner
                else:
                    stack.extend(here.values())

    def term(self, node: Body) -> Term | None:
        """Return *node* as a term, None when it does not depend on the target."""
        if "A_Const" in node or "ParamRef" in node:
            return None
        if "ColumnRef" in node:
            body = node["ColumnRef"]
            return self._column(body) if self.owners.get(id(body)) is self.target else None
        if not any(owner is self.target for owner in self.mentions(node)):
            return None
        return self._term(node)

    def _term(self, node: Body) -> Term:  # noqa: PLR0911  one return per kind of node
        ((kind, body),) = node.items()
        match kind:
            case "ColumnRef" if self.owners.get(id(body)) is self.target:
                return self._column(body)
            case "TypeCast":
                inner = self._term(body["arg"])
                if name_of(body["typeName"]) in _WIDER.get(inner.kind, ()):
                    return inner
            case "CollateClause" if "arg" in body:
                return self._term(body["arg"])
            case "CoalesceExpr":
                return self._coalesce(body, node)
            case "FuncCall":
                if body["funcname"][-1]["String"]["sval"] in _NOT_NEGATIVE and "args" in body:
                    inner = self._term(body["args"][0])
                    return Term(key(node, self.owners), None, "int", inner.nullable, _NATURAL)
            case "A_Expr" if body["kind"] == "AEXPR_OP":
                found = self._arithmetic(body)
                if found is not None:
                    return found
        return Term(key(node, self.owners))

    def _column(self, body: Body) -> Term:
        last = body["fields"][-1]
        name = last["String"].get("sval", "") if "String" in last else "*"
        column = self._known(name)
        if column is None:
            return Term(f"c:{name}", name, nullable=name not in SYSTEM)
        kind = _KINDS.get(column.type_oid, "other")
        domain = ANYTHING
        if kind == "bool":
            domain = _BOOL
        elif column.type_oid in _INTS:
            size = _INTS[column.type_oid]
            domain = Region(((before(-size), after(size - 1)),))
        elif kind == "text":
            domain = Region(((before(""), HIGHEST),))
        return Term(f"c:{name}", name, kind, not column.not_null, domain)

    def _known(self, name: str) -> Column | None:
        return self.target.table.column(name) if self.target.table is not None else None

    def _coalesce(self, body: Body, node: Body) -> Term:
        terms = [(a, self.term(a)) for a in body["args"]]
        first = terms[0][1]
        if first is None:
            return Term(key(node, self.owners))
        if not first.nullable or all(t is not None and t.key == first.key for _, t in terms):
            return first
        filled = any(t is None and value_of(a) not in (UNKNOWN, None) for a, t in terms)
        return Term(key(node, self.owners), None, first.kind, first.nullable and not filled, first.domain)

    def _arithmetic(self, body: Body) -> Term | None:  # noqa: PLR0911  one return per form
        """Take constants out of `x + 1`, `x * 1`, `x || ''`."""
        if "lexpr" not in body or "rexpr" not in body:
            return self._term(body["rexpr"]) if operator_of(body) == "+" and "rexpr" in body else None
        operator = operator_of(body)
        left, right = self.term(body["lexpr"]), self.term(body["rexpr"])
        if left is not None and right is not None:
            return self._both(operator, left, right)
        term, constant = (
            (left, value_of(body["rexpr"])) if left is not None else (right, value_of(body["lexpr"]))
        )
        if term is None or constant is UNKNOWN or constant is None:
            return None
        if operator == "||" and constant == "":
            return term
        if isinstance(constant, bool | str) or term.kind not in ("int", "number"):
            return None
        if (operator == "*" or (operator == "/" and left is not None)) and constant == 1:
            return term
        if operator == "+" or (operator == "-" and left is not None):
            change = constant if operator == "+" else -constant
            return Term(term.key, term.column, term.kind, term.nullable, term.domain, term.offset + change)
        return None

    def _both(self, operator: str, left: Term, right: Term) -> Term | None:
        if operator == "-" and left.key == right.key and left.kind in ("int", "number"):
            zero = left.offset - right.offset
            return Term(
                f"0:{left.key}", None, left.kind, left.nullable, Region(((before(zero), after(zero)),))
            )
        return None


def key(node: Any, owners: dict[int, Entry]) -> str:
    """Return a text that is the same for the same expression, however its names are qualified."""
    if type(node) is list:
        return "[" + ",".join(key(item, owners) for item in node) + "]"
    if type(node) is not dict:
        return repr(node)
    if "ColumnRef" in node:
        body = node["ColumnRef"]
        owner = owners.get(id(body))
        last = body["fields"][-1].get("String", {}).get("sval", "*")
        return f"{id(owner)}.{last}"
    return "{" + ",".join(f"{k}:{key(v, owners)}" for k, v in node.items() if k not in _PLACES) + "}"


_PLACES = frozenset({"location", "rexpr_list_start", "rexpr_list_end", "list_start", "list_end"})
