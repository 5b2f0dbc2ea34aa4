"""Limits before the parser, positions, and what hostile texts cost."""

import time

import pytest

from sqlguard.errors import NotUnderstood
from sqlguard.statement.text import MAX_BYTES, SyntaxFault, parse


def test_offsets_are_bytes_of_the_message() -> None:
    text = "SELECT 'ä' ; /* ö */ SELECT 2;"
    one, two = parse(text)
    raw = text.encode()
    assert raw[one.start : one.end].decode() == one.text == "SELECT 'ä' "
    assert raw[two.start : two.end].decode() == two.text
    assert two.text.strip().endswith("SELECT 2")


@pytest.mark.parametrize("text", ["SELECT 1", "  SELECT 1 ; ", "/*a='b'*/ SELECT 1 -- c"])
def test_a_single_statement_keeps_its_text_byte_for_byte(text: str) -> None:
    (one,) = parse(text)
    assert (one.text, one.start, one.end) == (text, 0, len(text.encode()))


@pytest.mark.parametrize("text", ["", "  ", ";", "-- nothing", "/* nothing */ ; ;"])
def test_an_empty_text_has_no_statement(text: str) -> None:
    assert parse(text) == ()


@pytest.mark.parametrize(
    ("text", "position"),
    [("SELEC 1", 1), ("SELECT 'ä' FORM t x y", 17), ("SELECT 'x", 8)],
)
def test_a_syntax_error_has_postgres_words_and_counts_characters(text: str, position: int) -> None:
    with pytest.raises(SyntaxFault) as caught:
        parse(text)
    assert caught.value.position == position
    assert caught.value.rules == ("syntax",)


@pytest.mark.parametrize(
    "text",
    [
        "SELECT 1\x00",
        "SELECT '\ud800'",
        "SELECT 1\u00a0",
        "SELECT a FROM größe",
        "SELECT x\u3000FROM t",
        "DELETE FROM t x\u0085WHERE\u0085false",
    ],
)
def test_characters_that_fool_people_are_refused(text: str) -> None:
    with pytest.raises(NotUnderstood):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        'SELECT "größe" FROM "tä"',
        "SELECT 'größe'",
        "SELECT 1 -- größe",
        "/* größe */ SELECT $ä$x$ä$",
        "SELECT E'ü'",
    ],
)
def test_any_character_may_stand_in_quotes_and_comments(text: str) -> None:
    assert len(parse(text)) == 1


HOSTILE = [
    "SELECT 1" + "+1" * 30_000,
    "SELECT 1" + " UNION SELECT 1" * 20_000,
    "SELECT * FROM " + "(SELECT * FROM " * 10_000 + "t" + ") x" * 10_000,
    "/*" * 100_000 + "*/" * 100_000 + "SELECT 1",
    "SELECT " + "(" * 6_000 + "1" + ")" * 6_000,
    "SELECT " + "NOT " * 8_000 + "true",
    "SELECT " + "+ " * 9_000 + "1",
    "SELECT a" + "[1]" * 15_000,
    "SELECT '" + "x" * MAX_BYTES + "'",
    "SELECT " + "1," * 50_000 + "1",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_are_refused_at_once(text: str) -> None:
    started = time.process_time()
    with pytest.raises(NotUnderstood):
        parse(text)
    assert time.process_time() - started < 0.1


@pytest.mark.parametrize(
    "text",
    [
        "SELECT " + "(" * 60 + "1" + ")" * 60,
        "SELECT id FROM t WHERE id IN (" + ",".join(map(str, range(5000))) + ")",
        "INSERT INTO t VALUES " + ",".join(f"({n}, 'text {n}')" for n in range(3000)),
        "SELECT 1" + " UNION ALL SELECT 1" * 100,
        "SELECT " + " OR ".join(f"a = {n}" for n in range(3000)),
        "SELECT " + " || ".join(f"'{n}'" for n in range(100)),
    ],
)
def test_long_texts_as_programs_write_them_pass(text: str) -> None:
    assert len(parse(text)) == 1
