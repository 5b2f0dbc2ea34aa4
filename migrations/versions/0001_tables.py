"""The schema: tables, group roles, and who the session is."""

from sqlguard.postgres.migrate import run_sql

revision = "0001"
down_revision = None


def upgrade() -> None:
    run_sql("0001_tables.sql")


def downgrade() -> None:
    # The schema itself stays: Alembic's version table lives in it.
    run_sql("0001_tables.down.sql")
