"""How far a replica has got, in times instead of positions."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sqlguard.postgres.replica import Marks


def test_it_has_what_was_there_when_the_primary_was_asked() -> None:
    marks = Marks()
    marks.mark(1.0, 100)
    marks.mark(2.0, 200)
    marks.mark(3.0, 200)
    marks.reached(99)
    assert marks.as_of == float("-inf")
    marks.reached(150)
    assert marks.as_of == 1.0
    marks.reached(200)
    assert marks.as_of == 3.0
    # It does not go back.
    marks.reached(50)
    assert marks.as_of == 3.0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=3000))
def test_it_never_says_too_much_however_long_the_replica_is_behind(steps: list[tuple[int, int]]) -> None:
    marks, end, replayed = Marks(), 0, 0
    ends: list[int] = []
    for at, (written, behind) in enumerate(steps):
        end += written
        ends.append(end)
        marks.mark(float(at), end)
        if behind == 0:
            replayed = end - written
            marks.reached(replayed)
            assert marks.as_of == float("-inf") or ends[int(marks.as_of)] <= replayed
    marks.reached(end)
    # The newest mark is never thrown away.
    assert marks.as_of >= len(steps) - 2
    assert all(a <= b for a, b in pairwise(ends))
