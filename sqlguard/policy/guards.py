"""Which guard a table has, by itself or through an ancestor."""

from sqlguard.catalog import Catalog, Guard, Table


def guard_of(table: Table, catalog: Catalog) -> Guard | None:
    """Return the table's guard, or that of the nearest ancestor: partitions are guarded through their parent."""
    if table.guard is not None:
        return table.guard
    for oid in table.parents:
        parent = catalog.tables.get(oid)
        found = guard_of(parent, catalog) if parent is not None else None
        if found is not None:
            return found
    return None
