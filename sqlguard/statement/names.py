"""
Whose name is it? Range-table entries, WITH queries and the levels of a query they are visible on.

As in PostgreSQL: a name is looked for on its own level first, then on the levels around it; a sub-select in
FROM that is not LATERAL does not see its neighbours; a WITH query hides a table of that name.
"""

from collections.abc import Iterator
from typing import Any

from sqlguard.catalog import Table
from sqlguard.statement.model import Relation


class Entry:
    """One FROM item or target; `columns` None means that they are not known, but for those in `sure`."""

    __slots__ = ("alias", "columns", "hidden", "query", "relation", "schema", "star", "sure", "table", "used")

    def __init__(  # noqa: PLR0913  each is a fact of its own
        self,
        alias: str,
        columns: frozenset[str] | None,
        *,
        table: Table | None = None,
        relation: Relation | None = None,
        query: Any = None,
        schema: str | None = None,
        sure: frozenset[str] | None = None,
    ) -> None:
        self.alias = alias
        self.columns = columns
        self.sure = (sure if columns is None else columns) or frozenset()
        self.table = table
        self.relation = relation
        #: The sub-select or WITH query that it stands for: a SelectStmt's body.
        self.query = query
        self.schema = schema
        self.used: set[str] = set()
        self.star = False
        #: In a join with an alias, which is the only name of what it joins.
        self.hidden = False


class Cte:
    """A WITH query; `query` is its body when it is a SELECT."""

    __slots__ = ("columns", "query")

    def __init__(self, columns: frozenset[str] | None, query: Any) -> None:
        self.columns = columns
        self.query = query


class Level:
    """One query level; `blind` when the entries of the level around it can't be seen (FROM without LATERAL)."""

    __slots__ = ("blind", "ctes", "entries", "parent")

    def __init__(self, parent: "Level | None", *, blind: bool = False) -> None:
        self.parent = parent
        self.blind = blind
        self.entries: list[Entry] = []
        self.ctes: dict[str, Cte] = {}

    def cte(self, name: str) -> Cte | None:
        level: Level | None = self
        while level is not None:
            if level.ctes and name in level.ctes:
                return level.ctes[name]
            level = level.parent
        return None

    def visible(self) -> Iterator[list[Entry]]:
        """Yield the entries of each level that can be seen from here, the nearest first."""
        level: Level | None = self
        blind = False
        while level is not None:
            if not blind:
                yield [entry for entry in level.entries if not entry.hidden]
            blind = level.blind
            level = level.parent

    def named(self, alias: str, schema: str | None = None) -> Entry | None:
        """Return the entry that `alias.column` or `schema.alias.column` speaks of."""
        for entries in self.visible():
            for entry in entries:
                if entry.alias == alias and (schema is None or entry.schema == schema):
                    return entry
        return None

    def meant(self, name: str) -> tuple[list[Entry], Entry | None]:
        """
        Return what an unqualified *name* may mean: entries that it may be a column of, and one whose row it may be.

        The columns of all levels come before any row. The first entry has it or may have it; others follow only
        where that is not known.
        """
        found: list[Entry] = []
        row: Entry | None = None
        for entries in self.visible():
            for entry in entries:
                if name in entry.sure:
                    return [*found, entry], None
                if row is None and entry.alias == name:
                    row = entry
            found += [entry for entry in entries if entry.columns is None][:1]
        return found, row


def output_columns(select: Any) -> frozenset[str] | None:
    """Return the names of a SELECT's result columns, None when they depend on more than its list."""
    while "larg" in select:
        select = select["larg"]
    if "valuesLists" in select:
        return frozenset(f"column{n}" for n in range(1, len(select["valuesLists"][0]["List"]["items"]) + 1))
    names: set[str] = set()
    for item in select.get("targetList", ()):
        name = _output_name(item["ResTarget"])
        if name is None:
            return None
        names.add(name)
    return frozenset(names)


def _output_name(target: Any) -> str | None:
    if "name" in target:
        return str(target["name"])
    value = target.get("val", {})
    while "TypeCast" in value:
        value = value["TypeCast"]["arg"]
    if "ColumnRef" in value:
        last = value["ColumnRef"]["fields"][-1]
        return last["String"].get("sval") if "String" in last else None
    if "FuncCall" in value:
        return str(value["FuncCall"]["funcname"][-1]["String"]["sval"])
    # CASE, COALESCE, sub-selects … have names of their own rules; `?column?` is what is left.
    return None if value.keys() & {"SubLink", "A_Indirection", "CaseExpr"} else "?column?"
