"""
The books of a session, against a small PostgreSQL that answers by the rules of the real one's main loop.

`Twin` follows postgres.c: what skips, what ends skipping, what COPY ignores. The property: with messages of ours
in between, whatever the lag, the client gets byte for byte what it would have got without them.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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

ONE, TWO, THREE = m.ParseComplete().encode(), m.BindComplete().encode(), m.CloseComplete().encode()
ROWS, NODATA = m.RowDescription((m.Column(b"a"),)).encode(), m.NoData().encode()
ROW, DONE = m.DataRow((b"x",)).encode(), m.CommandComplete(b"SELECT 1").encode()
READY = m.ReadyForQuery(b"I").encode()
COPY_IN, COPY_OUT = m.CopyInResponse(0, (0,)).encode(), m.CopyOutResponse(0, (0,)).encode()
FAULT = error_response("ERROR", "42601", "syntax error", position=8)
OURS = error_response("ERROR", "SG002", "no")
NOTICE = m.NoticeResponse(((b"S", b"NOTICE"), (b"V", b"NOTICE"), (b"M", b"n"))).encode()
EXTENDED = b"PBDEC"


@dataclass
class Message:
    """A message and what it will come to, once the server looks at it."""

    kind: int
    #: `ok`, `fail`, `copy`, `fail copy` (fails with the first data), `copy out`, `empty`, `suspend`, `rows`.
    outcomes: tuple[str, ...] = ("ok",)
    is_ours: bool = False


@dataclass
class Twin:
    """PostgreSQL's main loop, in short."""

    is_skipping: bool = False
    is_extended: bool = False
    copy: str = ""
    rest: deque[str] = field(default_factory=deque)
    copies_in_query: bool = False

    def take(self, message: Message) -> bytes:
        kind = message.kind
        if self.copy:
            return self._copy(message)
        if kind == ord("S"):
            self.is_skipping = self.is_extended = False
            return READY
        if kind in EXTENDED or kind == ord("H"):
            self.is_extended = True
        elif kind in b"QFdcf":
            self.is_extended = False
        if self.is_skipping or kind in b"Hdcf":
            return b""
        if kind == ord("F"):
            return (FAULT if message.outcomes[0] == "fail" else m.FunctionCallResponse(b"v").encode()) + READY
        if kind == ord("Q"):
            self.rest, self.copies_in_query = deque(message.outcomes), True
            return self._query()
        return self._extended(kind, message.outcomes[0])

    def _extended(self, kind: int, outcome: str) -> bytes:
        if outcome == "fail":
            self.is_skipping = True
            return NOTICE + FAULT
        if kind != ord("E"):
            described = m.ParameterDescription((23,)).encode() + (ROWS if outcome == "rows" else NODATA)
            return {"P": ONE, "B": TWO, "C": THREE, "D": described}[chr(kind)]
        if "copy" in outcome and outcome != "copy out":
            self.copy, self.copies_in_query = outcome, False
            return COPY_IN
        return self._result(outcome)

    @staticmethod
    def _result(outcome: str) -> bytes:
        return {
            "rows": ROW * 3 + DONE,
            "empty": m.EmptyQueryResponse().encode(),
            "suspend": ROW + m.PortalSuspended().encode(),
            "copy out": COPY_OUT + m.CopyData(b"line\n").encode() * 2 + m.CopyDone().encode() + DONE,
        }.get(outcome, NOTICE + DONE)

    def _query(self) -> bytes:
        out = b""
        while self.rest:
            outcome = self.rest.popleft()
            if outcome == "fail":
                self.rest.clear()
                return out + FAULT + READY
            if outcome in ("copy", "fail copy"):
                self.copy = outcome
                return out + COPY_IN
            out += (ROWS if outcome == "rows" else b"") + self._result(outcome)
        return out + READY

    def _copy(self, message: Message) -> bytes:
        if message.kind in b"HS":
            return b""
        if message.kind == ord("d") and self.copy == "copy":
            return b""
        is_done = message.kind == ord("c")
        self.copy = ""
        if self.copies_in_query:
            if is_done:
                return DONE + self._query()
            self.rest.clear()
            return FAULT + READY
        self.is_skipping = not is_done
        return DONE if is_done else FAULT


OUTCOMES: dict[int, list[str]] = {
    ord("P"): ["ok", "ok", "ok", "fail"],
    ord("B"): ["ok", "ok", "ok", "fail"],
    ord("C"): ["ok"],
    ord("D"): ["ok", "rows", "fail"],
    ord("E"): ["ok", "rows", "empty", "suspend", "copy out", "copy", "fail copy", "fail"],
    ord("F"): ["ok", "fail"],
    ord("Q"): ["ok", "rows", "copy", "copy out", "fail copy", "fail"],
}


