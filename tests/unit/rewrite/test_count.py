"""The query that measures a write before it is run."""

from dataclasses import replace

import pytest
from soft_catalog import fixture_catalog

from sqlguard.catalog import Trigger
from sqlguard.rewrite.count import counting
from sqlguard.statement import analyse
from sqlguard.statement.model import Session


def count(text: str) -> tuple[str, tuple[int, ...]] | None:
    catalog = fixture_catalog()
    (statement,) = analyse(text, catalog, Session())
    found = counting(statement, 10, catalog)
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
        (
            "DELETE FROM customers USING orders o WHERE o.customer_id = customers.id AND o.id = $2",
            (
                "SELECT pg_catalog.count(*) FROM customers"
                " WHERE EXISTS (SELECT FROM orders o WHERE o.customer_id = customers.id AND o.id = $1)"
            ),
            (2,),
        ),
        (
            "UPDATE customers SET name = o.note FROM orders o",
            "SELECT pg_catalog.count(*) FROM customers WHERE EXISTS (SELECT FROM orders o)",
            (),
        ),
        (
            (
                "WITH w AS (SELECT 1 AS id) INSERT INTO customers (id, name)"
                " SELECT id, 'x' FROM w UNION ALL SELECT id, note FROM orders"
            ),
            (
                "WITH w AS (SELECT 1 AS id) SELECT pg_catalog.count(*)"
                " FROM (SELECT id, 'x' FROM w UNION ALL SELECT id, note FROM orders) sg_rows"
            ),
            (),
        ),
        (
            (
                "MERGE INTO customers t USING orders s ON t.id = s.id WHEN MATCHED AND s.id > $1 THEN DO NOTHING"
                " WHEN MATCHED THEN UPDATE SET name = s.note WHEN NOT MATCHED THEN INSERT (id) VALUES (s.id)"
            ),
            (
                "SELECT pg_catalog.count(*) FROM customers t JOIN orders s ON t.id = s.id"
                " WHERE CASE WHEN s.id > $1 THEN false WHEN true THEN true ELSE false END"
            ),
            (1,),
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
        "INSERT INTO customers DEFAULT VALUES",
        "INSERT INTO customers (id, name) SELECT id, note FROM orders ON CONFLICT DO NOTHING",
        "INSERT INTO customers (id, name) SELECT nextval('s'), note FROM orders",
        "INSERT INTO customers (id, name) SELECT id, note FROM orders FOR UPDATE",
        "MERGE INTO customers t USING orders s ON t.id = s.id WHEN NOT MATCHED THEN INSERT (id) VALUES (s.id)",
        "DELETE FROM customers WHERE CURRENT OF c",
        "DELETE FROM customers WHERE random() < 0.5",
        "DELETE FROM customers WHERE id = nextval('s')",
        "WITH gone AS (DELETE FROM orders RETURNING id) DELETE FROM customers WHERE id IN (SELECT id FROM gone)",
    ],
)
def test_what_can_not_be_told_by_looking_is_not_counted(text: str) -> None:
    assert count(text) is None


def test_a_trigger_that_may_leave_rows_out_is_waited_for() -> None:
    catalog = fixture_catalog()
    table = next(t for t in catalog.tables.values() if t.name == "customers")
    trigger = Trigger("keeps", frozenset({"delete"}), "BEFORE", True, 1)  # noqa: FBT003 (for each row)
    watched = replace(catalog, tables={**catalog.tables, table.oid: replace(table, triggers=(trigger,))})
    for text, is_counted in (("DELETE FROM customers", False), ("UPDATE customers SET name = 'x'", True)):
        (statement,) = analyse(text, watched, Session())
        assert (counting(statement, 10, watched) is not None) is is_counted
