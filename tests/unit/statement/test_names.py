"""What names mean: tables, WITH queries, temporary tables, columns that are calls, views and rules."""

from dataclasses import replace

import guard_world
import pytest
from guard_world import CATALOG, PATH, SESSION, read

from sqlguard.catalog import Column, Operator, Table, Type
from sqlguard.errors import NotUnderstood
from sqlguard.statement import analyse
from sqlguard.statement.model import Kind, Session


def reads(text: str, session: Session = SESSION) -> set[str]:
    return {r.shown for r in read(text, session).reads}


@pytest.mark.parametrize(
    ("text", "tables"),
    [
        ("SELECT * FROM accounts", {"app.accounts"}),
        ("SELECT * FROM app.accounts a JOIN priv.secrets USING (id)", {"app.accounts", "priv.secrets"}),
        ("TABLE kv", {"app.kv"}),
        ("WITH accounts AS (SELECT 1) SELECT * FROM accounts", set()),
        ("WITH accounts AS (SELECT * FROM accounts) SELECT * FROM accounts", {"app.accounts"}),
        ("WITH RECURSIVE accounts AS (SELECT 1 UNION SELECT * FROM accounts) TABLE accounts", set()),
        ("WITH a AS (SELECT 1), b AS (SELECT * FROM a, kv) SELECT * FROM b", {"app.kv"}),
        ("WITH a AS (SELECT 1) SELECT * FROM app.a", {"app.a"}),
        ("SELECT (SELECT token FROM priv.secrets LIMIT 1)", {"priv.secrets"}),
        ("SELECT 1 WHERE EXISTS (TABLE priv.secrets)", {"priv.secrets"}),
        ("SELECT 1 ORDER BY (SELECT id FROM kv)", {"app.kv"}),
        ("SELECT * FROM accounts LIMIT (SELECT count(*) FROM kv)", {"app.accounts", "app.kv"}),
        ("SELECT count(*) FILTER (WHERE id IN (SELECT id FROM docs)) FROM kv", {"app.docs", "app.kv"}),
        ("SELECT sum(1) OVER (ORDER BY (SELECT id FROM docs)) FROM kv", {"app.docs", "app.kv"}),
        ("VALUES ((SELECT id FROM docs))", {"app.docs"}),
        ("SELECT * FROM (SELECT * FROM priv.secrets) accounts", {"priv.secrets"}),
        ("SELECT * FROM pg_class", {"pg_catalog.pg_class"}),
        ("SELECT * FROM information_schema.tables", {"information_schema.tables"}),
        ('SELECT * FROM "Accounts"', {"Accounts"}),
        ("UPDATE kv SET v = (SELECT title FROM docs) WHERE k = 'a' RETURNING v", {"app.docs", "app.kv"}),
        ("INSERT INTO kv SELECT title FROM docs", {"app.docs"}),
        (
            "MERGE INTO kv USING docs ON k = title WHEN NOT MATCHED THEN INSERT VALUES (title)",
            {"app.docs", "app.kv"},
        ),
        ("COPY (SELECT * FROM kv) TO STDOUT", {"app.kv"}),
        ("EXPLAIN SELECT * FROM kv", {"app.kv"}),
        ("SELECT * FROM v_active_accounts", {"app.v_active_accounts", "app.accounts"}),
    ],
)
def test_tables_that_are_read(text: str, tables: set[str]) -> None:
    assert reads(text) == tables


