"""The fixtures keep their promise: fresh, owned by a non-superuser, and gone afterwards."""

import psycopg
import pytest
from servers import Database, fresh_database

from sqlguard.embedded import EmbeddedServer


def test_a_database_is_empty_and_belongs_to_an_ordinary_role(database: Database) -> None:
    assert database.psql("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == "0"
    with database.connect(database.owner_dsn) as conn:
        conn.execute("CREATE TABLE t (id int); CREATE ROLE sg_made_by_owner")
        row = conn.execute(
            "SELECT rolsuper, rolcreaterole, pg_get_userbyid(datdba) = current_user"
            " FROM pg_roles, pg_database WHERE rolname = current_user AND datname = current_database()"
        ).fetchone()
    assert row == (False, True, True)


def test_nothing_stays_on_the_server(server: EmbeddedServer) -> None:
    with fresh_database(server) as database, database.connect() as conn:
        conn.execute(
            "CREATE ROLE sg_a LOGIN PASSWORD 'x' CREATEROLE; CREATE ROLE sqlguard_b"
            "; GRANT sg_a TO sqlguard_b"
            ";GRANT CREATE ON DATABASE postgres TO sg_a; CREATE TABLE t (id int); ALTER TABLE t OWNER TO sg_a"
        )
        other = psycopg.connect(server.dsn("postgres", "sg_a", "x"))
    with psycopg.connect(server.dsn()) as conn:
        # Roles of databases that other fixtures keep open stay.
        left = conn.execute("SELECT rolname FROM pg_roles WHERE rolname IN ('sg_a', 'sqlguard_b')").fetchall()
        databases = conn.execute(
            "SELECT count(*) FROM pg_database WHERE datname = %s", [database.name]
        ).fetchone()
    with pytest.raises(psycopg.OperationalError):
        other.execute("SELECT 1")
    other.close()
    assert (left, databases) == ([], (0,))


def test_roles_that_another_database_uses_stay(server: EmbeddedServer) -> None:
    with fresh_database(server) as kept:
        kept.execute("CREATE ROLE sg_kept")
        kept.execute("CREATE TABLE t (id int)")
        kept.execute("ALTER TABLE t OWNER TO sg_kept")
        with fresh_database(server):
            pass
        assert kept.execute("SELECT count(*) FROM pg_roles WHERE rolname = 'sg_kept'") == [(1,)]


def test_chinook_belongs_to_the_owner(chinook: Database) -> None:
    rows = chinook.execute("SELECT count(*), min(tableowner) FROM pg_tables WHERE schemaname = 'public'")
    assert rows == [(11, "app_owner")]
    assert chinook.execute("SELECT count(*) FROM customer") == [(59,)]


def test_guard_schema_has_its_tables_and_roles(guard_schema: Database) -> None:
    assert guard_schema.execute("SELECT count(*) > 5 FROM pg_tables WHERE schemaname = 'app'") == [(True,)]
    assert guard_schema.execute("SELECT count(*) FROM pg_roles WHERE rolname = 'sg_owner'") == [(1,)]
