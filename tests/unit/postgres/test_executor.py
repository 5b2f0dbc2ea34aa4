"""psycopg's placeholders become PostgreSQL's own, so that the grammar can judge the text."""

import psycopg
import pytest

from sqlguard.postgres.executor import number_placeholders


@pytest.mark.parametrize(
    ("text", "params", "expected"),
    [
        ("SELECT 1", None, ("SELECT 1", None)),
        ("SELECT '100%'", None, ("SELECT '100%'", None)),
        ("SELECT %s", [1], ("SELECT $1", [1])),
        ("SELECT %s, %s", (1, "a"), ("SELECT $1, $2", [1, "a"])),
        ("SELECT %(a)s, %(b)s, %(a)s", {"a": 1, "b": 2}, ("SELECT $1, $2, $1", [1, 2])),
        ("SELECT '100%%', %s", [1], ("SELECT '100%', $1", [1])),
        ("SELECT $1", [1], ("SELECT $1", [1])),
        ("SELECT %b, %t", [b"x", "y"], ("SELECT $1, $2", [b"x", "y"])),
    ],
)
def test_number_placeholders(text: str, params: object, expected: object) -> None:
    assert number_placeholders(text, params) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "params"), [("SELECT %s", []), ("SELECT %(a)s", {"b": 1}), ("SELECT %s", {"a": 1})]
)
def test_parameters_that_do_not_fit(text: str, params: object) -> None:
    with pytest.raises(psycopg.ProgrammingError):
        number_placeholders(text, params)  # type: ignore[arg-type]
