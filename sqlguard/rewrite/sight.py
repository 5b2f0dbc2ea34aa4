"""
What an agent may see, as the proof asks it of a statement's tree: names that hide columns, and shapes that
show none.

This is the proof's own reading of the statement, coarser than the one that `scope` makes: it knows which
tables are named anywhere in it and takes every reference by that name to mean any of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from postgast import pg_query_pb2 as pg

from sqlguard.catalog import DELETED_AT, Table
from sqlguard.rewrite.names import SoftTables

STAR = "*"
#: Fields that a SELECT of ours has; two of them are set in every SELECT.
_PLAIN_SELECT = frozenset({"target_list", "from_clause", "where_clause", "limit_option", "op"})


def unwrap(node: Any) -> tuple[str | None, Any]:
    """Return what kind of node *node* is and the node itself."""
    kind = node.WhichOneof("node")
    return kind, getattr(node, kind) if kind else None


def names_of(node: Any) -> list[str]:
    """Return the names of a column reference or `(row).*`, the star as a name; none of anything else."""
    if node.DESCRIPTOR.name == "Node":
        kind, value = unwrap(node)
        if kind == "a_indirection":
            stars = [unwrap(i)[0] for i in value.indirection] == ["a_star"]
            return [*names_of(value.arg), STAR] if stars else []
        return names_of(value) if kind == "column_ref" else []
    return [f.string.sval if f.HasField("string") else STAR for f in node.fields]


def messages(node: Any) -> Iterator[Any]:
    """Yield *node* and every message in it, in no order."""
    left = [node]
    while left:
        here = left.pop()
        yield here
        for field, value in here.ListFields():
            if field.message_type is not None:
                if hasattr(value, "DESCRIPTOR"):
                    left.append(value)
                else:
                    left.extend(value)


@dataclass(frozen=True)
class _Names:
    """`hidden`: name of a FROM item -> columns it may hide; `rows`: the same -> columns that it shows."""

    hidden: dict[str, set[str]]
    rows: dict[str, set[tuple[str, ...]]]
    #: Columns are merged or renamed somewhere: a star may give another order and names than a table's.
    loose: bool
    ctes: frozenset[str]

    @classmethod
    def of(cls, tree: Any, tables: SoftTables) -> "_Names":
        """Read *tree*."""
        found: dict[str, list[Any]] = {}
        for node in messages(tree):
            found.setdefault(node.DESCRIPTOR.name, []).append(node)
        hidden: dict[str, set[str]] = {}
        rows: dict[str, set[tuple[str, ...]]] = {}
        every: set[str] = set()
        for node in (*found.get("RangeVar", ()), *found.get("RangeFunction", ())):
            named, table = _table(node, tables)
            columns = tables.hidden(table)
            if table is None or not columns:
                continue
            every |= set(columns)
            name = node.alias.aliasname or named
            hidden.setdefault(name, set()).update(columns)
            rows.setdefault(name, set()).add(tuple(c.name for c in table.columns if c.name not in columns))
        joins = found.get("JoinExpr", ())
        hidden |= {j.alias.aliasname: every for j in joins if j.HasField("alias")}
        renamed = (o.value for o in found.get("ReturningOption", ()))
        for name in ("old", "new", "excluded", *renamed):
            hidden.setdefault(name, every)
            rows.setdefault(name, {columns for some in list(rows.values()) for columns in some})
        loose = any(a.colnames for a in found.get("Alias", ())) or any(
            j.is_natural or j.using_clause or j.HasField("alias") for j in joins
        )
        ctes = frozenset(c.ctename for c in found.get("CommonTableExpr", ()))
        return cls(hidden, rows, loose, ctes)


class Sight:
    """What is in sight anywhere in *tree*; the names are read when they are first asked for."""

    def __init__(self, tree: Any, tables: SoftTables) -> None:
        self.tables = tables
        self._tree = tree

    @cached_property
    def _names(self) -> _Names:
        return _Names.of(self._tree, self.tables)

    def any_hidden(self, names: Sequence[str]) -> bool:
        return any(name in columns for columns in self._names.hidden.values() for name in names)

    def is_star(self, entry: Any) -> bool:
        return names_of(_value(entry))[-1:] == [STAR]

    def is_expansion(self, entry: Any, columns: Sequence[Any], owners: Sequence[str | None]) -> bool:
        """Say whether *columns* are what the star *entry* may stand for where *owners* are in FROM."""
        owner = names_of(_value(entry))[:-1]
        found = []
        for column in columns:
            names = names_of(_value(column))
            if not names or _is_labelled(column) or (names[-1] == STAR and (owner or len(names) == 1)):
                return False
            if owner and names[:-1][-len(owner) :] != owner:
                return False
            found.append((tuple(names[:-1]), names[-1]))
        groups = [(o, tuple(n for _, n in g)) for o, g in groupby(found, key=lambda pair: pair[0])]
        named = [o[-1] if o else None for o, _ in groups]
        if not owner and not (set(named) <= {*owners, None} if self._names.loose else named == list(owners)):
            return False
        return all(self._may_show(o, names) for o, names in groups)

    def _may_show(self, owner: tuple[str, ...], names: tuple[str, ...]) -> bool:
        name = owner[-1] if owner else None
        if names == (STAR,):
            return name not in self._names.hidden or name in self._names.ctes
        if name is None:
            return not self.any_hidden(names)
        if set(names) & self._names.hidden.get(name, set()) or len(set(names)) < len(names):
            return False
        return self._names.loose or names in self._names.rows.get(name, ())

    def owners(self, nodes: Sequence[Any]) -> list[str | None]:
        """Return the names that FROM items can be called by, in order; None for one without a name."""
        found: list[str | None] = []
        for node in nodes:
            kind, value = unwrap(node)
            if kind == "range_table_sample":
                found += self.owners([value.relation])
            elif kind == "join_expr" and not value.HasField("alias"):
                found += self.owners([value.larg]) + self.owners([value.rarg])
                if value.HasField("join_using_alias"):
                    found.append(value.join_using_alias.aliasname)
            elif kind == "range_var":
                found.append(name_of(value))
            elif value.HasField("alias"):
                found.append(value.alias.aliasname)
            else:
                found.append(_called(kind, value))
        return found

    def is_natural(self, join: Any, named: Sequence[str]) -> bool:
        """Say whether *named* are the columns that the NATURAL *join* compares, as far as its arms are tables."""
        left, right = self._columns(join.larg), self._columns(join.rarg)
        return left is None or right is None or set(named) == left & right

    def _columns(self, node: Any) -> set[str] | None:
        """Return the columns of an arm of a join that an agent knows, None where it is not just tables."""
        kind, value = unwrap(node)
        if kind == "join_expr" and not value.HasField("alias"):
            left, right = self._columns(value.larg), self._columns(value.rarg)
            return None if left is None or right is None else left | right
        if kind != "range_var" or value.alias.colnames or value.relname in self._names.ctes:
            return None
        table = self.tables.resolve(value)
        hidden = self.tables.hidden(table)
        return {c.name for c in table.columns if c.name not in hidden} if table is not None else None

    def is_qualified(self, old: list[str], new: list[str]) -> bool:
        """Say whether *new* is the name *old* with an owner that has it in sight."""
        return (
            len(new) > 1
            and new[-1:] == old
            and self.any_hidden(old)
            and old[0] not in self._names.hidden.get(new[-2], set())
        )

    def is_row_of(self, old: list[str], link: Any) -> bool:
        """Say whether *link* is `(SELECT o FROM (SELECT o.a, o.b) AS o)`, for the whole row *old* of `o`."""
        row = [name for name in old if name != STAR]
        if link.sub_link_type != pg.EXPR_SUBLINK or not row or link.HasField("testexpr"):
            return False
        select, inner = link.subselect.select_stmt, None
        if len(select.from_clause) == 1 and select.from_clause[0].HasField("range_subselect"):
            inner = select.from_clause[0].range_subselect
        if inner is None or inner.lateral or inner.alias.aliasname != row[-1] or inner.alias.colnames:
            return False
        fields = inner.subquery.select_stmt
        if not _is_plain(select, {"from_clause"}) or not _is_plain(fields, {"where_clause"}):
            return False
        shown = [names_of(_value(c)) for c in fields.target_list]
        named = [names_of(_value(c)) for c in select.target_list]
        if named != [row[-1:]] or any(_is_labelled(c) for c in (*fields.target_list, *select.target_list)):
            return False
        owned = all(len(n) > 1 and n[-2] == row[-1] and n[-1] != STAR for n in shown)
        return (
            owned
            and self._may_show((row[-1],), tuple(n[-1] for n in shown))
            and self._is_there(fields, row[-1])
        )

    @staticmethod
    def _is_there(select: Any, row: str) -> bool:
        """Say whether the WHERE of *select*, if it has one, is `row.column IS NOT NULL`."""
        kind, test = unwrap(select.where_clause)
        if kind is None:
            return True
        names = names_of(test.arg) if kind == "null_test" else []
        return len(names) > 1 and names[-2] == row and test.nulltesttype == pg.IS_NOT_NULL

    def is_alive(self, node: Any, relation: Any) -> bool:
        """Say whether *node* is `<target>.deleted_at IS NULL` for the target *relation*."""
        kind, test = unwrap(node)
        table = self.tables.resolve(relation)
        if kind != "null_test" or test.nulltesttype != pg.IS_NULL or table is None:
            return False
        if relation.HasField("alias"):
            return names_of(test.arg) == [relation.alias.aliasname, DELETED_AT]
        return names_of(test.arg) in ([table.name, DELETED_AT], [table.schema, table.name, DELETED_AT])

    @staticmethod
    def is_live(node: Any) -> bool:
        """Say whether *node* is `deleted_at IS NULL`."""
        kind, test = unwrap(node)
        if kind != "null_test" or test.nulltesttype != pg.IS_NULL:
            return False
        return names_of(test.arg) == [DELETED_AT]


def name_of(relation: Any) -> str:
    """Return what the columns of a RangeVar are qualified with."""
    name: str = relation.alias.aliasname if relation.HasField("alias") else relation.relname
    return name


def _table(node: Any, tables: SoftTables) -> tuple[str, Table | None]:
    """Return what a FROM item is called without an alias, and the table whose rows it gives."""
    if node.DESCRIPTOR.name == "RangeVar":
        return node.relname, tables.resolve(node)
    called = [n.string.sval for n in node.functions[0].list.items[0].func_call.funcname]
    return (called[-1], tables.returned_by(called)) if called else ("", None)


def _called(kind: str | None, value: Any) -> str | None:
    """Return the name of a FROM item without an alias that is no table."""
    if kind == "range_function":
        call = value.functions[0].list.items[0].func_call
        return call.funcname[-1].string.sval if call.funcname else None
    return {"range_table_func": "xmltable", "json_table": "json_table"}.get(kind or "")


def _value(entry: Any) -> Any:
    """Return the expression of an entry of a list of columns."""
    kind, value = unwrap(entry)
    return value.val if kind == "res_target" else entry


def _is_labelled(entry: Any) -> bool:
    kind, value = unwrap(entry)
    return kind == "res_target" and bool(value.name or value.indirection)


def _is_plain(select: Any, more: set[str]) -> bool:
    """Say whether *select* has a list of columns, perhaps what *more* says, and nothing else."""
    fields = {f.name for f, _ in select.ListFields()}
    return fields <= _PLAIN_SELECT and fields - {"limit_option", "op", "target_list"} <= more
