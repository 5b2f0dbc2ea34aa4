"""The journal: intents and events with their hash chains, append-only walls, idempotency keys, undo records."""

from sqlguard.postgres.migrate import run_sql

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    run_sql("0002_journal.sql")


def downgrade() -> None:
    run_sql("0002_journal.down.sql")
