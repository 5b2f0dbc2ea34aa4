"""Which statements a standby answers as the primary would."""

from dataclasses import replace

import pytest
from soft_catalog import fixture_catalog

from sqlguard.policy.standby import is_standby_read
from sqlguard.statement import analyse
from sqlguard.statement.model import Session

CATALOG = fixture_catalog()


def fits(text: str, session: Session | None = None) -> bool:
    (statement,) = analyse(text, CATALOG, session or Session())
    return is_standby_read(statement, CATALOG)


@pytest.mark.parametrize(
    "text",
    [
        "SELECT * FROM customers WHERE id = $1",
        "SELECT count(*), max(upper(name)) FROM customers WHERE name LIKE 'a%' AND id::text <> ''",
        "WITH c AS (SELECT id FROM customers) SELECT * FROM c JOIN orders o ON o.id = c.id",
        "SELECT now(), current_date, current_user, coalesce(1, 2), CASE WHEN true THEN 1 END",
        "SELECT to_char(now(), 'YYYY'), extract(year FROM now()), generate_series(1, 3)",
        "VALUES (1)",
        "TABLE customers",
        "COPY customers TO STDOUT",
        "COPY (SELECT id FROM customers) TO STDOUT",
    ],
)
def test_plain_reads(text: str) -> None:
    assert fits(text)


@pytest.mark.parametrize(
    "text",
    [
        "SELECT id FROM customers FOR UPDATE",
        "SELECT id FROM customers FOR KEY SHARE",
        "SELECT * FROM (SELECT id FROM customers FOR SHARE) s",
        "WITH gone AS (DELETE FROM customers RETURNING id) SELECT * FROM gone",
        "UPDATE customers SET id = 1",
        "SELECT nextval('s'), setval('s', 1)",
        "SELECT currval('s')",
        "SELECT lastval()",
        "SELECT txid_current()",
        "SELECT txid_current_if_assigned()",
        "SELECT pg_current_xact_id()",
        "SELECT pg_current_snapshot()",
        "SELECT pg_current_wal_lsn()",
        "SELECT pg_last_wal_replay_lsn()",
        "SELECT pg_is_in_recovery()",
        "SELECT pg_notify('a', 'b')",
        "SELECT pg_advisory_lock(1)",
        "SELECT pg_advisory_xact_lock(1)",
        "SELECT pg_try_advisory_lock_shared(1)",
        "SELECT pg_export_snapshot()",
        "SELECT pg_backend_pid()",
        "SELECT pg_stat_get_numscans(1)",
        "SELECT inet_server_addr()",
        "SELECT current_setting('sqlguard.reason')",
        "SELECT set_config('a.b', 'c', false)",
        "SELECT random()",
        "SELECT gen_random_uuid()",
        "SELECT clock_timestamp()",
        "SELECT pg_sleep(1)",
        "SELECT query_to_xml('SELECT 1', true, true, '')",
        "SELECT lo_get(1)",
        "SELECT not_known_here(1)",
        "SELECT * FROM not_there",
        "SELECT * FROM pg_catalog.pg_class",
        "SELECT * FROM pg_stat_activity",
        "SELECT * FROM information_schema.tables",
        "SELECT * FROM sqlguard.task",
        "SHOW all",
        "EXPLAIN SELECT 1",
        "EXPLAIN ANALYZE SELECT 1",
        "LISTEN a",
        "FETCH 1 FROM c",
        "EXECUTE s",
        "DECLARE c CURSOR FOR SELECT 1",
        "PREPARE s AS SELECT 1",
        "BEGIN",
        "COPY customers FROM STDIN",
        "SET TimeZone = 'UTC'",
        "CALL p()",
        "DO 'BEGIN END'",
    ],
)
def test_what_stays_at_the_primary(text: str) -> None:
    assert not fits(text)


def test_the_sessions_own_tables_stay() -> None:
    assert not fits("SELECT * FROM t", Session(temporary={"t": ("a",)}))


def test_another_servers_tables_stay() -> None:
    table = CATALOG.table(None, "customers", ("public",))
    assert table is not None
    foreign = replace(CATALOG, tables={**CATALOG.tables, table.oid: replace(table, kind="f")})
    (statement,) = analyse("SELECT id FROM customers", foreign, Session())
    assert not is_standby_read(statement, foreign)