def test_a_temporary_table_hides_a_table() -> None:
    session = Session(search_path=PATH, temporary={"accounts": ("id",)})
    (relation,) = read("SELECT id FROM accounts", session).reads
    assert relation.temporary
    (relation,) = read("SELECT id FROM app.accounts", session).reads
    assert relation.oid == 1
    (write,) = read("DELETE FROM accounts WHERE id = 1", session).writes
    assert write.table.temporary


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("SELECT id, email FROM accounts WHERE status = 'x'", ("email", "id", "status")),
        ("SELECT a.id FROM accounts a", ("id",)),
        ("SELECT count(*) FROM accounts", ()),
        ("SELECT * FROM accounts", None),
        ("SELECT a FROM accounts a", None),
        ("SELECT a.* FROM accounts a", None),
        ("SELECT row_to_json(a) FROM accounts a", None),
        ("SELECT 1 FROM accounts a NATURAL JOIN kv", None),
        ("SELECT (SELECT email) FROM accounts", ("email",)),
        # The columns of all levels come before a row; what has unknown columns hides none.
        ("SELECT (SELECT email FROM generate_series(1, 1) g) FROM accounts", ("email",)),
        ("SELECT (SELECT email FROM pg_class LIMIT 1) FROM accounts", ("email",)),
        ("SELECT (SELECT email FROM kv email LIMIT 1) FROM accounts", ("email",)),
        ("SELECT accounts FROM accounts, generate_series(1, 1) g", None),
        ("SELECT (SELECT accounts FROM generate_series(1, 1) g) FROM accounts", None),
        ("SELECT (SELECT email FROM generate_series(1, 1) g(email)) FROM accounts", ()),
        ("SELECT (SELECT email FROM json_to_record('{}') g(email text)) FROM accounts", ()),
        ("SELECT (SELECT email FROM kv CROSS JOIN kv k) FROM accounts", ("email",)),
        # ORDER BY looks among the results first, GROUP BY last, and an expression never.
        ("SELECT max(id) AS email FROM accounts ORDER BY email DESC", ("id",)),
        ("SELECT max(id) AS email FROM accounts ORDER BY email || ''", ("email", "id")),
        ("SELECT max(id) AS email FROM accounts GROUP BY email", ("email", "id")),
        ("SELECT max(id) AS e FROM accounts ORDER BY email, e", ("email", "id")),
        ("SELECT (SELECT 1 AS e ORDER BY email), id AS email FROM accounts", ("email", "id")),
        # What an alias of a join is asked for.
        ("SELECT j.* FROM (accounts a CROSS JOIN kv) j", None),
        ("SELECT j.email FROM (accounts a CROSS JOIN kv) j", None),
        ("SELECT y FROM (accounts CROSS JOIN kv) j(x, y)", None),
        ("SELECT (SELECT k FROM (kv CROSS JOIN kv l) j(x)), id FROM accounts", ("id",)),
        ("SELECT email FROM accounts JOIN kv USING (id) AS j", ("email", "id")),
        ("SELECT (SELECT email FROM docs JOIN kv USING (id) AS j) FROM accounts", ("email",)),
        ("UPDATE accounts SET status = 'x' WHERE id = 1 RETURNING old.email", ("email", "id")),
        ("UPDATE accounts SET status = 'x' WHERE id = 1 RETURNING WITH (NEW AS n) n.email", ("email", "id")),
        ("UPDATE accounts SET status = 'x' WHERE id = 1 RETURNING old", None),
        ("DELETE FROM accounts WHERE id = 1 RETURNING old.*", None),
    ],
)
def test_columns_that_are_read(text: str, columns: tuple[str, ...] | None) -> None:
    relation = next(r for r in read(text).reads if r.name == "accounts")
    assert relation.columns == columns


