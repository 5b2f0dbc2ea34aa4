"""Annotations come from comments as PostgreSQL's scanner sees them, never from strings."""

from typing import Any

import pytest

from sqlguard.annotation import EMPTY, Annotation, clipped, confidence, given, read, with_field
from sqlguard.errors import NotUnderstood


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SELECT 1", EMPTY),
        ("/*reason='clean%20up'*/ SELECT 1", Annotation(reason="clean up")),
        ("SELECT 1 -- step='2'", Annotation(step="2")),
        (
            "DELETE FROM t WHERE id = 1 /*reason='a',confidence='0.9',idempotency_key='run-7:3'*/",
            Annotation("a", 0.9, "run-7:3"),
        ),
        ("/*reason='it\\'s'*/ SELECT 1", Annotation(reason="it's")),
        ("/*reason='first'*/ SELECT 1 /*reason='second'*/", Annotation(reason="second")),
        ("/*traceparent='00-ab-cd-01',unknown='x'*/ SELECT 1", Annotation(traceparent="00-ab-cd-01")),
        ("SELECT '/*reason=''x''*/'", EMPTY),
        ("SELECT 1 AS \"/*reason='x'*/\"", EMPTY),
        ("SELECT $$--reason='x'$$", EMPTY),
        ("/* plain words, reason: none */ SELECT 1", EMPTY),
        ("/*reason='no end*/ SELECT 1", EMPTY),
        ("/*confidence='7'*/ SELECT 1", EMPTY),
        ("/*confidence='nan'*/ SELECT 1", EMPTY),
        ("SELECT '/* unterminated", EMPTY),
    ],
)
def test_read(text: str, expected: Annotation) -> None:
    assert read(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("0", 0.0), ("1", 1.0), ("0.85", 0.85), ("1.01", None), ("-1", None), ("x", None)]
)
def test_confidence(text: str, expected: float | None) -> None:
    assert confidence(text) == expected


def test_statement_wins_over_session() -> None:
    session = Annotation(reason="session", step="1")
    assert session.merged(Annotation(reason="statement")) == Annotation(reason="statement", step="1")


def test_a_setting_is_cleared_by_an_empty_value() -> None:
    assert with_field(Annotation(reason="x"), "reason", "") == EMPTY
    assert with_field(EMPTY, "no_such_field", "x") == EMPTY


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ({"confidence": 1.5}, "between 0 and 1"),
        ({"confidence": -0.1}, "between 0 and 1"),
        ({"confidence": float("nan")}, "between 0 and 1"),
        ({"idempotency_key": "k" * 501}, "500 characters"),
        ({"reason": "r" * 10_001}, "10000 characters"),
        ({"step": "a\0b"}, "NUL"),
    ],
)
def test_arguments_are_held_to_what_a_comment_could_say(what: dict[str, Any], why: str) -> None:
    with pytest.raises(NotUnderstood, match=why) as caught:
        given(**what)
    assert caught.value.hint


def test_arguments_that_say_nothing_are_not_given() -> None:
    assert given(reason="", idempotency_key="", step="") == EMPTY
    assert given("because", 0, "k", "s") == Annotation("because", 0, "k", "s")


def test_what_is_refused_is_written_down_whatever_is_said() -> None:
    said = Annotation("r" * 20_000, 0.5, "k\0", "s", "t")
    assert clipped(said) == Annotation("r" * 10_000, 0.5, "k\ufffd", "s", "t")
    assert clipped(EMPTY) is EMPTY
