"""
Budgets that the doors keep: how many statements a minute, how large a result. The same for every door.

Pure: the clock is an argument. Budgets of changed rows are kept by the table walls (migrations/sql/0004), so that
they bind a session that comes past the doors, too.

How the rate is shared. The database counts what it has given out of a task's rate (`sqlguard.lease_statements`), and
every door spends of the slice that it was given without asking again. A slice starts with the statements at hand and
doubles while it is used up in time. What is not used up in time is lost, but a slice is never more than twice what
was used of the one before: so at worst a third of the rate is sent.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from math import ceil, inf

from sqlguard.errors import CapExceeded
from sqlguard.plan import Decision
from sqlguard.statement.model import Kind

#: What ends a transaction is not counted: whoever has spent the minute must be able to end.
_FREE = frozenset({Kind.COMMIT, Kind.ROLLBACK, Kind.ROLLBACK_TO, Kind.EMPTY})


@dataclass(frozen=True, slots=True)
class Grant:
    """
    What the database gives of a task's rate: so many statements, to be spent within so many seconds of the question.

    None of them when there is no room yet: there will be at `room_at`, in `wait` seconds, or never for so many.
    """

    statements: int
    budget: int | None
    lasts: float = 0.0
    room_at: datetime | None = None
    wait: float = 0.0


class Slice:
    """
    What one door holds of one task's rate. *now* is a clock that never goes back, in seconds.

    Ask the database when `spend` says so, for `asks()` at most, and give its answer to `take`.
    """

    def __init__(self) -> None:
        self._size = self._left = 0
        self._until = self._again = -inf
        self._lasts = 0.0
        self._full: Grant | None = None
        self._wanted = 0

    def spend(self, statements: int, now: float) -> bool:
        """
        Spend of what is held; False, and nothing spent, if the database has to be asked.

        Raises CapExceeded while it is known that there is no room.
        """
        if self._full is not None and now < self._again and statements >= self._wanted:
            raise _too_fast(self._full, statements, self._again - now)
        if statements > (self._left if now < self._until else 0):
            return statements == 0
        self._left -= statements
        return True

    def asks(self, statements: int, now: float) -> int:
        """Return how many statements to ask for at most, *statements* of them to be sent at once."""
        used = self._size - self._left
        if now >= self._until + self._lasts:
            used = 0  # silent for longer than a slice lasts
        elif now < self._until and not self._left:
            used *= 2
        return max(statements, used)

    def take(self, grant: Grant, statements: int, asked_at: float) -> None:
        """
        Spend *statements* of what was given, and hold the rest. *asked_at* is before the question was sent.

        Raises CapExceeded when nothing was given.
        """
        if grant.statements < statements:
            if grant.room_at is not None:
                self._full, self._wanted, self._again = grant, statements, asked_at + grant.wait
            raise _too_fast(grant, statements, grant.wait)
        self._size, self._left = grant.statements, grant.statements - statements
        self._lasts, self._until = grant.lasts, asked_at + grant.lasts


def _too_fast(grant: Grant, statements: int, wait: float) -> CapExceeded:
    message = f"the task may send {grant.budget} statements a minute, and they are spent"
    if grant.room_at is None or (grant.budget is not None and statements > grant.budget):
        return CapExceeded(message, hint="send fewer statements in one message")
    room_at = grant.room_at.astimezone(UTC)
    return CapExceeded(
        message, hint=f"send it again after {room_at:%Y-%m-%d %H:%M:%S} UTC, in {max(1, ceil(wait))} s"
    )


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
