"""Guarding and unguarding tables: what the pre-flight says, what is done, and that it can be done again."""

import threading
import time
from typing import Any

import psycopg
import pytest
from journaled import rows
from psycopg import sql
from servers import Database

from sqlguard.errors import GuardError
from sqlguard.postgres.catalog_reader import read_catalog
from sqlguard.postgres.guard_table import guard_table, guard_tables, unguard_tables, user_tables
from sqlguard.postgres.migrate import migrate
from sqlguard.postgres.walls_run import Runner
from sqlguard.postgres.walls_unique import _new_name


@pytest.fixture
def op(database: Database) -> psycopg.Connection[Any]:
    """The operator: no superuser, may create roles, owns the database but not the tables."""
    database.execute("CREATE ROLE sg_app NOLOGIN; GRANT sg_app TO app_owner")
    migrate(database.owner_dsn)
    database.execute("CREATE SCHEMA app AUTHORIZATION sg_app")
    return database.connect(database.owner_dsn)


def make(op: psycopg.Connection[Any], text: str) -> None:
    op.execute("SET ROLE sg_app; SET search_path = app")
    op.execute(text.encode())
    op.execute("RESET ROLE; RESET search_path")


def schema(op: psycopg.Connection[Any]) -> list[Any]:
    """Everything about the tables of `app` that guarding touches."""
    return [
        rows(op, text)
        for text in (
            (
                "SELECT attrelid::regclass::text, attname, atttypid::regtype::text FROM pg_attribute"
                " WHERE attrelid IN (SELECT oid FROM pg_class WHERE relnamespace = 'app'::regnamespace AND relkind IN"
                " ('r', 'p')) AND attnum > 0 AND NOT attisdropped ORDER BY 1, 2"
            ),
            (
                "SELECT pg_get_indexdef(indexrelid), indisvalid FROM pg_index JOIN pg_class c ON c.oid = indrelid"
                " WHERE relnamespace = 'app'::regnamespace ORDER BY 1"
            ),
            (
                "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint"
                " WHERE connamespace = 'app'::regnamespace ORDER BY 1, 2"
            ),
            (
                "SELECT tgrelid::regclass::text, tgname FROM pg_trigger JOIN pg_class c ON c.oid = tgrelid"
                " WHERE relnamespace = 'app'::regnamespace AND NOT tgisinternal ORDER BY 1, 2"
            ),
            "SELECT polrelid::regclass::text, polname FROM pg_policy ORDER BY 1, 2",
            "SELECT relname, relrowsecurity FROM pg_class WHERE relnamespace = 'app'::regnamespace ORDER BY 1",
            (
                "SELECT proname FROM pg_proc WHERE pronamespace = 'sqlguard'::regnamespace"
                " AND obj_description(oid, 'pg_proc') LIKE 'sqlguard wall%' ORDER BY 1"
            ),
        )
    ]


TWO = """
CREATE TABLE parent (id int PRIMARY KEY, name text UNIQUE);
CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES parent ON DELETE CASCADE, note text);
"""


def test_again_changes_nothing_and_off_leaves_nothing(op: psycopg.Connection[Any]) -> None:
    make(op, TWO)
    before = schema(op)
    first = guard_tables(op, ["app.parent", "app.child"], "soft")
    guarded = schema(op)
    again = guard_tables(op, ["app.parent", "app.child"], "soft")
    assert [r.changed for r in first] == [True, True]
    assert [r.changed for r in again] == [False, False]
    assert schema(op) == guarded != before
    assert [r.changed for r in unguard_tables(op, ["app.parent", "app.child"])] == [True, True]
    assert schema(op) == before
    assert [r.changed for r in unguard_tables(op, ["app.parent", "app.child"])] == [False, False]
    assert guard_tables(op, ["app.parent", "app.child"], "soft")[0].changed
    assert schema(op) == guarded


