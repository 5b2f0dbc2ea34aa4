"""The policy file: what is inherited, what is refused, how durations are read."""

from datetime import timedelta

import pytest

from sqlguard.errors import PolicyError
from sqlguard.policy import parse_policy
from sqlguard.policy.model import duration

POLICY = """
name = "support"

[defaults]
max_rows = 50

[tables."public.*"]
select = true
max_rows = 5

[tables."public.o*"]
update = ["note"]

[tables."public.orders"]
insert = true
delete = "soft"
class = ["financial"]
"""


def test_key_by_key_the_most_specific_pattern_wins() -> None:
    policy = parse_policy(POLICY, "support.toml")
    rule = policy.table_rule("public", "orders")
    assert rule is not None
    assert (rule.select, rule.update, rule.insert, rule.delete, rule.class_) == (
        True,
        ("note",),
        True,
        "soft",
        ("financial",),
    )
    assert policy.max_rows("public", "orders") == 5
    other = policy.table_rule("public", "items")
    assert other is not None
    assert (other.select, other.insert, other.delete, other.class_) == (True, False, "refuse", ())


def test_what_no_pattern_matches_is_not_granted() -> None:
    policy = parse_policy(POLICY, "support.toml")
    assert policy.table_rule("private", "secrets") is None
    assert policy.max_rows("private", "secrets") == 50


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("name = 'x'\nsurprise = 1", "surprise"),
        ("name = 'x'\n[tables.\"public.t\"]\ndelete = 'hard'", "delete"),
        ("name = 'x'\n[defaults]\nmax_share = 1.5", "max_share"),
        ("name = 'Bad Name'", "name"),
        ("name = 'x'\n[[gates]]\nthen = 'maybe'", "gates"),
        ("name = 'x'\n[defaults]\nstatement_timeout = 'soon'", "statement_timeout"),
        ("not toml", "TOML"),
    ],
)
def test_a_broken_policy_says_what_is_wrong(text: str, named: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse_policy(text, "broken.toml")
    assert named in f"{caught.value.message} {caught.value.detail}"
    assert "broken.toml" in caught.value.message


@pytest.mark.parametrize(
    ("text", "seconds"), [("5s", 5), ("250ms", 0.25), ("15min", 900), ("1h", 3600), (7, 7), ("300", 300)]
)
def test_durations(text: object, seconds: float) -> None:
    assert duration(text) == timedelta(seconds=seconds)
