"""Alembic and what comes after the guard: views over guarded tables, new foreign keys to them."""

from pathlib import Path

import psycopg
import pytest
from alembic_world import SOFT, Project, body, guarded, orders
from servers import Database
from sqlalchemy import Column, ForeignKey, Integer, MetaData, Table

FIXED = {"sqlguard": {"mode": "soft", "fix_views": True}}


@pytest.fixture
def alembic(migrated: Database, tmp_path: Path) -> Project:
    """A project whose table `orders` is there, not guarded yet."""
    made = Project(tmp_path / "project", migrated, orders())
    made.autogenerate()
    made.upgrade()
    return made


def invokers(database: Database) -> dict[str, bool]:
    """Say of every view whether it reads with its reader's rights."""
    return dict(
        database.execute(
            "SELECT relname, coalesce('security_invoker=true' = ANY (reloptions), false) FROM pg_class"
            " WHERE relkind = 'v' AND relnamespace = 'public'::regnamespace"
        )
    )


def test_views_are_mended_where_the_models_ask_for_it(alembic: Project, migrated: Database) -> None:
    migrated.load("CREATE VIEW v AS SELECT id FROM orders; CREATE VIEW w AS SELECT id FROM v")
    alembic.metadata = orders(FIXED)
    text = alembic.autogenerate()
    assert body(text, "upgrade") == ["op.guard_table('orders', mode='soft', fix_views=True)"]
    for _ in range(2):
        alembic.upgrade()
        assert invokers(migrated) == {"v": True, "w": True}
        assert alembic.pending() == ""
        alembic.downgrade("0001")
        assert invokers(migrated) == {"v": False, "w": False}
        assert guarded(migrated) == {}


def test_a_view_that_came_later_is_mended_by_the_next_revision(alembic: Project, migrated: Database) -> None:
    alembic.metadata = orders(FIXED)
    alembic.autogenerate()
    alembic.upgrade()
    assert alembic.pending() == ""
    migrated.execute("CREATE VIEW v AS SELECT id FROM orders")
    text = alembic.autogenerate()
    mend = ["op.guard_table('orders', mode='soft', fix_views=True, existing_mode='soft')"]
    assert (body(text, "upgrade"), body(text, "downgrade")) == (mend, mend)
    alembic.upgrade()
    assert invokers(migrated) == {"v": True}
    assert alembic.pending() == ""


def test_views_by_hand_and_offline(alembic: Project, migrated: Database) -> None:
    migrated.execute("CREATE VIEW v AS SELECT id FROM orders")
    alembic.write("op.add_soft_delete('orders', fix_views=True)", "op.drop_soft_delete('orders')")
    assert "sqlguard guard orders --mode soft --fix-views" in alembic.sql("0001:0002")
    alembic.upgrade()
    assert invokers(migrated) == {"v": True}
    alembic.downgrade("0001")
    assert invokers(migrated) == {"v": False}


def with_bills(*, referring: bool) -> MetaData:
    metadata = orders(SOFT)
    key = [ForeignKey("orders.id", name="bills_order_id_fkey")] if referring else []
    Table("bills", metadata, Column("id", Integer, primary_key=True), Column("order_id", Integer, *key))
    return metadata


@pytest.mark.parametrize("with_table", [True, False])
def test_a_new_foreign_key_comes_with_the_guard_of_its_parent(
    alembic: Project, migrated: Database, *, with_table: bool
) -> None:
    alembic.metadata = orders(SOFT) if with_table else with_bills(referring=False)
    alembic.autogenerate()
    alembic.upgrade()
    migrated.execute("INSERT INTO orders VALUES (1, 'a')")
    migrated.execute("UPDATE orders SET deleted_at = now(), deleted_by_agent = 'bot'")

    alembic.metadata = with_bills(referring=True)
    text = alembic.autogenerate()
    renewed = "op.guard_table('orders', mode='soft', existing_mode='soft')"
    assert body(text, "upgrade")[-1] == renewed
    assert body(text, "downgrade")[0] == renewed
    for _ in range(2):
        alembic.upgrade()
        assert alembic.pending() == ""
        with pytest.raises(psycopg.errors.ForeignKeyViolation, match="bills_order_id_fkey"):
            migrated.execute("INSERT INTO bills VALUES (1, 1)")
        alembic.downgrade("0002")
        if not with_table:
            # The trigger that stood behind the key has nothing to say without it, and goes with the next guard.
            migrated.execute("INSERT INTO bills VALUES (1, 1), (2, 77)")
            migrated.execute("TRUNCATE bills")
