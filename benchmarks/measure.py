"""Paired slices: the thing and what it is compared with, one right after the other, in alternating order."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: A slice does its own preparations and returns the seconds (or any cost) of the part that counts.
Slice = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Goal:
    """The ratio that is wanted: at most `limit`, or at least, where more is better."""

    limit: float
    at_least: bool = False

    def met(self, ratio: float) -> bool:
        return ratio >= self.limit if self.at_least else ratio <= self.limit

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}"


@dataclass(frozen=True, slots=True)
class Result:
    """`ratio` is a median, `low` and `high` the quartiles around it; `ours` and `base` are median costs in *unit*."""

    benchmark: str
    case: str
    against: str
    ratio: float
    low: float
    high: float
    ours: float
    base: float
    rounds: int
    goal: Goal | None = None
    unit: str = "s"

    @property
    def met(self) -> bool | None:
        return None if self.goal is None else self.goal.met(self.ratio)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"goal": None if self.goal is None else str(self.goal), "met": self.met}


@dataclass(frozen=True, slots=True)
class Label:
    """What a result is called in the table."""

    benchmark: str
    case: str
    against: str
    goal: Goal | None = None


def counted(label: Label, found: float, allowed: float, unit: str) -> Result:
    """Return a number of *unit*, measured once, against the number that is allowed."""
    ratio = found / allowed
    return Result(
        **asdict(label) | {"goal": label.goal},
        ratio=ratio,
        low=ratio,
        high=ratio,
        ours=found,
        base=allowed,
        rounds=1,
        unit=unit,
    )


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that *work* takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def processor_time(pid: int) -> float:
    """Return the seconds that the process has had a processor for (Linux only)."""
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[0]) / 1e9


def cycles(sides: Mapping[str, Slice], rounds: int) -> list[dict[str, float]]:
    """Run every side once per cycle, in an order that turns; the first cycle warms up and does not count."""
    names = list(sides)
    found: list[dict[str, float]] = []
    for number in range(rounds + 1):
        turn = number % len(names)
        order = names[turn:] + names[:turn]
        found.append({name: sides[name]() for name in order})
    return found[1:]


def compare(label: Label, ours: Slice, base: Slice, rounds: int) -> Result:
    """Measure *ours* against *base*."""
    return result(label, cycles({"ours": ours, "base": base}, rounds), "ours", "base")


def result(label: Label, found: list[dict[str, float]], ours: str, base: str) -> Result:
    """Return the result of two sides of *found*. Where more is better the costs are turned into speeds."""
    faster = label.goal is not None and label.goal.at_least
    ratios = [c[base] / c[ours] if faster else c[ours] / c[base] for c in found]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Result(
        benchmark=label.benchmark,
        case=label.case,
        against=label.against,
        ratio=middle,
        low=low,
        high=high,
        ours=statistics.median(c[ours] for c in found),
        base=statistics.median(c[base] for c in found),
        rounds=len(found),
        goal=label.goal,
    )
