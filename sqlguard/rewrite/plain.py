"""
Is a statement free of everything that a rewrite could be about? Then it needs no second parse and no walk.

Most reads are: they name their columns. What is asked here is coarse on purpose, and it lists what passes: a tree
with any other node or field goes the long way. Hidden columns come to light by their names, by a star, as part of
a whole row, by their place behind an alias's list of names or an INSERT without one, by NATURAL JOIN and by a
function that returns rows; DELETE and MERGE are changed themselves; ON CONFLICT may mean another index now.
`tests/unit/rewrite/test_plain.py` holds this against the walk.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from postgast import pg_query_pb2 as pg

from sqlguard.rewrite.names import SoftTables

_ROOTS = frozenset({"SelectStmt", "InsertStmt", "UpdateStmt"})
_NODES = (
    *("SelectStmt", "InsertStmt", "UpdateStmt", "WithClause", "CommonTableExpr", "ReturningClause"),
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


@cache
def _passing() -> frozenset[str]:
    """Return the keys that libpg_query's JSON may have here: types of nodes and their fields."""
    described: Any = pg.DESCRIPTOR.message_types_by_name
    return (frozenset(f.json_name for name in _NODES for f in described[name].fields) | {*_NODES}) - _NEVER


def is_plain(text: str, tree: Mapping[str, Any] | None, tables: SoftTables) -> bool:
    """Say whether *text*, whose JSON tree is *tree*, is certain to need no change and no refusal; False is no news."""
    if tree is None or not _ROOTS.issuperset(tree):
        return False
    content = text.lower()
    if "u&" in content or any(name in content for name in tables.catalog.soft_bookkeeping):
        return False
    reader = _Reader(tables)
    return reader.passes(tree) and reader.columns.isdisjoint(reader.rows)


class _Reader:
    def __init__(self, tables: SoftTables) -> None:
        self.tables = tables
        self.rows: set[str] = set(_ALWAYS)
        self.columns: set[str] = set()

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
            last = node["fields"][-1]
            if "String" in last:
                self.columns.add(last["String"]["sval"])
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
        return True
