"""The relay: every reply goes where its question says, however the bytes are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlguard.errors import ProtocolViolation
from sqlguard.proxy.packets import error_fields, message, row
from sqlguard.proxy.relay import Expect, Part, Relay, Reply


def complete(tag: str) -> bytes:
    return message(b"C", tag.encode() + b"\0")


def data_row(*values: bytes) -> bytes:
    body = len(values).to_bytes(2, "big") + b"".join(len(v).to_bytes(4, "big") + v for v in values)
    return message(b"D", body)


def failure(sqlstate: str, **fields: str) -> bytes:
    items = {"S": "ERROR", "C": sqlstate, **fields}
    return message(b"E", b"".join(k.encode() + v.encode() + b"\0" for k, v in items.items()) + b"\0")


def ready(status: str = "I") -> bytes:
    return message(b"Z", status.encode())


DESCRIPTION = message(b"T", b"\0\1id\0" + bytes(18))


def fed(relay: Relay, data: bytes, piece: int) -> bytes:
    return b"".join(relay.feed(data[at : at + piece]) for at in range(0, len(data), piece))


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000])
def test_a_read_passes_untouched(piece: int) -> None:
    stream = DESCRIPTION + data_row(b"1") + data_row(b"x" * 300) + complete("SELECT 2") + ready()
    relay = Relay()
    relay.expect(Expect(Reply.QUERY))
    assert fed(relay, stream, piece) == stream
    assert not relay.expected
    assert relay.status == b"I"


@pytest.mark.parametrize("piece", [1, 4, 1000])
def test_a_write_shows_only_its_own_statement_with_the_tag_of_the_client(piece: int) -> None:
    relay = Relay()
    done: list[Expect] = []
    relay.expect(
        Expect(
            Reply.QUERY,
            parts=(Part.SWALLOW, Part.SWALLOW, Part.PASS),
            tags=(None, None, "DELETE"),
            done=done.append,
        )
    )
    stream = (
        complete("SET") + complete("SET") + DESCRIPTION + data_row(b"7") + complete("UPDATE 1") + ready("T")
    )
    assert fed(relay, stream, piece) == DESCRIPTION + data_row(b"7") + complete("DELETE 1") + ready("T")
    assert [e.tag for e in done] == [b"DELETE 1"]
    assert relay.status == b"T"


@pytest.mark.parametrize("piece", [1, 5, 1000])
def test_a_dry_run_is_held_until_its_report_is_there(piece: int) -> None:
    relay = Relay()
    relay.expect(
        Expect(
            Reply.QUERY,
            parts=(Part.HOLD, Part.CAPTURE, Part.SWALLOW),
            tags=("DELETE",),
            before_held=lambda e: b"<%d>" % len(e.captured),
        )
    )
    stream = (
        complete("UPDATE 3")
        + DESCRIPTION
        + data_row(b"a")
        + data_row(b"b" * 500)
        + complete("SELECT 2")
        + complete("ROLLBACK")
        + ready()
    )
    assert fed(relay, stream, piece) == b"<2>" + complete("DELETE 3") + ready()


def test_a_refused_query_gets_our_error_and_one_ready() -> None:
    relay = Relay()
    ours = failure("SG002", M="no")
    relay.expect(Expect(Reply.QUERY, error=ours))
    assert relay.feed(failure("42601") + ready("E")) == ours + ready("E")


def test_a_refused_parse_in_a_pipeline_is_answered_in_order_and_skips_to_sync() -> None:
    relay = Relay()
    ours = failure("SG002")
    for item in (
        Expect(Reply.PARSE),
        Expect(Reply.BIND),
        Expect(Reply.EXECUTE),
        Expect(Reply.PARSE, error=ours),
        Expect(Reply.BIND),
        Expect(Reply.EXECUTE),
        Expect(Reply.SYNC),
        Expect(Reply.QUERY),
    ):
        relay.expect(item)
    stream = message(b"1", b"") + message(b"2", b"") + complete("SELECT 0")
    out = relay.feed(stream + failure("42601") + ready() + complete("SELECT 1") + ready())
    assert out == stream + ours + ready() + complete("SELECT 1") + ready()
    assert not relay.expected


def test_what_is_sent_after_a_failure_and_before_the_sync_is_never_answered() -> None:
    relay = Relay()
    relay.expect(Expect(Reply.PARSE))
    relay.feed(failure("42601"))
    skipped: list[Expect] = []
    relay.expect(Expect(Reply.BIND, done=skipped.append))
    assert skipped
    assert not relay.expected
    relay.expect(Expect(Reply.SYNC))
    assert relay.feed(ready()) == ready()
    relay.expect(Expect(Reply.BIND))
    assert len(relay.expected) == 1


def test_a_sync_inside_copy_in_is_not_counted() -> None:
    relay = Relay()
    relay.expect(Expect(Reply.EXECUTE))
    relay.expect(Expect(Reply.SYNC))
    relay.feed(message(b"G", b"\0\0\0"))
    assert relay.copying_in
    relay.expect(Expect(Reply.SYNC))
    relay.feed(complete("COPY 2"))
    relay.expect(Expect(Reply.SYNC))
    assert [e.reply for e in relay.expected] == [Reply.SYNC]
    relay.feed(ready())
    assert not relay.expected


def test_our_own_conversation_is_silent_even_when_it_fails() -> None:
    relay = Relay()
    asked = Expect(Reply.QUERY, swallow=True)
    relay.expect(asked)
    assert relay.feed(DESCRIPTION + data_row(b"1") + failure("25P02") + ready("E")) == b""
    assert asked.failed is not None
    assert error_fields(asked.failed)["C"] == "25P02"


def test_notices_and_parameters_of_the_server_pass() -> None:
    relay = Relay()
    relay.expect(Expect(Reply.QUERY))
    status = message(b"S", b"client_encoding\0LATIN1\0")
    notice = message(b"N", b"SNOTICE\0Mhello\0\0")
    assert (
        relay.feed(status + notice + complete("DO") + ready()) == status + notice + complete("DO") + ready()
    )
    assert relay.parameters == {"client_encoding": "LATIN1"}


@pytest.mark.parametrize(("given_", "expected"), [("30", "10"), ("5", None)])
def test_an_error_points_into_the_text_of_the_client(given_: str, expected: str | None) -> None:
    relay = Relay()
    relay.expect(Expect(Reply.QUERY, position=lambda p: p - 20 if p > 20 else None))
    out = relay.feed(failure("42703", P=given_, M="no such column"))
    assert error_fields(out).get("P") == expected
    assert error_fields(out)["M"] == "no such column"


def test_a_row_of_any_size_is_never_kept() -> None:
    relay = Relay()
    relay.expect(Expect(Reply.QUERY))
    header = b"D" + (2**31 - 1).to_bytes(4, "big")
    assert relay.feed(header + b"x" * 10) == header + b"x" * 10
    assert relay.feed(b"y" * 1000) == b"y" * 1000
    assert relay._left == b""


def test_an_impossible_length_is_a_violation() -> None:
    with pytest.raises(ProtocolViolation):
        Relay().feed(b"Z\0\0\0\1")
    with pytest.raises(ProtocolViolation):
        Relay().feed(b"T\x7f\xff\xff\xff....")


@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(1, 50), st.booleans())
def test_however_it_is_cut_the_result_is_the_same(rows: list[bytes], piece: int, swallow: bool) -> None:  # noqa: FBT001
    stream = b"".join(data_row(r) for r in rows) + complete("SELECT 1") + ready()
    parts = (Part.CAPTURE if swallow else Part.PASS,)
    one, many = Relay(), Relay()
    first, second = Expect(Reply.QUERY, parts=parts), Expect(Reply.QUERY, parts=parts)
    one.expect(first)
    many.expect(second)
    assert one.feed(stream) == fed(many, stream, piece)
    assert first.captured == second.captured
    assert [row(r)[0] for r in first.captured] == (rows if swallow else [])
