"""The quick looks at what the server sends say nothing but what the look at every message says."""

from hypothesis import example, given
from hypothesis import strategies as st

from sqlguard.wire.answers import READY_HEADER, Answers, answered, is_one_answer, is_one_run
from sqlguard.wire.buffer import message
from sqlguard.wire.replies import PLAIN, Expect, Reply
from sqlguard.wire.runs import RUN

BOUND, DESCRIBED, ROW, DONE, READY = (
    message(b"2", b""),
    message(b"T", b"\0\0"),
    message(b"D", b"\0\1\0\0\0\1Z"),
    message(b"C", b"SELECT 1\0"),
    message(b"Z", b"I"),
)
OTHERS = [
    message(b"1", b""),
    message(b"n", b""),
    message(b"s", b""),
    message(b"I", b""),
    message(b"E", b"SERROR\0\0"),
    message(b"N", b"SNOTICE\0\0"),
    message(b"Z", b"x"),
    message(b"D", READY_HEADER + b"I"),
]
PIECES = st.sampled_from([BOUND, DESCRIBED, ROW, DONE, READY, *OTHERS])
RUNS = st.lists(st.sampled_from([ROW, *OTHERS]), max_size=4).map(
    lambda p: [BOUND, DESCRIBED, *p, DONE, READY]
)


@given(st.lists(PIECES, min_size=1, max_size=7) | RUNS)
@example([BOUND, DESCRIBED, DONE, READY])
@example([BOUND, DESCRIBED, ROW, ROW, DONE, READY])
@example([BOUND, DESCRIBED, READY])
@example([BOUND, DESCRIBED, DONE, DONE, READY])
@example([BOUND, DESCRIBED, DONE, READY, READY])
def test_an_answer_to_a_run_is_one(pieces: list[bytes]) -> None:
    chunk = b"".join([*pieces, READY])
    if is_one_run(chunk):
        assert answered(chunk, RUN, has_begun=False) == len(RUN)
    if is_one_answer(chunk):
        assert answered(chunk, [PLAIN[Reply.QUERY]], has_begun=False) == 1


@given(st.lists(st.just(ROW), max_size=5), st.data())
def test_a_run_that_is_cut_is_none(rows: list[bytes], data: st.DataObject) -> None:
    whole = b"".join([BOUND, DESCRIBED, *rows, DONE, READY])
    assert is_one_run(whole)
    cut = data.draw(st.integers(0, len(whole) - len(READY) - 1))
    assert not is_one_run(whole[:cut] + READY)


SEVERAL = message(b"T", b"\0\0" + DONE + READY)
LIKE = st.sampled_from([BOUND, DESCRIBED, SEVERAL, ROW, DONE, READY, *OTHERS])
ONE = [DESCRIBED, ROW, DONE, READY]


CHUNKS = st.tuples(st.sampled_from([RUN, [PLAIN[Reply.QUERY]]]), st.lists(LIKE, max_size=6))


@given(st.lists(CHUNKS, max_size=4), LIKE)
@example([([PLAIN[Reply.QUERY]], [SEVERAL, ROW, DONE])], DESCRIBED)
def test_what_was_answered_before_changes_nothing(
    before: list[tuple[list[Expect], list[bytes]]], first: bytes
) -> None:
    answers, one = Answers(), [first, ROW, DONE]
    run_or_query = [(RUN, [BOUND, *one]), ([PLAIN[Reply.QUERY]], one)]
    for expected, pieces in [*before, *run_or_query, *run_or_query]:
        chunk = b"".join([*pieces, READY])
        found = answers.complete(chunk, expected, has_begun=False)
        assert found == Answers().complete(chunk, expected, has_begun=False)
        assert not found or found == answered(chunk, expected, has_begun=False)
