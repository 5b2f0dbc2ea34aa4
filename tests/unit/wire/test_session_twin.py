"""
The books of a session, against a small PostgreSQL that answers by the rules of the real one's main loop.

The property: with messages of ours in between, whatever the lag, the client gets byte for byte what it would have
got without them.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from unit.wire.twin import Message, Twin, scripts, send

from sqlguard.errors import ProtocolViolation
from sqlguard.wire.session import ASKS, Expect, Reply, Session, State


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
