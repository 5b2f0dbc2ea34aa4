"""
One statement in, the text to run out: DELETE on soft tables becomes the UPDATE that marks the rows.
"""

from collections.abc import Iterator
from typing import Any

from sqlguard.catalog import Catalog, Table
from sqlguard.rewrite.delete import soft_delete
from sqlguard.rewrite.edits import Edits
from sqlguard.rewrite.names import SoftTables
from sqlguard.rewrite.proof import prove
from sqlguard.rewrite.result import Rewritten
from sqlguard.rewrite.source import Source, parse
from sqlguard.statement.model import Session


def rewrite(text: str, tree: Any, catalog: Catalog, session: Session) -> Rewritten:
    """Return what is to be run for *text*, whose tree is *tree*; raise Refused where that can't be exact."""
    tables = SoftTables(catalog, session)
    if not _concerns_soft(tree, tables):
        return Rewritten(text)
    source, edits = Source(text), Edits()
    own = parse(text)
    marked: list[Table] = []
    for delete in _deletes(own):
        target = tables.resolve(delete.relation)
        if target is not None and tables.is_soft(target):
            soft_delete(source, edits, delete, target)
            marked.append(target)
    if not edits:
        return Rewritten(text)
    spliced = edits.apply(source.bytes)
    prove(tree, spliced.text, catalog, session)
    tag = "DELETE" if own.WhichOneof("node") == "delete_stmt" else None
    return Rewritten(spliced.text, True, tag, tuple(dict.fromkeys(t.oid for t in marked)), spliced.copied)


def _concerns_soft(tree: Any, tables: SoftTables) -> bool:
    """Say whether the name of a soft table stands anywhere in *tree*: names are kept in it as they are."""
    names = [t.name for t in tables.catalog.tables.values() if tables.is_soft(t)]
    if not names:
        return False
    content = tree.SerializeToString()
    return any(name.encode() in content for name in names)


def _deletes(node: Any) -> Iterator[Any]:
    """Yield every DELETE in *node*, innermost first."""
    for _, value in node.ListFields():
        if hasattr(value, "DESCRIPTOR"):
            yield from _deletes(value)
        elif not isinstance(value, str | bytes | int | float | bool):
            for item in value:
                yield from _deletes(item)
    if node.DESCRIPTOR.name == "DeleteStmt":
        yield node
