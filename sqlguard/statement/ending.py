"""
Statements that end in `WHERE … = number` and are the same up to there: what was found of one holds for the other.

The texts are equal up to the number, so PostgreSQL's scanner reads both alike up to there, and the tree of the one
says that it then reads a constant. Nothing but blanks, a semicolon and one comment follows in either, so their trees
differ in that constant alone. It is a column's, compared by `=` with a plain `integer`; which one of them it is changes
neither what the statement reads and writes nor how far its predicate narrows that down.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sqlguard.statement.model import Statement

#: Longer texts are seldom the same but for a number. All limits for texts are above it.
_LONGEST = 2048
#: At most nine digits: it is always an `integer`. At least one character stands before it that no number goes on from.
_NUMBER = re.compile(r"(?<=[= ])[1-9][0-9]{0,8}\Z")


def ending(text: str) -> tuple[str, int] | None:
    """Return what stands before the number that *text* ends in, and the number; None if it ends in something else."""
    if len(text) > _LONGEST or not text.isascii() or "\0" in text:
        return None
    end = text.rstrip()
    if end.endswith("*/"):
        start = end.rfind("/*")
        # No comment in the comment, and it ends where the text does.
        if start < 0 or end.find("*/", start + 2) != len(end) - 2:
            return None
        end = end[:start].rstrip()
    end = end.removesuffix(";").rstrip()
    found = _NUMBER.search(end, max(0, len(end) - 10))
    return None if found is None else (end[: found.start()], int(found[0]))


def ends_so(statement: Statement, before: str) -> bool:
    """Say whether *statement* ends in a comparison of a column with the number that stands behind *before*."""
    compared = _comparison(statement.tree)
    if compared is None or "ColumnRef" not in compared.get("lexpr", {}):
        return False
    constant = compared.get("rexpr", {}).get("A_Const", {})
    operator = [part.get("String", {}).get("sval") for part in compared.get("name", ())]
    return (
        compared.get("kind") == "AEXPR_OP"
        and operator == ["="]
        and constant.keys() == {"ival", "location"}
        and constant["location"] == len(before)
    )


def with_number(statement: Statement, text: str, number: int) -> Statement:
    """Return *statement*, of which `ends_so` is true, as it is for *text* with that *number* in its place."""
    ((kind, body),) = statement.tree.items()
    compared = body["whereClause"]["A_Expr"]
    constant = {"A_Const": {**compared["rexpr"]["A_Const"], "ival": {"ival": number}}}
    where = {"A_Expr": {**compared, "rexpr": constant}}
    return replace(statement, text=text, end=len(text), tree={kind: {**body, "whereClause": where}})


def _comparison(tree: Any) -> Mapping[str, Any] | None:
    if not isinstance(tree, dict) or len(tree) != 1:
        return None
    (body,) = tree.values()
    found: Mapping[str, Any] | None = body.get("whereClause", {}).get("A_Expr")
    return found