def test_a_superuser_s_work_goes_on_for_the_operator(op: psycopg.Connection[Any], database: Database) -> None:
    make(op, TWO)
    with database.connect() as superuser:
        guard_table(superuser, "app.parent", "soft")
    assert not guard_table(op, "app.parent", "soft").changed
    owners = rows(op, "SELECT DISTINCT proowner::regrole::text FROM pg_proc WHERE proname LIKE 'capture\\_%'")
    assert owners == [("app_owner",)]


def test_reached_tables_come_along(op: psycopg.Connection[Any]) -> None:
    make(op, TWO)
    reports = guard_tables(op, ["app.parent"])
    assert [(r.table, r.mode, r.because) for r in reports] == [
        ("app.child", "soft", "app.parent"),
        ("app.parent", "soft", None),
    ]


@pytest.mark.parametrize(
    ("index", "then"),
    [
        ("UNIQUE (a)", "(a) WHERE (deleted_at IS NULL)"),
        ("UNIQUE NULLS NOT DISTINCT (a)", "(a) NULLS NOT DISTINCT WHERE (deleted_at IS NULL)"),
        ('CONSTRAINT "odd "" ON name" UNIQUE (a) INCLUDE (b)', "(a) INCLUDE (b) WHERE (deleted_at IS NULL)"),
        ("UNIQUE (a) DEFERRABLE", "(a)"),
    ],
)
def test_unique_constraints(op: psycopg.Connection[Any], index: str, then: str) -> None:
    make(op, f"CREATE TABLE t (id int PRIMARY KEY, a int, b int, {index})")
    before = schema(op)
    guard_table(op, "app.t", "soft")
    (found,) = rows(
        op,
        "SELECT pg_get_indexdef(indexrelid) FROM pg_index WHERE indrelid = 'app.t'::regclass AND NOT indisprimary",
    )
    assert found[0].endswith(f"USING btree {then}")
    unguard_tables(op, ["app.t"])
    assert schema(op) == before


@pytest.mark.parametrize(
    ("index", "then"),
    [
        ("(lower(b)) WHERE a > 0", "(lower(b)) WHERE ((a > 0) AND (deleted_at IS NULL))"),
        (
            'USING btree (b COLLATE "C" text_pattern_ops DESC NULLS LAST) WITH (fillfactor=70)',
            "(b COLLATE \"C\" text_pattern_ops DESC NULLS LAST) WITH (fillfactor='70') WHERE (deleted_at IS NULL)",
        ),
    ],
)
def test_unique_indexes(op: psycopg.Connection[Any], index: str, then: str) -> None:
    make(op, f"CREATE TABLE t (id int PRIMARY KEY, a int, b text); CREATE UNIQUE INDEX u ON t {index}")
    before = schema(op)
    guard_table(op, "app.t", "soft")
    (found,) = rows(op, "SELECT pg_get_indexdef('app.u'::regclass)")
    assert found[0].endswith(f"USING btree {then}")
    unguard_tables(op, ["app.t"])
    assert schema(op) == before


def test_unique_is_kept_where_it_must_be(op: psycopg.Connection[Any]) -> None:
    make(op, "CREATE TABLE t (id int PRIMARY KEY, a int UNIQUE); CREATE TABLE c (a int REFERENCES t (a))")
    report = guard_table(op, "app.t", "soft")
    note = next(n for n in report.notes if n.code == "unique_value_held_by_tombstone")
    assert "c_a_fkey" in note.message
    make(op, "CREATE TABLE k (id int PRIMARY KEY, a int UNIQUE)")
    before = rows(op, "SELECT pg_get_indexdef(indexrelid) FROM pg_index WHERE indrelid = 'app.k'::regclass")
    guard_table(op, "app.k", "soft", unique="keep")
    assert (
        rows(op, "SELECT pg_get_indexdef(indexrelid) FROM pg_index WHERE indrelid = 'app.k'::regclass")
        == before
    )


