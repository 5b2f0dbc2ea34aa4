"""What an undo did, or would do, and the rows it left alone."""

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class TableCount:
    """How many rows of a table an undo inserted, updated, rekeyed, restored (unmarked) or deleted."""

    table: str
    op: str
    rows: int

    def as_dict(self) -> dict[str, Any]:
        return {"table": self.table, "op": self.op, "rows": self.rows}


@dataclass(frozen=True, slots=True)
class Conflict:
    """A row that an undo leaves alone, with what it is now and what it was before the agent's change."""

    table: str
    key: dict[str, str | None]
    reason: str
    current: dict[str, Any] | None = None
    wanted: dict[str, Any] | None = None
    change_set: int | None = None

    def __str__(self) -> str:
        key = ", ".join(f"{name}={value}" for name, value in self.key.items())
        return f"{self.table} ({key}): {self.reason}"

    def as_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, slots=True)
class Difference:
    """One row that a preview would change: as it is now, and as it would be (None: no row)."""

    table: str
    key: dict[str, str | None]
    op: str
    current: dict[str, Any] | None
    wanted: dict[str, Any] | None

    def as_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class UndoReport:
    """
    What an undo did, or would do. `undo` is its id (for a redo), None when nothing was changed for good.

    `stopped`: there were conflicts and nothing was changed. `already_undone`: there was nothing left to do.
    """

    scope: dict[str, Any]
    undo: int | None = None
    preview: bool = False
    already_undone: bool = False
    stopped: bool = False
    tables: tuple[TableCount, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    conflict_count: int = 0
    differences: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        return sum(t.rows for t in self.tables)

    def as_dict(self) -> dict[str, Any]:
        return {
            "undo": self.undo,
            "scope": self.scope,
            "preview": self.preview,
            "already_undone": self.already_undone,
            "stopped": self.stopped,
            "rows": self.rows,
            "tables": [t.as_dict() for t in self.tables],
            "conflicts": [c.as_dict() for c in self.conflicts],
            "conflict_count": self.conflict_count,
            "differences": [d.as_dict() for d in self.differences],
            "notes": list(self.notes),
        }
