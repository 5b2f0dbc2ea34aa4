"""What `include_object` and `include_name` leave out, and what they do not."""

from sqlalchemy import CheckConstraint, Column, DateTime, Index, Integer, MetaData, Table, Text, text

from sqlguard.alembic import include_name, include_object

soft = Table(
    "orders",
    MetaData(),
    Column("id", Integer),
    Column("mail", Text),
    Column("deleted_at", DateTime(timezone=True)),
    Column("deleted_by_agent", Text),
)
own = Table("notes", MetaData(), Column("id", Integer), Column("deleted_at", DateTime(timezone=True)))


def included(
    thing: object, name: str, kind: str, *, reflected: bool = True, compare_to: object = None
) -> bool:
    return include_object(thing, name, kind, reflected, compare_to)


def test_bookkeeping_columns_that_no_model_has() -> None:
    assert not included(soft.c.deleted_at, "deleted_at", "column")
    assert not included(soft.c.deleted_by_agent, "deleted_by_agent", "column")
    assert included(soft.c.mail, "mail", "column")
    assert included(soft.c.deleted_at, "deleted_at", "column", compare_to=soft.c.deleted_at)
    assert included(soft.c.deleted_at, "deleted_at", "column", reflected=False)
    assert included(own.c.deleted_at, "deleted_at", "column")


def test_indexes_over_live_rows() -> None:
    partial = Index("u", soft.c.mail, unique=True, postgresql_where=text("(deleted_at IS NULL)"))
    full = Index("f", soft.c.mail, unique=True)
    of_own = Index("o", own.c.id, postgresql_where=text("(deleted_at IS NULL)"))
    building = Index("sg_u_12345678", soft.c.mail)
    assert not included(partial, "u", "index")
    assert not included(building, "sg_u_12345678", "index")
    assert included(full, "f", "index")
    assert included(of_own, "o", "index")


def test_the_schema_of_sqlguard() -> None:
    assert not included(Table("action", MetaData(), schema="sqlguard"), "action", "table")
    assert included(own, "notes", "table")
    assert not include_name("sqlguard", "schema", {})
    assert include_name("sales", "schema", {})
    assert include_name(None, "schema", {})
    assert not include_name("action", "table", {"schema_name": "sqlguard"})
    assert include_name("action", "table", {"schema_name": None})


def test_constraints() -> None:
    assert not included(CheckConstraint("true", name="sg_x"), "sg_x", "check_constraint")
    assert included(CheckConstraint("true", name="x"), "x", "check_constraint")