@pytest.mark.parametrize(
    ("text", "called"),
    [
        ("SELECT a.purge_row FROM accounts a", True),
        ("SELECT (a).purge_row FROM accounts a", True),
        ("SELECT app.accounts.purge_row FROM app.accounts", True),
        ("SELECT s.purge_row FROM (SELECT * FROM accounts) s", True),
        ("UPDATE accounts SET status = 'x' WHERE id = 1 RETURNING accounts.purge_row", True),
        ("SELECT a.id FROM accounts a", False),
        ("SELECT purge_row FROM (SELECT 1 AS purge_row) s", False),
        ("SELECT s.purge_row FROM (SELECT 1 AS purge_row) s", False),
        ("WITH s(purge_row) AS (SELECT 1) SELECT s.purge_row FROM s", False),
        ("SELECT (ROW(1, 2)).f1", False),
    ],
)
def test_a_column_that_is_a_call(text: str, *, called: bool) -> None:
    assert any(c.name == "purge_row" for c in read(text).calls) is called


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("SELECT CASE WHEN false THEN purge_all() END", "purge_all"),
        ("SELECT * FROM ROWS FROM (purge_all(), generate_series(1, 2)) r", "purge_all"),
        ("SELECT sum(id) FILTER (WHERE purge_all() > 0) FROM accounts", "purge_all"),
        ("SELECT * FROM accounts a JOIN orders o ON purge_all() = 1", "purge_all"),
        ("SELECT id FROM accounts WHERE id === 1", "==="),
        ("SELECT id FROM accounts WHERE id OPERATOR(app.===) 1", "==="),
        ("SELECT 'x'::money_kind", "cast"),
        ("SELECT CAST(status AS app.money_kind) FROM accounts", "cast"),
        ("SELECT json_value(meta, 'x') FROM accounts", "json_value"),
        ("SELECT * FROM v_sleepy", "pg_sleep"),
        ("INSERT INTO kv (k) VALUES ('a') ON CONFLICT (k) DO UPDATE SET v = purge_all()", "purge_all"),
        ("SELECT XMLELEMENT(NAME a, purge_all())", "purge_all"),
        ("SELECT ARRAY[[purge_all()]]", "purge_all"),
        ("SELECT id FROM accounts ORDER BY id USING ===", "==="),
        ("SELECT 1 = ANY (SELECT purge_all())", "purge_all"),
        ("SELECT accounts[purge_all()] FROM accounts", "purge_all"),
        ("SELECT (a).meta[purge_all()] FROM accounts a", "purge_all"),
        ("EXPLAIN SELECT purge_all()", "purge_all"),
        ("PREPARE p AS SELECT purge_all()", "purge_all"),
        ("DECLARE c CURSOR FOR SELECT purge_all()", "purge_all"),
        ("SELECT 1 FROM accounts FETCH FIRST purge_all() ROWS ONLY", "purge_all"),
        ("SELECT 1 GROUP BY GROUPING SETS ((purge_all()))", "purge_all"),
        ("SELECT 1 FROM accounts TABLESAMPLE BERNOULLI (purge_all())", "purge_all"),
    ],
)
def test_a_call_is_found_wherever_it_stands(text: str, name: str) -> None:
    assert any(c.name == name for c in read(text).calls)


def test_pg_catalog_hides_a_function_of_the_same_signature_unless_the_path_names_it() -> None:
    def candidates(path: tuple[str, ...]) -> tuple[int, ...]:
        (call,) = read("SELECT lower('A')", Session(search_path=path)).calls
        return call.candidates

    assert candidates(PATH) == ()
    assert candidates(("app", "pg_catalog")) == (104,)
    (call,) = read("SELECT app.lower('A')").calls
    assert (call.candidates, call.builtin) == ((104,), False)


@pytest.mark.parametrize(
    ("text", "writes"),
    [
        ("WITH d AS (DELETE FROM orders RETURNING 1) SELECT 1", [("app.orders", "delete")]),
        ("COPY (DELETE FROM orders RETURNING 1) TO STDOUT", [("app.orders", "delete")]),
        ("EXPLAIN ANALYZE DELETE FROM orders", [("app.orders", "delete")]),
        ("EXPLAIN DELETE FROM orders", []),
        ("PREPARE d AS DELETE FROM orders", []),
        ("UPDATE v_active_accounts SET balance = 1 WHERE id = 2", [("app.accounts", "update")]),
        ("INSERT INTO v_active_accounts (id) VALUES (1)", [("app.accounts", "insert")]),
        ("UPDATE notes SET body = 'x' WHERE id = 1", [("app.notes", "update"), ("app.kv", "delete")]),
        (
            (
                "MERGE INTO kv USING docs ON k = title WHEN MATCHED AND v = 'x' THEN DELETE"
                " WHEN MATCHED THEN UPDATE SET v = 'y' WHEN NOT MATCHED THEN INSERT VALUES (title)"
            ),
            [("app.kv", "insert"), ("app.kv", "delete"), ("app.kv", "update")],
        ),
        ("INSERT INTO kv VALUES ('a') ON CONFLICT DO NOTHING", [("app.kv", "insert")]),
        ("SELECT refund(1)", [("app.refund", "call")]),
    ],
)
def test_writes_are_found_wherever_they_stand(text: str, writes: list[tuple[str, str]]) -> None:
    assert [(w.table.shown, w.op) for w in read(text).writes] == writes


