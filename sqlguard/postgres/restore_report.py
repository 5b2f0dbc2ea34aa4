"""What a restore did, or would do, and the rows it left alone."""

from dataclasses import dataclass, fields
from typing import Any

from sqlguard.postgres.undo_report import Conflict, Difference, TableCount

UNIQUE = "restore_unique_conflict"
PARENT = "restore_parent_is_deleted"
CHANGED = "restore_row_changed"
GONE = "restore_row_gone"
OTHER = "restore_conflict"
#: Not a conflict: the reference was pointed elsewhere since, and stays so.
MOVED = "reference_changed"

# What the undo's own words mean here; the first that fits.
_CODES = (
    ("another row has its value", UNIQUE),
    ("the key or a unique value is taken", UNIQUE),
    ("the row of `", PARENT),
    ("the row was purged", GONE),
    ("the row was erased", GONE),
    ("the row is gone", GONE),
    ("the row was", CHANGED),
)


@dataclass(frozen=True, slots=True)
class RowLeft:
    """A row that a restore leaves alone; `reason` is one of the codes above, `problem` says it in words."""

    table: str
    key: dict[str, str | None]
    reason: str
    problem: str
    current: dict[str, Any] | None = None

    def __str__(self) -> str:
        key = ", ".join(f"{name}={value}" for name, value in self.key.items())
        return f"{self.table} ({key}): {self.problem}"

    def as_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def row_left(conflict: Conflict) -> RowLeft:
    """Return a conflict of the undo underneath as a restore names it."""
    code = next((code for words, code in _CODES if conflict.reason.startswith(words)), OTHER)
    return RowLeft(conflict.table, conflict.key, code, conflict.reason, conflict.current)


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """
    `undo` is the number under which it can be taken back (`sqlguard undo --undo N`), None when nothing was done.

    `stopped`: there are conflicts and nothing was changed. `left`: references that others have changed since.
    """

    scope: dict[str, Any]
    undo: int | None = None
    preview: bool = False
    already_restored: bool = False
    stopped: bool = False
    tables: tuple[TableCount, ...] = ()
    conflicts: tuple[RowLeft, ...] = ()
    left: tuple[RowLeft, ...] = ()
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
            "already_restored": self.already_restored,
            "stopped": self.stopped,
            "rows": self.rows,
            "tables": [t.as_dict() for t in self.tables],
            "conflicts": [c.as_dict() for c in self.conflicts],
            "left": [c.as_dict() for c in self.left],
            "differences": [d.as_dict() for d in self.differences],
            "notes": list(self.notes),
        }
