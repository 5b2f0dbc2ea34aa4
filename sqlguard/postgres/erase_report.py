"""What an erasure removed and blanked, or why it did not."""

from dataclasses import dataclass
from typing import Any

LIVE = "erase_live_row"
HELD = "erase_held"
REFERENCED = "erase_referenced"
NOTHING = "erase_nothing_found"


@dataclass(frozen=True, slots=True)
class EraseRefusal:
    """`reason` is one of the codes above, or `purge_live_reference`."""

    reason: str
    problem: str
    key: list[str] | None = None

    def as_dict(self) -> dict[str, Any]:
        return {"reason": self.reason, "problem": self.problem, "key": self.key}


@dataclass(frozen=True, slots=True)
class EraseReport:
    """
    `rows` of the table removed, `images` of the journal blanked, entries of `actions` and `events` blanked in
    part, stored `results` of idempotency keys dropped. `erasure` is the number of the record.
    """

    table: str
    erasure: int | None = None
    preview: bool = False
    rows: int = 0
    images: int = 0
    actions: int = 0
    events: int = 0
    results: int = 0
    refused: tuple[EraseRefusal, ...] = ()

    @property
    def stopped(self) -> bool:
        return bool(self.refused)

    def as_dict(self) -> dict[str, Any]:
        return {
            "erasure": self.erasure,
            "table": self.table,
            "preview": self.preview,
            "stopped": self.stopped,
            "rows": self.rows,
            "images": self.images,
            "actions": self.actions,
            "events": self.events,
            "results": self.results,
            "refused": [r.as_dict() for r in self.refused],
        }
