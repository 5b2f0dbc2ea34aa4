"""What is remembered of messages that pass stays bounded."""

from sqlguard.proxy.operator import Passing


def test_the_oldest_go_first() -> None:
    passing = Passing()
    for number in range(5000):
        passing.remember(b"%d" % number)
    assert len(passing) == 4096
    assert b"4999" in passing
    assert b"0" not in passing


def test_long_messages_are_looked_at_each_time() -> None:
    passing = Passing()
    passing.remember(b"x" * 9000)
    assert not passing
