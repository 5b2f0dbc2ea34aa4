"""Which columns of a statement's rows a plan compares when it is committed."""

from dataclasses import replace
from typing import Any

import pytest
from soft_catalog import fixture_catalog

from sqlguard.catalog import Catalog, Function, Trigger
from sqlguard.rewrite.steady import steady
from sqlguard.statement import analyse
from sqlguard.statement.model import Session


def told(text: str, catalog: Catalog | None = None) -> dict[str, Any]:
    """Return what is found of the one table that is written, by its columns in order."""
    known = catalog or fixture_catalog()
    (statement,) = analyse(text, known, Session())
    (found,) = dict(steady(statement, known).get("tables", {"": {}})).values()
    return dict(found)


def columns(text: str, catalog: Catalog | None = None) -> list[str]:
    found = told(text, catalog)
    return [c for op in ("insert", "update") for c in found.get(op, {}).get("lasts", ())]


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
    assert told(f"UPDATE customers SET name = {value} WHERE id = 1")["compared"]


@pytest.mark.parametrize(
    "text",
    [
        "INSERT INTO customers (id, name) SELECT id, note || random() FROM orders",
        "INSERT INTO customers (id, name) SELECT id, to_char(now(), 'YYYY') FROM orders",
        "INSERT INTO customers (id, name) SELECT id, current_user FROM orders",
        "INSERT INTO customers (id, name) SELECT id, CURRENT_DATE::text FROM orders",
        "INSERT INTO customers (id, name) SELECT id, 'today'::date::text FROM orders",
        "INSERT INTO customers (id, name) VALUES (1, DEFAULT), ((SELECT max(id) FROM orders), 'x')",
        "INSERT INTO customers (id, name) SELECT id, (SELECT note FROM orders ORDER BY random() LIMIT 1) FROM orders",
        "INSERT INTO customers (id, name) SELECT id, random()::text r FROM orders ORDER BY r LIMIT 5",
        "INSERT INTO customers (id, name) VALUES (1, now()::text)",
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
        # Where the rows come from moves, and what is made of it does not show that.
        "INSERT INTO customers (id, name) SELECT id, r FROM orders, (SELECT random()::text AS r) AS x",
        "WITH w AS (SELECT id, now()::text AS at FROM orders) INSERT INTO customers (id, name) SELECT id, at FROM w",
        (
            "MERGE INTO customers c USING (SELECT id, random()::text AS r FROM orders) o ON c.id = o.id"
            " WHEN MATCHED THEN UPDATE SET name = o.r"
        ),
        # More than one statement writes, or none that is known.
        "WITH w AS (INSERT INTO orders (id) VALUES (1) RETURNING id) INSERT INTO customers (id, name) SELECT id, '' FROM w",
        "DELETE FROM customers USING orders o WHERE o.id = customers.id",
    ],
)
def test_nothing_is_compared(text: str) -> None:
    assert columns(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "INSERT INTO customers (id, name) SELECT id, note FROM orders WHERE random() < 0.5",
        "INSERT INTO customers (id, name) SELECT id, note FROM orders LIMIT 5",
        "INSERT INTO customers (id, name) SELECT id, (SELECT note FROM orders LIMIT 1) FROM orders",
        (
            "INSERT INTO customers (id, name) SELECT id, note FROM orders WHERE id = (SELECT count(*) FROM"
            " generate_series(1, extract(day FROM now())::int))"
        ),
        "INSERT INTO customers (id, name) SELECT o.id, o.note FROM orders o JOIN orders p ON mine(p.id) > 1",
        (
            "MERGE INTO customers c USING orders o ON c.id = o.id AND random() < 1 WHEN NOT MATCHED AND now() > '2020-01-01'"
            " THEN INSERT (id, name) VALUES (o.id, o.note)"
        ),
    ],
)
def test_which_rows_are_taken_is_compared_by_what_they_hold(text: str) -> None:
    assert columns(text, with_function("s")) == ["id", "name"]


