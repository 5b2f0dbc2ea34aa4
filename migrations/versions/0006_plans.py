"""Plans and approvals: what a dry run saw, and who let it pass."""

from sqlguard.postgres.migrate import run_sql

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    run_sql("0006_plans.sql")


def downgrade() -> None:
    run_sql("0006_plans.down.sql")