def test_partitioned_uniqueness(op: psycopg.Connection[Any]) -> None:
    make(
        op,
        "CREATE TABLE ev (id int, k text, PRIMARY KEY (id), UNIQUE (k, id)) PARTITION BY RANGE (id);"
        "CREATE TABLE ev1 PARTITION OF ev FOR VALUES FROM (0) TO (10);"
        "CREATE TABLE ev2 PARTITION OF ev FOR VALUES FROM (10) TO (99) PARTITION BY RANGE (id);"
        "CREATE TABLE ev2a PARTITION OF ev2 FOR VALUES FROM (10) TO (50)",
    )
    before = schema(op)
    guard_table(op, "app.ev", "soft")
    found = rows(
        op,
        "SELECT pg_get_indexdef(indexrelid), indisvalid FROM pg_index JOIN pg_class c ON c.oid = indrelid"
        " WHERE relnamespace = 'app'::regnamespace AND NOT indisprimary",
    )
    assert len(found) == 4
    assert all(valid and definition.endswith("WHERE (deleted_at IS NULL)") for definition, valid in found)
    assert not guard_table(op, "app.ev", "soft").changed
    unguard_tables(op, ["app.ev"])
    assert schema(op) == before


def test_a_partition_that_came_later_goes_back_as_well(op: psycopg.Connection[Any]) -> None:
    later = "CREATE TABLE ev2 PARTITION OF ev FOR VALUES FROM (10) TO (99)"
    make(
        op,
        "CREATE TABLE ev (id int, k text, UNIQUE (k, id)) PARTITION BY RANGE (id);"
        "CREATE UNIQUE INDEX ev_n ON ev (id) WHERE k > 'a';"
        "CREATE TABLE ev1 PARTITION OF ev FOR VALUES FROM (0) TO (10)",
    )
    guard_table(op, "app.ev", "soft")
    make(op, later)
    assert guard_table(op, "app.ev", "soft").changed
    assert not guard_table(op, "app.ev", "soft").changed
    unguard_tables(op, ["app.ev"])
    found = schema(op)
    make(op, f"DROP TABLE ev2; {later}")
    # Only names differ: PostgreSQL ends those of constraints in `_key`.
    assert repr(schema(op)) == repr(found).replace("ev2_k_id_idx", "ev2_k_id_key")


def test_an_invalid_index_is_built_again(op: psycopg.Connection[Any], database: Database) -> None:
    """A crash while the index was built leaves it invalid; IF NOT EXISTS would take it for done."""
    make(op, "CREATE TABLE t (id int PRIMARY KEY, a int UNIQUE); ALTER TABLE t ADD deleted_at timestamptz")
    new = _new_name("t_a_key")
    make(op, f"CREATE UNIQUE INDEX {new} ON t (a) WHERE deleted_at IS NULL")
    database.execute(f"UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'app.{new}'::regclass")
    guard_table(op, "app.t", "soft")
    assert rows(op, "SELECT indisvalid FROM pg_index WHERE indexrelid = 'app.t_a_key'::regclass") == [(True,)]


