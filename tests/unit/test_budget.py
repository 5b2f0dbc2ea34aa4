"""Statements a minute: a window that slides, and an error that says when there is room again."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlguard.budget import Rates
from sqlguard.errors import CapExceeded

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def test_the_minute_slides_and_tasks_have_their_own() -> None:
    rates = Rates()
    for second in (0, 20, 40):
        rates.spend("a", 3, at(second))
    rates.spend("b", 3, at(41))
    with pytest.raises(CapExceeded) as caught:
        rates.spend("a", 3, at(50))
    assert caught.value.sqlstate == "SG006"
    assert caught.value.hint == "send it again after 2026-03-01 12:01:00 UTC, in 10 s"
    rates.spend("a", 3, at(60))
    with pytest.raises(CapExceeded, match="3 statements a minute"):
        rates.spend("a", 3, at(60))


def test_what_never_fits_is_told_so() -> None:
    with pytest.raises(CapExceeded) as caught:
        Rates().spend("a", 2, at(0), 3)
    assert caught.value.hint == "send fewer statements in one message"


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 3))), st.integers(3, 8))
def test_never_more_than_the_limit_in_any_minute(steps: list[tuple[float, int]], limit: int) -> None:
    rates, now, let = Rates(), 0.0, []
    for pause, statements in steps:
        now += pause
        try:
            rates.spend("a", limit, at(now), statements)
        except CapExceeded:
            continue
        let += [now] * statements
    for moment in let:
        assert sum(1 for other in let if moment <= other < moment + 59.999) <= limit
