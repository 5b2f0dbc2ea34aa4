"""Which views show deleted rows."""

from dataclasses import replace

import pytest
from guard_world import CATALOG

from sqlguard.catalog import Catalog
from sqlguard.policy.views import shown_deleted

ACTIVE, ORDERS = CATALOG.tables[20], CATALOG.tables[21]
HIDDEN = "a.deleted_at IS NULL"


def over(definition: str, *, invoker: bool = False) -> str | None:
    view = replace(ORDERS, definition=definition, security_invoker=invoker)
    catalog = Catalog(**{**_parts(), "tables": {**CATALOG.tables, 21: view}})
    found = shown_deleted(view, catalog)
    return found.name if found else None


def _parts() -> dict[str, object]:
    names = (
        "version",
        "server_version",
        "functions",
        "operators",
        "casts",
        "types",
        "foreign_keys",
        "schemas",
    )
    return {name: getattr(CATALOG, name) for name in names}


@pytest.mark.parametrize(
    "definition",
    [
        f"SELECT a.id FROM app.accounts a WHERE {HIDDEN}",
        f"SELECT a.id FROM app.accounts a WHERE ({HIDDEN} AND (a.balance > (0)::numeric))",
        "SELECT id FROM app.accounts WHERE (deleted_at IS NULL)",
        "SELECT accounts.id FROM app.accounts WHERE (accounts.deleted_at IS NULL)",
        f"SELECT o.id FROM (app.orders o JOIN app.accounts a ON ({HIDDEN} AND o.deleted_at IS NULL))",
        f"SELECT o.id FROM (app.orders o LEFT JOIN app.accounts a ON ({HIDDEN})) WHERE o.deleted_at IS NULL",
        f"SELECT i.id FROM app.order_items i WHERE (EXISTS (SELECT 1 FROM app.accounts a WHERE {HIDDEN}))",
        f"WITH x AS (SELECT a.id FROM app.accounts a WHERE {HIDDEN}) SELECT x.id FROM x",
        f"SELECT a.id FROM app.accounts a WHERE {HIDDEN} UNION ALL SELECT i.id FROM app.order_items i",
        "SELECT v.id FROM app.v_active_accounts v",
        "SELECT i.id FROM app.order_items i",
        "SELECT kv.k FROM app.kv",
    ],
)
def test_a_filter_hides_deleted_rows(definition: str) -> None:
    assert over(definition) is None


@pytest.mark.parametrize(
    "definition",
    [
        "SELECT a.id FROM app.accounts a",
        f"SELECT a.id FROM app.accounts a WHERE ({HIDDEN} OR a.id = 1)",
        f"SELECT a.id FROM app.accounts a WHERE (NOT ({HIDDEN}))",
        "SELECT a.id FROM app.accounts a WHERE (a.deleted_by_agent IS NULL)",
        "SELECT a.id FROM app.accounts a WHERE (a.deleted_at IS NOT NULL)",
        # ON says nothing about the side that a join keeps.
        f"SELECT a.id FROM (app.accounts a LEFT JOIN app.order_items i ON ({HIDDEN}))",
        f"SELECT a.id FROM (app.order_items i RIGHT JOIN app.accounts a ON ({HIDDEN}))",
        f"SELECT a.id FROM (app.accounts a FULL JOIN app.order_items i ON ({HIDDEN}))",
        f"SELECT a.id, b.id AS b FROM app.accounts a, app.accounts b WHERE {HIDDEN}",
        f"SELECT a.id FROM app.accounts a WHERE {HIDDEN} UNION ALL SELECT b.id FROM app.accounts b",
        "SELECT (SELECT max(a.id) FROM app.accounts a) AS top",
        "SELECT i.id FROM app.order_items i WHERE (EXISTS (SELECT 1 FROM app.accounts a))",
        "WITH x AS (SELECT a.id FROM app.accounts a) SELECT x.id FROM x",
        f"SELECT s.id FROM (SELECT a.id FROM app.accounts a) s, app.accounts a WHERE {HIDDEN}",
        "SELECT a.id FROM app.accounts a TABLESAMPLE system (10)",
    ],
)
def test_without_one_they_are_shown(definition: str) -> None:
    assert over(definition) == "accounts"
    assert over(definition, invoker=True) is None


def test_an_owner_s_view_reads_as_its_owner_all_the_way_down() -> None:
    inner = replace(ACTIVE, definition="SELECT a.id FROM app.accounts a", security_invoker=True)
    outer = replace(ORDERS, definition="SELECT v.id FROM app.v_active_accounts v")
    catalog = Catalog(**{**_parts(), "tables": {**CATALOG.tables, 20: inner, 21: outer}})
    assert shown_deleted(inner, catalog) is None
    assert shown_deleted(outer, catalog) is not None
    assert shown_deleted(replace(outer, security_invoker=True), catalog) is None


def test_the_operator_may_accept_it() -> None:
    table = CATALOG.tables[1]
    assert table.guard is not None
    accepted = replace(table, guard=replace(table.guard, views_accepted=True))
    catalog = Catalog(**{**_parts(), "tables": {**CATALOG.tables, 1: accepted}})
    assert shown_deleted(replace(ORDERS, definition="SELECT a.id FROM app.accounts a"), catalog) is None
