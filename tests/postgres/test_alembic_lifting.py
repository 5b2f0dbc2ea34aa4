"""A revision that lifts a guard while there are deleted rows: refused, restored or purged, as it says."""

from pathlib import Path

import pytest
from alembic.util import CommandError
from alembic_world import Project, guarded, project, shop
from servers import Database


def test_lifting_is_refused_while_there_are_deleted_rows(migrated: Database, tmp_path: Path) -> None:
    alembic = with_deleted_rows(tmp_path, migrated, "op.unguard_tables(['customers', 'orders'])")
    with pytest.raises(CommandError, match=r"`public.customers` \(1\), `public.orders` \(1\)") as caught:
        alembic.downgrade("0001")
    assert "purge=True" in str(caught.value)
    assert guarded(migrated) == {"public.customers": "soft", "public.orders": "soft"}
    assert migrated.execute("SELECT version_num FROM alembic_version") == [("0002",)]


def test_lifting_with_restore(migrated: Database, tmp_path: Path) -> None:
    alembic = with_deleted_rows(
        tmp_path, migrated, "op.unguard_tables(['customers', 'orders'], restore=True)"
    )
    alembic.downgrade("0001")
    assert migrated.execute("SELECT id FROM customers ORDER BY id") == [(1,), (2,)]
    assert migrated.execute("SELECT count(*) FROM orders") == [(2,)]
    assert guarded(migrated) == {}


def test_restoring_is_refused_for_a_value_in_use_or_a_deleted_parent(
    migrated: Database, tmp_path: Path
) -> None:
    alembic = with_deleted_rows(
        tmp_path, migrated, "op.unguard_tables(['customers', 'orders'], restore=True)"
    )
    migrated.execute("INSERT INTO customers VALUES (3, 'b', NULL)")
    with pytest.raises(CommandError, match="its value in `customers_email_key` is in use"):
        alembic.downgrade("0001")
    alembic.write("op.unguard_table('orders', restore=True)")
    with pytest.raises(CommandError, match=r"whose parents in `public.customers` stay deleted"):
        alembic.upgrade()
    assert migrated.execute("SELECT count(*) FROM orders WHERE deleted_at IS NOT NULL") == [(1,)]


def test_lifting_with_purge(migrated: Database, tmp_path: Path) -> None:
    alembic = with_deleted_rows(tmp_path, migrated, "op.unguard_tables(['customers', 'orders'], purge=True)")
    alembic.downgrade("0001")
    assert migrated.execute("SELECT id FROM customers") == [(1,)]
    assert migrated.execute("SELECT id FROM orders") == [(1,)]
    assert guarded(migrated) == {}


def with_deleted_rows(folder: Path, database: Database, downgrade: str) -> Project:
    alembic = project(folder, database, shop())
    alembic.write("op.guard_tables(['customers', 'orders'], mode='soft')", downgrade)
    alembic.upgrade()
    database.load(
        """
        INSERT INTO customers (id, email, deleted_at) VALUES (1, 'a', NULL);
        INSERT INTO orders (id, customer_id) VALUES (1, 1);
        INSERT INTO customers (id, email) VALUES (2, 'b');
        INSERT INTO orders (id, customer_id) VALUES (2, 2);
        UPDATE orders SET deleted_at = now(), deleted_by_agent = 'bot' WHERE id = 2;
        UPDATE customers SET deleted_at = now(), deleted_by_agent = 'bot' WHERE id = 2;
        """
    )
    return alembic
