"""What a purge removed, or would remove, and the rows it left and why."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

#: The reason code of SOFT_DELETE for a tombstone that live rows refer to.
LIVE_REFERENCE = "purge_live_reference"


@dataclass(frozen=True, slots=True)
class Blocked:
    """Tombstones of `table` that live rows of `by` refer to through the foreign key `constraint`."""

    table: str
    by: str
    constraint: str
    rows: int
    #: A few of their keys.
    keys: list[list[str]]
    reason: str = LIVE_REFERENCE

    def __str__(self) -> str:
        return (
            f"{self.rows} deleted rows of `{self.table}` are referred to by live rows of `{self.by}`"
            f" (`{self.constraint}`)"
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "reason": self.reason,
            "table": self.table,
            "by": self.by,
            "constraint": self.constraint,
            "rows": self.rows,
            "keys": self.keys,
        }


@dataclass(frozen=True, slots=True)
class TablePurge:
    """
    Rows of one table: `removed` ones; those that are old enough but `held`; and those that were `left` for
    another reason (something still refers to them, or somebody has them locked).
    """

    table: str
    removed: int
    held: int
    left: int

    def as_dict(self) -> dict[str, Any]:
        return {"table": self.table, "removed": self.removed, "held": self.held, "left": self.left}


@dataclass(frozen=True, slots=True)
class PurgeReport:
    """`purge` is the number of the record, None when nothing was removed; `stopped`: because of `blocked`."""

    cutoff: datetime
    purge: int | None = None
    dry_run: bool = False
    stopped: bool = False
    tables: tuple[TablePurge, ...] = ()
    blocked: tuple[Blocked, ...] = ()

    @property
    def rows(self) -> int:
        return sum(t.removed for t in self.tables)

    def as_dict(self) -> dict[str, Any]:
        return {
            "purge": self.purge,
            "cutoff": self.cutoff.isoformat(),
            "dry_run": self.dry_run,
            "stopped": self.stopped,
            "rows": self.rows,
            "tables": [t.as_dict() for t in self.tables],
            "blocked": [b.as_dict() for b in self.blocked],
        }
