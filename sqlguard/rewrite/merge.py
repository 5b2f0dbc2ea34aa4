"""
MERGE … WHEN … THEN DELETE marks the row instead: `THEN UPDATE SET <marks>`. The tag stays MERGE.
"""

from collections.abc import Iterator
from typing import Any

from postgast import pg_query_pb2 as pg

from sqlguard.errors import NotUnderstood, Refused
from sqlguard.rewrite.edits import Edits
from sqlguard.rewrite.marks import ASSIGNMENTS
from sqlguard.rewrite.source import OPEN, Source, parts


def mark(source: Source, edits: Edits, node: Any) -> None:
    """Turn every DELETE action of the MERGE *node* into the UPDATE that marks the row."""
    if _asks_for_action(node.returning_clause):
        raise Refused(
            "what `merge_action()` says of a deleted row can't be kept",
            hint="leave merge_action() out of RETURNING",
            rules=("merge_action_of_delete",),
        )
    clauses = [n.merge_when_clause for n in node.merge_when_clauses]
    actions = list(_actions(source, _start(source, node)))
    deletes = [c.command_type == pg.CMD_DELETE for c in clauses]
    if deletes != [source.kind(i) == pg.DELETE_P for i in actions]:
        raise NotUnderstood("the actions of a MERGE were not found", rules=("rewrite-not-placed",))
    for index in actions:
        if source.kind(index) == pg.DELETE_P:
            edits.replace(source[index].start, source[index].end, f"UPDATE SET {ASSIGNMENTS}")


def _start(source: Source, node: Any) -> int:
    """Return the index of the first word after MERGE."""
    index = source.at(node.relation.location)
    while source.kind(index - 1) in (OPEN, pg.ONLY, pg.INTO):
        index -= 1
    return index


def _actions(source: Source, start: int) -> Iterator[int]:
    """Yield the index of each action's first word: what follows THEN outside of parentheses and CASE."""
    cases = 0
    for index in source.level(start):
        if source.is_name(index):
            continue
        kind = source.kind(index)
        if kind == pg.RETURNING:
            return
        cases += (kind == pg.CASE) - (kind == pg.END_P)
        if kind == pg.THEN and cases == 0:
            yield index + 1


def _asks_for_action(node: Any) -> bool:
    return node.DESCRIPTOR.name == "MergeSupportFunc" or any(map(_asks_for_action, parts(node)))
