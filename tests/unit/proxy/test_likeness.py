"""Texts that differ in a number only are alike where no number can matter, and nowhere else."""

import postgast
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlguard.catalog import Catalog
from sqlguard.plan import Decision
from sqlguard.policy.verdict import Effect, Verdict
from sqlguard.proxy.likeness import certain, is_alike, likeness
from sqlguard.proxy.passing import Passing
from sqlguard.statement import analyse
from sqlguard.statement.model import Session
from sqlguard.wire.messages import Query


def message(text: str) -> bytes:
    return Query(text.encode()).encode()


def test_a_number_behind_a_comparison() -> None:
    assert likeness(message("SELECT a FROM t WHERE id = 5")) == likeness(
        message("SELECT a FROM t WHERE id = 123456789")
    )
    assert likeness(message("SELECT a FROM t WHERE id=5;")) == likeness(
        message("SELECT a FROM t WHERE id=77;")
    )
    assert likeness(message("SELECT a FROM t WHERE id = 5")) != likeness(
        message("SELECT b FROM t WHERE id = 5")
    )


@pytest.mark.parametrize(
    "text",
    [
        "SELECT a FROM t",
        "SELECT a FROM t LIMIT 5",
        "SELECT a FROM t WHERE id = 1234567890",
        "SELECT a FROM t WHERE id = 5.5",
        "SELECT a FROM t WHERE id = 5e3",
        "SELECT a FROM t WHERE id = 5::text",
        "SELECT a FROM t WHERE b = '= 5 '",
        'SELECT "a = 5 " FROM t',
        "SELECT a FROM t -- = 5 \n",
        "SELECT a FROM t /* = 5 */",
        "SELECT $$= 5 $$ FROM t",
        "SELECT ä FROM t WHERE id = 5",
        "SELECT a FROM t WHERE id = 5" + " " * 2000,
    ],
)
def test_what_is_left_alone(text: str) -> None:
    assert certain(message(text)) is None


def test_half_a_message_and_two_are_left_alone() -> None:
    whole = message("SELECT a FROM t WHERE id = 5")
    assert likeness(whole[:-3]) is None
    assert likeness(whole + whole) is None


def test_what_is_no_number_is_not_alike_to_one() -> None:
    known = certain(message("SELECT a FROM t WHERE id = 5 AND b = 6"))
    assert known == likeness(message("SELECT a FROM t WHERE id = 7 AND b = 8"))
    for other in ("?", "'5'", "$1", "5::text", "/* 5 */ 5", "-5", "c"):
        assert known != likeness(message(f"SELECT a FROM t WHERE id = 7 AND b = {other}"))
    whole = message("SELECT a FROM t WHERE id = 7 AND b = x")
    assert likeness(whole.replace(b"x", b"\0")) is None


@given(st.text("=<>0123456789 ;(),.abx+'\"$-/*\\", max_size=40), st.integers(0, 999_999_999))
def test_a_number_that_is_replaced_is_one_to_the_scanner(text: str, number: int) -> None:
    """Whatever the text: where two are alike they have the same tokens but for integers behind comparisons."""
    like = certain(message(text))
    if like is None:
        return
    other = like[:-1].replace(b"\0", b"%d" % number).decode()
    assert likeness(message(other)) == certain(message(other)) == like
    try:
        tokens = [t.token for t in postgast.scan(text).tokens]
    except postgast.PgQueryError:
        return
    assert tokens == [t.token for t in postgast.scan(other).tokens]


def test_functions_are_not_alike() -> None:
    def decided(text: str) -> tuple[Decision, ...]:
        return tuple(Decision(s, Verdict(Effect.ALLOW), text) for s in analyse(text, Catalog(), Session()))

    assert is_alike(decided("SELECT a FROM t WHERE id = 5"))
    assert not is_alike(decided("SELECT repeat(a, b) FROM t WHERE id = 5"))
    assert not is_alike(decided("EXPLAIN SELECT a FROM t WHERE id = 5"))
    assert not is_alike(decided("UPDATE t SET a = 5 WHERE id = 5"))
    assert not is_alike(decided("SELECT 1; SELECT a FROM t WHERE id = 5"))


def test_what_is_alike_stays_bounded() -> None:
    passing = Passing()
    for number in range(5000):
        passing.remember(b"x", like=b"%d" % number)
        assert len(passing.alike) <= 4096
    assert b"4999" in passing.alike
    assert not passing.alike.again(b"0")
