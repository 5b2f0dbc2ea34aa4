"""Values as JSON, and results cut with a mark and a count."""

import ipaddress
import json
import uuid
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlguard.mcp_server.values import LONGEST_VALUE, cut, safe

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.decimals(),
    st.text(st.characters()),
    st.binary(),
    st.datetimes(),
    st.dates(),
    st.times(),
    st.timedeltas(),
    st.uuids(),
    st.ip_addresses(),
)


@given(
    st.recursive(
        SCALARS, lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner), st.tuples(inner))
    )
)
def test_anything_is_json_that_can_be_sent(value: Any) -> None:
    text = json.dumps(safe(value), allow_nan=False, ensure_ascii=False)
    assert json.loads(text.encode()) == safe(value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (2**53 - 1, 2**53 - 1),
        (2**53, "9007199254740992"),
        (-(2**53), "-9007199254740992"),
        (float("nan"), "NaN"),
        (float("inf"), "Infinity"),
        (float("-inf"), "-Infinity"),
        (Decimal("1E+3"), "1000"),
        (Decimal("1.10"), "1.10"),
        (Decimal("NaN"), "NaN"),
        (Decimal("sNaN"), "NaN"),
        (Decimal("Infinity"), "Infinity"),
        (b"\x00\xff", "\\x00ff"),
        (memoryview(b"a"), "\\x61"),
        (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "2026-01-02T03:04:05+00:00"),
        (date(2026, 1, 2), "2026-01-02"),
        (time(3, 4), "03:04:00"),
        (timedelta(days=1, seconds=2), "1 day, 0:00:02"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (ipaddress.ip_address("::1"), "::1"),
        ({"a": [float("nan")]}, {"a": ["NaN"]}),
        ("\ud800", "?"),
    ],
)
def test_values(value: Any, said: Any) -> None:
    assert safe(value) == said


def test_what_fits_is_not_cut() -> None:
    shown = cut([(1, "a"), (2, None)], 2)
    assert (shown.rows, shown.total, shown.truncated, shown.note) == ([[1, "a"], [2, None]], 2, False, None)


def test_a_cut_says_how_much_there_was() -> None:
    shown = cut([(n,) for n in range(12_345)], 10)
    assert (len(shown.rows), shown.total, shown.truncated) == (10, 12_345, True)
    assert "the first 10 of 12,345 rows" in (shown.note or "")


def test_long_values_and_documents_are_shortened() -> None:
    shown = cut([("x" * 20_000, ["y" * 20_000], "fits")], 10)
    text, document, fits = shown.rows[0]
    assert str(text).startswith("x" * LONGEST_VALUE)
    assert "20,000 characters in all" in str(text)
    assert "characters in all" in str(document)
    assert fits == "fits"
    assert "2 long values" in (shown.note or "")


def test_one_row_is_always_shown() -> None:
    wide = tuple("x" * 9_000 for _ in range(100))
    shown = cut([wide, wide], 10)
    assert (len(shown.rows), shown.total) == (1, 2)
