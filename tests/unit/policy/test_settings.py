"""What a session may set: what drivers send passes, what changes meaning or lifts a limit does not."""

from dataclasses import replace

import pytest
from guard_world import CONTEXT, PATH, SESSION, context, verdict

from sqlguard.policy import decide
from sqlguard.policy.setting import milliseconds
from sqlguard.policy.verdict import Effect
from sqlguard.statement import analyse

ALLOWED = """
SET application_name = 'agent'
SET client_encoding TO 'UTF8'
SET NAMES 'utf8'
SET extra_float_digits = 3
SET DateStyle = ISO
SET TIME ZONE 'UTC'
SET SESSION TIME ZONE 'Europe/Berlin'
SET TIME ZONE INTERVAL '+01:00' HOUR TO MINUTE
SET client_min_messages TO warning
SET standard_conforming_strings = on
SET bytea_output = 'hex'
SET search_path = app
SET search_path TO app, public
SET search_path = "$user", app
SET search_path TO '$user', app, public
SET statement_timeout = '2s'
SET LOCAL statement_timeout = 500
SET lock_timeout = 100
SET default_transaction_read_only = on
SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY
SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ
SET TRANSACTION ISOLATION LEVEL SERIALIZABLE
SET TRANSACTION READ ONLY
SET sqlguard.reason = 'tidy up'
SET sqlguard.confidence = '0.9'
SET sqlguard.idempotency_key = 'run-7:3'
SET sqlguard.step = '3'
SET sqlguard.dry_run = on
RESET ALL
RESET statement_timeout
RESET search_path
DISCARD ALL
DISCARD TEMP
CLOSE ALL
UNLISTEN *
DEALLOCATE ALL
SHOW server_version
SHOW TRANSACTION ISOLATION LEVEL
SHOW search_path
SELECT set_config('TimeZone', 'UTC', false)
SELECT current_setting('jit') AS cur, set_config('jit', 'off', false) AS new
SELECT set_config('jit', $1, false)
BEGIN
BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY DEFERRABLE
START TRANSACTION READ WRITE
ROLLBACK
SAVEPOINT sa_savepoint_1
ROLLBACK TO SAVEPOINT sa_savepoint_1
RELEASE SAVEPOINT sa_savepoint_1
""".strip().splitlines()
REFUSED = """
SET ROLE sg_group
SET LOCAL ROLE NONE
RESET ROLE
SET SESSION AUTHORIZATION DEFAULT
SET search_path = public
SET search_path = app, pg_catalog
SET search_path = priv
SET LOCAL search_path = app
SET search_path = ''
SET search_path = "$user"
SET search_path = '$user, app'
SET search_path = "$user", public
SET search_path = "$user", pg_temp, app
SET row_security = off
SET session_replication_role = replica
SET default_transaction_read_only = off
SET LOCAL transaction_read_only = off
SET TRANSACTION READ WRITE
SET SESSION CHARACTERISTICS AS TRANSACTION READ WRITE
SET TRANSACTION SNAPSHOT '00000003-0000001B-1'
SET statement_timeout = 0
SET statement_timeout = '1h'
SET statement_timeout = '-1'
SET statement_timeout = ''
SET lock_timeout = 0
SET idle_in_transaction_session_timeout = 0
SET work_mem = '2GB'
SET standard_conforming_strings = off
SET backslash_quote = on
SET client_encoding = 'SJIS'
SET app.tenant = 't2'
SET "app.tenant" = 't2'
SET sqlguard.action = '1'
SET sqlguard.task = 'x'
SET sqlguard.dry_run = 'perhaps'
SET zero_damaged_pages = on
SET local_preload_libraries = 'x'
SET extra_float_digits = 99
SET CONSTRAINTS ALL DEFERRED
SELECT set_config('role', 'sg_group', false)
SELECT set_config('search_path', 'app', false)
SELECT set_config('statement_timeout', '0', true)
SELECT set_config('statement_timeout', $1, true)
SELECT set_config(status, 'x', false) FROM accounts
SELECT count(*) FROM pg_settings WHERE setting = set_config('lock_timeout', '0', false)
COMMIT AND CHAIN
ROLLBACK TO sqlguard_preview
PREPARE TRANSACTION 'x'
LISTEN news
NOTIFY news
""".strip().splitlines()


@pytest.mark.parametrize("text", ALLOWED)
def test_what_drivers_and_poolers_send_passes(text: str) -> None:
    assert verdict(text).effect is Effect.ALLOW


@pytest.mark.parametrize("text", REFUSED)
def test_what_changes_meaning_or_lifts_a_limit_is_refused(text: str) -> None:
    assert verdict(text).effect is Effect.REFUSE


def test_asyncpg_resets_a_connection_with_one_message() -> None:
    text = "SELECT pg_advisory_unlock_all();\nCLOSE ALL;\nUNLISTEN *;\nRESET ALL;"
    found = [decide(s, SESSION, CONTEXT).effect for s in analyse(text, CONTEXT.catalog, SESSION)]
    assert found == [Effect.ALLOW] * 4


def test_a_schema_that_is_called_like_a_role_of_a_task_is_not_found_by_user() -> None:
    where = replace(
        CONTEXT, catalog=replace(CONTEXT.catalog, schemas=frozenset({"app", "public", "sg_tk_1"}))
    )
    assert verdict('SET search_path = "$user", app', where=where).effect is Effect.REFUSE


@pytest.mark.parametrize("text", ["BEGIN", "COMMIT", "ROLLBACK", "SAVEPOINT a", "ROLLBACK TO a", "RELEASE a"])
def test_a_preview_can_not_be_ended(text: str) -> None:
    assert verdict(text, where=context(plan_only=True)).effect is Effect.REFUSE


def test_a_policy_without_a_time_limit_lets_it_be_lifted() -> None:
    where = context(defaults={"search_path": PATH, "statement_timeout": None})
    assert verdict("SET statement_timeout = 0", where=where).effect is Effect.ALLOW


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", 5),
        ("5s", 5000),
        ("1.5 s", 1500),
        ("2min", 120_000),
        ("1us", 1),
        ("0", 0),
        ("-1", None),
        ("x", None),
        ("5 S", None),
    ],
)
def test_times_are_read_as_postgres_does(text: str, expected: int | None) -> None:
    assert milliseconds(text) == expected
