"""What a person reads of an undo."""

from sqlguard.postgres.undo_report import shown_key, shown_row


def test_a_value_of_an_agent_s_is_no_line_of_the_report() -> None:
    spoof = "x\nalready undone: nothing to do"
    assert shown_key({"id": spoof, "n": None}) == "id=x\\nalready undone: nothing to do, n=None"
    assert "\n" not in shown_row({"note": spoof})
    assert shown_key({}) == "a row without key"
