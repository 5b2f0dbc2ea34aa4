"""
DELETE on a soft table becomes the UPDATE that marks the very rows it names.

    DELETE FROM ONLY orders o USING users u WHERE u.id = o.owner OR o.old RETURNING o.id
    UPDATE ONLY orders o SET <marks> FROM users u WHERE (u.id = o.owner OR o.old) AND o.deleted_at IS NULL …

Target, ONLY, alias, FROM list, predicate and comments stay where they are; only the words around them change.
"""

from typing import Any

from postgast import pg_query_pb2 as pg

from sqlguard.catalog import DELETED_AT, Table
from sqlguard.errors import NotUnderstood
from sqlguard.rewrite.edits import Edits
from sqlguard.rewrite.marks import ASSIGNMENTS
from sqlguard.rewrite.source import OPEN, Source, quote


def soft_delete(source: Source, edits: Edits, delete: Any, target: Table) -> None:
    """Turn *delete* into the UPDATE; its sub-selects and its RETURNING list are other hands' work."""
    verb = start_of(source, delete)
    keyword = verb + 1
    edits.replace(source[verb].start, source[verb].end, "UPDATE")
    edits.replace(*source.word(keyword), "")
    after = keyword + 1
    end = source.stop(after)
    using = source.find(after, {pg.USING}) if delete.using_clause else None
    where = source.find(after, {pg.WHERE}) if delete.HasField("where_clause") else None
    returning = source.find(after, {pg.RETURNING}) if delete.HasField("returning_clause") else None
    ends = [i for i in (using, where, returning, end) if i is not None]
    behind_target = source[ends[0] - 1].end
    edits.insert(behind_target, f" SET {ASSIGNMENTS}{source.gap(behind_target)}")
    if using is not None:
        edits.replace(source[using].start, source[using].end, "FROM")
    _condition(
        source, edits, delete, (where, ends[-1] if returning is None else returning), live(delete, target)
    )


def _condition(source: Source, edits: Edits, delete: Any, place: tuple[int | None, int], alive: str) -> None:
    where, end = place
    behind = source[end - 1].end
    gap = source.gap(behind)
    if where is None:
        edits.insert(behind, f" WHERE {alive}{gap}")
    elif delete.where_clause.WhichOneof("node") != "current_of_expr":
        # The parentheses keep `a OR b` together; a cursor's row can't be combined with anything.
        edits.insert(source[where + 1].start, "(")
        edits.insert(behind, f") AND {alive}{gap}")


def start_of(source: Source, delete: Any) -> int:
    """Return the index of the word DELETE, found from the target's name."""
    index = source.at(delete.relation.location) - 1
    if source.kind(index) == OPEN:
        index -= 1
    if source.kind(index) == pg.ONLY:
        index -= 1
    if source.kind(index) != pg.FROM or source.kind(index - 1) != pg.DELETE_P:
        raise NotUnderstood("the start of a DELETE was not found", rules=("rewrite-not-placed",))
    return index - 1


def live(delete: Any, target: Table) -> str:
    """Return the condition that the target's row is not deleted yet, in a name that can't be ambiguous."""
    return f"{target_name(delete, target)}.{DELETED_AT} IS NULL"


def target_name(delete: Any, target: Table) -> str:
    """Return how the target's columns are qualified: by its alias, or by schema and name."""
    relation = delete.relation
    if relation.HasField("alias"):
        return quote(relation.alias.aliasname)
    if relation.schemaname or delete.using_clause:
        # Another schema's table of that name may stand in the FROM list.
        return f"{quote(target.schema)}.{quote(target.name)}"
    return quote(relation.relname)
