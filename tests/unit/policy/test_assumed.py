"""`check` without a database: what the text and the policy alone can tell."""

import pytest

from sqlguard.policy import decide, parse_policy
from sqlguard.policy.assumed import assumed_catalog
from sqlguard.policy.context import Context
from sqlguard.policy.verdict import Effect
from sqlguard.statement import analyse
from sqlguard.statement.model import Session

POLICY = parse_policy(
    """
name = "x"
[tables."public.*"]
select = true
[tables."public.orders"]
insert = true
update = ["status"]
delete = "soft"
""",
    "x",
)


@pytest.mark.parametrize(
    ("text", "effect"),
    [
        ("SELECT * FROM orders o JOIN customers c ON c.id = o.customer_id WHERE o.total > 1", Effect.ALLOW),
        ("SELECT o.name FROM orders o", Effect.ALLOW),
        ("INSERT INTO orders (id, status) VALUES (1, 'new')", Effect.ALLOW),
        ("UPDATE orders SET status = 'x' WHERE id = 5", Effect.ALLOW),
        ("UPDATE orders SET total = 1 WHERE id = 5", Effect.REFUSE),
        ("UPDATE orders SET status = 'x'", Effect.REFUSE),
        ("UPDATE orders SET status = 'x' WHERE true", Effect.REFUSE),
        ("DELETE FROM orders WHERE id = 1", Effect.REWRITE),
        ("DELETE FROM customers WHERE id = 1", Effect.REFUSE),
        ("DELETE FROM orders", Effect.REFUSE),
        ("SELECT count(*) FROM secret.things", Effect.REFUSE),
        ("DROP TABLE orders", Effect.REFUSE),
        ("SELECT pg_sleep(10)", Effect.REFUSE),
        ("SELECT lower(name) FROM customers", Effect.ALLOW),
        ("WITH gone AS (DELETE FROM orders WHERE id = 1 RETURNING id) SELECT * FROM gone", Effect.REWRITE),
    ],
)
def test_verdicts(text: str, effect: Effect) -> None:
    catalog = assumed_catalog(text, POLICY)
    (statement,) = analyse(text, catalog, Session())
    assert decide(statement, Session(), Context(catalog, POLICY, None)).effect is effect


@pytest.mark.parametrize("text", ["", "no SQL", "SELECT " + "(" * 5000, "x" * 200_000])
def test_what_can_not_be_parsed_assumes_nothing(text: str) -> None:
    assert not assumed_catalog(text, POLICY).tables