@st.composite
def scripts(draw: st.DrawFn) -> list[Message]:
    """Make what a client sends that keeps to the protocol, with messages of ours in between."""
    twin, script, is_copying, in_pipeline = Twin(), [], False, False
    for _ in range(draw(st.integers(1, 25))):
        if not is_copying and draw(st.integers(0, 3)) == 0:
            ours = draw(st.sampled_from(["Q", "PBECC", "PBDEC", ""] if in_pipeline else ["Q", "PBECCS"]))
            script += [Message(ord(kind), ("rows",), is_ours=True) for kind in ours]
            continue
        kind = ord(draw(st.sampled_from("dddSHcf" if is_copying else "QPBDECFSSHdc")))
        message = Message(kind)
        if kind == ord("Q"):
            message.outcomes = tuple(draw(st.lists(st.sampled_from(OUTCOMES[kind]), min_size=1, max_size=3)))
            if sum("copy" in one for one in message.outcomes) > 1:
                message.outcomes = ("copy",)
        elif kind in OUTCOMES:
            message.outcomes = (draw(st.sampled_from(OUTCOMES[kind])),)
        script.append(message)
        twin.take(message)
        in_pipeline = (in_pipeline or kind in b"PBDECH") and kind != ord("S")
        was_copying, is_copying = is_copying, kind not in b"cf" and (is_copying or bool(twin.copy))
        if was_copying and not is_copying:
            # As libpq does; what else stands here, behind a Sync that the COPY may have swallowed, is
            # not to be told apart, and ends the session.
            script.append(Message(ord("S")))
            twin.take(script[-1])
            in_pipeline = False
    if is_copying:
        script.append(Message(ord("c")))
    return [*script, Message(ord("S"))]


def send(session: Session, message: Message, wire: deque[Message], finished: list[Expect]) -> None:
    if not message.is_ours and not session.takes(message.kind):
        return
    wire.append(message)
    reply = ASKS.get(message.kind)
    if reply is not None:
        session.expect(Expect(reply, swallow=message.is_ours, done=finished.append))


@settings(max_examples=600, deadline=None)
@given(scripts(), st.data())
def test_the_client_gets_what_it_would_have_got_without_us(
    script: list[Message], data: st.DataObject
) -> None:
    alone = Twin()
    expected = b"".join(alone.take(message) for message in script if not message.is_ours)
    session, twin = Session(), Twin()
    wire: deque[Message] = deque()
    finished: list[Expect] = []
    got = bytearray()
    for message in script:
        send(session, message, wire, finished)
        for _ in range(data.draw(st.integers(0, len(wire)))):
            got += session.feed(twin.take(wire.popleft()))
    while wire:
        got += session.feed(twin.take(wire.popleft()))
    assert bytes(got) == expected
    assert session.is_quiet
    assert session.state is State.READY
    assert len({id(one) for one in finished}) == len(finished)
    assert not [one for one in finished if one.reply is Reply.QUERY and one.swallow and one.failed]


@settings(max_examples=100, deadline=None)
@given(scripts(), st.integers(1, 7))
def test_replies_in_pieces(script: list[Message], step: int) -> None:
    whole, pieces, twin = Session(), Session(), Twin()
    for message in script:
        if message.is_ours or (whole.takes(message.kind), pieces.takes(message.kind)) == (True, True):
            for session in (whole, pieces):
                if message.kind in ASKS:
                    session.expect(Expect(ASKS[message.kind], swallow=message.is_ours))
            raw = twin.take(message)
            cut = b"".join(pieces.feed(raw[at : at + step]) for at in range(0, len(raw), step))
            assert cut == whole.feed(raw)


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


def damage(draw: Callable[[st.SearchStrategy[Any]], Any], raw: bytes) -> bytes:
    changed = bytearray(raw)
    for _ in range(draw(st.integers(0, 3))):
        if changed:
            changed[draw(st.integers(0, len(changed) - 1))] = draw(st.integers(0, 255))
    return bytes(changed)


@settings(max_examples=200, deadline=None)
@given(scripts(), st.data())
def test_a_broken_server_raises_nothing_but_violations(script: list[Message], data: st.DataObject) -> None:
    session, twin = Session(limit=10_000), Twin()
    try:
        for message in script:
            send(session, message, deque(), [])
            session.feed(damage(data.draw, twin.take(message)))
    except ProtocolViolation:
        return


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
