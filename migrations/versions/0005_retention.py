"""Holds, purges and erasure: rows and images that are removed for good, and the record of it."""

from sqlguard.postgres.migrate import run_sql

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    run_sql("0005_retention.sql")


def downgrade() -> None:
    run_sql("0005_retention.down.sql")
