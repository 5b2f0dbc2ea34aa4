"""What is called plain is what the walk leaves alone: held against it for fixtures and for random statements."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from soft_catalog import FIXTURES, fixture_catalog
from soft_statements import ALIASES, SOFT, TABLES, texts

from sqlguard.errors import SqlguardError
from sqlguard.rewrite import Rewritten, rewrite
from sqlguard.rewrite.names import SoftTables
from sqlguard.rewrite.plain import Plain, plainness
from sqlguard.statement.model import Session
from sqlguard.statement.text import parse

CATALOG = fixture_catalog()
TABLES_OF = SoftTables(CATALOG, Session())


def plain(text: str) -> Plain:
    return plainness(text, parse(text)[0].tree, TABLES_OF)


def outcome(text: str, **given: object) -> object:
    try:
        return rewrite(text, None, CATALOG, Session(), **given)
    except SqlguardError as fault:
        return fault.rules


def holds(text: str) -> bool:
    """Return whether *text* is called plain in some way; fail if the long way comes to something else."""
    found = plain(text)
    if found is Plain.NO:
        return False
    slow = outcome(text)
    assert outcome(text, read=parse(text)[0].tree) == slow, text
    if found is Plain.YES:
        assert isinstance(slow, Rewritten), text
        assert not slow.changed, text
    return True


@pytest.mark.parametrize(
    "text",
    [
        "SELECT id, status FROM orders WHERE id = 1",
        "SELECT c.name, count(*), sum(o.total * 2) FROM customers c JOIN orders o ON o.customer_id = c.id GROUP BY 1",
        "SELECT id FROM orders WHERE id IN (SELECT order_id FROM items WHERE pos > 1) ORDER BY id LIMIT 3",
        "WITH a AS (SELECT id FROM orders) SELECT a.id FROM a FOR UPDATE",
        "UPDATE orders SET status = 'x' WHERE id = $1 RETURNING id",
        "INSERT INTO orders (id, status) VALUES (1, 'x'), (2, DEFAULT)",
        "SELECT CASE WHEN id > 1 THEN 'a' ELSE lower(status) END, total::text FROM orders",
    ],
)
def test_usual_statements_are_plain(text: str) -> None:
    assert plain(text) is Plain.YES
    assert holds(text)


@pytest.mark.parametrize(
    "text",
    [
        "DELETE FROM orders WHERE id = 1 RETURNING id, lower(status) AS s",
        "DELETE FROM orders o USING customers c WHERE c.id = o.customer_id AND c.region = 'eu' RETURNING o.id",
        "WITH gone AS (DELETE FROM items WHERE pos = 1 RETURNING sku) SELECT count(*) FROM gone",
        "WITH gone AS (DELETE FROM orders WHERE id = 1 RETURNING id) INSERT INTO orders (id) SELECT 2 FROM gone",
        "WITH gone AS (DELETE FROM plain WHERE id = 1) DELETE FROM orders WHERE id IN (SELECT 1)",
    ],
)
def test_plain_deletes_are_rewritten_the_short_way(text: str) -> None:
    assert plain(text) is Plain.BUT_DELETES
    assert holds(text)


@pytest.mark.parametrize(
    "text",
    [
        "SELECT * FROM orders",
        "SELECT o.* FROM orders o",
        "SELECT o FROM orders o",
        "SELECT row_to_json(orders) FROM orders",
        "SELECT (o).total FROM orders o",
        "SELECT a.id FROM (SELECT o FROM orders o) a",
        "SELECT deleted_at FROM orders",
        "SELECT Deleted_AT FROM orders",
        'SELECT U&"\\0064eleted_at" FROM orders',
        "SELECT id FROM orders WHERE deleted_by_agent IS NULL",
        "SELECT a FROM orders AS o (a, b, c, d, e, f, g)",
        "WITH x (a) AS (SELECT id FROM orders) SELECT a FROM x",
        "SELECT id FROM orders NATURAL JOIN customers",
        "TABLE orders",
        "DELETE FROM orders WHERE id = 1 RETURNING *",
        "DELETE FROM orders WHERE id = 1 RETURNING ctid",
        "DELETE FROM orders WHERE id IN (WITH x AS (DELETE FROM items RETURNING pos) SELECT pos FROM x)",
        "DELETE FROM orders WHERE id = 1 RETURNING new.id",
        "DELETE FROM orders WHERE id = 1 RETURNING WITH (OLD AS o) o.id",
        "MERGE INTO orders o USING plain p ON p.id = o.id WHEN MATCHED THEN DELETE",
        "UPDATE orders SET status = 'x' RETURNING *",
        "INSERT INTO orders SELECT id FROM plain",
        "INSERT INTO orders (id) VALUES (1) ON CONFLICT (id) DO NOTHING",
        "SELECT NULL::orders",
        "SELECT CAST(NULL AS orders[])",
        "COPY orders TO STDOUT",
        "EXPLAIN SELECT id FROM orders",
        "SELECT count(*) FROM orders WHERE orders IS NULL",
        "SELECT id FROM orders WHERE EXISTS (SELECT * FROM items)",
    ],
)
def test_what_may_show_or_change_a_hidden_column_is_not(text: str) -> None:
    assert plain(text) is Plain.NO


def test_fixtures_that_are_called_plain_are_left_alone() -> None:
    found = 0
    for name in ("same.sql", "pairs.sql"):
        for part in (FIXTURES / name).read_text(encoding="utf-8").replace("\n\n", "\n--\n").split("\n--\n"):
            lines = [line for line in part.strip().splitlines() if not line.startswith(("--", "=>"))]
            if lines:
                try:
                    found += holds("\n".join(lines))
                except SqlguardError:
                    continue  # not for the parser
    assert found


@given(text=texts())
@settings(max_examples=300, deadline=None)
def test_random_statements_that_are_called_plain_are_left_alone(text: str) -> None:
    _try(text)


NAMES = sorted({*TABLES, *ALIASES, "f", "deleted_at", *(c for columns in TABLES.values() for c in columns)})


@st.composite
def expressions(draw: st.DrawFn, depth: int = 2) -> str:
    name = draw(st.sampled_from(NAMES))
    kinds = ["{n}", "{m}.{n}", "lower({n})", "{n}::text", "1", "$1", "({n}).{m}", "{n} IS NULL", "f({m}.{n})"]
    if depth:
        inner = draw(expressions(depth - 1))
        kinds += [f"({inner}) = {{n}}", f"coalesce({inner}, {{n}})", f"ROW({inner}, {{n}})"]
        kinds += [f"(SELECT {inner} FROM {{t}} {{m}})", f"EXISTS (SELECT {inner} FROM {{t}})"]
    text = draw(st.sampled_from(kinds))
    return text.format(n=name, m=draw(st.sampled_from(NAMES)), t=draw(st.sampled_from(SOFT)))


@st.composite
def named(draw: st.DrawFn) -> str:
    """Return a statement whose columns, tables and aliases are called alike, as the walk has to tell them apart."""
    first, second = draw(st.sampled_from(SOFT)), draw(st.sampled_from(sorted(TABLES)))
    alias, other = draw(st.sampled_from(NAMES)), draw(st.sampled_from(NAMES))
    one, two = draw(expressions()), draw(expressions())
    join = draw(
        st.sampled_from([f"JOIN {second} {other} ON {two}", f"LEFT JOIN {second} {other} USING (id)"])
    )
    text = draw(
        st.sampled_from(
            [
                "SELECT {one} AS {o}, {two} FROM {f} {a} {join} WHERE {two} ORDER BY {o}",
                "SELECT {one} FROM {f} GROUP BY {two}",
                "UPDATE {f} AS {a} SET id = {one} WHERE {two} RETURNING {one}",
                "INSERT INTO {f} (id) SELECT {one} FROM {s} {o} WHERE {two} RETURNING {two}",
                "WITH {a} AS (SELECT {one} FROM {f}) SELECT {two} FROM {a} CROSS JOIN {s}",
                "DELETE FROM {f} {a} WHERE {one} RETURNING {two}",
                "DELETE FROM {f} {a} USING {s} {o} WHERE {one}",
                "WITH {a} AS (DELETE FROM {f} WHERE {one} RETURNING {two}) SELECT {two} FROM {a} {o}",
                "SELECT {one} FROM (SELECT {two} FROM {f}) {a}, LATERAL (SELECT {one} FROM {s} {o}) x",
            ]
        )
    )
    return text.format(one=one, two=two, f=first, s=second, a=alias, o=other, join=join)


@given(text=named())
@settings(max_examples=500, deadline=None)
def test_names_that_are_alike_are_told_apart(text: str) -> None:
    _try(text)


def _try(text: str) -> None:
    try:
        parse(text)
    except SqlguardError:
        return  # not for the rewrite
    holds(text)
