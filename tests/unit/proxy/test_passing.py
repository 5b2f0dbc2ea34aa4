"""What is remembered of messages that pass stays bounded."""

from sqlguard.proxy.passing import Passing, Recent
from sqlguard.wire.messages import Query


def test_the_oldest_go_first() -> None:
    passing = Passing()
    for number in range(5000):
        passing.remember(b"%d" % number)
    assert passing.passes(b"4999")
    assert not passing.passes(b"0")
    assert sum(passing.passes(b"%d" % number) for number in range(5000)) <= 4096


def test_what_is_used_stays() -> None:
    recent: Recent[int] = Recent(10)
    recent.keep(b"used", 7)
    for number in range(1000):
        recent.keep(b"%d" % number, 0)
        assert b"used" in recent or recent.again(b"used")
    assert recent[b"used"] == 7
    assert not recent.again(b"0")


def test_long_messages_are_looked_at_each_time() -> None:
    passing = Passing()
    passing.remember(b"x" * 9000)
    assert not passing.passes(b"x" * 9000)


def test_a_text_that_was_found_to_be_alike_is_known_from_then_on() -> None:
    passing = Passing()
    message = Query(b"SELECT a FROM t WHERE id = 5").encode()
    passing.remember(message, like=b"SELECT a FROM t WHERE id = \0\0")
    other = Query(b"SELECT a FROM t WHERE id = 4711").encode()
    assert passing.passes(other)
    assert other in passing.texts
