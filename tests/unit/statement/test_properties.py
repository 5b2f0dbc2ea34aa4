"""Whatever the text is, only our own errors come out; folding agrees with evaluating."""

from collections.abc import Sequence

from guard_world import CONTEXT, SESSION, read
from hypothesis import given
from hypothesis import strategies as st

from sqlguard.errors import SqlguardError
from sqlguard.policy import decide
from sqlguard.policy.verdict import Effect
from sqlguard.statement import analyse
from sqlguard.statement.model import Kind, Scope
from sqlguard.statement.regions import ANYTHING, NOTHING, Region, compared, intersection, union

PIECES = [
    "SELECT",
    "FROM",
    "WHERE",
    "accounts",
    "orders",
    "kv",
    "a",
    "o",
    ".",
    ",",
    ";",
    "(",
    ")",
    "[",
    "]",
    "*",
    "=",
    "<>",
    "===",
    "<",
    "+",
    "-",
    "||",
    "::",
    "~",
    "AND",
    "OR",
    "NOT",
    "IN",
    "IS",
    "NULL",
    "LIKE",
    "EXISTS",
    "ANY",
    "ALL",
    "ARRAY",
    "ROW",
    "CASE",
    "WHEN",
    "THEN",
    "ELSE",
    "END",
    "UPDATE",
    "SET",
    "DELETE",
    "INSERT",
    "INTO",
    "VALUES",
    "RETURNING",
    "USING",
    "MERGE",
    "ON",
    "CONFLICT",
    "DO",
    "NOTHING",
    "MATCHED",
    "WITH",
    "RECURSIVE",
    "AS",
    "JOIN",
    "LEFT",
    "LATERAL",
    "UNION",
    "GROUP",
    "BY",
    "ORDER",
    "LIMIT",
    "FOR",
    "BEGIN",
    "COMMIT",
    "EXPLAIN",
    "ANALYZE",
    "COPY",
    "TO",
    "STDOUT",
    "PREPARE",
    "EXECUTE",
    "DECLARE",
    "CURSOR",
    "FETCH",
    "TABLE",
    "id",
    "status",
    "email",
    "1",
    "'x'",
    "$1",
    "$$x$$",
    "true",
    "lower",
    "pg_sleep",
    "purge_all",
    "purge_row",
    "int",
    "text",
    "money_kind",
    "JSON_VALUE",
    "CAST",
    "COLLATE",
    "OVER",
    "FILTER",
    "WITHIN",
    "XMLELEMENT",
]


@given(st.lists(st.sampled_from(PIECES), max_size=25))
def test_random_words_raise_nothing_but_our_own_errors(words: Sequence[str]) -> None:
    try:
        found = analyse(" ".join(words), CONTEXT.catalog, SESSION)
    except SqlguardError:
        return
    for statement in found:
        verdict = decide(statement, SESSION, CONTEXT)
        assert verdict.findings
        if statement.kind in (Kind.DDL, Kind.OTHER, Kind.DO, Kind.TRUNCATE):
            assert verdict.effect is Effect.REFUSE


@given(st.text(max_size=60))
def test_random_characters_raise_nothing_but_our_own_errors(text: str) -> None:
    try:
        analyse(text, CONTEXT.catalog, SESSION)
    except SqlguardError:
        return


VALUES = range(-2, 4)
atoms = st.builds(
    lambda operator, value: f"id {operator} {value}",
    st.sampled_from(["=", "<>", "<", "<=", ">", ">="]),
    st.integers(-1, 2),
) | st.sampled_from(
    [
        "id IS NULL",
        "id IS NOT NULL",
        "id BETWEEN 0 AND 1",
        "id NOT IN (0, 1)",
        "id IN (0, 1)",
        "true",
        "false",
    ]
)
conditions = st.recursive(
    atoms,
    lambda inner: (
        st.builds("({} AND {})".format, inner, inner)
        | st.builds("({} OR {})".format, inner, inner)
        | st.builds("(NOT {})".format, inner)
        | st.builds("({} IS TRUE)".format, inner)
        | st.builds("({} IS NOT FALSE)".format, inner)
        | st.builds("(CASE WHEN {} THEN {} ELSE {} END)".format, inner, inner, inner)
        | st.builds("coalesce({}, true)".format, inner)
    ),
    max_leaves=6,
)


def holds(condition: str, value: int) -> bool:
    """Evaluate a condition over a column that is never NULL, in Python."""
    text = condition.replace("<>", "!=").replace(" = ", " == ")
    for word, other in (
        ("id IS NOT NULL", "True"),
        ("id IS NULL", "False"),
        ("id BETWEEN 0 AND 1", "(0 <= id <= 1)"),
        ("IS NOT FALSE", ""),
        ("IS TRUE", ""),
        ("NOT IN", "not in"),
        (" IN ", " in "),
        ("AND", "and"),
        ("OR", "or"),
        ("NOT", "not"),
        ("true", "True"),
        ("false", "False"),
        ("CASE WHEN", "choose(("),
        ("THEN", "), ("),
        ("ELSE", "), ("),
        ("END", "))"),
    ):
        text = text.replace(word, other)
    names = {"id": value, "choose": lambda c, a, b: a if c else b, "coalesce": lambda c, _: c}
    return bool(eval(text, {"__builtins__": {}}, names))  # noqa: S307  a text that this test made


@given(conditions)
def test_what_is_folded_to_all_rows_holds_for_all_rows(condition: str) -> None:
    """Over a NOT NULL column: ALL only if it holds for every value; and if it does, it is not called narrowed."""
    (write,) = read(f"UPDATE accounts SET balance = 0 WHERE {condition}").writes
    always = all(holds(condition, value) for value in VALUES)
    if write.scope is Scope.ALL:
        assert always
    if always:
        assert write.scope is not Scope.NARROWED


numbers = st.integers(-3, 3)
regions = st.recursive(
    st.builds(compared, st.sampled_from(["=", "<>", "<", "<=", ">", ">="]), numbers)
    | st.sampled_from([NOTHING, ANYTHING]),
    lambda inner: (
        st.builds(lambda a, b: union((a, b)), inner, inner)
        | st.builds(lambda a, b: intersection((a, b)), inner, inner)
        | inner.map(Region.complement)
    ),
    max_leaves=8,
)


def members(region: Region) -> set[int]:
    return {n for n in range(-6, 7) if region.covers(compared("=", n))}


@given(regions, regions)
def test_regions_are_sets(a: Region, b: Region) -> None:
    assert members(union((a, b))) == members(a) | members(b)
    assert members(intersection((a, b))) == members(a) & members(b)
    assert members(a.complement()) == set(range(-6, 7)) - members(a)
    assert a.complement().complement() == a
    assert union((a, b)).covers(a)
    assert a.covers(intersection((a, b)))
