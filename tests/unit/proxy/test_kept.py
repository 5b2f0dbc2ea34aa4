"""Answers kept under a key come back byte for byte."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlguard.proxy import kept
from sqlguard.wire.messages import Column, DataRow, RowDescription

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


@st.composite
def answers(draw: st.DrawFn) -> tuple[RowDescription, list[DataRow]]:
    formats = draw(st.lists(st.sampled_from([0, 1]), max_size=4))
    columns = [
        Column(
            draw(TEXT).encode(), 0, 0, draw(st.integers(0, 2**32 - 1)), draw(st.integers(-1, 16)), -1, form
        )
        for form in formats
    ]
    value = [st.none() | (TEXT.map(str.encode) if form == 0 else st.binary(max_size=20)) for form in formats]
    rows = draw(st.lists(st.tuples(*value), max_size=4))
    return RowDescription(tuple(columns)), [DataRow(row) for row in rows]


@given(answers(), st.none() | st.integers(1, 2**63 - 1))
def test_there_and_back(answer: tuple[RowDescription, list[DataRow]], action: int | None) -> None:
    description, rows = answer
    columns, values = kept.to_store(description.encode(), [row.encode() for row in rows], "utf-8")
    json.loads(columns), json.loads(values)
    number = None if action is None else str(action).encode()
    stored = DataRow((b"f", number, b"INSERT 0 1", columns.encode(), values.encode())).encode()
    found = kept.from_store(stored, "utf-8")
    assert found is not None
    assert (found.action, found.tag) == (action, "INSERT 0 1")
    assert [DataRow(row) for row in found.rows] == rows
    assert found.formats == tuple(c.format for c in description.columns)
    assert RowDescription.decode(found.description(found.formats)[5:]) == description


def test_a_claimed_key_and_a_lost_answer() -> None:
    assert kept.from_store(DataRow((b"t", b"1", None, None, None)).encode(), "utf-8") is None
    lost = kept.from_store(DataRow((b"f", b"7", None, None, None)).encode(), "utf-8")
    assert lost == kept.Answer(7, None)
    bare = kept.from_store(DataRow((b"f", b"7", b"UPDATE 2", None, None)).encode(), "utf-8")
    assert bare == kept.Answer(7, "UPDATE 2")


@pytest.mark.parametrize(
    ("given_formats", "count", "wanted"),
    [((), 2, (0, 0)), ((1,), 3, (1, 1, 1)), ((0, 1), 2, (0, 1)), ((), 0, ())],
)
def test_result_formats_are_read_as_postgresql_does(
    given_formats: tuple[int, ...], count: int, wanted: tuple[int, ...]
) -> None:
    assert kept.wanted_formats(given_formats, count) == wanted
