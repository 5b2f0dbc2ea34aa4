"""The pairs, and what a caller is told besides the new text."""

from dataclasses import replace

import postgast
import pytest
from soft_catalog import FIXTURES, fixture_catalog, in_full

from sqlguard.catalog import Catalog, Trigger
from sqlguard.errors import NotUnderstood, Refused, SqlguardError
from sqlguard.rewrite import Rewritten, rewrite
from sqlguard.statement.model import Session

CATALOG = fixture_catalog()


def pairs() -> list[tuple[str, str, str]]:
    found = []
    for block in (FIXTURES / "pairs.sql").read_text(encoding="utf-8").strip().split("\n\n")[1:]:
        title, _, rest = block.partition("\n")
        sent, _, expected = rest.partition("\n=> ")
        found.append((title.removeprefix("-- "), sent, expected))
    return found


def run(text: str, catalog: Catalog = CATALOG, **session: object) -> Rewritten:
    return rewrite(text, postgast.parse(text).stmts[0].stmt, catalog, Session().after(**session))


@pytest.mark.parametrize(("sent", "expected"), [pytest.param(s, e, id=t) for t, s, e in pairs()])
def test_pair(sent: str, expected: str) -> None:
    if expected.startswith("refused"):
        with pytest.raises(SqlguardError) as caught:
            run(sent)
        assert f"refused {' '.join(caught.value.rules)}" == expected
        assert caught.value.hint
        return
    done = run(sent)
    if done.changed:
        assert done.text == in_full(expected)
    else:
        assert expected == "unchanged"
        assert done.text == sent


def test_pairs_have_titles_of_their_own() -> None:
    titles = [title for title, _, _ in pairs()]
    assert len(set(titles)) == len(titles) > 80


@pytest.mark.parametrize(
    ("text", "tag", "execute_tag"),
    [
        ("DELETE FROM orders WHERE id = 1", "DELETE", None),
        ("WITH a AS (DELETE FROM orders WHERE id = 1 RETURNING id) SELECT * FROM a", None, None),
        ("WITH a AS (DELETE FROM orders WHERE id = 1 RETURNING id) DELETE FROM plain", None, None),
        ("WITH a AS (DELETE FROM plain) DELETE FROM orders WHERE id = 1", "DELETE", None),
        ("EXPLAIN DELETE FROM orders WHERE id = 1", None, None),
        ("PREPARE p AS DELETE FROM orders WHERE id = 1", None, "DELETE"),
        ("MERGE INTO orders USING plain ON true WHEN MATCHED THEN DELETE", None, None),
    ],
)
def test_the_tag_is_that_of_the_outer_statement(text: str, tag: str | None, execute_tag: str | None) -> None:
    done = run(text)
    assert (done.tag, done.execute_tag) == (tag, execute_tag)


def test_the_tables_that_are_marked_in_are_told() -> None:
    oids = {t.name: t.oid for t in CATALOG.tables.values()}
    done = run("WITH a AS (DELETE FROM items), b AS (DELETE FROM items) DELETE FROM orders WHERE id = 1")
    assert done.writes_soft == (oids["items"], oids["orders"])
    assert run("SELECT * FROM orders").writes_soft == ()


def test_a_temporary_table_hides_a_soft_one() -> None:
    text = "DELETE FROM orders WHERE id = 1 RETURNING *"
    assert not run(text, temporary={"orders": ("id",)}).changed
    assert run(text.replace("orders", "public.orders"), temporary={"orders": ("id",)}).changed
    assert not run(text.replace("orders", "pg_temp.orders"), temporary={"orders": ("id",)}).changed


def test_the_search_path_decides_which_table_is_meant() -> None:
    assert not run("DELETE FROM orders WHERE id = 1", search_path=("other",)).changed
    assert run("DELETE FROM public.orders WHERE id = 1", search_path=("other",)).changed


def test_a_table_that_deletes_its_own_way_is_read_as_it_is() -> None:
    orders = next(t for t in CATALOG.tables.values() if t.name == "orders")
    assert orders.guard is not None
    mine = replace(orders, guard=type(orders.guard)("soft", 1, ("deleted_by_agent",)))
    catalog = fixture_catalog(tables={**CATALOG.tables, orders.oid: mine})
    assert not run("SELECT id FROM orders WHERE deleted_at IS NULL", catalog).changed
    assert not run("UPDATE orders SET deleted_at = now() WHERE id = 1", catalog).changed
    assert run("SELECT * FROM orders", catalog).text.endswith('"Placed At", orders.deleted_at FROM orders')


