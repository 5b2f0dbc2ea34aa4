"""
The proof that a rewritten text is the statement that was sent, but for what was meant to change.

It knows nothing of how the text was made. It parses the new text and walks both trees together: every field has to
be equal, places in the text aside, except where the old node and the new one stand for a change that is allowed;
each allowed change is taken back on the tree before the comparison goes on. Whatever else differs is a fault of
ours, and the statement is not run.
"""

from typing import Any

from postgast import pg_query_pb2 as pg

from sqlguard.catalog import DELETED_AT, Catalog
from sqlguard.errors import NotUnderstood
from sqlguard.rewrite import marks
from sqlguard.rewrite.names import SoftTables
from sqlguard.rewrite.source import parse
from sqlguard.statement.model import Session

#: Fields that only say where something stands in the text.
PLACES = frozenset(
    {
        "location",
        "stmt_location",
        "stmt_len",
        "list_start",
        "list_end",
        "rexpr_list_start",
        "rexpr_list_end",
    }
)
_MARKS = parse(f"UPDATE t SET {marks.ASSIGNMENTS}").update_stmt.target_list


def prove(original: Any, text: str, catalog: Catalog, session: Session) -> None:
    """Raise unless *text* is the statement *original* (a libpg_query node) with nothing but soft deletion done to it."""
    if not _Proof(SoftTables(catalog, session)).same(original, parse(text)):
        raise NotUnderstood(
            "the statement can't be rewritten with certainty",
            hint="write it in a plainer form, with its columns named",
            rules=("rewrite-not-proved",),
        )


class _Proof:
    def __init__(self, tables: SoftTables) -> None:
        self.tables = tables

    def same(self, old: Any, new: Any) -> bool:
        """Compare two messages of any kind."""
        kind = old.DESCRIPTOR.name
        if kind == "Node":
            return self._same_node(old, new)
        return kind == new.DESCRIPTOR.name and self._same_fields(old, new)

    def _same_fields(self, old: Any, new: Any, skip: frozenset[str] = frozenset()) -> bool:
        skip = skip | PLACES
        before = {f.name: v for f, v in old.ListFields() if f.name not in skip}
        after = {f.name: v for f, v in new.ListFields() if f.name not in skip}
        if before.keys() != after.keys():
            return False
        return all(self._same_value(value, after[name]) for name, value in before.items())

    def _same_value(self, old: Any, new: Any) -> bool:
        if hasattr(old, "DESCRIPTOR"):
            return self.same(old, new)
        if isinstance(old, str | bytes | int | float | bool):
            return bool(old == new)
        return len(old) == len(new) and all(self._same_value(o, n) for o, n in zip(old, new, strict=True))

    def _same_node(self, old: Any, new: Any) -> bool:
        was, became = old.WhichOneof("node"), new.WhichOneof("node")
        if was is None or became is None:
            return was is became
        before, after = getattr(old, was), getattr(new, became)
        if was == "delete_stmt" and self.tables.is_soft(self.tables.resolve(before.relation)):
            return became == "update_stmt" and self._same_delete(before, after)
        return was == became and self.same(before, after)

    def _same_delete(self, old: Any, new: Any) -> bool:
        """Take the UPDATE back to the DELETE it has to be."""
        return (
            self.same(old.relation, new.relation)
            and self._same_value(_MARKS, new.target_list)
            and self._same_value(old.using_clause, new.from_clause)
            and self._same_condition(old, new.where_clause)
            and self.same(old.with_clause, new.with_clause)
            and self.same(old.returning_clause, new.returning_clause)
        )

    def _same_condition(self, old: Any, new: Any) -> bool:
        if old.where_clause.WhichOneof("node") == "current_of_expr":
            return self.same(old.where_clause, new)
        if not old.HasField("where_clause"):
            return self._is_alive(new, old.relation)
        both = new.bool_expr
        if new.WhichOneof("node") != "bool_expr" or both.boolop != pg.AND_EXPR:
            return False
        *rest, alive = both.args
        if not self._is_alive(alive, old.relation):
            return False
        if len(rest) == 1:
            return self.same(old.where_clause, rest[0])
        # The grammar makes one AND of `(a AND b) AND c`.
        was = old.where_clause.bool_expr
        return (
            old.where_clause.WhichOneof("node") == "bool_expr"
            and was.boolop == both.boolop
            and self._same_value(was.args, rest)
        )

    def _is_alive(self, node: Any, relation: Any) -> bool:
        """Say whether *node* is `<target>.deleted_at IS NULL`."""
        test = node.null_test
        if node.WhichOneof("node") != "null_test" or test.nulltesttype != pg.IS_NULL:
            return False
        names = [f.string.sval for f in test.arg.column_ref.fields]
        table = self.tables.resolve(relation)
        if table is None or not names or names[-1] != DELETED_AT:
            return False
        if relation.HasField("alias"):
            return names[:-1] == [relation.alias.aliasname]
        return names[:-1] in ([table.name], [table.schema, table.name])
