"""What the observing proxy saw."""

from sqlguard.postgres.migrate import run_sql

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    run_sql("0009_observed.sql")


def downgrade() -> None:
    run_sql("0009_observed.down.sql")
