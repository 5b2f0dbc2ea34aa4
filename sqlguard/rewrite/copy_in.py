"""
COPY … FROM STDIN into a table with row-level security, which PostgreSQL has not.

The rows go to a table of their own first (`sqlguard.copy_target` makes it, of the same columns, for this transaction),
and from there by INSERT, which row-level security knows. PostgreSQL reads the data in either case: formats, encodings
and the errors of a line are its own.
"""

from dataclasses import dataclass
from typing import Any

from sqlguard.catalog import Table
from sqlguard.errors import NotUnderstood, Refused
from sqlguard.rewrite.dml import behind_name
from sqlguard.rewrite.edits import Edits
from sqlguard.rewrite.placeless import without_places
from sqlguard.rewrite.source import Source, parse, quote

#: The table that the data goes to.
NAME = "sqlguard_copy"
#: They speak of the table itself, which the data does not reach directly.
_OPTIONS = {"default": "leave out the column, then it gets its default", "freeze": "leave it out"}


@dataclass(frozen=True, slots=True)
class Staged:
    """The statement as it is run, and what comes before and after it."""

    text: str
    before: tuple[str, ...]
    after: tuple[str, ...]


def staged(text: str, table: Table) -> Staged | None:
    """
    Return how *text*, a COPY into *table*, is run by way of another table.

    None: a column is not there, and PostgreSQL says so itself. Raises Refused for what can't be run so.
    """
    source, edits = Source(text), Edits()
    tree = parse(text)
    node = tree.copy_stmt
    listed = [n.string.sval for n in node.attlist]
    columns = listed or [c.name for c in table.columns if not c.generated]
    found = [c for c in map(table.column, columns) if c is not None]
    if len(found) < len(columns):
        return None
    _refuse_options(node, table)
    end = behind_name(source, node.relation)
    names = ", ".join(map(quote, columns))
    edits.replace(source[source.at(node.relation.location)].start, end, f"pg_temp.{NAME}")
    if not listed:
        edits.insert(end, f" ({names})")
    made = edits.apply(source.bytes).text
    _prove(tree, made, columns)
    numbers = ",".join(str(c.attnum) for c in found)
    target = f"{quote(table.schema)}.{quote(table.name)}"
    return Staged(
        made,
        (f"SELECT sqlguard.copy_target({table.oid:d}, '{{{numbers}}}')",),
        # COPY gives identity columns what it is given, too.
        (f"INSERT INTO {target} ({names}) OVERRIDING SYSTEM VALUE SELECT {names} FROM pg_temp.{NAME}",),  # noqa: S608 (quoted names)
    )


def _refuse_options(node: Any, table: Table) -> None:
    if node.HasField("where_clause"):
        raise Refused(
            f"COPY into `{table.name}` takes no WHERE: it has row-level security",
            hint="leave the rows out of the data",
            rules=("copy-with-row-security",),
        )
    for option in (n.def_elem.defname for n in node.options):
        if option in _OPTIONS:
            raise Refused(
                f"COPY into `{table.name}` has no option {option.upper()}: it has row-level security",
                hint=_OPTIONS[option],
                rules=("copy-with-row-security",),
            )


def _prove(original: Any, text: str, columns: list[str]) -> None:
    """Raise unless *text* is the COPY *original* but for its table and, where it lists none, its columns."""
    old, new = without_places(original).copy_stmt, without_places(parse(text)).copy_stmt
    relation = new.relation
    is_ours = (relation.schemaname, relation.relname) == ("pg_temp", NAME)
    listed = [n.string.sval for n in new.attlist]
    for tree in (old, new):
        tree.ClearField("relation")
        tree.ClearField("attlist")
    if not is_ours or listed != columns or old.SerializeToString() != new.SerializeToString():
        raise NotUnderstood(
            "the COPY can't be run with certainty",
            hint="use INSERT with several rows",
            rules=("rewrite-not-proved",),
        )
