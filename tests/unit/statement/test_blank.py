"""Values are cut out however they are written, and nothing else is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlguard.statement.blank import BLANK, Values, blank, blank_json, blank_params

BOB = Values(frozenset({"2"}), frozenset({"b@x", "bob", "Émile O'Brien", "-7.50", "f", ""}))


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (
            "INSERT INTO t2 VALUES (2, 'b@x', 'bob', 22, -7.5)",
            "INSERT INTO t2 VALUES ('***', '***', '***', 22, -'***')",
        ),
        ("SELECT E'b\\x6fb', $$BOB$$, U&'\\0062ob', 2.0, 12", "SELECT '***', '***', '***', '***', 12"),
        ("SELECT 'for Émile O''Brien', 'Emil'", "SELECT '***', 'Emil'"),
        ("SELECT 1 WHERE n LIKE '%O''Brien%'", "SELECT 1 WHERE n LIKE '***'"),
        (
            "SELECT 1 /*reason='bob (2), not bobby'*/ -- bob",
            "SELECT 1 /*reason='*** (***), not bobby'*/ -- ***",
        ),
        ("SELECT bob FROM bob WHERE f", "SELECT bob FROM bob WHERE f"),
        ("SELECT 'bob", "(erased: a text of 11 bytes)"),
        ("SELECT 'rob", "SELECT 'rob"),
    ],
)
def test_statements(text: str, left: str) -> None:
    assert blank(text, BOB) == left


def test_parameters_and_details() -> None:
    assert blank_params(["2", None, "20", "B@X"], BOB) == [BLANK, None, "20", BLANK]
    assert blank_params(None, BOB) is None
    detail = {"rows": 2, "sample": [{"id": 2, "bob": "to bob"}, True, None, "other"]}
    assert blank_json(detail, BOB, kept=frozenset({"rows"})) == {
        "rows": 2,
        "sample": [{"id": BLANK, "bob": "to ***"}, True, None, "other"],
    }


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)


@given(WORDS, st.sampled_from(["'{}'", "E'{}'", "$q${}$q$"]))
def test_a_string_constant_that_is_the_value_goes(value: str, form: str) -> None:
    written = value.replace("'", "''")
    if form.startswith("E"):
        written = written.replace("\\", "\\\\")
    if form.startswith("$"):
        written = value
        if "$" in value:
            return
    text = f"SELECT 'kept' WHERE c = {form.format(written)}"
    left = blank(text, Values(frozenset({value})))
    assert left.endswith("c = '***'") or left.startswith("(erased")


@given(WORDS)
def test_no_values_change_nothing(text: str) -> None:
    assert blank(text, Values(frozenset())) == text
