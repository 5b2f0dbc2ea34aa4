"""
Which table a name means, and which of its columns agents must not see.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlguard.catalog import Catalog, Table
from sqlguard.statement.model import Session

SOFT = "soft"


@dataclass(frozen=True, slots=True)
class SoftTables:
    """The tables guarded as `soft`, themselves or by an ancestor, and how the session's names reach them."""

    catalog: Catalog
    session: Session

    def resolve(self, relation: Any) -> Table | None:
        """Return the catalog's table that a RangeVar means (CTEs left aside), None for a temporary or unknown one."""
        schema = relation.schemaname or None
        if schema == "pg_temp" or (schema is None and relation.relname in self.session.temporary):
            return None
        return self.catalog.table(schema, relation.relname, self.session.search_path)

    def temporary(self, relation: Any) -> tuple[str, ...] | None:
        """Return the columns of the session's temporary table that a RangeVar means, None if it means none."""
        if relation.schemaname in ("", "pg_temp"):
            return self.session.temporary.get(relation.relname)
        return None

    def hidden(self, table: Table | None) -> tuple[str, ...]:
        """Return the bookkeeping columns of *table*, which it may have inherited; empty when it is not soft."""
        guarded = self.guarded_by(table)
        return guarded.guard.bookkeeping if guarded is not None and guarded.guard is not None else ()

    def is_soft(self, table: Table | None) -> bool:
        return self.guarded_by(table) is not None

    def guarded_by(self, table: Table | None) -> Table | None:
        """Return *table* or the nearest ancestor that is guarded, if that is guarded as soft."""
        if table is None:
            return None
        if table.guard is not None:
            return table if table.guard.mode == SOFT else None
        for oid in table.parents:
            found = self.guarded_by(self.catalog.tables.get(oid))
            if found is not None:
                return found
        return None

    def below(self, table: Table) -> Iterator[Table]:
        """Yield the soft tables that inherit from *table*."""
        return (child for child in self.catalog.descendants(table.oid) if self.is_soft(child))
