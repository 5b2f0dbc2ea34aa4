"""The proof lets the intended change pass and nothing else."""

import postgast
import pytest
from soft_catalog import FIXTURES, fixture_catalog, in_full

from sqlguard.errors import NotUnderstood
from sqlguard.rewrite import prove
from sqlguard.rewrite.marks import ASSIGNMENTS
from sqlguard.rewrite.once import BEFORE, BEHIND
from sqlguard.statement.model import Session

CATALOG = fixture_catalog()
SELECTED = 'o.id, o.customer_id, o.status, o.total, o."Placed At"'

DELETE = "DELETE FROM orders o USING plain p WHERE p.id = o.id OR o.total > 1 RETURNING *"
RIGHT = (
    f"UPDATE orders o SET {ASSIGNMENTS} FROM plain p WHERE (p.id = o.id OR o.total > 1) AND o.deleted_at IS NULL"
    f" RETURNING {SELECTED}, p.*"
)


def check(sent: str, text: str) -> None:
    prove(postgast.parse(sent).stmts[0].stmt, in_full(text), CATALOG, Session())


def passes(sent: str, text: str) -> bool:
    try:
        check(sent, text)
    except NotUnderstood:
        return False
    return True


def test_the_right_text_is_proved() -> None:
    check(DELETE, RIGHT)


@pytest.mark.parametrize(
    ("part", "tampered"),
    [
        ("UPDATE orders o", "UPDATE customers o"),
        ("UPDATE orders o", "UPDATE ONLY orders o"),
        ("UPDATE orders o", "UPDATE other.orders o"),
        ("statement_timestamp()", "now()"),
        ("deleted_at = ", "total = 1, deleted_at = "),
        ("(SELECT sqlguard.agent())", "'me'"),
        ("FROM plain p", "FROM plain p, items"),
        ("FROM plain p", "FROM customers p"),
        ("(p.id = o.id OR o.total > 1)", "p.id = o.id OR o.total > 1"),
        ("(p.id = o.id OR o.total > 1)", "(p.id = o.id AND o.total > 1)"),
        ("(p.id = o.id OR o.total > 1)", "(p.id = o.id OR o.total > 2)"),
        (" AND o.deleted_at IS NULL", ""),
        (" AND o.deleted_at IS NULL", " AND o.deleted_at IS NOT NULL"),
        (" AND o.deleted_at IS NULL", " AND p.deleted_at IS NULL"),
        (" AND o.deleted_at IS NULL", " AND o.deleted_at IS NULL AND true"),
        (" AND o.deleted_at IS NULL", " OR o.deleted_at IS NULL"),
        ("o.id, o.customer_id", "o.customer_id, o.id"),
        ("o.status, ", ""),
        ("o.status, ", "o.status, o.deleted_at, "),
        ("o.status, ", "o.status AS x, "),
        ("o.status, ", "lower(o.status), "),
        ("p.*", "p.id"),
        ("p.*", "o.*"),
        (f" RETURNING {SELECTED}, p.*", ""),
        ("UPDATE", "WITH x AS (SELECT 1) UPDATE"),
        ("p.*", "p.*; DROP TABLE plain"),
    ],
)
def test_a_tampered_text_is_not(part: str, tampered: str) -> None:
    assert part in RIGHT
    with pytest.raises(NotUnderstood) as caught:
        check(DELETE, RIGHT.replace(part, tampered, 1))
    if ";" not in tampered:
        assert caught.value.rules == ("rewrite-not-proved",)


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        # A change is for soft tables only.
        (
            "DELETE FROM plain WHERE id = 1",
            "UPDATE plain SET <marks> WHERE (id = 1) AND plain.deleted_at IS NULL",
        ),
        ("DELETE FROM orders WHERE id = 1", "DELETE FROM orders WHERE id = 1"),
        ("SELECT * FROM plain", "SELECT plain.id FROM plain"),
        ("COPY plain TO STDOUT", "COPY plain (id) TO STDOUT"),
        ("INSERT INTO plain VALUES (1)", "INSERT INTO plain (name) VALUES (1)"),
        # Half a change.
        ("SELECT * FROM orders", "SELECT orders.id FROM orders"),
        ("SELECT o.* FROM orders o, plain p", "SELECT p.id FROM orders o, plain p"),
        ("COPY orders TO STDOUT", "COPY orders (id) TO STDOUT"),
        ("COPY orders (id) TO STDOUT", "COPY orders (id, total) TO STDOUT"),
        ("INSERT INTO orders VALUES (1)", "INSERT INTO orders (total) VALUES (1)"),
        ("SELECT o FROM orders o", "SELECT (SELECT o FROM (SELECT o.id) AS o) FROM orders o"),
        (
            "SELECT o FROM orders o",
            f"SELECT (SELECT o FROM (SELECT {SELECTED}, o.deleted_at) AS o) FROM orders o",
        ),
        ("SELECT o FROM orders o", f"SELECT (SELECT x FROM (SELECT {SELECTED}) AS x) FROM orders o"),
        (
            "SELECT o FROM orders o",
            f"SELECT (SELECT o FROM (SELECT {SELECTED} FROM plain) AS o) FROM orders o",
        ),
        (
            "SELECT o FROM orders o",
            f"SELECT (SELECT o FROM (SELECT {SELECTED} WHERE false) AS o) FROM orders o",
        ),
        ("SELECT o FROM orders o", f"SELECT (SELECT o FROM (SELECT {SELECTED}) AS o LIMIT 0) FROM orders o"),
        # Something beside it.
        ("SELECT 1 FROM plain, log WHERE at IS NULL", "SELECT 1 FROM plain, log WHERE log.at IS NULL"),
        ("SELECT deleted_at FROM log, orders", "SELECT orders.deleted_at FROM log, orders"),
        ("SELECT 1 FROM orders NATURAL JOIN tags", "SELECT 1 FROM orders JOIN tags ON false"),
        ("SELECT 1 FROM orders NATURAL LEFT JOIN tags", "SELECT 1 FROM orders CROSS JOIN tags"),
        (
            "SELECT 1 FROM orders NATURAL JOIN customers",
            "SELECT 1 FROM orders JOIN customers USING (deleted_at)",
        ),
        (
            "INSERT INTO usr VALUES (1) ON CONFLICT (id) DO NOTHING",
            "INSERT INTO usr VALUES (1) ON CONFLICT DO NOTHING",
        ),
        (
            "INSERT INTO usr VALUES (1) ON CONFLICT (email) DO NOTHING",
            "INSERT INTO usr VALUES (1) ON CONFLICT (email) WHERE id > 1 DO NOTHING",
        ),
        (
            "INSERT INTO usr VALUES (1) ON CONFLICT ON CONSTRAINT usr_email_key DO NOTHING",
            "INSERT INTO usr VALUES (1) ON CONFLICT (id) WHERE deleted_at IS NULL DO NOTHING",
        ),
        (
            "MERGE INTO orders o USING plain p ON true WHEN MATCHED THEN DELETE",
            "MERGE INTO orders o USING plain p ON true WHEN MATCHED THEN UPDATE SET total = 1",
        ),
        (
            "MERGE INTO plain o USING plain p ON true WHEN MATCHED THEN DELETE",
            "MERGE INTO plain o USING plain p ON true WHEN MATCHED THEN UPDATE SET <marks>",
        ),
        (
            "MERGE INTO orders o USING plain p ON true WHEN MATCHED AND p.id = 1 THEN DELETE",
            "MERGE INTO orders o USING plain p ON true WHEN MATCHED THEN UPDATE SET <marks>",
        ),
    ],
)
def test_a_change_that_was_not_meant_is_not_proved(sent: str, text: str) -> None:
    with pytest.raises(NotUnderstood):
        check(sent, text)


