"""A result is cut at its limit wherever the chunks fall, and what the client is told fits together."""

from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlguard.budget import ResultLimits
from sqlguard.proxy.results import Results, State, TooLate
from sqlguard.wire import messages as m
from sqlguard.wire.buffer import Bulk, Scanner

ROW = m.DataRow((b"x",)).encode()
DONE, READY = m.CommandComplete(b"SELECT 9").encode(), m.ReadyForQuery(b"I").encode()
HEAD = m.RowDescription((m.Column(b"a"),)).encode()
FAULT = m.ErrorResponse(((b"S", b"ERROR"), (b"C", b"57014"), (b"M", b"canceled"))).encode()
OURS = m.ErrorResponse(((b"S", b"ERROR"), (b"C", b"SG006"), (b"M", b"too large"))).encode()
NOTICE = m.NoticeResponse(((b"S", b"NOTICE"), (b"C", b"00000"), (b"M", b"n"))).encode()


THREE = ResultLimits(3)


def run(stream: bytes, size: int, limits: ResultLimits = THREE) -> tuple[bytes, Results]:
    results = Results(limits, OURS)
    out = b""
    for at in range(0, len(stream), size):
        chunk = stream[at : at + size]
        out += chunk if results.passes(chunk) or results.skims(chunk) else results.take(chunk)
    return out, results


SIZES = (1, 2, 7, 11, 10_000)


@pytest.mark.parametrize("size", SIZES)
def test_what_fits_is_passed_as_it_is(size: int) -> None:
    stream = (HEAD + ROW * 3 + DONE + READY) * 3 + NOTICE + HEAD + ROW + FAULT + READY
    assert run(stream, size)[0] == stream


@given(st.lists(st.integers(1, 120), min_size=1), st.sampled_from([None, 100]))
def test_no_chunk_goes_past_what_is_held_of_the_one_before(sizes: list[int], rows: int | None) -> None:
    """A chunk may end in the next answer's first message, and the one behind it with a ReadyForQuery."""
    stream = (HEAD + ROW * 2 + DONE + READY) * (sum(sizes) // 40 + 1)
    results = Results(ResultLimits(rows), OURS)
    out = b""
    at = 0
    for size in [*sizes, len(stream)]:
        chunk = stream[at : at + size]
        out += chunk if results.passes(chunk) or results.skims(chunk) else results.take(chunk)
        at += size
        # Nothing but a header in pieces waits for more.
        assert len(stream[:at]) - len(out) < max(map(len, (HEAD, DONE, READY)))
    assert out == stream


PARTS = [
    ROW,
    ROW * 2,
    HEAD,
    DONE,
    READY,
    NOTICE,
    FAULT,
    m.CopyData(b"x" * 30).encode(),
    m.PortalSuspended().encode(),
]


@given(st.lists(st.sampled_from(PARTS), max_size=30), st.lists(st.integers(1, 60), min_size=1))
def test_the_quick_look_finds_what_the_long_one_does(parts: list[bytes], sizes: list[int]) -> None:
    stream = b"".join(parts)
    quick, slow = Results(THREE, OURS), Results(THREE, OURS)
    at = 0
    while at < len(stream):
        for size in sizes:
            chunk = stream[at : at + size]
            at += size
            if not chunk:
                return
            try:
                expected = slow.take(chunk)
            except TooLate:
                return
            assert (chunk if quick.skims(chunk) else quick.take(chunk)) == expected
            assert vars(quick) == vars(slow)


@given(
    st.lists(
        st.sampled_from([*PARTS, *(m.DataRow((b"x" * n,)).encode() * 9 for n in (90, 900, 9000))]),
        max_size=30,
    ),
    st.lists(st.integers(1, 20_000), min_size=1),
    st.integers(1, 200_000),
)
def test_what_the_books_have_counted_is_what_the_long_look_counts(
    parts: list[bytes], sizes: list[int], most: int
) -> None:
    stream = b"".join(parts)
    limits = ResultLimits(100, most)
    scanner = Scanner(lambda _kind, _raw: None, lambda: Bulk.PASS)
    quick, slow = Results(limits, OURS), Results(limits, OURS)
    at = 0
    for size in cycle(sizes):
        if at >= len(stream):
            return
        out = scanner.feed(stream[at : at + size])
        at += size
        if not out:
            continue
        try:
            expected = slow.take(out)
        except TooLate:
            return
        as_it_is = quick.adds(scanner.rows, len(out)) or quick.skims(out)
        assert (out if as_it_is else quick.take(out)) == expected
        assert vars(quick) == vars(slow)


@pytest.mark.parametrize("size", SIZES)
def test_a_cancelled_one_ends_with_our_error(size: int) -> None:
    out, results = run(HEAD + ROW * 5 + NOTICE + FAULT + READY, size)
    assert out == HEAD + ROW * 3 + NOTICE + OURS + READY
    assert results.state is State.PASSING


@pytest.mark.parametrize("size", SIZES)
def test_a_server_that_was_done_before_says_it_too(size: int) -> None:
    behind = HEAD + ROW + m.CommandComplete(b"SELECT 1").encode()
    out, _ = run(HEAD + ROW * 5 + DONE + behind + READY, size)
    assert out == HEAD + ROW * 3 + OURS + READY


@pytest.mark.parametrize("size", SIZES)
def test_a_block_fails(size: int) -> None:
    out, results = run(HEAD + ROW * 5 + DONE + m.ReadyForQuery(b"T").encode(), size)
    assert out == HEAD + ROW * 3 + OURS + m.ReadyForQuery(b"E").encode()
    assert results.must_fail


def test_a_write_behind_it_can_t_be_denied() -> None:
    with pytest.raises(TooLate):
        run(HEAD + ROW * 5 + DONE + m.CommandComplete(b"UPDATE 1").encode() + READY, 10_000)


@pytest.mark.parametrize("size", SIZES)
def test_bytes_and_copies_and_portals_count(size: int) -> None:
    assert (
        run(HEAD + ROW * 3 + DONE + READY, size, ResultLimits(10, len(ROW) * 2))[0]
        == HEAD + ROW * 2 + OURS + READY
    )
    line = m.CopyData(b"x\n").encode()
    assert run(line * 4 + m.CopyDone().encode() + DONE + READY, size)[0] == line * 3 + OURS + READY
    suspended = m.PortalSuspended().encode()
    stream = ROW * 2 + suspended + READY + ROW * 2 + suspended + READY
    assert run(stream, size)[0] == ROW * 2 + suspended + READY + ROW * 2 + suspended + READY
