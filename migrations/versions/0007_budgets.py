"""Budgets of tasks and of all agents together, and refusals of DDL by task sessions."""

from sqlguard.postgres.migrate import run_sql

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    run_sql("0007_budgets.sql")


def downgrade() -> None:
    run_sql("0007_budgets.down.sql")
