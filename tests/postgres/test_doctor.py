"""Every finding of the doctor: make the fault, see it found, do what it says, see it gone."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from servers import Database
from task_world import POLICY, World, shop

from sqlguard.errors import NotConfigured
from sqlguard.postgres import event_trigger
from sqlguard.postgres.doctor import Finding, Report, Severity, examine
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.policy_apply import refresh_policies

#: What a fresh database of the tests has open, because PostgreSQL does.
DEFAULTS = {
    "public-temp",
    "public-language",
    "public-function",
    "public-large-objects",
    "prepared-transactions",
    "no-event-trigger",
    "asynchronous-commit",
    "unsafe-storage",
    "trusted-login",
}
SCOPED = POLICY.replace('delete = "soft"', 'delete = "soft"\nrows = "customer_id = :customer_id"')


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with shop(database) as made:
        made.apply()
        yield made


def look(world: World, policy: str | None = None) -> Report:
    return examine(world.op, policy)


def found(world: World, code: str, thing: str | None = None) -> list[Finding]:
    return [f for f in look(world).findings if f.code == code and thing in (None, f.object)]


def mend(world: World, finding: Finding) -> None:
    """Do what the finding says: as the operator where that suffices, else as a superuser."""
    if finding.command is not None and finding.sql is None:
        run(world, finding.command)
        return
    assert finding.sql is not None
    if "As a superuser" in finding.message:  # a REVOKE by anyone else would only warn
        world.database.load(finding.sql)
        return
    try:
        world.op.execute(finding.sql.encode())
    except psycopg.errors.InsufficientPrivilege:
        world.database.load(finding.sql)


def run(world: World, command: str) -> None:
    words = command.split()
    assert words[0] == "sqlguard"
    dsn = world.database.dsn if "--event-trigger" in words else world.database.owner_dsn
    done = subprocess.run(
        [sys.executable, "-m", "sqlguard", *words[1:], "--dsn", dsn],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@dataclass(frozen=True)
class Fault:
    """`sql` is run as a superuser; the finding's `object` is named where more than one could be there."""

    code: str
    sql: str
    object: str | None = None
    policy: str = POLICY


