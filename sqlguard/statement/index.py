"""
What the walk asks of a catalog again and again, worked out once per snapshot.

The index lives and dies with its catalog: it is kept in the catalog's own `__dict__`, as its cached
properties are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from sqlguard import functions
from sqlguard.catalog import FIRST_NORMAL_OID, SYSTEM_SCHEMAS, Cast, Catalog, Function, Operator, Table, Type
from sqlguard.functions import data
from sqlguard.functions.model import FunctionEffect

#: Columns that every table has and that no catalog lists.
SYSTEM_COLUMNS = frozenset({"ctid", "xmin", "xmax", "cmin", "cmax", "tableoid"})
_ATTRIBUTE = "_sqlguard_index"


@dataclass
class Index:
    """`columns` by relation; operators and casts only where their function is not known to be harmless."""

    catalog: Catalog
    columns: Mapping[int, frozenset[str]]
    operators: Mapping[str, tuple[Operator, ...]]
    #: Operators that need no second look, whatever their operands are.
    plain: frozenset[str]
    casts: tuple[Cast, ...]
    types: Mapping[str, tuple[Type, ...]]
    functions: frozenset[str]
    #: What views, rules and functions do, by oid; filled when first asked for.
    expansions: dict[Any, Any] = field(default_factory=dict)
    #: Whether a domain has a CHECK.
    checked: bool = False

    def type_named(self, schema: str | None, name: str) -> tuple[Type, ...]:
        """Every type outside pg_catalog that the name may mean."""
        some = self.types.get(name, ())
        return some if schema is None else tuple(t for t in some if t.schema == schema)


def index_of(catalog: Catalog) -> Index:
    found = catalog.__dict__.get(_ATTRIBUTE)
    if found is None:
        found = catalog.__dict__[_ATTRIBUTE] = _make(catalog)
    return found


def reviewed(function: Function | None) -> bool:
    """Whether *function* is built in or an extension's, and the reviewed list calls it harmless without conditions."""
    if function is None:
        return False
    if function.schema in SYSTEM_SCHEMAS and function.oid < FIRST_NORMAL_OID:
        built_in = functions.classify(function.name, function.arg_type_names, schema=function.schema)
        return built_in.effect is FunctionEffect.HARMLESS and built_in.bounded_argument is None
    if function.extension is None:
        return False
    judged = functions.classify_extension(function.extension, function.name, function.arg_type_names)
    return judged.effect is FunctionEffect.HARMLESS and judged.bounded_argument is None


def _make(catalog: Catalog) -> Index:
    operators: dict[str, list[Operator]] = {}
    for operator in catalog.operators:
        if not reviewed(catalog.functions.get(operator.function)) and operator.function in catalog.functions:
            operators.setdefault(operator.name, []).append(operator)
    theirs = frozenset(o.name for o in catalog.operators)
    types: dict[str, list[Type]] = {}
    for kind in catalog.types.values():
        types.setdefault(kind.name, []).append(kind)
    return Index(
        catalog=catalog,
        columns={t.oid: _columns(t) for t in catalog.tables.values()},
        operators={name: tuple(some) for name, some in operators.items()},
        plain=(plain_operators() | theirs) - frozenset(operators) - _bounded_operators(),
        casts=tuple(
            c for c in catalog.casts if c.function and not reviewed(catalog.functions.get(c.function))
        ),
        types={name: tuple(some) for name, some in types.items()},
        functions=frozenset(f.name for f in catalog.functions.values()),
        checked=any(t.checks for t in catalog.types.values()),
    )


def _columns(table: Table) -> frozenset[str]:
    return frozenset(c.name for c in table.columns) | SYSTEM_COLUMNS


@cache
def plain_operators() -> frozenset[str]:
    """Return the operators of pg_catalog that are harmless for all operands."""
    return (
        frozenset(
            name
            for name in data.operators()
            if functions.classify_operator(name).effect is FunctionEffect.HARMLESS
        )
        - _bounded_operators()
    )


@cache
def _bounded_operators() -> frozenset[str]:
    """Operators with an operand that decides: the pattern of a regular expression."""
    return frozenset(
        name for name in data.operators() if functions.classify_operator(name).bounded_argument is not None
    )
