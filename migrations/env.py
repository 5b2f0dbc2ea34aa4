"""
Alembic environment of sqlguard's own schema; `sqlguard.postgres.migrate` hands over the connection.

All revisions run in one transaction that holds an advisory lock, so two operators who migrate at the same
time get one result, and a failure leaves the schema as it was.
"""

from alembic import context
from sqlalchemy import Connection

connection: Connection | None = context.config.attributes.get("connection")
OPTIONS = {
    "target_metadata": None,
    "version_table_schema": "sqlguard",
    "on_version_apply": context.config.attributes.get("on_version_apply"),
}

if context.is_offline_mode():
    context.configure(dialect_name="postgresql", **OPTIONS)
    with context.begin_transaction():
        context.run_migrations()
elif connection is None:
    raise RuntimeError("run `sqlguard migrate`: this environment takes its connection from there")
else:
    context.configure(connection=connection, **OPTIONS)
    context.run_migrations()
