"""The Alembic operations on a real server: round trips, repeats, refusals, and the demo's own revision."""

import logging
from pathlib import Path
from typing import Any

import pytest
from alembic.util import CommandError
from alembic_world import DRIVERS, PLUGINS, SOFT, Project, body, guarded, project, shape, shop
from servers import Database
from sqlalchemy import Column, ForeignKey, Index, Integer, MetaData, Table, Text, UniqueConstraint

from sqlguard.alembic import include_name
from sqlguard.demo import stage
from sqlguard.postgres import guard_table, walls_unique


@pytest.mark.parametrize("driver", DRIVERS)
def test_upgrade_downgrade_upgrade(migrated: Database, tmp_path: Path, driver: str) -> None:
    alembic = project(tmp_path, migrated, shop(), driver=driver)
    bare = {table: shape(migrated, table) for table in ("customers", "orders")}
    assert alembic.pending() == ""
    alembic.metadata = shop(SOFT)
    text = alembic.autogenerate()
    assert body(text, "upgrade") == ["op.guard_tables(['customers', 'orders'], mode='soft')"]
    assert body(text, "downgrade") == ["op.unguard_tables(['customers', 'orders'])"]
    assert "import sqlguard.alembic" in text

    alembic.upgrade()
    assert guarded(migrated) == {"public.customers": "soft", "public.orders": "soft"}
    assert alembic.pending() == ""
    walled = {table: shape(migrated, table) for table in bare}

    alembic.downgrade("0001")
    assert guarded(migrated) == {}
    assert {table: shape(migrated, table) for table in bare} == bare
    alembic.metadata = shop()
    with pytest.raises(CommandError, match="not up to date"):
        alembic.autogenerate()

    alembic.upgrade()
    alembic.metadata = shop(SOFT)
    assert alembic.pending() == ""
    assert {table: shape(migrated, table) for table in bare} == walled


def test_tables_of_the_same_revision_are_guarded_and_go_again(migrated: Database, tmp_path: Path) -> None:
    alembic = Project(tmp_path / "project", migrated, shop(SOFT))
    text = alembic.autogenerate()
    assert body(text, "upgrade")[-1].startswith("op.guard_tables")
    assert body(text, "downgrade")[0].startswith("op.unguard_tables")
    for _ in range(2):
        alembic.upgrade()
        assert alembic.pending() == ""
        alembic.downgrade("base")
        assert guarded(migrated) == {}
        assert migrated.execute("SELECT to_regclass('orders')") == [(None,)]


def test_guarding_again_changes_nothing(migrated: Database, tmp_path: Path) -> None:
    alembic = project(tmp_path, migrated, shop())
    alembic.write("op.guard_table('customers', mode='soft')")
    alembic.upgrade()
    # `orders` is reached by the cascade.
    assert guarded(migrated) == {"public.customers": "soft", "public.orders": "soft"}
    before = shape(migrated, "customers"), migrated.execute("SELECT xmin FROM sqlguard.guarded_table")
    alembic.write("op.add_soft_delete('customers')", "op.drop_soft_delete('customers')")
    alembic.upgrade()
    assert (
        shape(migrated, "customers"),
        migrated.execute("SELECT xmin FROM sqlguard.guarded_table"),
    ) == before
    alembic.downgrade("0002")
    assert guarded(migrated) == {"public.orders": "soft"}