@pytest.mark.parametrize(
    ("table", "code", "soft_is_refused"),
    [
        ("CREATE TABLE t (id int)", "primary_key_missing", False),
        ("CREATE TABLE t (id int PRIMARY KEY, deleted_at boolean)", "column_name_taken", True),
        ("CREATE TABLE t (id int PRIMARY KEY, deleted_at timestamptz NOT NULL)", "column_name_taken", True),
        (
            "CREATE TABLE t (id int PRIMARY KEY); CREATE RULE r AS ON DELETE TO t DO ALSO SELECT 1",
            "rule_on_table",
            True,
        ),
        (
            "CREATE TABLE t (id int PRIMARY KEY); CREATE TRIGGER g AFTER DELETE ON t EXECUTE FUNCTION app.f()",
            "user_delete_trigger",
            True,
        ),
        (
            (
                "CREATE TABLE t (id int PRIMARY KEY);"
                "CREATE TRIGGER g BEFORE UPDATE ON t FOR EACH ROW EXECUTE FUNCTION app.f()"
            ),
            "update_trigger_blocks_soft_delete",
            False,
        ),
        (
            "CREATE TABLE t (id int PRIMARY KEY); ALTER TABLE t ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY",
            "row_security_forced",
            True,
        ),
        (
            "CREATE TABLE t (id int PRIMARY KEY); CREATE FUNCTION g() RETURNS SETOF t LANGUAGE sql AS 'TABLE app.t'",
            "function_returns_row",
            True,
        ),
    ],
)
def test_the_pre_flight(op: psycopg.Connection[Any], table: str, code: str, soft_is_refused: bool) -> None:  # noqa: FBT001 - a parameter
    make(op, "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'")
    make(op, table)
    if soft_is_refused:
        with pytest.raises(GuardError, match=code):
            guard_table(op, "app.t", "soft")
        assert rows(op, "SELECT count(*) FROM sqlguard.guarded_table") == [(0,)]
    report = guard_table(op, "app.t")
    assert report.mode == "journal"
    assert code in [n.code for n in report.notes]
    if not soft_is_refused:
        unguard_tables(op, ["app.t"])
        assert guard_table(op, "app.t", "soft").mode == "soft"


def test_a_harmless_trigger_can_be_accepted(op: psycopg.Connection[Any]) -> None:
    make(
        op,
        "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
        "CREATE TABLE t (id int PRIMARY KEY); CREATE TRIGGER g AFTER DELETE ON t EXECUTE FUNCTION app.f()",
    )
    assert guard_table(op, "app.t", accept=["user_delete_trigger"]).mode == "soft"


def test_rights_are_asked_for_first(op: psycopg.Connection[Any], database: Database) -> None:
    database.execute("CREATE TABLE app.foreign_owner (id int PRIMARY KEY)")
    with pytest.raises(GuardError, match="operator_is_not_owner"):
        guard_table(op, "app.foreign_owner")
    with pytest.raises(GuardError, match="there is no table"):
        guard_table(op, "app.nothing")


def test_deleted_rows_hinder_unguarding(op: psycopg.Connection[Any]) -> None:
    make(op, "CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)")
    guard_table(op, "app.t", "soft")
    op.execute("UPDATE app.t SET deleted_at = now()")
    with pytest.raises(GuardError, match="come back to life"):
        unguard_tables(op, ["app.t"])
    with pytest.raises(GuardError, match="come back to life"):
        guard_table(op, "app.t", "journal")
    op.execute("DELETE FROM app.t")
    assert guard_table(op, "app.t", "journal").mode == "journal"
    assert rows(op, "SELECT count(*) FROM pg_policy WHERE polrelid = 'app.t'::regclass") == [(0,)]


def test_a_busy_table_is_tried_again(op: psycopg.Connection[Any], database: Database) -> None:
    make(op, "CREATE TABLE t (id int PRIMARY KEY)")
    busy = database.connect(autocommit=False)
    busy.execute("SELECT * FROM app.t")
    waits: list[float] = []

    def read() -> None:
        with database.connect(prepare_threshold=None) as conn:
            for _ in range(30):
                start = time.monotonic()
                conn.execute("SELECT * FROM app.t")
                waits.append(time.monotonic() - start)
                time.sleep(0.05)

    reader = threading.Thread(target=read)
    reader.start()
    timer = threading.Timer(1.0, busy.commit)
    timer.start()
    assert guard_table(op, "app.t", "soft").changed
    reader.join()
    assert max(waits) < 0.9
    busy.execute("SELECT * FROM app.t")
    with pytest.raises(GuardError, match="a lock was not to be had"):
        Runner(op, lock_timeout_ms=50, budget=0.3).run(
            [sql.SQL("ALTER TABLE {} ADD x int").format(sql.Identifier("app", "t"))]
        )


