"""
Reading before images: PostgreSQL's record text, cast back to the row type it was written from.

As long as the table still has the columns it had then, that is the table's own row type. After an ALTER TABLE
the image is read with a type made of the old columns, which lives as long as the caller's transaction.
"""

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
    "row_security": "off",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """How images are read: the table's row type when `exact`, else a type made for this transaction."""

    row_type: sql.Composable
    columns: tuple[str, ...]
    exact: bool


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
            "SELECT columns, types FROM sqlguard.shape WHERE id = %s", [shape_id]
        ).fetchone()
        if row is None:
            raise UndoConflict(f"the journal does not say how images of `{target.label}` are read")
        columns, types = row
        if [(c.name, c.type) for c in target.columns] == list(zip(columns, types, strict=True)):
            return Shape(target.ident, tuple(columns), exact=True)
        self._note(target, columns)
        name = sql.Identifier("pg_temp", f"sqlguard_shape_{len(self._shapes)}")
        attributes = sql.SQL(", ").join(
            sql.SQL("{} {}").format(sql.Identifier(c), sql.SQL(t))
            for c, t in zip(columns, types, strict=True)
        )
        self.conn.execute(sql.SQL("CREATE TYPE {} AS ({})").format(name, attributes))
        return Shape(name, tuple(columns), exact=False)

    def _note(self, target: Target, columns: list[str]) -> None:
        lost = [c for c in columns if c not in target.by_name]
        added = [c for c in target.by_name if c not in columns]
        if lost:
            self.notes.append(f"`{target.label}` has no column {', '.join(lost)} now: its values stay lost")
        if added:
            self.notes.append(f"`{target.label}` has a new column {', '.join(added)}: it keeps what it has")


def pin(conn: psycopg.Connection[Any]) -> None:
    """Set, until the transaction ends, what texts of values depend on."""
    for name, value in SETTINGS.items():
        conn.execute("SELECT set_config(%s, %s, true)", [name, value])
