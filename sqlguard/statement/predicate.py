"""Whether a write's predicate really narrows it down (first step: a WHERE that mentions the target)."""

from typing import TYPE_CHECKING, Any

from sqlguard.statement.model import Scope
from sqlguard.statement.names import Entry

if TYPE_CHECKING:
    from sqlguard.statement.walk import Walk


def scope(walk: "Walk", where: Any, target: Entry) -> Scope:
    """Return how far a WHERE narrows a write of *target* down."""
    return scope_of_all(walk, [] if where is None else [where], target)


def scope_of_all(walk: "Walk", conditions: list[Any], target: Entry) -> Scope:
    """The same for several conditions that must all hold."""
    return Scope.MEASURED if any(_mentions(walk, c, target) for c in conditions) else Scope.ALL


def upsert_scope(walk: "Walk", select: Any, target: Entry) -> Scope:
    """Return how far the source of an INSERT … SELECT … ON CONFLICT DO UPDATE narrows the update down."""
    return Scope.MEASURED


def _mentions(walk: "Walk", node: Any, target: Entry) -> bool:
    if isinstance(node, list):
        return any(_mentions(walk, item, target) for item in node)
    if not isinstance(node, dict):
        return False
    if "ColumnRef" in node:
        return walk.owners.get(id(node["ColumnRef"])) is target
    return any(_mentions(walk, value, target) for value in node.values())
