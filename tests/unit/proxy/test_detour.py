"""What a server says behind its answer is no part of it."""

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sqlguard.proxy.detour import Detour
from sqlguard.wire.messages import CommandComplete, DataRow, ErrorResponse, NoticeResponse, ReadyForQuery

ANSWER = DataRow((b"1",)).encode() + CommandComplete(b"SELECT 1").encode() + ReadyForQuery(b"I").encode()
GOING = ((b"S", b"FATAL"), (b"V", b"FATAL"), (b"C", b"57P01"), (b"M", b"going"))


class Socket:
    def write(self, data: bytes) -> None: ...

    def hand_over(self, to: object) -> None: ...

    def abort(self) -> None: ...


class Session:
    def __init__(self) -> None:
        self.primary = Socket()
        self.memory = SimpleNamespace(texts={})
        self.is_closed = False
        self.told: list[bytes] = []
        self.sent: list[bytes] = []

    def from_replica(self, data: bytes) -> None:
        self.told.append(data)

    def run_at_primary(self, sent: bytes, _: bytes) -> None:
        self.sent.append(sent)

    def resume(self) -> None: ...


def on_its_way(session: Session, side: Socket) -> Detour:
    replica = SimpleNamespace(max_message_bytes=1 << 20, reads=Counter(), detours=set(), avoid=lambda _: None)
    detour = Detour(cast("Any", session), cast("Any", replica), cast("Any", None))
    detour._side = cast("Any", side)
    detour.carry(b"Q", {}, ())
    return detour


@pytest.mark.parametrize("word", [NoticeResponse(GOING), ErrorResponse(GOING)])
def test_a_word_behind_the_answer(word: Any) -> None:
    session, side = Session(), Socket()
    detour = on_its_way(session, side)
    detour._from_replica(cast("Any", side), ANSWER + word.encode())
    assert not detour.is_busy
    detour._gone(cast("Any", side))
    assert session.told == [ANSWER]
    assert session.sent == []


def test_an_error_before_it_goes_to_the_primary() -> None:
    session, side = Session(), Socket()
    detour = on_its_way(session, side)
    detour._from_replica(cast("Any", side), ErrorResponse(GOING).encode())
    detour._gone(cast("Any", side))
    assert session.told == []
    assert session.sent == [b"Q"]
