"""
One statement in, the text to run out.

Most statements touch no soft table: they are told by their text alone and returned as they came. So are those
that touch one in a plain way (`plain`). The others are parsed, walked (`walk`), spliced (`edits`) and proved
(`proof`).
"""

from collections.abc import Mapping
from typing import Any

from sqlguard.catalog import Catalog
from sqlguard.errors import Refused
from sqlguard.rewrite import once, walk
from sqlguard.rewrite.names import SoftTables
from sqlguard.rewrite.plain import Plain, plainness
from sqlguard.rewrite.proof import prove
from sqlguard.rewrite.result import Rewritten
from sqlguard.rewrite.source import Source, parse
from sqlguard.rewrite.work import Work
from sqlguard.statement.model import Session


def rewrite(
    text: str,
    tree: Any,
    catalog: Catalog,
    session: Session,
    *,
    read: Mapping[str, Any] | None = None,
) -> Rewritten:
    """
    Return what is to be run for *text*, one statement; raise Refused where that can't be exact.

    *tree* is the libpg_query node that was judged, wherever its places count from; the proof is against it.
    *read* is the same as libpg_query's JSON, if the caller has it: most reads need no other parse then.
    """
    tables = SoftTables(catalog, session)
    if not tables.may_concern(text):
        return Rewritten(text)
    plain = plainness(text, read, tables)
    if plain is Plain.YES:
        return Rewritten(text)
    own = parse(text)
    work = Work(Source(text), tables, only_deletes=plain is Plain.BUT_DELETES)
    walk.statement(work, own)
    _refuse_replacing(work)
    if work.marked:
        once.keep(work.source, work.edits, own)
    if not work.edits:
        return Rewritten(text)
    spliced = work.edits.apply(work.source.bytes)
    prove(own if tree is None else tree, spliced.text, catalog, session)
    return Rewritten(
        spliced.text,
        changed=True,
        tag=_tag(own, work),
        writes_soft=tuple(dict.fromkeys(table.oid for table in work.marked)),
        copied=spliced.copied,
        execute_tag=_tag(own.prepare_stmt.query, work),
    )


def _tag(node: Any, work: Work) -> str | None:
    if not node.HasField("delete_stmt"):
        return None
    target = work.tables.resolve(node.delete_stmt.relation)
    return "DELETE" if work.tables.is_soft(target) else None


def _refuse_replacing(work: Work) -> None:
    """Refuse to delete rows and insert rows with given keys at once: a deleted row keeps its primary key."""
    families = [work.tables.family(table) for table in work.marked]
    for table in work.keyed:
        if any(table.oid in family for family in families):
            raise Refused(
                f"a deleted row of `{table.name}` keeps its primary key, which is inserted again here",
                hint="UPDATE the row instead of replacing it",
                rules=("primary_key_held_by_tombstone",),
            )
