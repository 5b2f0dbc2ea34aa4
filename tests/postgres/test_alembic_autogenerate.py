"""Autogenerate on a real server: proposes what the models declare, nothing when nothing changed, never our objects."""

from pathlib import Path
from typing import Any

import pytest
from alembic.util import CommandError
from alembic_world import PLUGINS, SOFT, Project, body, guarded, orders
from servers import Database
from sqlalchemy import (
    Column,
    DateTime,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqlguard.alembic import declare_policies
from sqlguard.orm import SoftDeleteMixin
from sqlguard.policy import parse_policy


@pytest.fixture
def alembic(migrated: Database, tmp_path: Path) -> Project:
    """A project whose table `orders` is guarded as soft, by its second revision."""
    made = Project(tmp_path / "project", migrated, orders())
    made.autogenerate()
    made.upgrade()
    made.metadata = orders(SOFT)
    made.autogenerate()
    made.upgrade()
    assert made.pending() == ""
    return made


@pytest.mark.parametrize(
    ("info", "written"),
    [
        ({"sqlguard": {"mode": "journal"}}, "op.guard_table('orders', mode='journal')"),
        (
            {"sqlguard": {"mode": "soft", "unique": "keep"}},
            "op.guard_table('orders', mode='soft', unique='keep')",
        ),
        ({"sqlguard": "soft"}, "op.guard_table('orders', mode='soft')"),
        ({"sqlguard": True}, "op.guard_table('orders', mode='auto')"),
        ({"soft_delete": True}, "op.guard_table('orders', mode='soft')"),
    ],
)
def test_every_form_of_declaration(migrated: Database, tmp_path: Path, info: Any, written: str) -> None:
    made = Project(tmp_path / "project", migrated, orders(info))
    assert body(made.autogenerate(), "upgrade")[-1] == written
    made.upgrade()
    assert made.pending() == ""
    made.downgrade("base")
    assert guarded(migrated) == {}


@pytest.mark.parametrize("said", [False, {"mode": "hard"}, {"modus": "soft"}, 7])
def test_what_is_no_declaration(migrated: Database, tmp_path: Path, said: Any) -> None:
    made = Project(tmp_path / "project", migrated, orders({"sqlguard": said}))
    if said is False:
        assert not any("guard_table" in line for line in body(made.autogenerate(), "upgrade"))
        return
    with pytest.raises(Exception, match="declares no guard"):
        made.autogenerate()


def test_another_mode_and_back(alembic: Project, migrated: Database) -> None:
    alembic.metadata = orders({"sqlguard": {"mode": "journal"}})
    text = alembic.autogenerate()
    assert body(text, "upgrade") == ["op.guard_table('orders', mode='journal', existing_mode='soft')"]
    assert body(text, "downgrade") == ["op.guard_table('orders', mode='soft', existing_mode='journal')"]
    alembic.upgrade()
    assert guarded(migrated) == {"public.orders": "journal"}
    assert alembic.pending() == ""
    alembic.downgrade("0002")
    assert guarded(migrated) == {"public.orders": "soft"}
    alembic.upgrade()
    assert alembic.pending() == ""


@pytest.mark.parametrize("info", [{"sqlguard": False}, {"sqlguard": None}, {"soft_delete": False}])
def test_a_table_that_is_declared_as_not_guarded(alembic: Project, migrated: Database, info: Any) -> None:
    alembic.metadata = orders(info)
    text = alembic.autogenerate()
    assert body(text, "upgrade") == ["op.unguard_table('orders')"]
    assert body(text, "downgrade") == ["op.guard_table('orders', mode='soft')"]
    alembic.upgrade()
    assert guarded(migrated) == {}
    assert alembic.pending() == ""


def test_guards_of_a_project_that_declares_none_are_left_alone(alembic: Project) -> None:
    alembic.metadata = orders()
    assert alembic.pending() == ""


def test_a_project_that_declares_guards_lifts_what_it_does_not_declare(alembic: Project) -> None:
    alembic.metadata = orders()
    Table("notes", alembic.metadata, Column("id", Integer, primary_key=True), info=SOFT)
    assert body(alembic.autogenerate(), "upgrade")[0] == "op.unguard_table('orders')"


def test_tables_that_deletes_reach_are_guarded_by_name(migrated: Database, tmp_path: Path) -> None:
    metadata = orders(SOFT)
    for name, parent, action in (
        ("items", "orders", "CASCADE"),
        ("parts", "items", "SET NULL (item)"),
        ("bills", "orders", "RESTRICT"),
    ):
        key = parent.rstrip("s")
        Table(
            name,
            metadata,
            Column("id", Integer, primary_key=True),
            Column(key, ForeignKey(f"{parent}.id", ondelete=action)),
        )
    made = Project(tmp_path / "project", migrated, metadata)
    text = body(made.autogenerate(), "upgrade")
    assert text[-2:] == [
        "op.guard_table('orders', mode='soft')",
        "op.guard_tables(['items', 'parts'], mode='auto')",
    ]
    made.upgrade()
    assert made.pending() == ""
    assert guarded(migrated) == {f"public.{name}": "soft" for name in ("items", "orders", "parts")}
    made.downgrade("base")
    assert guarded(migrated) == {}


@pytest.mark.parametrize(
    "damage",
    [
        "DROP TRIGGER sqlguard_update ON orders",
        "ALTER TABLE orders DISABLE TRIGGER sqlguard_delete",
        "DROP POLICY sqlguard_live_select ON orders",
        "ALTER POLICY sqlguard_live_select ON orders USING (true)",
        "ALTER TABLE orders DISABLE ROW LEVEL SECURITY",
        "ALTER TABLE orders ADD COLUMN extra integer",
        "ALTER TABLE orders DROP COLUMN deleted_by_agent CASCADE",
        "UPDATE sqlguard.guarded_table SET version = 0",
        "CREATE UNIQUE INDEX extra ON orders (note)",
        """
        DO $$ DECLARE f text := (SELECT proname FROM pg_proc WHERE proname LIKE 'capture_public_orders%'); BEGIN
        EXECUTE format('CREATE OR REPLACE FUNCTION sqlguard.%I() RETURNS trigger LANGUAGE plpgsql AS
        ''BEGIN RETURN NULL; END''', f); END $$
        """,
    ],
)
def test_a_damaged_guard_is_mended(alembic: Project, migrated: Database, damage: str) -> None:
    migrated.execute(damage)
    if "extra integer" in damage:
        alembic.metadata = orders(SOFT, Column("extra", Integer))
    if "INDEX" in damage:
        alembic.metadata = orders(SOFT, Index("extra", "note", unique=True))
    text = alembic.autogenerate()
    mend = ["op.guard_table('orders', mode='soft', existing_mode='soft')"]
    assert (body(text, "upgrade"), body(text, "downgrade")) == (mend, mend)
    alembic.upgrade()
    assert alembic.pending() == ""


def test_a_new_column_is_added_with_the_guard_renewed(alembic: Project) -> None:
    alembic.metadata = orders(SOFT, Column("extra", Integer))
    text = alembic.autogenerate()
    renewed = "op.guard_table('orders', mode='soft', existing_mode='soft')"
    assert body(text, "upgrade") == [
        "op.loosen_guard('orders')",
        "op.add_column('orders', sa.Column('extra', sa.Integer(), nullable=True))",
        renewed,
    ]
    assert body(text, "downgrade") == [
        "op.loosen_guard('orders')",
        "op.drop_column('orders', 'extra')",
        renewed,
    ]
    for _ in range(2):
        alembic.upgrade()
        assert alembic.pending() == ""
        alembic.downgrade("0002")


def test_columns_are_dropped_and_retyped_under_the_guard(alembic: Project, migrated: Database) -> None:
    metadata = MetaData()
    Table(
        "orders",
        metadata,
        Column("id", Integer, primary_key=True),
        Column("number", String(40), unique=True),
        info=SOFT,
    )
    alembic.metadata = metadata
    migrated.execute("INSERT INTO orders VALUES (1, 'a', 'b', now(), 'bot')")
    alembic.autogenerate()
    for _ in range(2):
        alembic.upgrade()
        assert alembic.pending() == ""
        assert migrated.execute("SELECT count(*) FROM sqlguard.freeze WHERE thawed_at IS NULL") == [(0,)]
        alembic.downgrade("0002")
        assert migrated.execute("SELECT count(note) FROM orders") == [(0,)]
        assert migrated.execute("SELECT tgname FROM pg_trigger WHERE tgname = 'sqlguard_bookkeeping'") != []
    assert migrated.execute("SELECT id, deleted_by_agent FROM orders") == [(1, "bot")]


def test_a_change_that_fails_leaves_the_guard_whole(alembic: Project, migrated: Database) -> None:
    alembic.write("op.loosen_guard('orders'); op.drop_column('orders', 'nonesuch'); op.guard_table('orders')")
    with pytest.raises(ProgrammingError, match="nonesuch"):
        alembic.upgrade()
    assert alembic.pending_now() == ""
    assert migrated.execute("SELECT count(*) FROM sqlguard.freeze") == [(0,)]


def test_a_loosened_table_is_frozen_until_it_is_guarded(alembic: Project, migrated: Database) -> None:
    alembic.write("op.loosen_guard('orders')")
    alembic.upgrade()
    found = "SELECT tables, thawed_at IS NULL FROM sqlguard.freeze"
    assert migrated.execute(found) == [(["public.orders"], True)]
    assert body(alembic.autogenerate(), "upgrade") == [
        "op.guard_table('orders', mode='soft', existing_mode='soft')"
    ]
    alembic.upgrade()
    assert migrated.execute(found) == [(["public.orders"], False)]
    assert alembic.pending() == ""


def test_a_unique_constraint_goes_when_the_model_drops_it(alembic: Project, migrated: Database) -> None:
    alembic.metadata = orders(SOFT, unique=False)
    text = alembic.autogenerate()
    assert any("drop_index" in line and "orders_number_key" in line for line in body(text, "upgrade"))
    alembic.upgrade()
    assert migrated.execute("SELECT to_regclass('orders_number_key')") == [(None,)]
    assert alembic.pending() == ""


@pytest.mark.parametrize(
    "rule",
    [
        lambda: UniqueConstraint("number", "note", name="both"),
        lambda: Index("both", "number", "note", unique=True),
        lambda: Index("both", text("lower(note)"), unique=True),
        lambda: Index("both", "note", unique=True, postgresql_where=text("note <> ''")),
    ],
)
def test_a_new_unique_rule_becomes_one_of_live_rows(alembic: Project, migrated: Database, rule: Any) -> None:
    alembic.metadata = orders(SOFT, rule())
    written = alembic.autogenerate()
    assert body(written, "upgrade")[-1] == "op.guard_table('orders', mode='soft', existing_mode='soft')"
    alembic.upgrade()
    assert "deleted_at IS NULL" in migrated.execute("SELECT pg_get_indexdef('both'::regclass)")[0][0]
    assert alembic.pending() == ""


def test_the_applications_own_deleted_at_is_the_applications(migrated: Database, tmp_path: Path) -> None:
    made = Project(
        tmp_path / "project", migrated, orders(None, Column("deleted_at", DateTime(timezone=True)))
    )
    made.autogenerate()
    made.upgrade()
    made.metadata = orders()
    assert body(made.autogenerate(), "upgrade") == ["op.drop_column('orders', 'deleted_at')"]


def test_a_table_that_goes_loses_its_guard_first(alembic: Project, migrated: Database) -> None:
    alembic.metadata = MetaData()
    text = alembic.autogenerate()
    assert body(text, "upgrade") == [
        "op.unguard_table('orders')",
        "op.drop_constraint('orders_number_key', 'orders', type_='unique')",
        "op.drop_table('orders')",
    ]
    alembic.upgrade()
    assert guarded(migrated) == {}
    assert alembic.pending() == ""
    alembic.downgrade("0002")
    assert guarded(migrated) == {"public.orders": "soft"}
    alembic.upgrade()
    assert alembic.pending() == ""


def test_the_mixin(migrated: Database, tmp_path: Path) -> None:
    class Base(DeclarativeBase):
        pass

    class Order(SoftDeleteMixin, Base):
        __tablename__ = "orders"
        id: Mapped[int] = mapped_column(primary_key=True)
        number: Mapped[str | None] = mapped_column(Text, unique=True)
        note: Mapped[str | None] = mapped_column(Text)

    made = Project(tmp_path / "new", migrated, Base.metadata)
    text = made.autogenerate()
    assert body(text, "upgrade")[-1] == "op.guard_table('orders', mode='soft')"
    for _ in range(2):
        made.upgrade()
        assert made.pending() == ""
        made.downgrade("base")
    assert migrated.execute("SELECT to_regclass('orders')") == [(None,)]
    migrated.execute("DROP TABLE alembic_version")

    # The same model on a table that was there before: guarding adds the columns, and takes them again.
    made = Project(tmp_path / "old", migrated, orders())
    made.autogenerate()
    made.upgrade()
    made.metadata = Base.metadata
    assert body(made.autogenerate(), "upgrade") == ["op.guard_table('orders', mode='soft')"]
    for _ in range(2):
        made.upgrade()
        assert made.pending() == ""
        made.downgrade("0001")
        assert (
            migrated.execute(
                "SELECT FROM pg_attribute WHERE attname = 'deleted_at' AND attrelid = 'orders'::regclass"
            )
            == []
        )


def test_a_reason_that_does_not_matter_is_accepted_by_name(migrated: Database, tmp_path: Path) -> None:
    made = Project(tmp_path / "project", migrated, orders())
    made.autogenerate()
    made.upgrade()
    migrated.load(
        """
        CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
        CREATE TRIGGER note AFTER DELETE ON orders EXECUTE FUNCTION note();
        """
    )
    made.metadata = orders(SOFT)
    made.autogenerate()
    with pytest.raises(CommandError, match="user_delete_trigger"):
        made.upgrade()
    next((made.folder / "versions").glob("0002_*")).unlink()
    made.metadata = orders({"sqlguard": {"mode": "soft", "accept": ["user_delete_trigger"]}})
    written = "op.guard_table('orders', mode='soft', accept=['user_delete_trigger'])"
    assert body(made.autogenerate(), "upgrade") == [written]
    made.upgrade()
    assert guarded(migrated) == {"public.orders": "soft"}
    assert made.pending() == ""


def test_modes_from_policy_files(migrated: Database, tmp_path: Path) -> None:
    policy = parse_policy('name = "support"\n[tables."public.orders"]\ndelete = "journal"\n', "support.toml")
    metadata = orders()
    declare_policies(metadata, [policy])
    made = Project(tmp_path / "project", migrated, metadata)
    assert body(made.autogenerate(), "upgrade")[-1] == "op.guard_table('orders', mode='journal')"


@pytest.mark.skipif(not PLUGINS, reason="Alembic has no plugins before 1.18")
def test_autogenerate_can_be_switched_off(migrated: Database, tmp_path: Path) -> None:
    off = {"autogenerate_plugins": ["alembic.autogenerate.*", "~alembic.autogenerate.sqlguard"]}
    made = Project(tmp_path / "project", migrated, orders(SOFT), options=off)
    assert not any("guard_table" in line for line in body(made.autogenerate(), "upgrade"))
