"""
Bring the schema `sqlguard` to the newest version with the Alembic revisions that the wheel carries.

The one idea: all missing revisions run in a single transaction under an advisory lock; the second of two
operators waits and then finds nothing to do.
"""

from pathlib import Path
from typing import Any

import psycopg
from alembic import command, context
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.pool import NullPool

from sqlguard.errors import NotConfigured
from sqlguard.postgres.connect import OWN_LOCKS, connect

_PACKAGE = Path(__file__).resolve().parent.parent
LOCK = (OWN_LOCKS, 1)


def migrations_directory() -> Path:
    """Return where the revisions are: inside the wheel, or beside the package in a checkout."""
    shipped = _PACKAGE / "_migrations"
    return shipped if shipped.is_dir() else _PACKAGE.parent / "migrations"


def alembic_config() -> Config:
    config = Config()
    # Alembic reads options through ConfigParser, to which a `%` in a path would be an interpolation.
    config.set_main_option("script_location", str(migrations_directory()).replace("%", "%%"))
    return config


def head() -> str:
    """Return the newest revision that this version of sqlguard knows."""
    revision = ScriptDirectory.from_config(alembic_config()).get_current_head()
    if revision is None:
        raise NotConfigured("the migrations of sqlguard are missing", hint="install sqlguard again")
    return revision


def migrate(dsn: str, revision: str = "head") -> list[str]:
    """
    Run what is missing up to *revision* and return the ids of the revisions that ran, in order.

    Safe to repeat and to run from several places at once.
    """
    done: list[str] = []

    def note(*, step: Any, **_: object) -> None:
        done.append(step.up_revision_id)

    config = alembic_config()
    config.attributes["on_version_apply"] = note
    with _engine(dsn).begin() as connection:
        _prepare(connection)
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, revision)
        except psycopg.errors.InsufficientPrivilege as fault:
            raise _lacking(fault) from None
    return done


def downgrade(dsn: str, revision: str) -> None:
    """Undo the revisions after *revision* (`base` for all); the journal goes with its tables."""
    config = alembic_config()
    with _engine(dsn).begin() as connection:
        _prepare(connection)
        config.attributes["connection"] = connection
        command.downgrade(config, revision)


def current(conn: psycopg.Connection) -> str | None:
    """Return the revision of the database, None when it was never migrated."""
    if conn.execute("SELECT to_regclass('sqlguard.alembic_version')").fetchone() == (None,):
        return None
    row = conn.execute("SELECT version_num FROM sqlguard.alembic_version").fetchone()
    return None if row is None else str(row[0])


def run_sql(name: str) -> None:
    """
    Run the file *name* from the folder `sql` next to the revisions; for use inside a revision.

    The text goes through the simple query protocol as it is, so that neither `%` nor `:` needs escaping.
    """
    script = (migrations_directory() / "sql" / name).read_text(encoding="utf-8")
    environment = context.get_context()
    if environment.as_sql:
        environment.impl.static_output(script)
        return
    bind = environment.bind
    if bind is None:
        raise NotConfigured("a revision of sqlguard runs without a connection")
    driver: Any = bind.connection.driver_connection
    driver.execute(script)


def _engine(dsn: str) -> Any:
    return create_engine(
        "postgresql+psycopg://", creator=lambda: connect(dsn, autocommit=False), poolclass=NullPool
    )


def _prepare(connection: Connection) -> None:
    connection.execute(text("SELECT pg_advisory_xact_lock(:a, :b)"), {"a": LOCK[0], "b": LOCK[1]})
    found = connection.execute(text("SELECT to_regnamespace('sqlguard')")).scalar()
    if found is not None:
        return
    try:
        # Alembic's version table needs the schema before the first revision runs.
        connection.execute(text("CREATE SCHEMA sqlguard"))
    except Exception as fault:
        raise _lacking(getattr(fault, "orig", fault)) from None


def _lacking(fault: BaseException) -> NotConfigured:
    return NotConfigured(
        f"this role may not migrate: {str(fault).splitlines()[0]}",
        hint="the operator needs CREATE on the database and CREATEROLE; a superuser can run "
        "`GRANT CREATE ON DATABASE … TO …` and `ALTER ROLE … CREATEROLE`",
    )
