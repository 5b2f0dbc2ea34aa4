"""Errors made and edited."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlguard.errors import ProtocolViolation, Refused
from sqlguard.wire import messages as m
from sqlguard.wire.buffer import message
from sqlguard.wire.reports import (
    error_response,
    fields_of,
    from_error,
    moved,
    notice_response,
    shifted,
    with_fields,
    without_ours,
)

FAULT = error_response("ERROR", "42601", "syntax error", hint="look", position=8, internal_query="SELECT")


def test_an_error_has_the_fields_that_clients_look_for() -> None:
    assert fields_of(FAULT) == {
        b"S": b"ERROR",
        b"V": b"ERROR",
        b"C": b"42601",
        b"M": b"syntax error",
        b"H": b"look",
        b"P": b"8",
        b"q": b"SELECT",
    }
    assert m.decode_backend(FAULT[0], FAULT[5:]) == m.ErrorResponse.decode(FAULT[5:])


def test_notices_are_notices() -> None:
    raw = notice_response("NOTICE", "00000", "would change 3 rows", detail="")
    assert isinstance(m.decode_backend(raw[0], raw[5:]), m.NoticeResponse)
    assert b"D" not in fields_of(raw)


def test_our_errors_keep_their_rules_to_themselves() -> None:
    fault = Refused("no", hint="add a WHERE", detail="all rows", rules=["write-without-where"])
    raw = from_error(fault, severity="FATAL")
    assert fields_of(raw)[b"C"] == b"SG002"
    assert m.ErrorResponse.decode(raw[5:]).is_fatal
    assert b"write-without-where" not in raw


def test_text_comes_in_the_clients_encoding() -> None:
    raw = error_response("ERROR", "SG002", "Ä ☃", encoding="latin-1", detail=b"\xe4")
    assert fields_of(raw)[b"M"] == b"\xc4 ?"
    assert fields_of(raw)[b"D"] == b"\xe4"


def test_a_nul_does_not_make_a_field() -> None:
    assert fields_of(error_response("ERROR", "SG002", "a\0Cxxxxx"))[b"C"] == b"SG002"


def test_an_unknown_field_is_a_mistake_of_ours() -> None:
    with pytest.raises(KeyError):
        error_response("ERROR", "SG002", "no", hnit="x")


@pytest.mark.parametrize(
    ("offset", "expected"), [(0, b"8"), (5, b"13"), (-7, b"1"), (-8, None), (-100, None)]
)
def test_positions_are_shifted_or_dropped(offset: int, expected: bytes | None) -> None:
    assert fields_of(shifted(FAULT, offset)).get(b"P") == expected


def test_positions_are_dropped() -> None:
    without = moved(FAULT, lambda _: None)
    assert b"P" not in fields_of(without)
    assert shifted(without, 5) is without
    assert fields_of(without)[b"q"] == b"SELECT"


def test_fields_are_replaced_added_and_dropped_in_place() -> None:
    changed = with_fields(FAULT, {b"C": b"SG002", b"H": None, b"D": b"more"})
    letters = [letter for letter, _ in m.ErrorResponse.decode(changed[5:]).fields]
    assert letters == [b"S", b"V", b"C", b"M", b"P", b"q", b"D"]
    assert fields_of(changed)[b"C"] == b"SG002"


@pytest.mark.parametrize("position", [b"x", b"-1", b"9" * 5000, "²".encode()])
def test_positions_that_are_none(position: bytes) -> None:
    raw = m.ErrorResponse(((b"P", position),)).encode()
    with pytest.raises(ProtocolViolation):
        shifted(raw, 1)


@given(st.binary(max_size=60))
def test_any_bytes(body: bytes) -> None:
    with suppress(ProtocolViolation):
        shifted(message(b"E", body), 3)


def test_an_error_of_ours_can_point_into_the_text() -> None:
    fault = Refused("no")
    fault.position = 8
    assert fields_of(from_error(fault))[b"P"] == b"8"
    assert b"P" not in fields_of(from_error(Refused("no")))


def test_where_in_our_own_functions_it_happened_is_not_told() -> None:
    ours = error_response(
        "ERROR",
        "SG006",
        "too many rows",
        hint="narrow the WHERE",
        where="PL/pgSQL function sqlguard.capture_orders() line 12 at RAISE",
        internal_query="SELECT sqlguard.judge()",
        internal_position=8,
    )
    fields = fields_of(ours)
    assert fields_of(without_ours(ours)) == {k: v for k, v in fields.items() if k not in (b"W", b"q", b"p")}
    theirs = error_response(
        "ERROR", "P0001", "sqlguard. is named", where="PL/pgSQL function app.pay() line 1"
    )
    assert without_ours(theirs) == theirs
