"""What a function does to anything but its result: the class that a rule decides by."""

from dataclasses import dataclass
from enum import Enum


class FunctionEffect(Enum):
    """
    From harmless to unknown; `rank` orders them, and the worst overload speaks for a name.

    `harmless` computes. `infrastructure` shows the server's insides. `reads_data` reads what the statement
    does not name. `denial_of_service` holds the session or fills memory. `internal` is for the server only.
    `side_effect` does what neither a roll-back nor READ ONLY stops, or runs SQL out of a string. `writes`
    writes.
    """

    HARMLESS = "harmless"
    INFRASTRUCTURE = "infrastructure"
    READS_DATA = "reads_data"
    DENIAL_OF_SERVICE = "denial_of_service"
    INTERNAL = "internal"
    SIDE_EFFECT = "side_effect"
    WRITES = "writes"
    UNKNOWN = "unknown"

    @property
    def rank(self) -> int:
        return _RANK[self]


_RANK = {effect: rank for rank, effect in enumerate(FunctionEffect)}


@dataclass(frozen=True, slots=True)
class FunctionClass:
    """
    The class of one function, or of every overload of a name together.

    `bounded_argument` (from 0) is the argument that decides: the class is harmless when a constant stands
    there that `bounds.harmless_with` accepts. On a harmless class it works the other way round: only a wild
    constant (a pattern that backtracks for ever, a format a million wide) is not.
    """

    effect: FunctionEffect
    reason: str = ""
    bounded_argument: int | None = None

    @property
    def severity(self) -> tuple[int, bool]:
        """Orders classes; a harmless one with an argument to look at is worse than one without."""
        to_look_at = self.bounded_argument is not None
        return (self.effect.rank, to_look_at is (self.effect is FunctionEffect.HARMLESS))


def worst(classes: list[FunctionClass]) -> FunctionClass:
    """Return the class that speaks for all of *classes*, which must not be empty."""
    return max(classes, key=lambda c: c.severity)
