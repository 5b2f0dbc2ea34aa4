# ruff: noqa: INP001 (Alembic loads it by its path)
"""Alembic environment of the demo's shop, as small as a project's own could be."""

from alembic import context
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

import sqlguard.alembic  # noqa: F401 (op.guard_table and its kin)
from sqlguard.postgres.connect import connect

DSN: str = context.config.attributes["dsn"]
engine = create_engine(
    "postgresql+psycopg://", creator=lambda: connect(DSN, autocommit=False), poolclass=NullPool
)

with engine.connect() as connection:
    context.configure(connection=connection, transaction_per_migration=True)
    with context.begin_transaction():
        context.run_migrations()
