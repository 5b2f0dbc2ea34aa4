"""The books of a session, case by case: what is swallowed, shown, held, captured, refused, and what ends it."""

from typing import Any

import pytest
from unit.wire.twin import COPY_IN, DONE, FAULT, NODATA, NOTICE, ONE, OURS, READY, ROW, ROWS, TWO

from sqlguard.errors import ProtocolViolation
from sqlguard.wire import messages as m
from sqlguard.wire.reports import error_response, fields_of
from sqlguard.wire.session import (
    ASKS,
    NEXT,
    PLAIN,
    REFUSED_TEXT,
    Event,
    Expect,
    Part,
    Reply,
    Session,
    State,
    refusal,
    refused_reply,
)


def asked(*items: Expect) -> Session:
    session = Session()
    for item in items:
        session.expect(item)
    return session


def test_a_refusal_in_a_pipeline_stands_in_its_place() -> None:
    session = Session()
    for kind in b"PBE":
        assert session.takes(kind)
        session.expect(Expect(ASKS[kind]))
    assert session.takes(ord("P"))
    refused = Expect(refused_reply(ord("P")), error=OURS)
    session.expect(refused)
    for kind in b"BES":
        assert session.takes(kind)
        session.expect(Expect(ASKS[kind]))
    assert session.feed(ONE + TWO + ROW + DONE + FAULT + READY) == ONE + TWO + ROW + DONE + OURS + READY
    assert refused.failed == FAULT
    assert session.is_quiet


@pytest.mark.parametrize("kind", list(b"QFPBDEC"))
def test_what_a_refusal_is_sent_as(kind: int) -> None:
    raw = refusal(kind)
    sent = m.decode_frontend(raw[0], raw[5:])
    assert isinstance(sent, m.Query | m.Parse)
    assert sent.text.decode() == REFUSED_TEXT
    assert ASKS[sent.kind] is refused_reply(kind)
    assert getattr(sent, "statement", b"x")


def test_an_error_can_be_made_from_the_servers() -> None:
    session = asked(Expect(Reply.QUERY, error=lambda raw: raw.replace(b"42601", b"SG002")))
    assert fields_of(session.feed(FAULT))[b"C"] == b"SG002"


def test_positions_are_mapped() -> None:
    session = asked(Expect(Reply.QUERY, position=lambda place: place - 5))
    assert fields_of(session.feed(FAULT))[b"P"] == b"3"
    session = asked(Expect(Reply.QUERY, position=lambda _: None))
    assert b"P" not in fields_of(session.feed(FAULT))


def test_an_error_of_ours_is_hidden_if_our_sync_ends_the_skipping() -> None:
    ours = [Expect(reply, swallow=True) for reply in (Reply.PARSE, Reply.BIND, Reply.SYNC)]
    session = asked(*ours)
    assert session.feed(FAULT + READY) == b""
    assert [item.failed for item in ours] == [FAULT, b"", None]
    assert session.state is State.READY


def test_an_error_of_ours_in_the_clients_pipeline_is_shown() -> None:
    session = Session()
    session.takes(ord("P"))
    session.expect(Expect(Reply.PARSE, swallow=True))
    assert session.feed(FAULT) == FAULT
    assert session.is_skipping
    assert not session.takes(ord("B"))
    assert session.takes(ord("S"))


def test_a_sync_of_ours_does_not_revive_a_dead_pipeline() -> None:
    session = Session()
    session.takes(ord("P"))
    session.expect(Expect(Reply.PARSE))
    session.expect(Expect(Reply.SYNC, swallow=True))
    assert session.feed(FAULT + READY) == FAULT
    assert not session.takes(ord("P"))
    assert not session.takes(ord("Q"))
    assert session.takes(ord("S"))
    session.expect(Expect(Reply.SYNC))
    assert session.feed(READY) == READY
    assert session.takes(ord("P"))


def test_a_query_does_not_end_the_skipping() -> None:
    late = Expect(Reply.QUERY)
    session = asked(Expect(Reply.PARSE), late)
    assert session.feed(FAULT) == FAULT
    assert late.failed == b""
    after = Expect(Reply.QUERY)
    session.expect(after)
    assert after.failed == b""
    session.expect(Expect(Reply.SYNC))
    assert session.feed(READY) == READY


