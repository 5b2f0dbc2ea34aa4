"""
Which table a name means, and which of its columns agents must not see.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlguard.catalog import Catalog, Table
from sqlguard.statement.model import Session


@dataclass(frozen=True, slots=True)
class SoftTables:
    """The tables guarded as `soft`, themselves or by an ancestor, and how the session's names reach them."""

    catalog: Catalog
    session: Session

    def resolve(self, relation: Any) -> Table | None:
        """Return the table that a RangeVar means (CTEs left aside), None for a temporary or unknown one."""
        schema = relation.schemaname or None
        if schema == "pg_temp" or (schema is None and relation.relname in self.session.temporary):
            return None
        return self.catalog.table(schema, relation.relname, self.session.search_path)

    def temporary(self, relation: Any) -> tuple[str, ...] | None:
        """Return the columns of the session's temporary table that a RangeVar means, None without one."""
        if relation.schemaname in ("", "pg_temp"):
            return self.session.temporary.get(relation.relname)
        return None

    def hidden(self, table: Table | None) -> tuple[str, ...]:
        """Return the bookkeeping columns of *table*, perhaps inherited; empty when it is not soft."""
        guarded = self.catalog.soft.get(table.oid) if table is not None else None
        return guarded.guard.bookkeeping if guarded is not None and guarded.guard is not None else ()

    def is_soft(self, table: Table | None) -> bool:
        return table is not None and table.oid in self.catalog.soft

    def row_type(self, oid: int) -> Table | None:
        """Return the soft table whose row type, or an array of them, *oid* is."""
        found = self.catalog.types.get(oid)
        while found is not None and found.element:
            found = self.catalog.types.get(found.element)
        table = self.catalog.tables.get(found.relation) if found is not None else None
        return table if self.is_soft(table) else None

    def returned_by(self, names: Sequence[str]) -> Table | None:
        """Return the soft table whose rows a function called *names* may return."""
        schema = names[-2] if len(names) > 1 else None
        functions = self.catalog.functions_named(schema, names[-1])
        return next((t for f in functions if (t := self.row_type(f.return_type)) is not None), None)

    def below(self, table: Table) -> Iterator[Table]:
        """Yield the soft tables that inherit from *table*."""
        return (child for child in self.catalog.descendants(table.oid) if self.is_soft(child))

    def family(self, table: Table) -> set[int]:
        """Return the oids of *table*, what it inherits from and what inherits from it."""
        found = {table.oid, *(t.oid for t in self.catalog.descendants(table.oid))}
        for oid in table.parents:
            parent = self.catalog.tables.get(oid)
            if parent is not None:
                found |= self.family(parent)
        return found

    def may_concern(self, text: str) -> bool:
        """Say whether *text* may name a soft table, or a view or a parent of one; False is certain."""
        content = text.encode().lower()
        if b"u&" in content and b'"' in content:
            return bool(self.catalog.soft)  # a name may be written with escapes
        return any(name in content for name in self.catalog.soft_spellings)
