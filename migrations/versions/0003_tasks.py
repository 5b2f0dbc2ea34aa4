"""Tasks: what a lease must remember, who the session is for the guard, parameters for row scopes."""

from sqlguard.postgres.migrate import run_sql

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    run_sql("0003_tasks.sql")


def downgrade() -> None:
    run_sql("0003_tasks.down.sql")
