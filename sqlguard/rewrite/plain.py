"""
Is a statement free of everything that a rewrite could be about? Then it needs no second parse and no walk. Or of
everything but DELETE? Then the walk has nothing to look for in expressions.

Most reads are: they name their columns. What is asked here is coarse on purpose, and it lists what passes: a tree
with any other node or field goes the long way. Hidden columns come to light by their names, by a star, as part of
a whole row, by their place behind an alias's list of names or an INSERT without one, by NATURAL JOIN and by a
function that returns rows; MERGE is changed itself; ON CONFLICT may mean another index now. RETURNING of a DELETE
has no new row, and no row version of the old one.
`tests/unit/rewrite/test_plain.py` holds this against the walk.
"""

from collections.abc import Mapping
from enum import Enum, auto
from functools import cache
from typing import Any

from postgast import pg_query_pb2 as pg

from sqlguard.rewrite.names import SoftTables


class Plain(Enum):
    """What a statement is certain to be free of."""

    NO = auto()
    #: Of all but DELETE: those are all that there is to change.
    BUT_DELETES = auto()
    YES = auto()


_ROOTS = frozenset({"SelectStmt", "InsertStmt", "UpdateStmt", "DeleteStmt"})
_NODES = (
    *(*_ROOTS, "WithClause", "CommonTableExpr", "ReturningClause"),
    *("RangeVar", "Alias", "JoinExpr", "RangeSubselect", "RangeFunction", "LockingClause"),
    *("ResTarget", "ColumnRef", "A_Const", "String", "Integer", "Float", "Boolean", "BitString", "ParamRef"),
    *("A_Expr", "BoolExpr", "NullTest", "BooleanTest", "SubLink", "CaseExpr", "CaseWhen", "CoalesceExpr"),
    *("MinMaxExpr", "A_ArrayExpr", "RowExpr", "List", "TypeCast", "TypeName", "CollateClause"),
    *("SQLValueFunction", "FuncCall", "WindowDef", "SortBy", "GroupingSet", "MultiAssignRef", "SetToDefault"),
)
#: Fields of these nodes that are a matter for the walk when they are set.
_NEVER = frozenset({"colnames", "aliascolnames", "coldeflist", "isNatural", "onConflictClause", "options"})
#: Fields that name what stands in FROM; a column of that name may be the whole row.
_NAMING = frozenset({"relname", "aliasname", "ctename"})
#: Rows that are in sight without being named.
_ALWAYS = frozenset({"excluded", "old", "new"})
#: What can't be had of a deleted row: versions and the row after.
_NOT_OF_DELETED = frozenset({"ctid", "xmin", "xmax", "cmin", "cmax", "old", "new"})


@cache
def _passing() -> frozenset[str]:
    """Return the keys that libpg_query's JSON may have here: types of nodes and their fields."""
    described: Any = pg.DESCRIPTOR.message_types_by_name
    return (frozenset(f.json_name for name in _NODES for f in described[name].fields) | {*_NODES}) - _NEVER


def plainness(text: str, tree: Mapping[str, Any] | None, tables: SoftTables) -> Plain:
    """Say what *text*, whose JSON tree is *tree*, is certain to be free of; NO is no news."""
    if tree is None or not _ROOTS.issuperset(tree):
        return Plain.NO
    content = text.lower()
    if "u&" in content or any(name in content for name in tables.catalog.soft_bookkeeping):
        return Plain.NO
    reader = _Reader(tables)
    if not reader.passes(tree) or not reader.columns.isdisjoint(reader.rows):
        return Plain.NO
    if not reader.deletes:
        return Plain.YES
    at_top = reader.deletes == _deletes_at_top(tree)
    return Plain.BUT_DELETES if at_top and reader.every.isdisjoint(_NOT_OF_DELETED) else Plain.NO


def _deletes_at_top(tree: Mapping[str, Any]) -> int:
    """Count the DELETEs where PostgreSQL takes them: the statement itself and those of its own WITH."""
    ((kind, body),) = tree.items()
    ctes = body.get("withClause", {}).get("ctes", ())
    below = sum("DeleteStmt" in cte["CommonTableExpr"]["ctequery"] for cte in ctes)
    return below + (kind == "DeleteStmt")


class _Reader:
    def __init__(self, tables: SoftTables) -> None:
        self.tables = tables
        self.rows: set[str] = set(_ALWAYS)
        self.columns: set[str] = set()
        #: All parts of all names of columns.
        self.every: set[str] = set()
        self.deletes = 0

    def passes(self, tree: Mapping[str, Any]) -> bool:
        """Go through *tree*, collecting names; stop at the first thing that is not plain."""
        known = _passing()
        left: list[Any] = [tree]
        while left:
            here = left.pop()
            for key, value in here.items():
                if key not in known:
                    return False
                if isinstance(value, dict):
                    if not self._enters(key, value):
                        return False
                    left.append(value)
                elif isinstance(value, list):
                    left.extend(value)
                elif key in _NAMING:
                    self.rows.add(value)
        return True

    def _enters(self, key: str, node: Mapping[str, Any]) -> bool:
        if key == "ColumnRef":
            # A star is no string; it is stopped where its own node is met.
            names = [part["String"]["sval"] for part in node["fields"] if "String" in part]
            self.every.update(names)
            self.columns.update(names[-1:])
        elif key == "FuncCall":
            called = [part["String"]["sval"] for part in node["funcname"]]
            self.rows.add(called[-1])
            return self.tables.returned_by(called) is None
        elif key in ("TypeName", "typeName"):
            return not any(
                n["String"]["sval"] in self.tables.catalog.soft_names for n in node.get("names", ())
            )
        elif key == "InsertStmt":
            return "cols" in node
        elif key == "DeleteStmt":
            self.deletes += 1
        return True
