"""An Alembic project of a user in a folder: env.py, models, revisions; run by Alembic's own commands."""

import importlib.util
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from servers import Database
from sqlalchemy import Column, ForeignKey, Integer, MetaData, Table, Text

#: Whether Alembic has plugins, which it has since 1.18; `make oldest` tests without.
PLUGINS = importlib.util.find_spec("alembic.runtime.plugins") is not None
SOFT = {"sqlguard": {"mode": "soft"}}
DRIVERS = ["psycopg", "psycopg_async", "asyncpg"]
PLAIN = """
from alembic import context
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

import sqlguard.alembic

config = context.config
options = dict(target_metadata=config.attributes["metadata"], **config.attributes["options"])

if context.is_offline_mode():
    context.configure(url=config.attributes["url"], **options)
    with context.begin_transaction():
        context.run_migrations()
else:
    engine = create_engine(config.attributes["url"], poolclass=NullPool)
    with engine.connect() as connection:
        for statement in config.attributes["session"]:
            connection.exec_driver_sql(statement)
        connection.commit()
        context.configure(connection=connection, **options)
        with context.begin_transaction():
            context.run_migrations()
        config.attributes["after"](connection)
    engine.dispose()
"""
ASYNC = """
import asyncio

from alembic import context
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

import sqlguard.alembic

config = context.config
options = dict(target_metadata=config.attributes["metadata"], **config.attributes["options"])


def run(connection):
    for statement in config.attributes["session"]:
        connection.exec_driver_sql(statement)
    connection.commit()
    context.configure(connection=connection, **options)
    with context.begin_transaction():
        context.run_migrations()
    config.attributes["after"](connection)


async def main():
    engine = create_async_engine(config.attributes["url"], poolclass=NullPool)
    async with engine.connect() as connection:
        await connection.run_sync(run)
    await engine.dispose()


asyncio.run(main())
"""
TEMPLATE = '''"""${message}"""

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}


def upgrade():
    ${upgrades if upgrades else "pass"}


def downgrade():
    ${downgrades if downgrades else "pass"}
'''


def orders(info: Any = None, *more: Any, unique: bool = True) -> MetaData:
    metadata = MetaData()
    Table(
        "orders",
        metadata,
        Column("id", Integer, primary_key=True),
        Column("number", Text, unique=unique),
        Column("note", Text),
        *more,
        info=dict(info or {}),
    )
    return metadata


@dataclass
class Project:
    """`driver` is SQLAlchemy's name of it; asyncpg and psycopg_async have an asynchronous env.py."""

    folder: Path
    database: Database
    metadata: MetaData
    driver: str = "psycopg"
    options: dict[str, Any] = field(default_factory=dict)
    #: Statements that env.py runs in the session first.
    session: list[str] = field(default_factory=list)
    after: Callable[[Any], Any] = id
    _numbers: Any = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        (self.folder / "versions").mkdir(parents=True)
        asynchronous = self.driver in ("asyncpg", "psycopg_async")
        (self.folder / "env.py").write_text(ASYNC if asynchronous else PLAIN)
        (self.folder / "script.py.mako").write_text(TEMPLATE)

    def config(self, output: Any = None) -> Config:
        config = Config(output_buffer=output, stdout=io.StringIO())
        config.set_main_option("script_location", str(self.folder).replace("%", "%%"))
        config.set_main_option("path_separator", "os")
        config.attributes.update(
            url=self.database.dsn.replace("postgresql://", f"postgresql+{self.driver}://"),
            metadata=self.metadata,
            options=self.options,
            session=self.session,
            after=self.after,
        )
        return config

    def autogenerate(self) -> str:
        """Write the next revision and return its text."""
        number = f"{next(self._numbers):04}"
        script: Any = command.revision(self.config(), "next", autogenerate=True, rev_id=number)
        return Path(script.path).read_text()

    def write(self, upgrade: str, downgrade: str = "pass") -> None:
        """Write the next revision by hand."""
        number = f"{next(self._numbers):04}"
        command.revision(self.config(), "next", rev_id=number)
        path = next((self.folder / "versions").glob(f"{number}_*.py"))
        text = (
            path.read_text()
            .replace("    pass", f"    {upgrade}", 1)
            .replace("    pass", f"    {downgrade}", 1)
        )
        path.write_text(text)

    def upgrade(self, revision: str = "head") -> None:
        command.upgrade(self.config(), revision)

    def downgrade(self, revision: str) -> None:
        command.downgrade(self.config(), revision)

    def sql(self, revisions: str, *, down: bool = False) -> str:
        """Return what `--sql` prints."""
        output = io.StringIO()
        (command.downgrade if down else command.upgrade)(self.config(output), revisions, sql=True)
        return output.getvalue()

    def pending(self) -> str:
        """Return what autogenerate would still write; empty when it is quiet."""
        try:
            command.check(self.config())
        except CommandError as fault:
            return str(fault)
        return ""

    def pending_now(self) -> str:
        """As `pending`, where the newest revision has not been run."""
        newest = max((self.folder / "versions").glob("*.py"))
        hidden = newest.with_suffix(".hidden")
        newest.rename(hidden)
        try:
            return self.pending()
        finally:
            hidden.rename(newest)


