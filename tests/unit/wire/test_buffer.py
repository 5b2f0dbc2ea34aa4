"""Streams cut into messages: the same frames however the bytes arrive, lengths judged at their header."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlguard.errors import ProtocolViolation
from sqlguard.wire.buffer import (
    BACKEND_LIMITS,
    COPY_RUNS,
    LARGE_LIMIT,
    Bulk,
    Frame,
    FrameReader,
    Run,
    Scanner,
    frontend_limits,
    message,
)

QUERY, COPY_DATA, ROW = ord("Q"), ord("d"), ord("D")
FRAMES = st.lists(st.builds(Frame.of, st.sampled_from(b"QPBDECHSXFdcf"), st.binary(max_size=40)), max_size=12)
ANSWERS = st.lists(
    st.builds(Frame.of, st.sampled_from(b"DDDdTCZESN12s"), st.binary(max_size=40)), max_size=20
)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(places)]


CUTS = st.lists(st.integers(0, 600), max_size=30)


@given(FRAMES, CUTS)
def test_frames_do_not_depend_on_how_bytes_arrive(frames: list[Frame], cuts: list[int]) -> None:
    stream = b"".join(frame.encode() for frame in frames)
    reader = FrameReader(frontend_limits())
    assert [found for piece in pieces(stream, cuts) for found in reader.receive(piece)] == frames
    assert reader.is_between_messages
    assert reader.held == b""


@given(FRAMES)
def test_one_byte_at_a_time(frames: list[Frame]) -> None:
    stream = b"".join(frame.encode() for frame in frames)
    reader = FrameReader(frontend_limits())
    assert [f for i in range(len(stream)) for f in reader.receive(stream[i : i + 1])] == frames


@given(FRAMES, CUTS)
def test_runs_hold_the_same_bytes_in_the_same_order(frames: list[Frame], cuts: list[int]) -> None:
    stream = b"".join(frame.encode() for frame in frames)
    reader = FrameReader(frontend_limits(), COPY_RUNS)
    found = [found for piece in pieces(stream, cuts) for found in reader.receive(piece)]
    assert b"".join(f.data if isinstance(f, Run) else f.encode() for f in found) == stream
    assert [f for f in found if isinstance(f, Frame)] == [f for f in frames if f.kind != COPY_DATA]


def test_receive_counts_even_if_nobody_looks() -> None:
    reader = FrameReader(frontend_limits())
    reader.receive(b"Q\0\0\0")
    assert list(reader.receive(b"\x05\0")) == [Frame.of(QUERY, b"\0")]


@pytest.mark.parametrize("length", [0, 3, 0x7FFFFFFF, 0xFFFFFFFF])
def test_an_impossible_length_is_refused_at_its_header(length: int) -> None:
    header = b"Q" + length.to_bytes(4, "big")
    reader = FrameReader(frontend_limits())
    assert list(reader.receive(header[:4])) == []
    with pytest.raises(ProtocolViolation, match="impossible length"):
        reader.receive(header[4:])


def test_each_type_has_its_own_limit() -> None:
    with pytest.raises(ProtocolViolation):
        FrameReader(frontend_limits()).receive(b"S" + (10_005).to_bytes(4, "big"))
    FrameReader(frontend_limits()).receive(b"S" + (10_004).to_bytes(4, "big"))
    with pytest.raises(ProtocolViolation):
        FrameReader(frontend_limits(1000)).receive(b"Q" + (1005).to_bytes(4, "big"))
    FrameReader(frontend_limits(1000), COPY_RUNS).receive(b"d" + LARGE_LIMIT.to_bytes(4, "big"))


@pytest.mark.parametrize("kind", [b"\0", b"p", b"Z", b"q", b"\xff"])
def test_an_unknown_type_is_refused_at_its_first_byte(kind: bytes) -> None:
    with pytest.raises(ProtocolViolation, match="no message type"):
        FrameReader(frontend_limits()).receive(kind)


def test_copy_data_of_any_size_is_run_through_without_being_held() -> None:
    reader = FrameReader(frontend_limits(), COPY_RUNS)
    assert list(reader.receive(b"d" + (1_000_004).to_bytes(4, "big"))) == [Run(COPY_DATA, b"d\0\x0fBD")]
    for _ in range(1000):
        assert list(reader.receive(bytes(1000))) == [Run(COPY_DATA, bytes(1000))]
        assert reader.held == b""
    assert reader.is_between_messages
    assert list(reader.receive(message(b"c", b""))) == [Frame.of(ord("c"), b"")]


def naive(frames: list[Frame], bulk: Bulk) -> tuple[bytes, list[bytes]]:
    """Say what a scanner should do: judged are all but bulk, `N` is dropped, `E` replaced."""
    out, judged = [], []
    for frame in frames:
        raw = frame.encode()
        if frame.kind in b"Dd" and bulk is not Bulk.JUDGE:
            out.append(raw if bulk is Bulk.PASS else b"")
            continue
        judged.append(raw)
        out.append({ord("N"): b"", ord("E"): b"<error>"}.get(frame.kind, raw))
    return b"".join(out), judged


@given(ANSWERS, CUTS, st.sampled_from(Bulk))
def test_scanner_does_what_a_naive_one_does(frames: list[Frame], cuts: list[int], bulk: Bulk) -> None:
    judged: list[bytes] = []

    def judge(kind: int, raw: bytes) -> bytes | None:
        assert raw[0] == kind
        judged.append(raw)
        return {ord("N"): b"", ord("E"): b"<error>"}.get(kind)

    stream = b"".join(frame.encode() for frame in frames)
    expected = naive(frames, bulk)
    for parts in (pieces(stream, cuts), [stream[i : i + 1] for i in range(len(stream))]):
        judged.clear()
        scanner = Scanner(judge, lambda: bulk)
        assert (b"".join(map(scanner.feed, parts)), judged) == expected
        assert scanner.is_between_messages


@pytest.mark.parametrize("bulk", [Bulk.PASS, Bulk.DROP])
def test_a_huge_row_is_never_held(bulk: Bulk) -> None:
    scanner = Scanner(lambda _kind, _raw: None, lambda: bulk)
    head = b"D" + (1_073_000_004).to_bytes(4, "big")
    assert scanner.feed(head) == (head if bulk is Bulk.PASS else b"")
    piece = bytes(1_000_000)
    for _ in range(1073):
        assert scanner.feed(piece) == (piece if bulk is Bulk.PASS else b"")
        assert not scanner._held
    assert scanner.is_between_messages


def test_scanner_passes_a_chunk_on_without_copying_it() -> None:
    chunk = b"".join(message(b"D", bytes(50)) for _ in range(100)) + message(b"C", b"SELECT 100\0")
    assert Scanner(lambda _kind, _raw: None, lambda: Bulk.PASS).feed(chunk) is chunk


@pytest.mark.parametrize(
    ("kind", "length"), [(b"T", 0), (b"T", 3), (b"T", 0xFFFFFFFF), (b"D", 0), (b"D", 3), (b"d", 3)]
)
def test_scanner_refuses_impossible_lengths_at_the_header(kind: bytes, length: int) -> None:
    scanner = Scanner(lambda _kind, _raw: None, lambda: Bulk.PASS)
    with pytest.raises(ProtocolViolation):
        scanner.feed(kind + length.to_bytes(4, "big"))


def test_a_row_to_be_judged_is_bounded() -> None:
    with pytest.raises(ProtocolViolation):
        Scanner(lambda _k, _r: None, lambda: Bulk.JUDGE, limit=1000).feed(b"D" + (1001).to_bytes(4, "big"))


@given(st.binary(max_size=200), CUTS)
def test_any_bytes_raise_nothing_but_a_violation(data: bytes, cuts: list[int]) -> None:
    for reader in (FrameReader(frontend_limits(), COPY_RUNS), FrameReader(BACKEND_LIMITS)):
        try:
            for piece in pieces(data, cuts):
                list(reader.receive(piece))
        except ProtocolViolation:
            pass
    try:
        scanner = Scanner(lambda _k, _r: None, lambda: Bulk.PASS)
        for piece in pieces(data, cuts):
            scanner.feed(piece)
    except ProtocolViolation:
        pass


def test_a_run_that_is_cut_is_known() -> None:
    reader = FrameReader(frontend_limits(), COPY_RUNS)
    assert not reader.is_in_run
    list(reader.receive(message(b"d", b"12345678")[:-3]))
    assert reader.is_in_run
    list(reader.receive(b"678"))
    assert not reader.is_in_run
