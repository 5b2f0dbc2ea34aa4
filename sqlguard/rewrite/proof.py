"""
The proof that a rewritten text is the statement that was sent, but for what was meant to change.

It knows nothing of how the text was made. It parses the new text and walks both trees together: every field
has to be equal, places in the text aside (`placeless`), except where the old node and the new one stand for a
change that is allowed; each allowed change is taken back on the tree before the comparison goes on. Whatever
else differs is a fault of ours, and the statement is not run.

Allowed are: DELETE on a soft table as the UPDATE that marks, in MERGE too; a star as the columns that an
agent sees; a whole row as a row of them; a bare name qualified, NATURAL written out, columns listed after
INSERT INTO t and COPY t; the index on the live rows named in ON CONFLICT; and a sub-select that is executed once.
"""

from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import postgast
from postgast import pg_query_pb2 as pg

from sqlguard.catalog import Catalog, Table
from sqlguard.errors import NotUnderstood
from sqlguard.rewrite import conflict, dml, marks, once
from sqlguard.rewrite.names import SoftTables
from sqlguard.rewrite.placeless import without_places
from sqlguard.rewrite.sight import Sight, name_of, names_of, unwrap
from sqlguard.rewrite.source import parse
from sqlguard.statement.model import Session

#: Lists in which a star stands for columns.
_COLUMN_LISTS = frozenset({("SelectStmt", "target_list"), ("ReturningClause", "exprs"), ("RowExpr", "args")})
#: Statements with columns to return, and where their FROM and their target are.
_STATEMENTS: dict[str, tuple[str, str]] = {
    "SelectStmt": ("from_clause", ""),
    "InsertStmt": ("", "relation"),
    "UpdateStmt": ("from_clause", "relation"),
    "DeleteStmt": ("using_clause", "relation"),
    "MergeStmt": ("source_relation", "relation"),
}

_KIND = attrgetter("token")


@cache
def _marks() -> Any:
    return without_places(parse(marks.UPDATE)).update_stmt.target_list


def prove(original: Any, text: str, catalog: Catalog, session: Session) -> None:
    """Raise unless *text* is the statement *original*, a node, but for what was meant to change."""
    tables = SoftTables(catalog, session)
    old, new = without_places(original), without_places(parse(text))
    # Equal parts are the same, unless the old one has a DELETE that had to be changed; the new one has it then.
    deletes = pg.DELETE_P in map(_KIND, postgast.scan(text).tokens)
    if not _Proof(tables, Sight(old, tables), equal_is_same=not deletes).same_part(old, new):
        raise NotUnderstood(
            "the statement can't be rewritten with certainty",
            hint="write it in a plainer form, with its columns named",
            rules=("rewrite-not-proved",),
        )


