"""What an undo did, or would do, and the rows it left alone."""

import json
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


def shown_key(key: dict[str, str | None]) -> str:
    # On one line: what an agent has made a key of must not look like a line of the report.
    shown = ", ".join(f"{name}={value}" for name, value in key.items()) or "a row without key"
    return shown.replace("\n", "\\n")


def shown_row(row: dict[str, Any] | None) -> str:
    return "no row" if row is None else ", ".join(f"{name}={_value(value)}" for name, value in row.items())


def _value(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


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
        return f"{self.table} ({shown_key(self.key)}): {self.reason}"

    def values(self) -> list[str]:
        """Return a line for each column that an undo would change, with what is there and what was there before."""
        if self.current is None and self.wanted is None:
            return []
        if not self.key:
            return [f"was {shown_row(self.wanted)} before"]  # which row it is now can't be told
        if self.current is None or self.wanted is None:
            now, was = (shown_row(row) for row in (self.current, self.wanted))
            return [f"is {now}", f"was {was} before"]
        return [
            f"{name} is {_value(value)}, was {_value(self.wanted.get(name))} before"
            for name, value in self.current.items()
            if name in self.wanted and self.wanted[name] != value
        ]

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
