"""
The given guard cases: a function that one of them names has the class that its expected verdict needs.

Only what a function's name and constants say is looked at; the rest is the guard's.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import postgast
import pytest
import yaml
from postgast import pg_query_pb2 as pg

from sqlguard.functions import (
    FunctionClass,
    FunctionEffect,
    classify,
    classify_extension,
    classify_operator,
    classify_relation,
    data,
    fold,
    harmless_with,
)

CASES = Path(__file__).resolve().parents[4] / "shared" / "corpus" / "guard_cases.yaml"
HARMLESS = FunctionEffect.HARMLESS
OPERATORS = (pg.AEXPR_OP, pg.AEXPR_OP_ANY, pg.AEXPR_OP_ALL, pg.AEXPR_LIKE, pg.AEXPR_ILIKE)
# What approval can buy; the rest is refused.
APPROVABLE = (FunctionEffect.INFRASTRUCTURE, FunctionEffect.DENIAL_OF_SERVICE, HARMLESS)
# pgvector's operators are in the catalog snapshot, with their extension.
EXTENSION_OPERATORS = {"<=>", "<#>"}


def entries() -> list[dict[str, Any]]:
    if not CASES.exists():
        return []
    return yaml.safe_load(CASES.read_text(encoding="utf-8"))["entries"]


def texts(entry: dict[str, Any]) -> list[str]:
    return entry["sql"] if isinstance(entry["sql"], list) else [entry["sql"]]


def found_in(text: str) -> Iterator[tuple[str, FunctionClass]]:
    """Yield what the text runs and is not harmless, with its class."""
    try:
        tree = postgast.parse(text)
    except postgast.PgQueryError:
        return
    for _, node in postgast.walk(tree):
        if isinstance(node, pg.FuncCall):
            name, found = classify_call(node)
            if not harmless_with(name, found, [fold(a) for a in node.args]):
                yield name, found
        elif isinstance(node, pg.A_Expr) and node.kind in OPERATORS:
            name = node.name[-1].string.sval
            found = classify_operator(name)
            if name not in EXTENSION_OPERATORS and not harmless_with(
                name, found, [fold(node.lexpr), fold(node.rexpr)]
            ):
                yield name, found
        elif isinstance(node, pg.RangeVar) and node.relname.startswith("pg_"):
            found = classify_relation(node.relname)
            if found.effect is not HARMLESS:
                yield node.relname, found


def classify_call(node: Any) -> tuple[str, FunctionClass]:
    name = node.funcname[-1].string.sval
    schema = node.funcname[0].string.sval if len(node.funcname) > 1 else "pg_catalog"
    found = classify(name, schema=schema, arguments=len(node.args))
    owners = [of for of, known in data.extensions() if known == name]
    if found.effect is FunctionEffect.UNKNOWN and owners and schema == "pg_catalog":
        found = classify_extension(owners[0], name, arguments=len(node.args))
    return name, found


@pytest.mark.skipif(not CASES.exists(), reason="the guard cases are not beside the project")
@pytest.mark.parametrize("entry", [e for e in entries() if e["expected"] == "allow"], ids=lambda e: e["id"])
def test_nothing_in_an_allowed_case_is_more_than_harmless(entry: dict[str, Any]) -> None:
    assert [found for text in texts(entry) for found in found_in(text)] == []


def stopped_by_function() -> list[dict[str, Any]]:
    # Without a call by name there is nothing to look up: attribute notation, casts, locks, recursion.
    others = {"func-005", "func-007", "func-008", "func-009", "func-010", "func-011", "func-070", "func-090"}
    others |= {"func-091", "func-092", "func-094", "func-102", "dos-003", "dos-006", "dos-010", "dos-012"}
    others |= {"dos-013", "dos-014"}
    return [
        e
        for e in entries()
        if e["category"] in ("side_effect_function", "denial_of_service") and e["id"] not in others
    ]


@pytest.mark.skipif(not CASES.exists(), reason="the guard cases are not beside the project")
@pytest.mark.parametrize("entry", stopped_by_function(), ids=lambda e: e["id"])
def test_what_must_be_stopped_has_a_class_that_stops_it(entry: dict[str, Any]) -> None:
    found = [c for text in texts(entry) for _, c in found_in(text)]
    assert found
    if entry["expected"] == "needs_approval":
        assert all(c.effect in APPROVABLE for c in found)
    else:
        # A bounded argument is what approval is for: a refusal needs a class without.
        assert any(c.effect not in APPROVABLE or c.bounded_argument is None for c in found)
