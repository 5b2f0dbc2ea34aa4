# ruff: noqa: INP001 (Alembic loads it by its path)
"""Guard the shop: what agents delete stays in the tables, out of their sight, and can come back."""

from alembic import op

import sqlguard.alembic  # noqa: F401 (op.guard_table and its kin)

revision = "0001"
down_revision = None

TABLES = ["customers", "staff", "products", "orders", "items"]


def upgrade() -> None:
    op.guard_tables(TABLES, mode="soft")


def downgrade() -> None:
    op.unguard_tables(TABLES)
