"""
Budgets that the doors keep: how many statements a minute, how large a result. The same for every door.

Pure: the clock is an argument. Budgets of changed rows are kept by the table walls (migrations/sql/0004), so that
they bind a session that comes past the doors, too.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlguard.errors import CapExceeded
from sqlguard.plan import Decision
from sqlguard.statement.model import Kind

#: What ends a transaction is not counted: whoever has spent the minute must be able to end.
_FREE = frozenset({Kind.COMMIT, Kind.ROLLBACK, Kind.ROLLBACK_TO, Kind.EMPTY})
_MINUTE = timedelta(minutes=1)
#: Tasks whose statements are counted at the same time; of more, those that were quiet the longest are forgotten.
_TASKS = 10_000


class Rates:
    """Counts the statements of the last minute, task by task; one per process."""

    def __init__(self) -> None:
        self._sent: dict[str, deque[datetime]] = {}

    def spend(self, task: str, limit: int, now: datetime, statements: int = 1) -> None:
        """
        Count *statements* of *task*. Raises CapExceeded, and counts nothing, when *limit* per minute is spent.
        """
        sent = self._sent.pop(task, None)
        if sent is None:
            sent = deque()
            if len(self._sent) >= _TASKS:
                del self._sent[next(iter(self._sent))]
        self._sent[task] = sent
        while sent and sent[0] <= now - _MINUTE:
            sent.popleft()
        if statements and len(sent) + statements > limit:
            raise _too_fast(limit, sent, now, statements)
        sent.extend([now] * statements)


def _too_fast(limit: int, sent: deque[datetime], now: datetime, statements: int) -> CapExceeded:
    message = f"the task may send {limit} statements a minute, and they are spent"
    if statements > limit:
        return CapExceeded(message, hint="send fewer statements in one message")
    # Since `statements` fit into an empty minute, so many of the oldest must go first.
    room_at = sent[len(sent) + statements - limit - 1] + _MINUTE
    seconds = max(1, -((now - room_at) // timedelta(seconds=1)))
    return CapExceeded(message, hint=f"send it again after {room_at:%Y-%m-%d %H:%M:%S} UTC, in {seconds} s")


def statements(decisions: Iterable[Decision]) -> int:
    """Return how many statements of a message count."""
    return sum(1 for decision in decisions if decision.kind not in _FREE)


@dataclass(frozen=True, slots=True)
class ResultLimits:
    """What one statement may be answered with; None means any number of rows or bytes."""

    rows: int | None = None
    bytes: int | None = None

    def excess(self) -> CapExceeded:
        """Return the error that a larger result is answered with."""
        sizes = [f"{n} {unit}" for n, unit in ((self.rows, "rows"), (self.bytes, "bytes")) if n is not None]
        return CapExceeded(
            f"the result is larger than the {' or '.join(sizes)} that the task may read at once",
            hint="narrow the WHERE, aggregate, or read page by page with LIMIT",
        )
