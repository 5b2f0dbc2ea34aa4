"""The operations as values: what they reverse to, how they differ, what they refuse."""

import pytest

from sqlguard.alembic import GuardOp, LoosenOp, UnguardOp


def fields(op: object) -> dict[str, object]:
    return {"type": type(op).__name__, **vars(op)}


def test_a_guard_is_reversed_by_lifting_it() -> None:
    op = GuardOp(["a", "b"], schema="s", mode="soft", unique="keep", fix_views=True)
    back = op.reverse()
    assert isinstance(back, UnguardOp)
    assert (back.tables, back.schema, back.purge, back.restore) == (("a", "b"), "s", False, False)
    assert fields(back.reverse()) == fields(op)


def test_a_change_of_mode_is_reversed_by_the_change_back() -> None:
    op = GuardOp(["a"], mode="journal", existing_mode="soft")
    back = op.reverse()
    assert isinstance(back, GuardOp)
    assert (back.mode, back.existing_mode) == ("soft", "journal")
    assert fields(back.reverse()) == fields(op)


def test_a_renewal_is_reversed_by_a_renewal() -> None:
    op = GuardOp(["a"], mode="soft", existing_mode="soft")
    assert fields(op.reverse()) == fields(op)


def test_a_revision_that_loosens_first_and_guards_last_reads_the_same_backwards() -> None:
    first = LoosenOp(["a"], schema="s", mode="soft", next_mode="journal", fix_views=True)
    last = GuardOp(["a"], schema="s", mode="journal", existing_mode="soft", fix_views=True)
    last.loosened = True
    opening, closing = last.reverse(), first.reverse()
    assert isinstance(opening, LoosenOp)
    assert isinstance(closing, GuardOp)
    assert (closing.mode, closing.existing_mode) == ("soft", "journal")
    assert fields(opening.reverse()) == fields(last)
    assert fields(closing.reverse()) == fields(first)


def test_diff_tuples_say_what_differs() -> None:
    assert GuardOp(["a"], mode="soft").to_diff_tuple() == ("guard_tables", None, ("a",), "soft", "partial")
    assert UnguardOp(["a"], schema="s").to_diff_tuple() == ("unguard_tables", "s", ("a",))
    assert LoosenOp(["a"]).to_diff_tuple() == ("loosen_guards", None, ("a",))


@pytest.mark.parametrize("options", [{"mode": "hard"}, {"mode": None}, {"unique": "full"}])
def test_unknown_modes_are_refused_when_the_revision_is_read(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="must be one of"):
        GuardOp(["a"], **options)  # type: ignore[arg-type]


def test_deleted_rows_have_one_fate() -> None:
    with pytest.raises(ValueError, match="not both"):
        UnguardOp(["a"], purge=True, restore=True)
