"""Which columns of a statement's rows a plan compares when it is committed."""

from dataclasses import replace

import pytest
from soft_catalog import fixture_catalog

from sqlguard.catalog import Catalog, Function, Trigger
from sqlguard.rewrite.steady import steady
from sqlguard.statement import analyse
from sqlguard.statement.model import Session


def columns(text: str, catalog: Catalog | None = None) -> list[str]:
    known = catalog or fixture_catalog()
    (statement,) = analyse(text, known, Session())
    found = steady(statement, known)
    return [
        c.name for oid, numbers in found.items() for c in known.tables[oid].columns if c.attnum in numbers
    ]


@pytest.mark.parametrize(
    "text",
    [
        "INSERT INTO customers (id, name) SELECT id, note FROM orders WHERE id > 3",
        "INSERT INTO customers SELECT id, note FROM orders",
        "INSERT INTO customers (id, name) SELECT * FROM orders",
        "INSERT INTO customers (id, name) SELECT id, 'a' FROM orders UNION SELECT 1, 'b'",
        "INSERT INTO customers (id, name) SELECT id, note FROM orders ORDER BY id LIMIT 5",
        "INSERT INTO customers (id, name) VALUES (1, (SELECT note FROM orders WHERE id = 3)), (2, 'x')",
        "INSERT INTO customers (id, name) SELECT id, concat(note, id) FROM orders RETURNING now()",
        "WITH w AS (SELECT id, note FROM orders) INSERT INTO customers (id, name) SELECT id, note FROM w",
        "UPDATE customers SET (id, name) = (SELECT id, note FROM orders WHERE id = 1)",
        "UPDATE customers c SET id = o.id, name = o.note FROM orders o WHERE o.customer_id = c.id",
    ],
)
def test_what_comes_from_other_rows_is_compared(text: str) -> None:
    assert columns(text) == ["id", "name"]


@pytest.mark.parametrize(
    "value",
    [
        "'01/02/2024'::date::text",
        "('x' || '1 day'::interval)",
        "to_char(1.5, 'FM9D9')",
        "current_setting('application_name')",
        "justify_days('40 days')",
        "CASE WHEN id > 1 THEN '01/02/2024'::date::text END",
    ],
)
def test_what_settings_give_another_meaning_is_compared(value: str) -> None:
    assert columns(f"UPDATE customers SET name = {value} WHERE id = 1") == ["name"]
    assert (
        columns(f"UPDATE customers SET name = CASE WHEN now() > '-infinity' THEN {value} END WHERE id = 1")
        == []
    )


@pytest.mark.parametrize(
    "text",
    [
        "INSERT INTO customers (id, name) SELECT id, note || random() FROM orders",
        "INSERT INTO customers (id, name) SELECT id, to_char(now(), 'YYYY') FROM orders",
        "INSERT INTO customers (id, name) SELECT id, current_user FROM orders",
        "INSERT INTO customers (id, name) SELECT id, CURRENT_DATE::text FROM orders",
        "INSERT INTO customers (id, name) SELECT id, 'today'::date::text FROM orders",
        "INSERT INTO customers (id, name) VALUES (1, DEFAULT), ((SELECT max(id) FROM orders), 'x')",
        "INSERT INTO customers (id, name) SELECT id, (SELECT note FROM orders LIMIT 1) FROM orders",
        (
            "UPDATE customers c SET id = o.id, name = concat(o.note, clock_timestamp()) FROM orders o"
            " WHERE o.customer_id = c.id"
        ),
    ],
)
def test_what_another_run_would_give_another_value_is_left_out(text: str) -> None:
    assert columns(text) == ["id"]


@pytest.mark.parametrize(
    "text",
    [
        # The text says all of it.
        "INSERT INTO customers (id, name) VALUES (1, 'x')",
        "UPDATE customers SET name = 'x' WHERE id = 1",
        "DELETE FROM customers USING orders o WHERE o.id = customers.id",
        # Which rows it is differs.
        "INSERT INTO customers (id, name) SELECT id, note FROM orders WHERE random() < 0.5",
        "INSERT INTO customers (id, name) SELECT id, note FROM orders LIMIT 5",
        "INSERT INTO customers (id, name) SELECT id, random()::text r FROM orders ORDER BY r LIMIT 5",
        (
            "INSERT INTO customers (id, name) SELECT id, note FROM orders WHERE id = (SELECT count(*) FROM generate_series"
            "(1, extract(day FROM now())::int))"
        ),
        # What a function of the users' does is not known.
        "INSERT INTO customers (id, name) SELECT mine(id), note FROM orders WHERE mine(id) > 1",
    ],
)
def test_nothing_is_compared(text: str) -> None:
    assert columns(text, with_function("s")) == []


def with_function(volatility: str) -> Catalog:
    catalog = fixture_catalog()
    mine = Function(9001, "public", "mine", (23,), ("integer",), return_type=23, volatility=volatility)
    return replace(catalog, functions={**catalog.functions, mine.oid: mine})


def test_a_function_that_is_immutable_is_as_good_as_its_argument() -> None:
    text = "INSERT INTO customers (id, name) SELECT mine(id), note FROM orders"
    assert columns(text, with_function("i")) == ["id", "name"]
    assert columns(text, with_function("s")) == ["name"]


@pytest.mark.parametrize(
    ("timing", "event", "compared"),
    [("BEFORE", "insert", 0), ("BEFORE", "update", 2), ("AFTER", "insert", 2)],
)
def test_a_trigger_that_may_change_the_row(timing: str, event: str, compared: int) -> None:
    catalog = fixture_catalog()
    table = next(t for t in catalog.tables.values() if t.name == "customers")
    trigger = Trigger("stamps", frozenset({event}), timing, True, 1)  # noqa: FBT003 (for each row)
    watched = replace(catalog, tables={**catalog.tables, table.oid: replace(table, triggers=(trigger,))})
    text = "INSERT INTO customers (id, name) SELECT id, note FROM orders"
    assert len(columns(text, watched)) == compared