ONCE = "DELETE FROM orders WHERE id IN (SELECT id FROM plain LIMIT 2 FOR UPDATE SKIP LOCKED)"
KEPT = (
    "UPDATE orders SET <marks> WHERE (id IN (<once>SELECT id FROM plain LIMIT 2 FOR UPDATE SKIP LOCKED</once>))"
    " AND orders.deleted_at IS NULL"
)


def test_a_sub_select_that_is_executed_once_is_the_same() -> None:
    check(ONCE, KEPT)


@pytest.mark.parametrize(
    ("part", "tampered"),
    [
        ("<once>", "WITH x AS MATERIALIZED ("),
        ("<once>", BEFORE.replace("MATERIALIZED", "NOT MATERIALIZED")),
        ("<once>", BEFORE.replace(" MATERIALIZED", "")),
        ("<once>", BEFORE.replace(" AS", " (id) AS")),
        ("<once>", BEFORE.replace("WITH", "WITH x AS (SELECT 1),")),
        ("</once>", BEHIND.replace("IS NOT NULL", "IS NULL")),
        ("</once>", BEHIND.replace("*", "1", 1)),
        ("</once>", BEHIND.replace(" WHERE ", ", plain WHERE ")),
        ("</once>", BEHIND + " LIMIT 1"),
        ("</once>", ") SELECT * FROM sqlguard_once"),
        ("LIMIT 2", "LIMIT 3"),
        ("LIMIT 2", ""),
        (" SKIP LOCKED", ""),
        ("id FROM plain", "id FROM tags"),
    ],
)
def test_a_tampered_sub_select_is_not(part: str, tampered: str) -> None:
    assert part in KEPT
    with pytest.raises(NotUnderstood):
        check(ONCE, KEPT.replace(part, tampered))


def test_what_is_locked_through_from_has_to_stay_there() -> None:
    def sent(body: str, tail: str) -> str:
        return f"WITH gone AS (<delete>) SELECT * FROM ({body}) s, gone {tail}"

    deletes = {
        False: "DELETE FROM orders WHERE id = 1 RETURNING id",
        True: "UPDATE orders SET <marks> WHERE (id = 1) AND orders.deleted_at IS NULL RETURNING id",
    }
    for tail, same in {"": True, "FOR UPDATE": False}.items():
        plain = sent("SELECT id FROM plain LIMIT 1", tail).replace("<delete>", deletes[False])
        kept = sent("<once>SELECT id FROM plain LIMIT 1</once>", tail).replace("<delete>", deletes[True])
        assert passes(plain, kept) is same


def test_the_tree_of_another_statement_is_not_proved() -> None:
    """No pair's result passes for the statement of another pair."""
    blocks = (FIXTURES / "pairs.sql").read_text(encoding="utf-8").strip().split("\n\n")[1:]
    pairs = [block.partition("\n")[2].partition("\n=> ")[::2] for block in blocks]
    changed = [(sent, text) for sent, text in pairs if text != "unchanged" and not text.startswith("refused")]
    for sent, own in changed:
        check(sent, own)
        passing = [text for _, text in changed if text != own and passes(sent, text)]
        assert passing == [], sent
