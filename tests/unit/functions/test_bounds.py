"""What the constants of a call say, and that doubt is never harmless where it matters."""

import postgast
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlguard.functions import NOT_CONSTANT, classify, classify_extension, fold, harmless_with, series_rows
from sqlguard.functions.pattern import tame


def call(expression: str, *parameters: object) -> bool:
    node = (
        postgast.parse(f"SELECT {expression}")
        .stmts[0]
        .stmt.select_stmt.target_list[0]
        .res_target.val.func_call
    )
    name = node.funcname[-1].string.sval
    found = classify(name, arguments=len(node.args))
    if name in ("crypt", "gen_salt"):
        found = classify_extension("pgcrypto", name, arguments=len(node.args))
    return harmless_with(name, found, [fold(argument, parameters) for argument in node.args])


@pytest.mark.parametrize(
    "expression",
    [
        "generate_series(1, 100)",
        "generate_series(100, 1)",
        "generate_series(100, 1, -1)",
        "generate_series(1, NULL)",
        "generate_series(0, 1000000000, 100000)",
        "generate_series('2024-01-01'::date, '2024-02-01', interval '1 day')",
        "generate_series(now() - interval '7 days', now(), '1 hour')",
        "generate_series(date_trunc('day', now()) - '30 days'::interval, current_date, '1 day'::interval)",
        "generate_series(current_date - 30, current_date, '1 day')",
        "generate_series((SELECT min(at) FROM t), now(), '1 day')",
        "generate_series((SELECT min(at) FROM t), (SELECT max(at) FROM t), '1 day')",
        "generate_series(1, array_length(tags, 1))",
        "generate_series(1, 10 * 5 - 1)",
        "repeat('x', 1000)",
        "repeat(name, 20)",
        "lpad(id::text, 10, '0')",
        "array_fill(0, ARRAY[10, 10])",
        "format('%I.%s', a, b)",
        "format('%-10s|%2$5s', a, b)",
        "format(template, a)",
        "regexp_replace(name, '[^a-z0-9]+', '-', 'g')",
        "regexp_match(name, $1)",
        "substring(name, 1, 3)",
        "substring(name, '^([a-z]+-)*[a-z]+$')",
        "current_setting('server_version_num')",
        "current_setting('TimeZone', true)",
        "pg_input_is_valid(name, 'integer')",
        "pg_input_is_valid(name, 'numeric(10,2)')",
        "pg_input_is_valid(name, 'timestamp with time zone')",
        "crypt('secret', password_hash)",
        "crypt('secret', gen_salt('bf'))",
        "gen_salt('bf', 8)",
        "lower('x')",
    ],
)
def test_harmless(expression: str) -> None:
    assert call(expression)


@pytest.mark.parametrize(
    "expression",
    [
        "generate_series(1, 1000000000000)",
        "generate_series(-1000000000, 1)",
        "generate_series(1, 1000000 * 1000000)",
        "generate_series(1, 1e12)",
        "generate_series(1.0, 2.0, 0.0000001)",
        "generate_series(1, n)",
        "generate_series(n, 10)",
        "generate_series(1, $1)",
        "generate_series(1, (SELECT max(id) FROM t))",
        "generate_series('2024-01-01'::timestamp, '2034-01-01', '1 second')",
        "generate_series('2024-01-01'::timestamp, 'infinity', '1 day')",
        "generate_series((SELECT min(at) FROM t), now(), '1 second')",
        "generate_series((SELECT min(at) FROM t), 'infinity', '1 day')",
        "repeat('x', 1000000000)",
        "repeat('0123456789', 5000000)",
        "repeat('x', n)",
        "repeat(repeat('x', 1000000), 1000000)",
        "lpad('x', 1000000000)",
        "rpad('x', n)",
        "array_fill(0, ARRAY[10000, 10000])",
        "array_fill(0, dims)",
        "format('%1000000000s', 'x')",
        "format('%*s', 1000000000, 'x')",
        "format('%2$*1$s', 1000000000, 'x')",
        "regexp_match('x', '((((((((((((((x+x+)+y)+z)+)+)+)+)+)+)+)+)+)+)+)')",
        "current_setting('data_directory')",
        "current_setting(name)",
        "current_setting('app.jwt_secret')",
        "pg_input_is_valid(name, 'app.evil_domain')",
        "pg_input_is_valid(name, kind)",
        "crypt('x', '$2a$31$abcdefghijklmnopqrstuu')",
        "crypt('x', '$6$rounds=999999999$salt')",
        "gen_salt('bf', 31)",
        "pg_sleep(0)",
        "nextval('s')",
        "no_such_function(1)",
    ],
)
def test_not_harmless(expression: str) -> None:
    assert not call(expression)


def test_bound_parameters_are_read() -> None:
    assert call("generate_series(1, $1)", 10)
    assert not call("generate_series(1, $1)", 10**9)
    assert not call("regexp_match(name, $1)", "((((a+)+)+)+)+")


def test_the_deciding_argument_left_out_is_not_harmless() -> None:
    assert not harmless_with("repeat", classify("repeat"), ["x"])


@given(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6), st.integers(-1000, 1000))
def test_series_rows_counts_as_the_server_does(start: int, stop: int, step: int) -> None:
    expected = len(range(start, stop + (1 if step > 0 else -1), step)) if step else 0
    assert series_rows([start, stop, step]) == expected


@given(
    st.lists(st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.just(NOT_CONSTANT)), max_size=4)
)
def test_any_constants_give_an_answer(constants: list[object]) -> None:
    for name in (
        "generate_series",
        "repeat",
        "lpad",
        "array_fill",
        "format",
        "regexp_match",
        "current_setting",
    ):
        assert harmless_with(name, classify(name), constants) in (True, False)


@pytest.mark.parametrize(
    "expression",
    ["1e999999999", "'NaN'::numeric", "'Infinity'::numeric", "1e999999999 * 1e999999999", "'x'::int"],
)
def test_numbers_that_are_none_are_not_constants(expression: str) -> None:
    assert not call(f"generate_series(1, {expression})")


@given(st.text(alphabet="ab()[]{}*+?\\^$.,:1234567890|-", max_size=60))
def test_any_pattern_gives_an_answer(pattern: str) -> None:
    assert tame(pattern) in (True, False)


@pytest.mark.parametrize(
    "pattern",
    [
        r"^[A-Za-z0-9._%+-]+@([A-Za-z0-9-]+\.)+[A-Za-z]{2,}$",
        r"^(\d{1,3}\.){3}\d{1,3}$",
        r"^(([a-z]+)(-[a-z]+)*\.)+com$",
        r"[]()*+]+",
        r"[[:alpha:]+*]+",
        r"\(+\)*\++",
        "***=((((((((((",
        "(?i)^drop +table",
        "a+?b*?",
        "x{255}",
        "",
    ],
)
def test_tame_patterns(pattern: str) -> None:
    assert tame(pattern)


@pytest.mark.parametrize(
    "pattern", ["((((a+)+)+)+)+", "((((x+x+)+y)*z)+)*", "((a{200}){200}){200}", "a" * 3000, "(((((a*)*)*)*"]
)
def test_wild_patterns(pattern: str) -> None:
    assert not tame(pattern)