FAULTS = (
    Fault("operator-superuser", "ALTER ROLE app_owner SUPERUSER"),
    Fault("operator-bypasses-rls", "ALTER ROLE app_owner BYPASSRLS"),
    Fault("agent-attribute", "ALTER ROLE sg_po_support_1 CREATEDB BYPASSRLS"),
    Fault("agent-membership", "GRANT pg_write_all_data TO sg_po_support_1"),
    Fault("agent-owner", "ALTER TABLE secrets OWNER TO sg_po_support_1"),
    Fault("agents-right", "GRANT SELECT, DELETE ON secrets TO sqlguard_agent"),
    Fault("public-write", "GRANT INSERT, TRUNCATE ON items TO PUBLIC", "items"),
    Fault("public-read", "GRANT SELECT ON secrets TO PUBLIC", "secrets"),
    Fault("public-temp", "SELECT"),
    Fault("public-create", "GRANT CREATE ON SCHEMA public TO PUBLIC", "public"),
    Fault("public-language", "SELECT", "plpgsql"),
    Fault("public-function", "SELECT", "refund(integer)"),
    Fault("public-large-objects", "SELECT"),
    Fault(
        "definer-function",
        "CREATE FUNCTION peek() RETURNS bigint LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog"
        " AS 'SELECT count(*) FROM public.orders'; ALTER FUNCTION peek() OWNER TO app_owner",
    ),
    Fault(
        "definer-search-path",
        "CREATE FUNCTION peek() RETURNS bigint LANGUAGE sql SECURITY DEFINER AS 'SELECT 1::bigint'",
    ),
    Fault(
        "leaked-role",
        "CREATE ROLE sg_tk_leak LOGIN; GRANT sg_po_support_1 TO sg_tk_leak; GRANT sg_tk_leak TO app_owner",
    ),
    Fault(
        "unguarded-table",
        "SELECT",
        "orders2",
        POLICY + '[tables."public.orders2"]\nupdate = true\nselect = true\n',
    ),
    Fault("guarded-gone", "DROP TABLE items"),
    Fault("wall-disabled", "ALTER TABLE orders DISABLE TRIGGER sqlguard_update", "public.orders"),
    Fault("wall-missing", "DROP TRIGGER sqlguard_truncate ON items", "public.items"),
    Fault(
        "wall-changed",
        "DROP TRIGGER sqlguard_delete ON items; CREATE TRIGGER sqlguard_delete AFTER DELETE ON items"
        " REFERENCING OLD TABLE AS sg_old FOR EACH STATEMENT WHEN (false) EXECUTE FUNCTION sqlguard.refuse_truncate()",
        "public.items",
    ),
    Fault("wall-policies", "ALTER TABLE orders DISABLE ROW LEVEL SECURITY", "public.orders"),
    Fault("wall-policies", "DROP POLICY sqlguard_live_select ON customers", "public.customers"),
    Fault("wall-version", "UPDATE sqlguard.guarded_table SET version = 1 WHERE table_name = 'items'"),
    Fault("wall-function", "ALTER TABLE items ADD COLUMN colour text", "public.items"),
    Fault(
        "wall-missing",
        "CREATE TABLE notes (id integer PRIMARY KEY, order_id integer REFERENCES orders);"
        "ALTER TABLE notes OWNER TO app_owner",
        "public.notes",
    ),
    Fault(
        "reached-unguarded",
        "CREATE TABLE notes (id integer PRIMARY KEY, order_id integer REFERENCES orders ON DELETE CASCADE);"
        "ALTER TABLE notes OWNER TO app_owner",
        "public.notes",
    ),
    Fault("row-security-off", "ALTER TABLE orders DISABLE ROW LEVEL SECURITY", "orders", SCOPED),
    Fault("scope-without-index", "SELECT", "orders", SCOPED),
    Fault(
        "view-owner-rights",
        "CREATE VIEW inner_v AS SELECT * FROM orders; CREATE VIEW all_orders AS SELECT * FROM inner_v;"
        "ALTER VIEW inner_v OWNER TO app_owner; ALTER VIEW all_orders OWNER TO app_owner;"
        "GRANT SELECT ON all_orders TO sg_po_support_1",
        "all_orders",
    ),
    Fault(
        "materialized-view",
        "CREATE MATERIALIZED VIEW frozen_orders AS SELECT * FROM orders; GRANT SELECT ON frozen_orders TO sg_po_support_1",
    ),
    Fault(
        "tombstones-without-index",
        "UPDATE pg_class SET reltuples = 100000 WHERE oid = 'orders'::regclass",
        "orders",
    ),
    Fault("policy-drift", "GRANT DELETE ON orders TO sg_po_support_1"),
    Fault("policy-drift", "REVOKE SELECT ON orders FROM sg_po_support_1"),
    Fault("policy-drift", "DROP POLICY sg_rows_support_2 ON orders", None, SCOPED),
    Fault("overdue-task", "UPDATE sqlguard.task SET expires_at = now() - interval '1 minute'"),
    Fault("stuck-lease", "UPDATE sqlguard.lease SET problem = 'it would not go' WHERE state <> 'ended'"),
    Fault("no-event-trigger", "SELECT"),
    Fault("asynchronous-commit", "SELECT"),
)
#: Nothing can be run for it: what to do is in the message.
NO_REMEDY = {"materialized-view"}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.code} {f.sql[:30]}")
def test_a_fault_is_found_and_what_is_said_mends_it(world: World, fault: Fault) -> None:
    world.op.execute("CREATE TABLE orders2 (id integer PRIMARY KEY)")
    if fault.policy != POLICY:
        world.apply(fault.policy)
    if fault.code in ("overdue-task", "stuck-lease"):
        world.task()
    if fault.sql != "SELECT" and fault.code not in DEFAULTS:
        assert found(world, fault.code, fault.object) == []
    try:
        world.database.load(fault.sql)
        findings = found(world, fault.code, fault.object)
        assert len(findings) == 1, look(world).findings
        if fault.code not in NO_REMEDY:
            mend(world, findings[0])
            assert found(world, fault.code, fault.object) == []
    finally:
        world.database.load("ALTER ROLE app_owner NOSUPERUSER NOBYPASSRLS")


