"""The schema `sqlguard`: made by an operator without superuser rights, once, whoever asks and how often."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from journaled import rows
from servers import Database

from sqlguard.errors import DatabaseUnavailable, NotConfigured
from sqlguard.postgres.migrate import current, downgrade, head, migrate


def test_it_is_made_once(database: Database) -> None:
    done = migrate(database.owner_dsn)
    assert done[0] == "0001"
    assert done[-1] == head()
    assert migrate(database.owner_dsn) == []
    with database.connect() as conn:
        assert current(conn) == head()


def test_two_operators_at_once(database: Database) -> None:
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(migrate, [database.owner_dsn] * 4))
    assert sorted(map(len, done)) == [0, 0, 0, len(max(done, key=len))]


def test_down_and_up_again(database: Database) -> None:
    migrate(database.owner_dsn)
    downgrade(database.owner_dsn, "base")
    assert database.execute(
        "SELECT count(*) FROM pg_class WHERE relnamespace = 'sqlguard'::regnamespace"
    ) == [(2,)]
    assert migrate(database.owner_dsn)[-1] == head()


def test_the_owner_of_the_schema_is_the_operator(database: Database) -> None:
    migrate(database.owner_dsn)
    assert database.execute(
        "SELECT DISTINCT relowner::regrole::text FROM pg_class WHERE relnamespace = 'sqlguard'::regnamespace"
        " AND relkind IN ('r', 'S')"
    ) == [("app_owner",)]


def test_nothing_is_open_to_public(database: Database) -> None:
    """The tables can't be read, and functions that write can't be called, by a role that has nothing."""
    migrate(database.owner_dsn)
    database.execute("CREATE ROLE sg_nobody LOGIN PASSWORD 'x'")
    with database.connect() as conn:
        assert (
            rows(
                conn,
                "SELECT relname FROM pg_class WHERE relnamespace = 'sqlguard'::regnamespace AND relkind IN ('r', 'v')"
                " AND has_table_privilege('sg_nobody', oid, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE')",
            )
            == []
        )
        callable_ = rows(
            conn,
            "SELECT proname::text FROM pg_proc WHERE pronamespace = 'sqlguard'::regnamespace AND prosecdef"
            " AND prorettype <> 'trigger'::regtype AND has_function_privilege('sg_nobody', oid, 'EXECUTE')"
            " ORDER BY 1",
        )
        assert {name for (name,) in callable_} <= {
            "agent",
            "current_task",
            "current_login",
            "authorised_task",
        }


def test_what_is_missing_is_said(database: Database) -> None:
    database.execute("CREATE ROLE sg_poor LOGIN PASSWORD 'x'")
    with pytest.raises(NotConfigured) as caught:
        migrate(database.dsn_for("sg_poor", "x"))
    assert "CREATE on the database" in (caught.value.hint or "")
    with pytest.raises(DatabaseUnavailable):
        migrate("host=127.0.0.1 port=1 dbname=nothing connect_timeout=1")
