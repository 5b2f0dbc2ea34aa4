"""
A small PostgreSQL that answers by the rules of the real one's main loop, and what clients send it.

`Twin` follows postgres.c: what skips, what ends skipping, what COPY ignores.
"""

from collections import deque
from dataclasses import dataclass, field

from hypothesis import strategies as st

from sqlguard.wire import messages as m
from sqlguard.wire.reports import error_response
from sqlguard.wire.session import ASKS, Expect, Session

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
