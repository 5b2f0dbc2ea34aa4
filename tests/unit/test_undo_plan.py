"""The order of an undo: newest first, and inside one statement what foreign keys accept."""

from datetime import UTC, datetime

from sqlguard.postgres.undo_plan import ChangeSet, Reference, ordered

PARENT, CHILD, OTHER = 1, 2, 3
EDGES = [Reference(CHILD, PARENT, "c", "c"), Reference(OTHER, PARENT, "a", "a")]


def change(number: int, table: int, op: str, *, tx: str = "1", depth: int = 1, at: int = 0) -> ChangeSet:
    return ChangeSet(
        id=number,
        action_id=None,
        task_id="t",
        txid=tx,
        statement_at=datetime(2026, 1, 1, 0, 0, at, tzinfo=UTC),
        relid=table,
        schema="public",
        name=str(table),
        op=op,
        rows=1,
        key_columns=["id"],
        shape_id=1,
        depth=depth,
        undo_id=None,
        pending=None,
    )


def order(*sets: ChangeSet) -> list[int]:
    return [s.id for s in ordered(sets, EDGES)]


def test_statements_are_undone_newest_first() -> None:
    assert order(
        change(1, PARENT, "insert"),
        change(2, CHILD, "insert", at=1),
        change(3, CHILD, "update", at=2, tx="2"),
    ) == [3, 2, 1]


def test_a_cascade_comes_back_parents_first() -> None:
    assert order(change(1, PARENT, "delete"), change(2, CHILD, "delete")) == [1, 2]
    assert order(change(1, PARENT, "delete"), change(2, CHILD, "update")) == [1, 2]
    assert order(change(1, PARENT, "rekey"), change(2, CHILD, "update")) == [1, 2]
    assert order(change(1, PARENT, "soft_delete"), change(2, CHILD, "delete", depth=2)) == [1, 2]


def test_without_an_action_of_the_key_two_statements_stay_two() -> None:
    assert order(change(1, PARENT, "delete"), change(2, OTHER, "update")) == [2, 1]
    assert order(change(1, PARENT, "delete"), change(2, CHILD, "delete", at=1)) == [2, 1]
    assert order(change(1, PARENT, "delete"), change(2, CHILD, "insert")) == [2, 1]


def test_what_a_trigger_inserted_is_removed_children_first() -> None:
    # An AFTER INSERT trigger of the parent inserts children: recorded first, happened last.
    assert order(change(1, OTHER, "insert", depth=2), change(2, PARENT, "insert")) == [1, 2]
    # A BEFORE INSERT trigger of the child inserts the parent.
    assert order(change(1, PARENT, "insert", depth=2), change(2, OTHER, "insert")) == [2, 1]


def test_what_a_trigger_did_to_the_same_row_happened_after_the_statement() -> None:
    assert order(change(1, PARENT, "update", depth=2), change(2, PARENT, "update")) == [1, 2]
    assert order(change(1, PARENT, "update", depth=2), change(2, PARENT, "insert")) == [1, 2]


def test_a_trigger_that_clears_the_way_for_an_insert_happened_before_it() -> None:
    assert order(change(1, PARENT, "delete", depth=2), change(2, PARENT, "insert")) == [2, 1]


def test_nests_and_cascades_of_one_statement_are_one_unit() -> None:
    sets = (
        change(1, PARENT, "delete"),
        change(2, OTHER, "update", depth=2),
        change(3, CHILD, "delete"),
        change(4, CHILD, "insert", at=1),
    )
    assert order(*sets) == [4, 1, 3, 2]


def test_a_cycle_of_references_has_an_order_all_the_same() -> None:
    edges = [Reference(PARENT, CHILD, "c", "a"), Reference(CHILD, PARENT, "c", "a")]
    sets = [change(1, PARENT, "delete"), change(2, CHILD, "delete"), change(3, PARENT, "delete")]
    assert sorted(s.id for s in ordered(sets, edges)) == [1, 2, 3]