@pytest.mark.parametrize(
    ("text", "insert", "update", "given"),
    [
        (
            (
                "MERGE INTO customers c USING orders o ON c.id = o.id WHEN MATCHED AND o.id < 3 THEN UPDATE SET name = o.note"
                " WHEN MATCHED THEN UPDATE SET id = o.id, name = now()::text"
                " WHEN NOT MATCHED THEN INSERT (id, name) VALUES (o.id, DEFAULT)"
            ),
            ["id"],
            ["id"],
            ["id"],
        ),
        (
            (
                "INSERT INTO customers (id, name) SELECT id, clock_timestamp()::text FROM orders"
                " ON CONFLICT (id) DO UPDATE SET id = excluded.id, name = excluded.name"
            ),
            ["id"],
            ["id"],
            ["id", "name"],
        ),
        ("INSERT INTO customers (name) SELECT note FROM orders", ["name"], None, ["name"]),
        ("INSERT INTO customers DEFAULT VALUES", [], None, []),
        ("UPDATE customers SET name = DEFAULT WHERE id = 1", None, [], ["id"]),
    ],
)
def test_each_way_of_writing(
    text: str, insert: list[str] | None, update: list[str] | None, given: list[str]
) -> None:
    found = told(text)
    assert (found.get("insert") or {}).get("lasts") == insert
    assert (found.get("update") or {}).get("lasts") == update
    assert [name for name in found["given"] if name in ("id", "name")] == given


def test_what_the_text_says_need_not_be_read_again() -> None:
    assert not told("INSERT INTO customers (id, name) VALUES (1, 'x')")["compared"]
    assert not told("UPDATE customers SET name = 'x' WHERE id = 1")["compared"]
    assert told("UPDATE customers SET name = (SELECT max(note) FROM orders) WHERE id = 1")["compared"]


def test_functions_of_the_users_are_named() -> None:
    (statement,) = analyse("UPDATE customers SET name = mine(id) WHERE id = 1", with_function("v"), Session())
    assert steady(statement, with_function("v"))["code"] == [9001]


def with_function(volatility: str) -> Catalog:
    catalog = fixture_catalog()
    mine = Function(9001, "public", "mine", (23,), ("integer",), return_type=23, volatility=volatility)
    return replace(catalog, functions={**catalog.functions, mine.oid: mine})


def test_a_function_that_is_immutable_is_as_good_as_its_argument() -> None:
    text = "INSERT INTO customers (id, name) SELECT mine(id), note FROM orders"
    assert columns(text, with_function("i")) == ["id", "name"]
    assert columns(text, with_function("s")) == ["name"]


@pytest.mark.parametrize(
    ("timing", "event", "source", "compared"),
    [
        ("BEFORE", "insert", "BEGIN NEW.name := 'x'; RETURN NEW; END", ["id"]),
        ("BEFORE", "update", "BEGIN NEW.name := 'x'; RETURN NEW; END", ["id", "name"]),
        ("AFTER", "insert", "BEGIN NEW.name := 'x'; RETURN NEW; END", ["id", "name"]),
        (
            "BEFORE",
            "insert",
            "BEGIN /* NEW */ IF NEW.name = 'x' THEN RETURN NULL; END IF; RETURN new; END",
            ["id", "name"],
        ),
        ("BEFORE", "insert", 'BEGIN IF NEW.id > 1 THEN "new"."name" = \'\'; END IF; RETURN NEW; END', ["id"]),
        ("BEFORE", "insert", "BEGIN SELECT 1, 'x' INTO NEW.id, NEW.name; RETURN NEW; END", []),
        ("BEFORE", "insert", "BEGIN PERFORM lower(NEW.name), NEW.id + 1; RETURN NEW; END", ["name"]),
        ("BEFORE", "insert", "BEGIN NEW := x(NEW); RETURN NEW; END", []),
        ("BEFORE", "insert", "DECLARE n ALIAS FOR NEW; BEGIN n.name := ''; RETURN NEW; END", []),
        ("BEFORE", "insert", "DECLARE r customers; BEGIN RETURN r; END", []),
        ("BEFORE", "insert", "BEGIN CALL change(NEW.name); RETURN NEW; END", []),
        ("BEFORE", "insert", "BEGIN FOR NEW.id IN 1..3 LOOP END LOOP; RETURN NEW; END", ["name"]),
        ("BEFORE", "insert", None, []),
    ],
)
def test_what_a_trigger_may_fill(timing: str, event: str, source: str | None, compared: list[str]) -> None:
    catalog = fixture_catalog()
    table = next(t for t in catalog.tables.values() if t.name == "customers")
    trigger = Trigger("stamps", frozenset({event}), timing, True, 9002)  # noqa: FBT003 (for each row)
    fills = Function(9002, "public", "fills", (), (), language="plpgsql", source=source or "")
    watched = replace(
        catalog,
        tables={**catalog.tables, table.oid: replace(table, triggers=(trigger,))},
        functions={**catalog.functions, **({} if source is None else {fills.oid: fills})},
    )
    assert columns("INSERT INTO customers (id, name) SELECT id, note FROM orders", watched) == compared
