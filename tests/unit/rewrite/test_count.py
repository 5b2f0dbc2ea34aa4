"""The query that measures a write before it is run."""

import pytest
from soft_catalog import fixture_catalog

from sqlguard.rewrite.count import counting
from sqlguard.statement import analyse
from sqlguard.statement.model import Session


def count(text: str) -> tuple[str, tuple[int, ...]] | None:
    (statement,) = analyse(text, fixture_catalog(), Session())
    found = counting(statement, 10)
    return None if found is None else (found.text, found.params)


@pytest.mark.parametrize(
    ("text", "query", "params"),
    [
        ("DELETE FROM customers", "SELECT pg_catalog.count(*) FROM customers", ()),
        (
            "UPDATE ONLY customers AS c SET name = $1 WHERE c.id = $3 OR id = $2 OR lower(name) = $3 RETURNING *",
            "SELECT pg_catalog.count(*) FROM ONLY customers c WHERE c.id = $1 OR id = $2 OR lower(name) = $1",
            (3, 2),
        ),
        (
            "WITH few AS (SELECT 1 AS id) DELETE FROM customers WHERE id IN (SELECT id FROM few)",
            "WITH few AS (SELECT 1 AS id) SELECT pg_catalog.count(*) FROM customers WHERE id IN (SELECT id FROM few)",
            (),
        ),
    ],
)
def test_the_same_rows_are_counted(text: str, query: str, params: tuple[int, ...]) -> None:
    assert count(text) == (query, params)


@pytest.mark.parametrize(
    "text",
    [
        "INSERT INTO customers (id) VALUES (1)",
        "SELECT 1",
        "DELETE FROM customers USING orders o WHERE o.customer_id = customers.id",
        "UPDATE customers SET name = o.note FROM orders o WHERE o.customer_id = customers.id",
        "DELETE FROM customers WHERE random() < 0.5",
        "DELETE FROM customers WHERE id = nextval('s')",
        "WITH gone AS (DELETE FROM orders RETURNING id) DELETE FROM customers WHERE id IN (SELECT id FROM gone)",
    ],
)
def test_what_the_where_alone_does_not_say_is_not_counted(text: str) -> None:
    assert count(text) is None
