"""
Reading before images: PostgreSQL's record text, cast back to the row type it was written from.

As long as the table still has the columns it had then, that is the table's own row type. After an ALTER TABLE
the image is read with a type made of the old columns, which lives as long as the caller's transaction. A column is
known by its number (attnum), so one that was renamed is read under the name that it has now.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql

from sqlguard.errors import UndoConflict
from sqlguard.postgres.undo_table import Target

# The settings under which the capture triggers write texts, so that they are read back as they were written.
SETTINGS = {
    "DateStyle": "ISO, YMD",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "quote_all_identifiers": "off",
    "row_security": "off",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """How images are read: the table's row type when `exact`, else a type made for this transaction."""

    row_type: sql.Composable
    #: Under the names of today; those that are gone under a name that no column has.
    columns: tuple[str, ...]
    exact: bool
    #: Old names and new ones of what was renamed since.
    renamed: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Images:
    """Knows the shapes of one transaction; `close` drops the types that were made for it."""

    conn: psycopg.Connection[Any]
    notes: list[str] = field(default_factory=list)
    _shapes: dict[tuple[int, int], Shape] = field(default_factory=dict)

    def shape(self, target: Target, shape_id: int) -> Shape:
        """Return how images of *shape_id* are read as rows of *target*."""
        found = self._shapes.get((target.oid, shape_id))
        if found is None:
            found = self._shapes[target.oid, shape_id] = self._read(target, shape_id)
        return found

    def close(self) -> None:
        for shape in self._shapes.values():
            if not shape.exact:
                self.conn.execute(sql.SQL("DROP TYPE {}").format(shape.row_type))
        self._shapes.clear()

    def _read(self, target: Target, shape_id: int) -> Shape:
        row = self.conn.execute(
            "SELECT columns, types, CASE WHEN relid = %s THEN numbers ELSE '{}' END FROM sqlguard.shape WHERE id = %s",
            [target.oid, shape_id],
        ).fetchone()
        if row is None:
            raise UndoConflict(f"the journal does not say how images of `{target.label}` are read")
        old, types, numbers = row
        columns, lost = _names_now(target, old, numbers)
        renamed = {o: n for o, n in zip(old, columns, strict=True) if o != n and n in target.by_name}
        if [(c.name, c.type) for c in target.columns] == list(zip(columns, types, strict=True)):
            return Shape(target.ident, tuple(columns), exact=True, renamed=renamed)
        self._note(target, columns, lost)
        name = sql.Identifier("pg_temp", f"sqlguard_shape_{len(self._shapes)}")
        attributes = sql.SQL(", ").join(
            sql.SQL("{} {}").format(sql.Identifier(c), sql.SQL(t))
            for c, t in zip(columns, types, strict=True)
        )
        self.conn.execute(sql.SQL("CREATE TYPE {} AS ({})").format(name, attributes))
        return Shape(name, tuple(columns), exact=False, renamed=renamed)

    def _note(self, target: Target, columns: Sequence[str], lost: Sequence[str]) -> None:
        added = [c for c in target.by_name if c not in columns]
        if lost:
            self.notes.append(f"`{target.label}` has no column {', '.join(lost)} now: its values stay lost")
        if added:
            self.notes.append(f"`{target.label}` has a new column {', '.join(added)}: it keeps what it has")


def _names_now(target: Target, old: Sequence[str], numbers: Sequence[int]) -> tuple[list[str], list[str]]:
    """
    Return what the columns *old* are called now, and the old names of those that are gone.

    One that was dropped and made anew under its name is the same to whoever uses the table. Without *numbers*, as of a
    table that was made anew, names are all there is.
    """
    kept = {c.number: c.name for c in target.columns if c.number in numbers}
    free = set(target.by_name) - set(kept.values())
    names: list[str] = []
    lost: list[str] = []
    for place, name in enumerate(old):
        now = kept.get(numbers[place]) if numbers else None
        if now is None and name in free:
            now = name
        if now is None:
            lost.append(name)
            now = name if name not in target.by_name else f"{name} (dropped {place})"
        names.append(now)
    return names, lost


def pin(conn: psycopg.Connection[Any]) -> None:
    """Set, until the transaction ends, what texts of values depend on."""
    for name, value in SETTINGS.items():
        conn.execute("SELECT set_config(%s, %s, true)", [name, value])