@pytest.mark.parametrize(
    ("module", "step"),
    [
        (walls_unique, "_build"),
        (walls_unique, "convert"),
        (guard_table, "_walls"),
        (guard_table, "_register"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.parametrize("calls", [0, 1])
def test_what_was_left_half_done_is_finished(  # noqa: PLR0917
    migrated: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, step: str, calls: int
) -> None:
    alembic = project(tmp_path, migrated, shop())
    alembic.write(
        "op.guard_tables(['orders', 'customers'], mode='soft')", "op.unguard_tables(['orders', 'customers'])"
    )
    real, left = getattr(module, step), iter([True] * calls)

    def stops(*arguments: Any) -> Any:
        if next(left, False):
            return real(*arguments)
        if step == "_build":
            real(*arguments)  # the new index is there, and the old one as well
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module, step, stops)
        if (step, calls) in {("_build", 1), ("convert", 1)}:
            alembic.upgrade()  # there is one unique index only
        else:
            with pytest.raises(KeyboardInterrupt):
                alembic.upgrade()
            assert migrated.execute("SELECT version_num FROM alembic_version") == [("0001",)]
    alembic.upgrade()
    alembic.metadata = shop(SOFT)
    assert guarded(migrated) == {"public.customers": "soft", "public.orders": "soft"}
    assert alembic.pending() == ""
    alembic.downgrade("0001")
    alembic.metadata = shop()
    assert guarded(migrated) == {}
    assert (
        migrated.execute(
            "SELECT FROM pg_attribute WHERE attname = 'deleted_at' AND attrelid = 'orders'::regclass"
        )
        == []
    )


def test_an_index_that_became_invalid_is_built_again(migrated: Database, tmp_path: Path) -> None:
    alembic = project(tmp_path, migrated, shop())
    alembic.write("op.guard_tables(['orders', 'customers'], mode='soft')")
    alembic.metadata = shop(SOFT)
    alembic.upgrade()
    migrated.execute(
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'customers_email_key'::regclass"
    )
    text = alembic.autogenerate()
    assert body(text, "upgrade") == ["op.guard_table('customers', mode='soft', existing_mode='soft')"]
    alembic.upgrade()
    assert migrated.execute(
        "SELECT indisvalid FROM pg_index WHERE indexrelid = 'customers_email_key'::regclass"
    ) == [(True,)]
    assert alembic.pending() == ""


def test_a_failed_revision_leaves_its_number_and_goes_through_later(
    migrated: Database, tmp_path: Path
) -> None:
    alembic = project(tmp_path, migrated, shop())
    migrated.execute("ALTER TABLE orders ADD COLUMN deleted_at boolean")
    alembic.write("op.guard_tables(['customers', 'orders'], mode='soft')")
    with pytest.raises(CommandError, match="column_name_taken"):
        alembic.upgrade()
    assert migrated.execute("SELECT version_num FROM alembic_version") == [("0001",)]
    migrated.execute("ALTER TABLE orders DROP COLUMN deleted_at")
    alembic.upgrade()
    assert migrated.execute("SELECT version_num FROM alembic_version") == [("0002",)]
    assert guarded(migrated) == {"public.customers": "soft", "public.orders": "soft"}


def test_journal_and_auto(migrated: Database, tmp_path: Path) -> None:
    alembic = project(tmp_path, migrated, shop())
    alembic.write("op.guard_table('orders', mode='journal')", "op.unguard_table('orders')")
    alembic.write("op.guard_table('customers')", "op.unguard_table('customers')")
    alembic.upgrade()
    assert guarded(migrated) == {"public.customers": "soft", "public.orders": "journal"}
    alembic.downgrade("0001")
    assert guarded(migrated) == {}


def test_without_the_schema_sqlguard_the_way_out_is_named(database: Database, tmp_path: Path) -> None:
    alembic = project(tmp_path, database, shop())
    assert alembic.pending() == ""
    alembic.metadata = shop(SOFT)
    alembic.autogenerate()
    with pytest.raises(CommandError, match="sqlguard migrate"):
        alembic.upgrade()


def test_a_table_that_is_not_there(migrated: Database, tmp_path: Path) -> None:
    alembic = project(tmp_path, migrated, shop())
    alembic.write("op.guard_table('nothing', schema='nowhere')")
    with pytest.raises(CommandError, match=r"there is no table `nowhere.nothing`"):
        alembic.upgrade()


def test_the_preflights_notes_are_logged(
    migrated: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alembic = project(tmp_path, migrated, shop())
    alembic.write("op.guard_table('customers', mode='soft')")
    with caplog.at_level(logging.INFO, "sqlguard.alembic"):
        alembic.upgrade()
    assert any("on_conflict_needs_predicate" in message for message in caplog.messages)


# Before the plugins Alembic reflects the schema `sqlguard`, too, and warns of types that it does not know.
@pytest.mark.parametrize("filtered", [True, False] if PLUGINS else [True])
def test_several_schemas_and_a_naming_convention(
    migrated: Database, tmp_path: Path, *, filtered: bool
) -> None:
    migrated.execute("CREATE SCHEMA sales")

    def models(info: Any = None) -> MetaData:
        metadata = MetaData(
            naming_convention={"uq": "uq_%(table_name)s_%(column_0_name)s", "ix": "ix_%(column_0_label)s"}
        )
        Table(
            "people",
            metadata,
            Column("id", Integer, primary_key=True),
            Column("mail", Text, unique=True),
            info=info,
        )
        Table(
            "orders",
            metadata,
            Column("id", Integer, primary_key=True),
            Column("number", Text),
            Column("person", ForeignKey("people.id", ondelete="SET NULL"), index=True),
            UniqueConstraint("number", "person"),
            Index("ux_orders_lower", "number", unique=True),
            schema="sales",
            info=info,
        )
        return metadata

    options = {"include_schemas": True, **({"include_name": include_name} if filtered else {})}
    alembic = project(tmp_path, migrated, models(), options=options)
    assert alembic.pending() == ""
    alembic.metadata = models(SOFT)
    text = alembic.autogenerate()
    assert body(text, "upgrade") == [
        "op.guard_table('people', mode='soft')",
        "op.guard_table('orders', schema='sales', mode='soft')",
    ]
    for _ in range(2):
        alembic.upgrade()
        assert alembic.pending() == ""
        assert guarded(migrated) == {"public.people": "soft", "sales.orders": "soft"}
        alembic.downgrade("0001")
        assert guarded(migrated) == {}


def test_the_demos_own_migration(migrated: Database) -> None:
    migrated.load(stage.HERE.joinpath("shop.sql").read_text(encoding="utf-8"))
    for _ in range(2):
        stage.guard_the_shop(migrated.dsn)
        assert guarded(migrated) == dict.fromkeys(
            [f"public.{table}" for table in ("customers", "staff", "products", "orders", "items")], "soft"
        )
