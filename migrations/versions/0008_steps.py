"""Steps that are not SQL, and the feed that tells other systems of actions."""

from sqlguard.postgres.migrate import run_sql

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    run_sql("0008_steps.sql")


def downgrade() -> None:
    run_sql("0008_steps.down.sql")