def test_parts_of_one_query() -> None:
    """What a dry run is made of: BEGIN, the client's statement, our report, ROLLBACK, in one message."""
    item = Expect(
        Reply.QUERY,
        parts=(Part.SWALLOW, Part.HOLD, Part.CAPTURE, Part.SWALLOW),
        tags=(None, "DELETE"),
        before_held=lambda one: NOTICE * len(one.captured),
    )
    session = asked(item)
    begin, rollback = (m.CommandComplete(tag).encode() for tag in (b"BEGIN", b"ROLLBACK"))
    update, delete = (m.CommandComplete(tag + b" 3").encode() for tag in (b"UPDATE", b"DELETE"))
    out = session.feed(begin + ROWS + ROW + update + ROWS + ROW + ROW + DONE + NOTICE + rollback)
    assert out == ROWS + ROW
    assert session.feed(READY) == NOTICE * 2 + delete + READY
    assert (item.captured, item.tag, item.statement) == ([ROW, ROW], b"DELETE 3", 4)


def test_what_is_held_does_not_go_out_after_an_error() -> None:
    session = asked(Expect(Reply.QUERY, parts=(Part.HOLD, Part.SWALLOW)))
    assert session.feed(DONE + FAULT + READY) == FAULT + READY


def test_captured_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sqlguard.wire.replies.CAPTURE_LIMIT", 100)
    item = Expect(Reply.QUERY, parts=(Part.CAPTURE,))
    assert asked(item).feed(ROW * 1000) == b""
    assert sum(map(len, item.captured)) <= 100
    assert item.was_cut


def test_appended_parameters_are_cut_off() -> None:
    session = asked(Expect(Reply.DESCRIBE, hidden_parameters=2))
    long, short = m.ParameterDescription((23, 25, 16)).encode(), m.ParameterDescription((23,)).encode()
    assert session.feed(long + ROWS) == short + ROWS


def test_fatal_errors_pass_whatever_was_expected() -> None:
    fatal = error_response("FATAL", "57P01", "terminating connection")
    items = [Expect(Reply.QUERY, swallow=True, error=OURS), Expect(Reply.SYNC)]
    session = asked(*items)
    assert session.feed(fatal) == fatal
    assert [item.failed for item in items] == [fatal, fatal]


def test_abandoned_expectations_are_told() -> None:
    told: list[Expect] = []
    session = asked(Expect(Reply.QUERY, done=told.append), Expect(Reply.SYNC, done=told.append))
    session.abandon()
    assert [item.failed for item in told] == [b"", b""]


def test_what_nobody_asked_for_passes_in_any_state() -> None:
    status = m.ParameterStatus(b"client_encoding", b"LATIN1").encode()
    note = m.NotificationResponse(7, b"channel", b"").encode()
    session = Session()
    assert session.feed(status + note + NOTICE) == status + note + NOTICE
    session.expect(Expect(Reply.QUERY, swallow=True))
    assert session.feed(status + note + NOTICE) == status + note
    assert session.parameters == {"client_encoding": "LATIN1"}


@pytest.mark.parametrize(
    ("item", "reply"),
    [
        (None, READY),
        (None, DONE),
        (None, ROW),
        (Reply.PARSE, TWO),
        (Reply.PARSE, ROW),
        (Reply.PARSE, READY),
        (Reply.QUERY, ONE),
        (Reply.QUERY, READY),
        (Reply.SYNC, DONE),
        (Reply.EXECUTE, ROWS),
        (Reply.QUERY, b"K\0\0\0\x0c12345678"),
        (Reply.QUERY, b"R\0\0\0\x08\0\0\0\0"),
        (Reply.QUERY, b"?\0\0\0\x04"),
        (Reply.SYNC, b"Z\0\0\0\x05X"),
        (Reply.PARSE, b"E\0\0\0\x04"),
    ],
)
def test_replies_that_answer_nothing_end_the_session(item: Reply | None, reply: bytes) -> None:
    session = asked(*([Expect(item)] if item else []))
    with pytest.raises(ProtocolViolation):
        session.feed(reply)


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        (State.READY, "p"),
        (State.READY, "Z"),
        (State.COPY_IN, "Q"),
        (State.COPY_IN_PIPELINE, "P"),
        (State.CLOSED, "Q"),
    ],
)
def test_illegal_messages(state: State, kind: str) -> None:
    session = Session()
    session._enter(state)
    with pytest.raises(ProtocolViolation, match="not legal here"):
        session.takes(ord(kind))


