"""The session that a revision runs in, by each driver: its settings, its role, its transaction, or none at all."""

from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic.util import CommandError
from alembic_world import DRIVERS, SOFT, Project, guarded, project, shop
from servers import Database
from sqlalchemy import MetaData


@pytest.mark.parametrize("driver", DRIVERS)
def test_the_session_is_left_as_it_was(migrated: Database, tmp_path: Path, driver: str) -> None:
    found: list[Any] = []

    def note(connection: Any) -> None:
        found.append(connection.exec_driver_sql(shown).one())

    shown = (
        "SELECT current_setting('lock_timeout'), current_setting('statement_timeout'),"
        " current_setting('search_path'), current_user"
    )
    alembic = Project(
        tmp_path / "project",
        migrated,
        shop(SOFT),
        driver=driver,
        session=[
            "SET lock_timeout = '7s'",
            "SET statement_timeout = '9min'",
            "SET search_path = public, pg_temp",
        ],
        after=note,
    )
    alembic.autogenerate()
    alembic.upgrade()
    assert set(found) == {("7s", "9min", "public, pg_temp", "postgres")}


@pytest.mark.parametrize("driver", DRIVERS)
def test_guarding_is_done_as_the_role_and_in_the_schema_of_the_session(
    migrated: Database, tmp_path: Path, driver: str
) -> None:
    migrated.load("CREATE SCHEMA sales AUTHORIZATION app_owner; GRANT CREATE ON SCHEMA public TO app_owner;")
    migrated.load("GRANT app_owner TO postgres; CREATE TABLE public.orders (id integer PRIMARY KEY);")
    migrated.load("GRANT ALL ON ALL TABLES IN SCHEMA sqlguard TO app_owner;")
    migrated.load("SET ROLE app_owner; CREATE TABLE sales.orders (id integer PRIMARY KEY)")
    alembic = Project(
        tmp_path / "project", migrated, MetaData(), driver=driver, session=["SET search_path = sales, public"]
    )
    alembic.write("op.guard_table('orders', mode='soft')")
    alembic.upgrade()
    assert guarded(migrated) == {"sales.orders": "soft"}


def test_another_transaction_of_the_caller_is_refused_with_words(migrated: Database, tmp_path: Path) -> None:
    alembic = project(tmp_path, migrated, shop())
    alembic.write("op.guard_table('orders')")
    path = alembic.folder / "env.py"
    path.write_text(
        path.read_text().replace(
            "        context.configure(", "        connection.begin()\n        context.configure("
        )
    )
    with pytest.raises(CommandError, match="inside a transaction of their caller"):
        alembic.upgrade()


def test_offline_a_script_checks_that_the_guard_is_there(migrated: Database, tmp_path: Path) -> None:
    alembic = project(tmp_path, migrated, shop())
    alembic.write(
        "op.guard_tables(['customers', 'orders'], mode='soft')", "op.unguard_tables(['customers', 'orders'])"
    )
    script = alembic.sql("0001:0002")
    assert "sqlguard guard customers orders --mode soft" in script
    with pytest.raises(psycopg.errors.RaiseException, match="is not guarded") as caught:
        migrated.load(script)
    assert "sqlguard guard customers orders" in (caught.value.diag.message_hint or "")
    assert migrated.execute("SELECT version_num FROM alembic_version") == [("0001",)]
    alembic.upgrade()
    migrated.execute("UPDATE alembic_version SET version_num = '0001'")
    migrated.load(script)
    assert migrated.execute("SELECT version_num FROM alembic_version") == [("0002",)]
    back = alembic.sql("0002:0001", down=True)
    with pytest.raises(psycopg.errors.RaiseException, match="is still guarded"):
        migrated.load(back)
