"""One slice per task for all sessions of a process, and one question at a time."""

import asyncio
from dataclasses import dataclass, field

import pytest

from sqlguard.budget import Grant
from sqlguard.errors import DatabaseUnavailable
from sqlguard.proxy.rates import Rates


@dataclass
class Source:
    """Gives all that is asked for, or raises what it was told to."""

    asked: list[tuple[str, int, int]] = field(default_factory=list)
    fault: DatabaseUnavailable | None = None
    at_once: int = 0

    async def __call__(self, task: str, wanted: int, most: int) -> Grant:
        self.asked.append((task, wanted, most))
        self.at_once += 1
        assert self.at_once == 1
        await asyncio.sleep(0)
        self.at_once -= 1
        if self.fault is not None:
            raise self.fault
        return Grant(most, 1000, lasts=60.0)


def test_sessions_that_run_short_together_ask_one_after_another_and_share() -> None:
    source = Source()
    rates = Rates(source)

    async def work() -> None:
        assert not rates.spend("a", 1)
        await asyncio.gather(*[rates.lease("a", 1) for _ in range(7)])
        assert rates.spend("b", 0)

    asyncio.run(work())
    assert source.asked == [("a", 1, 1), ("a", 1, 2), ("a", 1, 4)]


def test_after_a_count_that_was_not_to_be_had_nobody_asks_for_a_while() -> None:
    source = Source(fault=DatabaseUnavailable("PostgreSQL does not answer"))
    rates = Rates(source)

    async def work() -> None:
        for _ in range(3):
            with pytest.raises(DatabaseUnavailable):
                await rates.lease("a", 1)
        assert len(source.asked) == 1
        source.fault = None
        await rates.lease("b", 1)
        await asyncio.sleep(1.1)
        await rates.lease("a", 1)

    asyncio.run(work())
    assert [task for task, _, _ in source.asked] == ["a", "b", "a"]