class _Proof:
    def __init__(self, tables: SoftTables, sight: Sight, *, equal_is_same: bool) -> None:
        self.tables = tables
        self.sight = sight
        self._equal_is_same = equal_is_same
        #: The statements that are being compared, innermost last.
        self._statements: list[Any] = []
        self._changes: dict[str, Callable[[Any, Any], bool]] = {
            "ColumnRef": self._same_column,
            "CopyStmt": self._same_copy,
            "InferClause": self._same_fields,
            "InsertStmt": self._same_insert,
            "JoinExpr": self._same_join,
            "MergeStmt": self._same_merge,
            "RangeSubselect": lambda old, new: self._same_select(old, new, "subquery"),
            "SubLink": lambda old, new: self._same_select(old, new, "subselect"),
        }

    def same(self, old: Any, new: Any) -> bool:
        """Compare two messages of any kind."""
        # The same bytes are the same message; comparing the messages takes four times as long.
        equal = self._equal_is_same and old.SerializeToString() == new.SerializeToString()
        return equal or self.same_part(old, new)

    def same_part(self, old: Any, new: Any) -> bool:
        """Compare two messages part by part, as there is hardly a chance that they are equal."""
        kind = old.DESCRIPTOR.name
        if kind == "Node":
            return self._same_node(old, new)
        if kind != new.DESCRIPTOR.name:
            return False
        if kind not in _STATEMENTS:
            return self._changes.get(kind, self._same_fields)(old, new)
        return self._within(old, lambda: self._changes.get(kind, self._same_fields)(old, new))

    def _within(self, statement: Any, compare: Callable[[], bool]) -> bool:
        """Compare while the FROM of *statement* is in sight."""
        self._statements.append(statement)
        try:
            return compare()
        finally:
            self._statements.pop()

    def _owners(self) -> list[str | None]:
        """Return what is in FROM of the innermost statement that is being compared."""
        statement = self._statements[-1]
        kind = statement.DESCRIPTOR.name
        source, target = _STATEMENTS[kind]
        found: list[str | None] = [name_of(getattr(statement, target))] if target else []
        sources = getattr(statement, source) if source else []
        more = self.sight.owners([sources] if hasattr(sources, "DESCRIPTOR") else sources)
        # MERGE returns its source first.
        return more + found if kind == "MergeStmt" else found + more

    def _same_fields(self, old: Any, new: Any, skip: frozenset[str] = frozenset()) -> bool:
        before = {f.name: v for f, v in old.ListFields() if f.name not in skip}
        after = {f.name: v for f, v in new.ListFields() if f.name not in skip}
        if before.keys() != after.keys():
            return False
        kind = old.DESCRIPTOR.name
        return all(
            self._same_columns(value, after[name])
            if (kind, name) in _COLUMN_LISTS
            else self._same_value(value, after[name])
            for name, value in before.items()
        )

    def _same_value(self, old: Any, new: Any) -> bool:
        if hasattr(old, "DESCRIPTOR"):
            return self.same(old, new)
        if isinstance(old, str | bytes | int | float | bool):
            return bool(old == new)
        return len(old) == len(new) and all(self._same_value(o, n) for o, n in zip(old, new, strict=True))

    def _same_node(self, old: Any, new: Any) -> bool:
        was, before = unwrap(old)
        became, after = unwrap(new)
        if was == "delete_stmt" and self._is_soft(before.relation):
            return became == "update_stmt" and self._within(before, lambda: self._same_delete(before, after))
        if became == "sub_link" and was in ("column_ref", "a_indirection"):
            return self.sight.is_row_of(names_of(old), after)
        if was == "select_stmt" and before.values_lists:
            return was == became and self._same_values(before, after)
        return was == became and (was is None or self.same_part(before, after))

    def _same_delete(self, old: Any, new: Any) -> bool:
        """Take the UPDATE back to the DELETE it has to be."""
        return (
            self.same(old.relation, new.relation)
            and self._same_value(_marks(), new.target_list)
            and self._same_value(old.using_clause, new.from_clause)
            and self._same_condition(old, new)
            and self.same(old.with_clause, new.with_clause)
            and self.same(old.returning_clause, new.returning_clause)
        )

    def _same_condition(self, old: Any, new: Any) -> bool:
        kind, before = unwrap(old.where_clause)
        if kind == "current_of_expr":
            return self.same(old.where_clause, new.where_clause)
        if kind is None:
            return self.sight.is_alive(new.where_clause, old.relation)
        rest = self._without(new.where_clause, lambda node: self.sight.is_alive(node, old.relation))
        return rest is not None and self._same_conjunction(old.where_clause, (kind, before), rest)

    @staticmethod
    def _without(node: Any, is_last: Callable[[Any], bool]) -> Sequence[Any] | None:
        """Return the arms of the AND *node* but its last, which has to be ours."""
        kind, both = unwrap(node)
        if kind != "bool_expr" or both.boolop != pg.AND_EXPR or not is_last(both.args[-1]):
            return None
        return list(both.args[:-1])

    def _same_conjunction(self, old: Any, parts: tuple[str, Any], rest: Sequence[Any]) -> bool:
        if len(rest) == 1:
            return self.same(old, rest[0])
        # The grammar makes one AND of `(a AND b) AND c`.
        kind, before = parts
        return kind == "bool_expr" and before.boolop == pg.AND_EXPR and self._same_value(before.args, rest)

    def _same_merge(self, old: Any, new: Any) -> bool:
        if not self._is_soft(old.relation):
            return self._same_fields(old, new)
        if len(old.merge_when_clauses) != len(new.merge_when_clauses):
            return False
        for before, after in zip(old.merge_when_clauses, new.merge_when_clauses, strict=True):
            was, became = before.merge_when_clause, after.merge_when_clause
            if was.command_type != pg.CMD_DELETE:
                same = self.same(before, after)
            else:
                same = (
                    became.command_type == pg.CMD_UPDATE
                    and self._same_value(_marks(), became.target_list)
                    and self._same_fields(was, became, frozenset({"command_type", "target_list"}))
                )
            if not same:
                return False
        return self._same_fields(old, new, frozenset({"merge_when_clauses"}))

    def _same_insert(self, old: Any, new: Any) -> bool:
        listed = [c.res_target.name for c in new.cols]
        skip: frozenset[str] = frozenset({"on_conflict_clause"})
        if listed and not old.cols:
            if listed != list(self._visible(old.relation))[: len(listed)]:
                return False
            skip |= {"cols"}
        return self._same_conflict(old, new) and self._same_fields(old, new, skip)

    def _same_conflict(self, old: Any, new: Any) -> bool:
        before, after = old.on_conflict_clause, new.on_conflict_clause
        if not self._same_fields(before, after, frozenset({"infer"})):
            return False
        if self._same_fields(before.infer, after.infer):
            return True
        table = self.tables.resolve(old.relation)
        soft = table is not None and self.tables.is_soft(table)
        return table is not None and soft and self._same_inference(before.infer, after.infer, table)

    def _same_inference(self, was: Any, became: Any, table: Table) -> bool:
        """Take the index on the live rows back to the constraint that it stands for."""
        if was.conname:
            columns = [e.index_elem.name for e in became.index_elems]
            gone = any(
                conflict.of_live_rows(u)
                and conflict.replaces(u, was.conname, table)
                and list(u.columns) == columns
                for u in table.uniques
            )
            return gone and not became.conname and self.sight.is_live(became.where_clause)
        if not self._same_fields(was, became, frozenset({"where_clause"})):
            return False
        kind, condition = unwrap(was.where_clause)
        if kind is None:
            return self.sight.is_live(became.where_clause)
        rest = self._without(became.where_clause, self.sight.is_live)
        return rest is not None and self._same_conjunction(was.where_clause, (kind, condition), rest)

    def _same_copy(self, old: Any, new: Any) -> bool:
        listed = [n.string.sval for n in new.attlist]
        if listed and not old.attlist:
            table = self.tables.resolve(old.relation)
            if table is None or not self.tables.is_soft(table):
                return False
            same = listed == dml.copied(table, self._visible(old.relation), inward=old.is_from)
            return same and self._same_fields(old, new, frozenset({"attlist"}))
        return self._same_fields(old, new)

    def _same_join(self, old: Any, new: Any) -> bool:
        """Take JOIN … USING, ON true and CROSS JOIN back to the NATURAL JOIN they may have been."""
        if not old.is_natural or new.is_natural:
            return self._same_fields(old, new)
        named = [n.string.sval for n in new.using_clause]
        kind, quals = unwrap(new.quals)
        true = kind == "a_const" and quals.boolval.boolval
        condition = bool(named) or true or (kind is None and new.jointype == pg.JOIN_INNER)
        changed = frozenset({"is_natural", "using_clause", "quals"})
        if not condition or self.sight.any_hidden(named) or not self.sight.is_natural(old, named):
            return False
        return self._same_fields(old, new, changed)

    def _same_select(self, old: Any, new: Any, field: str) -> bool:
        """Take a sub-select that is executed once back to the plain one."""
        inside = once.kept(getattr(new, field))
        # What FOR UPDATE locks by way of a sub-select in FROM it does not lock in a WITH query.
        locked = field == "subquery" and any(
            s.locking_clause for s in self._statements if s.DESCRIPTOR.name == "SelectStmt"
        )
        if inside is None or locked or not self.same(getattr(old, field), inside):
            return self._same_fields(old, new)
        return self._same_fields(old, new, frozenset({field}))

    def _same_values(self, old: Any, new: Any) -> bool:
        rows = zip(old.values_lists, new.values_lists, strict=False)
        return (
            len(old.values_lists) == len(new.values_lists)
            and all(self._same_columns(o.list.items, n.list.items) for o, n in rows)
            and self._same_fields(old, new, frozenset({"values_lists"}))
        )

    def _same_columns(self, old: Sequence[Any], new: Sequence[Any]) -> bool:
        """Compare two lists of columns; a star of the old one may stand for several of the new one."""
        reach = {0}
        for entry in old:
            further = {i + 1 for i in reach if i < len(new) and self.same(entry, new[i])}
            if self.sight.is_star(entry):
                further |= {
                    end
                    for start in reach
                    for end in range(start + 1, len(new) + 1)
                    if self.sight.is_expansion(entry, new[start:end], self._owners())
                }
            reach = further
        return len(new) in reach

    def _same_column(self, old: Any, new: Any) -> bool:
        """Take a qualified name back to the bare one, if a bookkeeping column might have been meant by it."""
        if self._same_fields(old, new):
            return True
        return len(old.fields) == 1 and self.sight.is_qualified(names_of(old), names_of(new))

    def _is_soft(self, relation: Any) -> bool:
        return self.tables.is_soft(self.tables.resolve(relation))

    def _visible(self, relation: Any) -> tuple[str, ...]:
        table = self.tables.resolve(relation)
        hidden = self.tables.hidden(table)
        return tuple(c.name for c in table.columns if c.name not in hidden) if table else ()