def body(text: str, function: str) -> list[str]:
    """Return the lines of *function* of a revision without Alembic's comments."""
    after = text.split(f"def {function}():\n")[1].split("\n\n\ndef ", maxsplit=1)[0]
    lines = (line.strip() for line in after.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def guarded(database: Database) -> dict[str, str]:
    """Return the mode of every guarded table, by `schema.name`."""
    rows = database.execute("SELECT schema_name || '.' || table_name, mode FROM sqlguard.guarded_table")
    return dict(rows)


def shape(database: Database, table: str) -> list[tuple[Any, ...]]:
    """Return columns, indexes, constraints, triggers and policies of *table*: all that a guard may touch."""
    return database.execute(
        """
        SELECT 'column', attname::text, format_type(atttypid, atttypmod) FROM pg_attribute
        WHERE attrelid = %(t)s::regclass AND attnum > 0 AND NOT attisdropped
        UNION ALL SELECT 'index', indexrelid::regclass::text, pg_get_indexdef(indexrelid) FROM pg_index
        WHERE indrelid = %(t)s::regclass
        UNION ALL SELECT 'constraint', conname::text, pg_get_constraintdef(oid) FROM pg_constraint
        WHERE conrelid = %(t)s::regclass
        UNION ALL SELECT 'trigger', tgname::text, pg_get_triggerdef(oid) FROM pg_trigger
        WHERE tgrelid = %(t)s::regclass AND NOT tgisinternal
        UNION ALL SELECT 'policy', polname::text, polcmd::text FROM pg_policy WHERE polrelid = %(t)s::regclass
        UNION ALL SELECT 'security', relrowsecurity::text, '' FROM pg_class WHERE oid = %(t)s::regclass
        ORDER BY 1, 2
        """,
        {"t": table},
    )


def shop(info: Any = None) -> MetaData:
    """Customers with unique emails and their orders, cascading."""
    metadata = MetaData()
    Table(
        "customers",
        metadata,
        Column("id", Integer, primary_key=True),
        Column("email", Text, unique=True),
        Column("name", Text),
        info=dict(info or {}),
    )
    Table(
        "orders",
        metadata,
        Column("id", Integer, primary_key=True),
        Column("customer_id", ForeignKey("customers.id", ondelete="CASCADE"), index=True),
        Column("note", Text),
        info=dict(info or {}),
    )
    return metadata


def project(folder: Path, database: Database, metadata: MetaData, **options: Any) -> Project:
    """Return a project whose tables are there and whose guards are declared in the next revision."""
    made = Project(folder / "project", database, metadata, **options)
    made.autogenerate()
    made.upgrade()
    return made
