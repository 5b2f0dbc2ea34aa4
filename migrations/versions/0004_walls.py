"""What the table walls share: change sets with caps and freeze, referential actions of soft deletes."""

from sqlguard.postgres.migrate import run_sql

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    run_sql("0004_walls.sql")


def downgrade() -> None:
    run_sql("0004_walls.down.sql")
