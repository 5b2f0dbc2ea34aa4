"""What the policy shows of the schema: names, rights, and nothing of what it does not show."""

import pytest

from sqlguard.catalog import Catalog, Column, ForeignKey, Guard, Table, Unique
from sqlguard.errors import Refused
from sqlguard.mcp_server import describe
from sqlguard.policy import parse_policy
from sqlguard.policy.context import Context

POLICY = """
name = "shop"
description = "answers tickets"
[tables."public.orders"]
select = ["id", "note"]
update = ["note"]
delete = "soft"
rows = "customer_id = :customer_id"
class = ["financial"]
[tables."public.items"]
select = true
[tables."sqlguard.*"]
select = true
[[gates]]
when = { class = "financial" }
then = "approve"
"""


def columns(*names: str) -> tuple[Column, ...]:
    return tuple(Column(name, n, 23, "integer", not_null=n == 1) for n, name in enumerate(names, 1))


def table(
    oid: int, name: str, *names: str, schema: str = "public", guard: Guard | None = None, part: bool = False
) -> Table:
    key = (Unique(f"{name}_pkey", (names[0],), primary=True),)
    return Table(oid, schema, name, "r", columns(*names), key, guard=guard, is_partition=part)


CATALOG = Catalog(
    tables={
        t.oid: t
        for t in (
            table(
                1,
                "orders",
                "id",
                "customer_id",
                "note",
                "deleted_at",
                guard=Guard("soft", 1, ("deleted_at",)),
            ),
            table(2, "items", "id", "order_id", "secret_id"),
            table(3, "secrets", "id"),
            table(4, "action", "id", schema="sqlguard"),
            table(5, "orders_1", "id", part=True),
        )
    },
    foreign_keys=(
        ForeignKey("a", 2, ("order_id",), 1, ("id",), on_delete="c"),
        ForeignKey("b", 2, ("secret_id",), 3, ("id",)),
        ForeignKey("c", 3, ("id",), 1, ("id",)),
    ),
)
CONTEXT = Context(CATALOG, parse_policy(POLICY, "shop"), None)


def test_tables() -> None:
    found = describe.list_tables(CONTEXT)
    assert [t.table for t in found.tables] == ["public.items", "public.orders"]
    assert (found.total, found.truncated) == (2, False)
    assert [t.table for t in describe.list_tables(CONTEXT, "ORD").tables] == ["public.orders"]


@pytest.mark.parametrize("name", ["orders", "public.orders"])
def test_a_table(name: str) -> None:
    found = describe.describe(CONTEXT, name)
    assert [(c.name, c.may_read, c.may_update) for c in found.columns] == [
        ("id", True, False),
        ("note", True, True),
    ]
    assert (found.row_scope, found.classes, found.primary_key) == (
        "customer_id = :customer_id",
        ["financial"],
        ["id"],
    )
    assert found.referenced_by == ["public.items"]
    assert [k.references for k in describe.describe(CONTEXT, "items").foreign_keys] == ["public.orders"]


@pytest.mark.parametrize(
    "name", ["secrets", "sqlguard.action", "action", "orders_1", "", "pg_class", "public.*"]
)
def test_what_is_not_shown_is_not_there(name: str) -> None:
    with pytest.raises(Refused) as caught:
        describe.describe(CONTEXT, name)
    assert caught.value.hint


def test_words() -> None:
    policy = describe.policy_in_words(CONTEXT)
    assert (
        "- public.orders: read (id, note), update (note), delete (rows are hidden and can be restored)"
        in policy
    )
    assert "only rows where customer_id = :customer_id" in policy
    assert "When class is financial: a person has to approve it first." in policy
    schema = describe.schema_in_words(CONTEXT)
    assert "## public.orders (table, financial)" in schema
    assert "deleted_at" not in schema
    assert "secrets" not in schema + policy