def test_what_a_prepared_statement_does_is_done_by_execute() -> None:
    session = SESSION.after(prepared={"d": read("DELETE FROM orders WHERE id = 1")})
    statement = read("EXECUTE d", session)
    assert statement.kind is Kind.EXECUTE
    assert [w.op for w in statement.writes] == ["delete"]
    assert read("EXECUTE other", session).inner is None


def test_what_is_prepared_means_by_execute_what_the_catalog_has_by_then() -> None:
    prepared = read("PREPARE p AS SELECT * FROM v_active_accounts").inner
    assert prepared is not None
    session = SESSION.after(prepared={"p": prepared})
    assert reads("EXECUTE p", session) == {"app.v_active_accounts", "app.accounts"}
    view = CATALOG.table(None, "v_active_accounts", PATH)
    assert view is not None
    view = replace(view, definition="SELECT id, purge_all() FROM app.docs")
    now = read("EXECUTE p", session, replace(CATALOG, tables={**CATALOG.tables, view.oid: view}))
    assert {r.shown for r in now.reads} == {"app.v_active_accounts", "app.accounts", "app.docs"}
    assert [c.name for c in now.calls] == ["purge_all"]
    assert now.inner is not None
    assert now.inner.calls == now.calls
    hidden = SESSION.after(prepared={"p": prepared}, search_path=("priv",))
    assert "v_active_accounts" in reads("EXECUTE p", hidden)


def test_a_name_with_a_database_is_not_understood() -> None:
    with pytest.raises(NotUnderstood):
        read("SELECT * FROM other.app.accounts")
    with pytest.raises(NotUnderstood):
        read("SELECT other.app.f()")


def test_several_statements_in_order() -> None:
    kinds = [s.kind for s in analyse("BEGIN; SELECT 1; COMMIT", CATALOG, SESSION)]
    assert kinds == [Kind.BEGIN, Kind.SELECT, Kind.COMMIT]
    assert guard_world.read("").kind is Kind.EMPTY


def test_an_operator_of_a_users_type_is_meant_only_where_such_a_value_is_at_hand() -> None:
    """An extension nobody reviewed may have its own `=`: statements without its type go on as before."""
    odd = replace(CATALOG.functions[106], oid=700, name="odd_eq", language="c", arg_types=(800, 800))
    column = Column("odd", 1, 800, "app.odd")
    catalog = replace(
        CATALOG,
        functions={**CATALOG.functions, 700: odd},
        operators=(*CATALOG.operators, Operator(701, "app", "=", 800, 800, 700)),
        types={**CATALOG.types, 800: Type(800, "app", "odd", "b")},
        tables={**CATALOG.tables, 90: Table(90, "app", "odds", "r", (column,))},
    )

    def meant(text: str) -> bool:
        return any(700 in c.candidates for c in read(text, catalog=catalog).calls)

    assert not meant("SELECT id FROM accounts WHERE id = 1")
    assert not meant("SELECT id FROM accounts WHERE id = $1")
    assert meant("SELECT 1 FROM odds WHERE odd = '1'")
    assert meant("SELECT 1 FROM odds a JOIN odds b USING (odd)")
    assert meant("SELECT '1'::odd = '2'")
    assert meant("SELECT $1 = $2")
    assert meant("SELECT s.odd = '1' FROM (SELECT * FROM odds) s")
