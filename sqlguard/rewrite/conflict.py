"""
ON CONFLICT: a unique constraint of a soft table has become a unique index on the live rows, which has to be
named.

    ON CONFLICT (email)                        becomes  ON CONFLICT (email) WHERE deleted_at IS NULL
    ON CONFLICT ON CONSTRAINT users_email_key  becomes  ON CONFLICT (email) WHERE deleted_at IS NULL

A primary key stays as it is; a deleted row that holds the key is found by PostgreSQL when the statement
runs.
"""

from typing import Any

from postgast import pg_query_pb2 as pg

from sqlguard.catalog import DELETED_AT, Table, Unique
from sqlguard.errors import NotUnderstood, Refused
from sqlguard.rewrite.source import Source, quote
from sqlguard.rewrite.work import Work, reads

_LIVE = f"{DELETED_AT} IS NULL"
#: PostgreSQL's NAMEDATALEN - 1.
_LONGEST = 63


def infer(work: Work, clause: Any, table: Table) -> None:
    """Make the conflict target *clause* name the index on the live rows, if that is what it meant."""
    if clause.conname:
        _by_name(work, clause, table)
        return
    columns = [e.index_elem.name for e in clause.index_elems]
    hidden = work.tables.hidden(table)
    caught = next((c for c in columns if c in hidden), None)
    if caught is not None:
        raise reads(caught, table.name)
    if any(_is_on(u, columns) for u in table.uniques if of_live_rows(u)):
        _add_predicate(work, clause)


def of_live_rows(unique: Unique) -> bool:
    """Say whether *unique* is an index on the rows that are not deleted."""
    return unique.predicate is not None and _LIVE in unique.predicate


def replaces(unique: Unique, name: str, table: Table) -> bool:
    """Say whether *unique* is what became of the constraint *name*, by its name or a default one."""
    given = "_".join((table.name, *(c or "expr" for c in unique.columns), "key"))
    return name == unique.name or (len(given) <= _LONGEST and name == given)


def _is_on(unique: Unique, columns: list[str]) -> bool:
    # An expression has no name on either side.
    return sorted(c or "" for c in unique.columns) == sorted(columns)


def _by_name(work: Work, clause: Any, table: Table) -> None:
    if any(u.name == clause.conname and u.constraint for u in table.uniques):
        return
    found = [u for u in table.uniques if of_live_rows(u) and replaces(u, clause.conname, table)]
    columns = [c for u in found for c in u.columns]
    if len(found) != 1 or None in columns:
        raise Refused(
            f"the constraint `{clause.conname}` of `{table.name}` is an index on the live rows now",
            hint="name the columns instead: ON CONFLICT (column, …)",
            rules=("unique_value_held_by_tombstone",),
        )
    source = work.source
    first = source.at(clause.location)
    if [source.kind(first), source.kind(first + 1)] != [pg.ON, pg.CONSTRAINT]:
        raise NotUnderstood("a conflict target was not found", rules=("rewrite-not-placed",))
    named = ", ".join(quote(c) for c in columns if c is not None)
    work.edits.replace(source[first].start, source[first + 2].end, f"({named}) WHERE {_LIVE}")


def _add_predicate(work: Work, clause: Any) -> None:
    source = work.source
    closing = source.close(source.at(clause.location))
    if not clause.HasField("where_clause"):
        work.edits.insert(source[closing].end, f" WHERE {_LIVE}{source.gap(source[closing].end)}")
        return
    end = _do(source, closing + 1)
    work.edits.insert(source[closing + 2].start, "(")
    behind = source[end - 1].end
    work.edits.insert(behind, f") AND {_LIVE}{source.gap(behind)}")


def _do(source: Source, start: int) -> int:
    found = source.find(start, {pg.DO})
    if found is None:
        raise NotUnderstood("a conflict action was not found", rules=("rewrite-not-placed",))
    return found