def test_a_well_kept_database_has_nothing_broken(world: World) -> None:
    report = look(world)
    assert {f.code for f in report.findings} <= DEFAULTS
    assert not report.broken
    tables = {t.table: t for t in report.tables}
    assert tables["public.orders"].as_dict() == {
        "table": "public.orders",
        "mode": "soft",
        "read": ["support"],
        "write": ["support"],
        "scope": [],
        "worst": None,
    }
    assert tables["public.secrets"].read == ()
    assert all(f.sql or f.command or f.code == "trusted-login" for f in report.findings)


def test_partitions_and_keys_that_came_after_the_guard(world: World) -> None:
    world.op.execute(
        "CREATE TABLE events (id integer, at date, PRIMARY KEY (id, at)) PARTITION BY RANGE (at);"
        "CREATE TABLE events_1 PARTITION OF events FOR VALUES FROM ('2024-01-01') TO ('2025-01-01')"
    )
    guard_tables(world.op, ["events"], "journal")
    assert not look(world).broken
    world.op.execute(
        "CREATE TABLE events_2 PARTITION OF events FOR VALUES FROM ('2025-01-01') TO ('2026-01-01')"
    )
    (finding,) = found(world, "wall-missing", "public.events_2")
    assert (finding.severity, finding.command) == (Severity.BROKEN, "sqlguard guard public.events")
    mend(world, finding)
    assert found(world, "wall-missing") == found(world, "wall-function") == []


def test_unique_look_ups_that_deleted_rows_are_not_in(world: World) -> None:
    world.op.execute("CREATE TABLE people (id integer PRIMARY KEY, email text UNIQUE)")
    guard_tables(world.op, ["people"], "soft")
    (finding,) = found(world, "unique-only-partial", "people")
    assert finding.sql == "CREATE INDEX CONCURRENTLY ON people (email)"
    mend(world, finding)
    assert found(world, "unique-only-partial") == []


def test_a_policy_that_matches_a_new_table(world: World) -> None:
    world.apply(POLICY + '[tables."public.*"]\nselect = true\n')
    world.op.execute("CREATE TABLE later (id integer PRIMARY KEY)")
    (finding,) = found(world, "policy-drift")
    assert finding.severity is Severity.NOTE
    assert "later" in (finding.sql or "")
    refresh_policies(world.op)
    assert found(world, "policy-drift") == []


def test_one_policy_alone(world: World) -> None:
    world.op.execute("CREATE TABLE other (id integer PRIMARY KEY)")
    world.apply('name = "other"\n[tables."public.other"]\nselect = true\ninsert = true\n')
    assert found(world, "unguarded-table", "other")
    report = look(world, "support")
    assert {t.table for t in report.tables} == {"public.customers", "public.orders", "public.items"}
    assert not any(f.code == "unguarded-table" for f in report.findings)
    with pytest.raises(NotConfigured, match="never applied"):
        look(world, "nobody")


def test_another_revision_of_the_schema_is_all_that_is_said(world: World) -> None:
    world.op.execute("UPDATE sqlguard.alembic_version SET version_num = '0003'")
    report = look(world)
    assert [f.code for f in report.findings] == ["schema-version"]
    assert report.broken


def test_a_session_that_went_past_the_proxy(world: World) -> None:
    opened = world.task()
    conn = world.login(opened)
    (finding,) = found(world, "bypassing-session")
    assert finding.object == str(conn.info.backend_pid)
    assert finding.severity is Severity.NOTE
    world.op.execute(
        "INSERT INTO sqlguard.door_session (pid, role) VALUES (%s, %s)", [conn.info.backend_pid, opened.role]
    )
    assert found(world, "bypassing-session") == []


def test_a_transaction_that_a_task_left_prepared(world: World) -> None:
    conn = world.login(world.task())
    conn.execute("BEGIN; UPDATE orders SET note = 'x' WHERE id = 1; PREPARE TRANSACTION 'left'")
    (finding,) = found(world, "left-prepared")
    mend(world, finding)
    assert found(world, "left-prepared") == []


