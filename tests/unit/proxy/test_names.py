"""Names count from the message that makes them, and are given back when the server says no."""

from sqlguard.proxy.names import Names
from sqlguard.wire.replies import Expect, Reply


def ended(done: object, failed: bytes | None = None) -> None:
    expect = Expect(Reply.PARSE)
    expect.failed = failed
    done(expect)  # type: ignore[operator]


def test_a_name_counts_at_once_and_stays_when_all_went_well() -> None:
    names: Names[str] = Names()
    done = names.make(b"s", "one")
    assert names.find(b"s") == "one"
    ended(done)
    assert names.find(b"s") == "one"


def test_a_name_that_could_not_be_made_means_what_it_meant() -> None:
    names: Names[str] = Names()
    ended(names.make(b"s", "one"))
    done = names.make(b"s", "two")
    assert names.find(b"s") == "two"
    ended(done, failed=b"E")
    assert names.find(b"s") == "one"


def test_a_close_counts_at_once_unless_it_is_skipped() -> None:
    names: Names[str] = Names()
    ended(names.make(b"s", "one"))
    done = names.close(b"s")
    assert names.find(b"s") is None
    ended(done, failed=b"")
    assert names.find(b"s") == "one"
    ended(names.close(b"s"))
    assert names.find(b"s") is None
    assert not names.is_used


def test_of_several_under_way_the_last_counts() -> None:
    names: Names[str] = Names()
    first, gone, second = names.make(b"", "one"), names.close(b""), names.make(b"", "two")
    assert names.find(b"") == "two"
    ended(first)
    ended(gone)
    assert names.find(b"") == "two"
    ended(second)
    assert names.find(b"") == "two"


def test_what_is_under_way_outlives_the_end_of_a_transaction() -> None:
    names: Names[str] = Names()
    ended(names.make(b"old", "one"))
    done = names.make(b"new", "two")
    names.clear()
    assert names.find(b"old") is None
    assert names.find(b"new") == "two"
    ended(done)
    assert names.find(b"new") == "two"
