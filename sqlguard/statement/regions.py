"""
Sets of values of one type as sorted, disjoint intervals; NULL is a member of its own.

An end is a cut between values: `(0, v, 0)` just before v, `(0, v, 1)` just after it, `(-1, 0, 0)` and
`(1, 0, 0)` before and after everything. So open and closed ends need no cases, and tuples order them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Cut = tuple[int, Any, int]
LOWEST: Cut = (-1, 0, 0)
HIGHEST: Cut = (1, 0, 0)


def before(value: Any) -> Cut:
    return (0, value, 0)


def after(value: Any) -> Cut:
    """Return the cut after *value*; of whole numbers it is the one before the next."""
    return (0, value + 1, 0) if type(value) is int else (0, value, 1)


@dataclass(frozen=True, slots=True)
class Region:
    """A set of values; raises TypeError where values of different types meet."""

    spans: tuple[tuple[Cut, Cut], ...] = ()
    null: bool = False

    def complement(self) -> "Region":
        spans: list[tuple[Cut, Cut]] = []
        low = LOWEST
        for start, end in self.spans:
            if low < start:
                spans.append((low, start))
            low = end
        if low < HIGHEST:
            spans.append((low, HIGHEST))
        return Region(tuple(spans), not self.null)

    def covers(self, other: "Region") -> bool:
        """Whether every value of *other* but NULL is in this set."""
        return all(
            any(low <= start and end <= high for low, high in self.spans) for start, end in other.spans
        )

    @property
    def points(self) -> bool:
        """Whether the set is a list of single values, or short runs of whole numbers."""
        return all(_single(start, end) for start, end in self.spans)


def union(regions: Iterable[Region]) -> Region:
    """Return what is in one of *regions*."""
    some = list(regions)
    return Region(_merged([span for region in some for span in region.spans]), any(r.null for r in some))


def intersection(regions: Iterable[Region]) -> Region:
    """Return what is in all of *regions*."""
    return union(r.complement() for r in regions).complement()


#: `id BETWEEN 3 AND 5` is as good as a list.
_RUN = 100


def _single(start: Cut, end: Cut) -> bool:
    if not start[0] == 0 == end[0]:
        return False
    return bool(start[1] == end[1]) or (type(start[1]) is type(end[1]) is int and end[1] - start[1] <= _RUN)


def _merged(spans: list[tuple[Cut, Cut]]) -> tuple[tuple[Cut, Cut], ...]:
    merged: list[tuple[Cut, Cut]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        elif start < end:
            merged.append((start, end))
    return tuple(merged)


NOTHING = Region()
#: Every value but NULL.
ANYTHING = Region(((LOWEST, HIGHEST),))
NULL = Region((), null=True)


def of_values(values: Iterable[Any]) -> Region:
    return Region(_merged([(before(v), after(v)) for v in values]))


def compared(operator: str, value: Any) -> Region:
    """Return the set of all x for which `x <operator> value` is true."""
    match operator:
        case "=":
            return of_values((value,))
        case "<>":
            return Region(of_values((value,)).complement().spans)
        case "<":
            return Region(_merged([(LOWEST, before(value))]))
        case "<=":
            return Region(_merged([(LOWEST, after(value))]))
        case ">":
            return Region(_merged([(after(value), HIGHEST)]))
        case _:
            return Region(_merged([(before(value), HIGHEST)]))