def test_user_tables_are_roots_only(op: psycopg.Connection[Any]) -> None:
    make(
        op,
        "CREATE TABLE t (id int); CREATE TABLE p (id int) PARTITION BY RANGE (id);"
        "CREATE TABLE p1 PARTITION OF p DEFAULT; CREATE VIEW v AS TABLE t",
    )
    assert user_tables(op) == ["app.p", "app.t"]
    assert guard_table(op, "app.p1").table == "app.p"


def test_the_given_schema(guard_schema: Database) -> None:
    """Accounts and orders have a deleted_at of their own; tickets and notes have triggers and rules."""
    with guard_schema.connect() as conn:
        migrate(guard_schema.dsn)
        reports = {r.table: r for r in guard_tables(conn, user_tables(conn))}
        assert {name: r.mode for name, r in reports.items() if r.mode == "soft"} == {
            f"app.{name}": "soft" for name in ("accounts", "audit_log", "docs", "kv", "order_items", "orders")
        } | {
            name: "soft" for name, r in reports.items() if name.startswith("app.tenant") and r.mode == "soft"
        }
        assert not any(r.changed for r in guard_tables(conn, user_tables(conn)))


def test_many_tables(op: psycopg.Connection[Any]) -> None:
    """400 tables take half a minute on an idle machine, and a fraction of that when there is nothing to do."""
    make(
        op,
        "DO $$ BEGIN FOR i IN 1..400 LOOP EXECUTE format("
        "'CREATE TABLE many_%s (id int PRIMARY KEY, email text UNIQUE, other int %s)', i,"
        " CASE WHEN i > 1 THEN format('REFERENCES many_%s', i - 1) ELSE '' END); END LOOP; END $$",
    )
    start = time.monotonic()
    guard_tables(op, user_tables(op))
    first = time.monotonic() - start
    again = guard_tables(op, user_tables(op))
    assert not any(r.changed for r in again)
    # Compared with each other: other work of the machine slows both.
    assert time.monotonic() - start - first < first / 2


def test_views_are_mended_and_go_back(op: psycopg.Connection[Any]) -> None:
    make(
        op,
        "CREATE TABLE t (id int PRIMARY KEY); CREATE VIEW v AS SELECT id FROM t; CREATE VIEW w AS SELECT id FROM v;"
        "CREATE VIEW mine WITH (security_invoker = true) AS SELECT id FROM t",
    )
    options = (
        "SELECT relname, reloptions FROM pg_class WHERE relkind = 'v' AND relnamespace = 'app'::regnamespace"
    )
    before = sorted(rows(op, options))
    (report,) = guard_tables(op, ["app.t"], "soft")
    (note,) = (n for n in report.notes if n.code == "view_shows_deleted_rows")
    assert "app.v" in note.message
    assert "app.mine" not in note.message
    (report,) = guard_tables(op, ["app.t"], "soft", fix_views=True)
    assert report.changed
    assert "view_shows_deleted_rows" not in [note.code for note in report.notes]
    assert {r[1][0] for r in rows(op, options)} == {"security_invoker=true"}
    assert not guard_tables(op, ["app.t"], "soft", fix_views=True)[0].changed
    assert not guard_tables(op, ["app.t"], "soft")[0].changed
    op.execute("DROP VIEW app.w")
    unguard_tables(op, ["app.t"])
    assert sorted(rows(op, options)) == [r for r in before if r[0] != "w"]


def test_views_are_accepted_for_good(op: psycopg.Connection[Any]) -> None:
    make(op, "CREATE TABLE t (id int PRIMARY KEY); CREATE VIEW v AS SELECT id FROM t")
    guard_table(op, "app.t", "soft", accept=["view_shows_deleted_rows"])
    assert not guard_table(op, "app.t", "soft").changed
    guard = next(t.guard for t in read_catalog(op).tables.values() if t.name == "t")
    assert guard is not None
    assert guard.views_accepted