def test_the_table_is_whole() -> None:
    assert set(NEXT) == set(State)
    assert {state for row in NEXT.values() for state in row.values()} == set(State)
    assert {event for row in NEXT.values() for event in row if isinstance(event, Event)} == set(Event)


def test_libpqs_copy_in_has_a_sync_that_is_not_answered() -> None:
    session = Session()
    for kind in b"PBDES":
        session.takes(kind)
        session.expect(Expect(ASKS[kind]))
    assert session.feed(ONE + TWO + m.ParameterDescription(()).encode() + NODATA + COPY_IN)
    assert session.is_copying_in
    assert session.state is State.COPY_IN_PIPELINE
    for kind in b"dHScS":
        assert session.takes(kind)
        if kind in ASKS:
            session.expect(Expect(ASKS[kind]))
    assert not session.is_quiet
    assert session.feed(DONE + READY) == DONE + READY
    assert session.is_quiet
    assert session.state is State.READY


def test_a_late_sync_of_a_failed_copy_may_count() -> None:
    session = Session()
    for kind in b"ES":
        session.takes(kind)
        session.expect(Expect(ASKS[kind]))
    session.feed(COPY_IN)
    assert session.feed(FAULT) == FAULT
    assert session.state is State.SKIPPING
    assert session.feed(READY) == READY
    assert session.takes(ord("Q"))
    session.expect(Expect(Reply.QUERY))
    assert session.feed(DONE + READY) == DONE + READY
    with pytest.raises(ProtocolViolation):
        session.feed(READY)


@pytest.mark.parametrize("chunks", [(FAULT, READY, READY), (FAULT + READY, READY), (FAULT, READY + READY)])
def test_both_syncs_of_a_failed_copy_are_answered_in_any_pieces(chunks: tuple[bytes, ...]) -> None:
    session = Session()
    for kind in b"ES":
        session.takes(kind)
        session.expect(Expect(ASKS[kind]))
    session.feed(COPY_IN)
    for kind in b"dScS":
        session.takes(kind)
        if kind in ASKS:
            session.expect(Expect(ASKS[kind]))
    for chunk in chunks:
        assert session.feed(chunk) == chunk
    assert session.is_quiet
    session.expect(PLAIN[Reply.QUERY])
    assert session.feed(DONE + READY) == DONE + READY


def test_what_is_kept_goes_out_too_and_its_end_is_held() -> None:
    session, rows = Session(), [m.DataRow((b"1",)).encode(), m.DataRow((b"2",)).encode()]
    described = m.RowDescription((m.Column(b"id"),)).encode()
    kept = Expect(Reply.QUERY, parts=(Part.KEEP,), tags=("DELETE",), keep_ready=True)
    session.expect(kept)
    updated = m.CommandComplete(b"UPDATE 2").encode()
    assert session.feed(described + rows[0] + rows[1] + updated + READY) == described + rows[0] + rows[1]
    assert kept.captured == [described, *rows]
    assert kept.held == m.CommandComplete(b"DELETE 2").encode()
    assert kept.tag == b"DELETE 2"


def test_a_description_can_be_captured() -> None:
    session = Session()
    described = m.RowDescription((m.Column(b"id"),)).encode()
    asked = Expect(Reply.DESCRIBE, swallow=True, parts=(Part.CAPTURE,))
    session.expect(asked)
    assert session.feed(described) == b""
    assert asked.captured == [described]


def test_plain_messages_share_what_is_expected_of_them() -> None:
    session = Session()
    for _ in range(3):
        for reply in (Reply.BIND, Reply.EXECUTE, Reply.SYNC):
            session.expect(PLAIN[reply])
    fault = FAULT + READY
    assert session.feed(TWO + DONE + READY) == TWO + DONE + READY
    assert session.feed(TWO + fault) == TWO + fault
    assert session.feed(TWO + DONE + READY) == TWO + DONE + READY
    assert session.is_quiet


@pytest.mark.parametrize(
    "more", [{"keep_ready": True}, {"swallow": True}, {"keep_ready": True, "error": b"E"}]
)
def test_a_ready_that_is_not_the_clients_is_kept_back_in_a_chunk_of_its_own(more: dict[str, Any]) -> None:
    session = Session()
    session.expect(Expect(Reply.QUERY, **more))
    session.feed(FAULT)
    assert session.feed(READY) == b""
    assert session.is_quiet
