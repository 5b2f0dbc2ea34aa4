from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlguard import lease

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SPANS = st.timedeltas(min_value=timedelta(seconds=1), max_value=timedelta(days=400_000))


def test_names_fit_into_an_identifier() -> None:
    assert lease.role_name("abc") == "sg_tk_abc"
    assert lease.role_name("abc", "x7") == "sg_tk_abc_x7"
    assert lease.group_name("support", 3) == "sg_po_support_3"
    longest = lease.group_name("p" * 40, 10_000, 4_294_967_295)
    assert len(longest) <= lease.LONGEST_NAME
    assert longest.endswith("_4294967295")


@given(ttl=SPANS, latest=SPANS)
def test_an_expiry_is_never_past_the_limit_nor_before_now(ttl: timedelta, latest: timedelta) -> None:
    limit = NOW + latest
    found = lease.expiry(NOW, ttl, limit)
    assert found == min(NOW + ttl, limit)
    assert NOW < found <= limit


def test_a_ttl_that_reaches_past_the_calendar_ends_at_the_limit() -> None:
    assert lease.expiry(NOW, timedelta.max, NOW + timedelta(hours=1)) == NOW + timedelta(hours=1)


@pytest.mark.parametrize("ttl", [timedelta(), timedelta(milliseconds=999), timedelta(seconds=-5)])
def test_a_ttl_has_at_least_a_second(ttl: timedelta) -> None:
    with pytest.raises(ValueError, match="one second"):
        lease.expiry(NOW, ttl, NOW + timedelta(hours=1))


def test_a_role_can_log_in_a_little_longer_than_the_lease_and_no_more_than_two_seconds() -> None:
    assert timedelta() < lease.valid_until(NOW) - NOW <= timedelta(seconds=2)


def test_settings_leave_out_what_the_policy_does_not_set() -> None:
    found = lease.settings(("app", "public"), timedelta(seconds=5), None, timedelta(minutes=5))
    always = tuple((name, (value,)) for name, value in lease.MEANING)
    assert found == (
        ("search_path", ("app", "public")),
        *always,
        ("statement_timeout", ("5000ms",)),
        ("idle_in_transaction_session_timeout", ("300000ms",)),
    )
    assert lease.settings((), None, None, None) == always


def test_a_search_path_is_one_value() -> None:
    assert lease.path_text(("app", "Größe", 'a"b', "")) == 'app, "Größe", "a""b", ""'


def test_no_timeout_rounds_to_none_at_all() -> None:
    assert lease.milliseconds(timedelta(microseconds=1)) == "1ms"
