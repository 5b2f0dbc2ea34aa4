"""Statements a minute: slices of a shared rate, and an error that says when there is room again."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlguard.budget import Grant, Slice
from sqlguard.errors import CapExceeded

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
LASTS, MINUTE = 2, 60
# Quarters of a second are exact as floats.
PAUSES = st.integers(0, 120).map(lambda n: n / 4)


@dataclass
class Database:
    """The spec of `sqlguard.lease_statements`, with the clock as an argument."""

    budget: int
    taken: list[tuple[float, int]] = field(default_factory=list)
    given: int = 0

    def lease(self, wanted: int, most: int, now: float) -> Grant:
        counted = sorted((until, n) for until, n in self.taken if until > now)
        left = self.budget - sum(n for _, n in counted)
        if wanted <= left:
            number = max(wanted, min(most, left // 8))
            until = now + MINUTE + (LASTS if number > wanted else 0)
            self.taken.append((-(-until // 1), number))
            self.given += number
            return Grant(number, self.budget, LASTS)
        for until, n in counted:
            left += n
            if wanted <= left:
                return Grant(0, self.budget, LASTS, NOON + timedelta(seconds=until), until - now)
        return Grant(0, self.budget, LASTS)


def send(door: Slice, database: Database, statements: int, now: float) -> bool:
    """Send so many statements if the rate allows it; say whether it did."""
    try:
        if not door.spend(statements, now):
            door.take(database.lease(statements, door.asks(statements, now), now), statements, now)
    except CapExceeded:
        return False
    return True


def test_the_minute_slides() -> None:
    door, database = Slice(), Database(3)
    assert all(send(door, database, 1, second) for second in (0, 20, 40))
    asked = len(database.taken)
    assert not door.spend(1, 50)
    with pytest.raises(CapExceeded) as caught:
        door.take(database.lease(1, 1, 50), 1, 50)
    assert caught.value.sqlstate == "SG006"
    assert caught.value.hint == "send it again after 2026-03-01 12:01:00 UTC, in 10 s"
    with pytest.raises(CapExceeded) as caught:
        door.spend(1, 55)
    assert (caught.value.hint or "").endswith("in 5 s")
    assert len(database.taken) == asked
    assert send(door, database, 1, 60)
    assert not send(door, database, 1, 60)


def test_what_never_fits_is_told_so() -> None:
    with pytest.raises(CapExceeded) as caught:
        Slice().take(Database(2).lease(3, 3, 0), 3, 0)
    assert caught.value.hint == "send fewer statements in one message"


def test_what_ends_a_transaction_is_free_when_all_is_spent() -> None:
    door, database = Slice(), Database(1)
    assert send(door, database, 1, 0)
    assert not send(door, database, 1, 1)
    assert door.spend(0, 2)


def test_a_large_rate_costs_few_questions() -> None:
    door, database = Slice(), Database(6000)
    assert all(send(door, database, 1, n / 1000) for n in range(5000))
    assert len(database.taken) < 30


STEPS = st.lists(st.tuples(PAUSES, st.integers(0, 2), st.integers(1, 3)), max_size=80)


@given(STEPS, st.integers(3, 60))
def test_never_more_than_the_rate_over_any_interleaving(
    steps: list[tuple[float, int, int]], budget: int
) -> None:
    """Each step moves one of three doors: it sends or asks, is answered by the database, or hears of the answer."""
    doors, database, now = [Slice() for _ in range(3)], Database(budget), 0.0
    asked: dict[int, tuple[int, int, float]] = {}
    answers: dict[int, tuple[Grant, int, float]] = {}
    sent: list[tuple[float, int]] = []
    for pause, number, statements in steps:
        now += pause
        door = doors[number]
        try:
            if number in answers:
                door.take(*answers.pop(number))
            elif number in asked:
                wanted, most, asked_at = asked.pop(number)
                grant = database.lease(wanted, most, now)
                answers[number] = grant, wanted, asked_at
                # What is sent at once counts from the moment at which it is given out.
                sent += [(now, wanted)] if grant.statements else []
            elif door.spend(statements, now):
                sent.append((now, statements))
            else:
                asked[number] = statements, door.asks(statements, now), now
        except CapExceeded:
            continue
    for moment, _ in sent:
        assert sum(n for other, n in sent if moment <= other < moment + MINUTE) <= budget


@given(STEPS, st.integers(3, 15))
def test_a_small_rate_is_exact_over_all_doors(steps: list[tuple[float, int, int]], budget: int) -> None:
    doors, database, now = [Slice() for _ in range(3)], Database(budget), 0.0
    sent: list[tuple[float, int]] = []
    for pause, number, statements in steps:
        now += pause
        if send(doors[number], database, statements, now):
            sent.append((now, statements))
        else:
            # Whole seconds are rounded up.
            assert sum(n for at, n in sent if at > now - MINUTE - 1) + statements > budget


@given(STEPS, st.integers(60, 10_000))
def test_at_least_a_third_of_what_is_given_is_sent(steps: list[tuple[float, int, int]], budget: int) -> None:
    door, database, now, sent = Slice(), Database(budget), 0.0, 0
    for pause, _, statements in steps:
        now += pause / 20
        sent += statements if send(door, database, statements, now) else 0
        assert database.given <= 3 * sent