def test_hidden_columns_that_are_not_the_last_ones() -> None:
    orders = next(t for t in CATALOG.tables.values() if t.name == "orders")
    first, *rest = orders.columns
    mixed = replace(orders, columns=(first, *rest[-2:], *rest[:-2]))
    catalog = fixture_catalog(tables={**CATALOG.tables, orders.oid: mixed})
    done = run("INSERT INTO public.orders AS o VALUES (1, 2)", catalog)
    assert done.text == "INSERT INTO public.orders AS o (id, customer_id) VALUES (1, 2)"
    assert not run("INSERT INTO orders VALUES (1)", catalog).changed
    with pytest.raises(Refused):
        run("SELECT * FROM orders AS o (a, b)", catalog)


def test_a_trigger_that_changes_the_row_forbids_returning() -> None:
    orders = next(t for t in CATALOG.tables.values() if t.name == "orders")
    touched = replace(
        orders, triggers=(Trigger("touch", frozenset({"update"}), "before", for_each_row=True, function=1),)
    )
    catalog = fixture_catalog(tables={**CATALOG.tables, orders.oid: touched})
    assert run("DELETE FROM orders WHERE id = 1", catalog).changed
    with pytest.raises(Refused) as caught:
        run("DELETE FROM orders WHERE id = 1 RETURNING id", catalog)
    assert caught.value.rules == ("update_trigger_blocks_soft_delete",)


def test_unless_the_guards_own_trigger_puts_the_row_back() -> None:
    orders = next(t for t in CATALOG.tables.values() if t.name == "orders")
    update = frozenset({"update"})
    triggers = (
        Trigger("touch", update, "BEFORE", for_each_row=True, function=1),
        Trigger("zz_guard", update, "BEFORE", for_each_row=True, function=2, ours=True),
    )
    touched = replace(orders, triggers=triggers)
    catalog = fixture_catalog(tables={**CATALOG.tables, orders.oid: touched})
    assert run("DELETE FROM orders WHERE id = 1 RETURNING id", catalog).changed


def test_a_parent_that_is_not_soft_itself() -> None:
    tables = {oid: replace(t, guard=None) if t.name == "base" else t for oid, t in CATALOG.tables.items()}
    sub = next(t for t in tables.values() if t.name == "sub")
    tables[sub.oid] = replace(sub, guard=next(t.guard for t in CATALOG.tables.values() if t.name == "base"))
    catalog = fixture_catalog(tables=tables)
    with pytest.raises(Refused) as caught:
        run("DELETE FROM base WHERE id = 1", catalog)
    assert caught.value.rules == ("unmanaged_table",)
    assert not run("DELETE FROM ONLY base WHERE id = 1", catalog).changed
    assert run("DELETE FROM sub WHERE id = 1", catalog).changed


def test_functions_that_return_rows_of_a_soft_table() -> None:
    worth = next(iter(CATALOG.functions.values()))
    newest = type(worth)(77, "public", "newest", (), (), return_type=1000)
    catalog = fixture_catalog(functions={77: newest})
    assert run("SELECT * FROM newest() n", catalog).text == (
        'SELECT n.id, n.customer_id, n.status, n.total, n."Placed At" FROM newest() n'
    )
    for text in ("SELECT newest()", "SELECT (newest()).*", "SELECT * FROM newest() WITH ORDINALITY"):
        with pytest.raises(Refused) as caught:
            run(text + " -- orders", catalog)
        assert caught.value.rules == ("function_reads_managed_table",)


def test_what_touches_no_soft_table_is_not_even_parsed() -> None:
    for text in ("SELECT 1", "this is no SQL", "", "SELECT * FROM plain WHERE name = U&'\\0041'"):
        assert rewrite(text, None, CATALOG, Session()) == Rewritten(text)


def test_one_statement_at_a_time() -> None:
    with pytest.raises(NotUnderstood):
        rewrite("DELETE FROM orders; SELECT 1", None, CATALOG, Session())


def test_an_error_is_shown_where_the_agent_wrote_it() -> None:
    text = "DELETE FROM ordérs o WHERE o.id = nope -- orders"
    assert not run(text).changed
    text = "DELETE FROM orders AS é WHERE é.id = nope RETURNING é.*, gone"
    done = run(text)
    for word in ("orders", "é.id", "nope", "gone"):
        there = done.text.index(word) + 1
        assert done.position(there) == text.index(word) + 1
    assert done.position(done.text.index("deleted_at") + 1) is None
    assert done.position(len(done.text) + 1) is None
    assert Rewritten("SELECT 1").position(3) == 3