def ddl(conn: psycopg.Connection[Any], text: str) -> str | None:
    try:
        conn.execute(text.encode())
    except psycopg.Error as fault:
        return fault.sqlstate
    return None


def test_the_event_trigger_refuses_ddl_by_tasks_and_by_nobody_else(world: World) -> None:
    with pytest.raises(NotConfigured, match="superuser"):
        event_trigger.put_up(world.op)
    root = world.database.connect()
    event_trigger.put_up(root)
    event_trigger.put_up(root)
    root.execute("GRANT CREATE ON SCHEMA public TO PUBLIC; CREATE TABLE victim (id integer)")
    opened = world.task()
    root.execute(f'ALTER TABLE victim OWNER TO "{opened.role}"')
    agent = world.login(opened)
    for text in (
        "CREATE TABLE mine (id integer)",
        "CREATE TABLE mine AS SELECT 1",
        "SELECT 1 INTO mine",
        "CREATE FUNCTION f() RETURNS integer LANGUAGE sql AS 'SELECT 1'",
        "ALTER TABLE victim ADD COLUMN x integer",
        "DROP TABLE victim",
        "GRANT SELECT ON victim TO PUBLIC",
        "CREATE FUNCTION pg_temp.f() RETURNS integer LANGUAGE sql AS 'SELECT 1'",
        "DO $$ BEGIN EXECUTE 'CREATE TABLE mine (id integer)'; END $$",
    ):
        assert ddl(agent, text) == "SG002", text
    assert ddl(agent, "CREATE TEMP TABLE t (id integer); DROP TABLE t") is None
    assert ddl(world.op, "CREATE TABLE ours (id integer); DROP TABLE ours") is None
    root.execute("ALTER EVENT TRIGGER sqlguard_refuse_ddl DISABLE")
    (finding,) = found(world, "event-trigger-off")
    world.database.load(finding.sql or "")
    assert found(world, "event-trigger-off") == []
    event_trigger.take_down(root)
    assert found(world, "no-event-trigger")


def test_the_event_trigger_warns_of_a_partition_without_walls(world: World) -> None:
    world.op.execute("CREATE TABLE events (id integer PRIMARY KEY) PARTITION BY RANGE (id)")
    guard_tables(world.op, ["events"], "journal")
    event_trigger.put_up(world.database.connect())
    said: list[str | None] = []
    world.op.add_notice_handler(lambda notice: said.append(notice.message_hint))
    world.op.execute("CREATE TABLE events_1 PARTITION OF events FOR VALUES FROM (1) TO (9)")
    assert said == ["run `sqlguard guard public.events`"]


def test_a_function_of_the_operator_s_is_not_taken_for_the_event_trigger(world: World) -> None:
    world.op.execute(
        "CREATE FUNCTION sqlguard.refuse_ddl() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN END'"
    )
    event_trigger.put_up(world.database.connect())
    assert world.value(
        "SELECT r.rolsuper FROM pg_proc p JOIN pg_roles r ON r.oid = p.proowner WHERE p.proname = 'refuse_ddl'"
    )


def test_the_command_says_it_and_exits_with_one(world: World) -> None:
    words = [sys.executable, "-m", "sqlguard", "doctor", "--dsn", world.database.owner_dsn]
    whole = subprocess.run(words, capture_output=True, text=True, check=False)
    assert whole.returncode == 0, whole.stderr
    assert "wall 2, the role" in whole.stdout
    assert "REVOKE TEMPORARY ON DATABASE" in whole.stdout
    world.op.execute("ALTER TABLE orders DISABLE TRIGGER sqlguard_update")
    whole = subprocess.run([*words, "--json"], capture_output=True, text=True, check=False)
    assert whole.returncode == 1
    assert '"wall-disabled"' in whole.stdout


def test_what_doctor_takes_from_everybody_the_operator_keeps(world: World) -> None:
    for code in ("public-language", "public-temp"):
        (finding,) = found(world, code)
        world.database.load(finding.sql or "")
        assert found(world, code) == []
    world.op.execute("CREATE TABLE orders2 (id integer PRIMARY KEY)")
    guard_tables(world.op, ["orders2"], "soft")
    world.op.execute("CREATE TEMP TABLE kept (id integer)")
