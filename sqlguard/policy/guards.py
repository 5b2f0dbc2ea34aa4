"""Which guard a table has, by itself or through an ancestor."""

from sqlguard.catalog import Catalog, Guard, Table

#: The trigger without which nothing is kept of what agents write.
_CAPTURE = "sqlguard_insert"


def guard_of(table: Table, catalog: Catalog) -> Guard | None:
    """
    Return the table's guard, or that of the nearest ancestor: partitions are guarded through their parent.

    One that came after the guard has no walls yet. Nothing would be kept of what is written to it by its own name.
    """
    if table.guard is not None:
        return table.guard
    if not any(t.ours and t.name == _CAPTURE for t in table.triggers):
        return None
    return next((g for t in _ancestors(table, catalog) if (g := t.guard) is not None), None)


def awaits_guard(table: Table, catalog: Catalog) -> bool:
    """Say whether an ancestor is guarded and *table* has no walls yet: it shows deleted rows, and keeps nothing."""
    return guard_of(table, catalog) is None and any(t.guard is not None for t in _ancestors(table, catalog))


def _ancestors(table: Table, catalog: Catalog) -> list[Table]:
    found: list[Table] = []
    for oid in table.parents:
        if (parent := catalog.tables.get(oid)) is not None:
            found += [parent, *_ancestors(parent, catalog)]
    return found
