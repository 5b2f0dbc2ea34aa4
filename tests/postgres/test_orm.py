"""Application code with SoftDeleteMixin sees no deleted row, unless a query asks for them."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
import sqlalchemy
from servers import Database
from sqlalchemy import ForeignKey, create_engine, delete, func, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    Session,
    aliased,
    joinedload,
    mapped_column,
    relationship,
    selectinload,
    subqueryload,
)
from sqlalchemy.pool import NullPool

from sqlguard.orm import SoftDeleteMixin

#: From 2.1 on SQLAlchemy takes the filter into `exists()`, `any()` and `has()`.
FILTERS_INSIDE = not sqlalchemy.__version__.startswith("2.0.")
GONE = datetime(2024, 5, 1, tzinfo=UTC)


class Base(DeclarativeBase):
    pass


class Customer(SoftDeleteMixin, Base):
    __tablename__ = "customers"
    __table_args__ = ({"comment": "who buys"},)
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    orders: Mapped[list["Order"]] = relationship(back_populates="customer")


class Order(SoftDeleteMixin, Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer_id: Mapped[int] = mapped_column(ForeignKey("customers.id"))
    total: Mapped[int] = mapped_column(default=0)
    customer: Mapped[Customer] = relationship(back_populates="orders")
    notes: Mapped[list["Note"]] = relationship()


class Note(Base):
    __tablename__ = "notes"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"))


@pytest.fixture
def session(database: Database) -> Iterator[Session]:
    """Customers 1 and 2 (2 deleted); orders 11 and 12 (12 deleted) of 1, 21 of 2; a note each."""
    engine = create_engine("postgresql+psycopg://", creator=lambda: database.connect(autocommit=False))
    Base.metadata.create_all(engine)
    with Session(engine) as opened:
        opened.add_all(
            [
                Customer(id=1, name="a"),
                Customer(id=2, name="b", deleted_at=GONE, deleted_by_agent="bot"),
                Order(id=11, customer_id=1),
                Order(id=12, customer_id=1, deleted_at=GONE),
                Order(id=21, customer_id=2),
            ]
        )
        opened.flush()
        opened.add_all([Note(id=n, order_id=n) for n in (11, 12, 21)])
        opened.commit()
        yield opened
    engine.dispose()


ALL = {"include_deleted": True}


def test_queries_leave_out_deleted_rows_and_one_can_ask_for_them(session: Session) -> None:
    assert session.scalars(select(Order.id).order_by(Order.id)).all() == [11, 21]
    assert session.scalars(select(Order).order_by(Order.id)).all() == [
        session.get(Order, 11),
        session.get(Order, 21),
    ]
    assert session.scalar(select(func.count()).select_from(Order)) == 2
    assert session.scalar(select(func.count()).select_from(Order).execution_options(**ALL)) == 3
    assert session.query(Order).count() == 2
    assert session.query(Order).execution_options(**ALL).count() == 3


def test_get_finds_a_deleted_row_only_when_asked(session: Session) -> None:
    assert session.get(Order, 12) is None
    found = session.get(Order, 12, execution_options=ALL)
    assert found is not None
    assert found.deleted_at == GONE
    session.refresh(found)
    assert found.deleted_at == GONE


def test_an_object_that_was_deleted_meanwhile_can_be_refreshed(session: Session) -> None:
    held = session.scalars(select(Order).where(Order.id == 11)).one()
    session.execute(text("UPDATE orders SET deleted_at = now(), deleted_by_agent = 'bot' WHERE id = 11"))
    session.refresh(held)
    assert held.deleted_by_agent == "bot"
    session.expire(held)
    assert held.deleted_by_agent == "bot"


def test_joins_and_aliases_are_filtered(session: Session) -> None:
    other = aliased(Order)
    assert session.execute(select(Customer.id, Order.id).join(Customer.orders)).all() == [(1, 11)]
    assert session.execute(
        select(Customer.id, other.id).outerjoin(other, other.customer_id == Customer.id)
    ).all() == [(1, 11)]
    wanted = select(Note.id).join(Order, Order.id == Note.order_id).order_by(Note.id)
    assert session.scalars(wanted).all() == [11, 21]
    assert session.scalars(wanted.execution_options(**ALL)).all() == [11, 12, 21]


def test_an_outer_join_keeps_the_row_whose_partner_is_deleted(session: Session) -> None:
    rows = session.execute(
        select(Note.id, Order.id).outerjoin(Order, Order.id == Note.order_id).order_by(Note.id)
    ).all()
    assert rows == [(11, 11), (12, None), (21, 21)]


def test_subqueries_are_filtered(session: Session) -> None:
    busy = select(Customer.id).where(Customer.orders.any(Order.id == 12))
    assert session.scalars(busy).all() == ([] if FILTERS_INSIDE else [1])
    of_live = Customer.orders.any((Order.id == 12) & Order.deleted_at.is_(None))
    assert session.scalars(select(Customer.id).where(of_live)).all() == []
    assert session.scalars(select(Note.id).where(Note.order_id.in_(select(Order.id)))).all() == [11, 21]


@pytest.mark.parametrize("load", [None, joinedload, selectinload, subqueryload])
def test_relationship_loads_are_filtered(session: Session, load: object) -> None:
    query = select(Customer)
    if load is not None:
        query = query.options(load(Customer.orders))  # type: ignore[operator]
    customer = session.scalars(query).unique().one()
    assert [order.id for order in customer.orders] == [11]


@pytest.mark.parametrize("load", [joinedload, selectinload, subqueryload])
def test_eager_loads_of_a_query_that_asks_for_all_have_all(session: Session, load: object) -> None:
    query = select(Customer).options(load(Customer.orders)).order_by(Customer.id)  # type: ignore[operator]
    found = session.scalars(query.execution_options(**ALL)).unique().all()
    assert [[order.id for order in sorted(c.orders, key=lambda o: o.id)] for c in found] == [[11, 12], [21]]


def test_a_lazy_load_of_an_object_that_no_query_loaded_is_filtered(session: Session) -> None:
    added = Customer(id=3, name="c")
    session.add(added)
    session.flush()
    session.execute(insert(Order), [{"id": 31, "customer_id": 3}, {"id": 32, "customer_id": 3}])
    session.execute(update(Order).where(Order.id == 32).values(deleted_at=GONE))
    session.expire(added, ["orders"])
    assert [order.id for order in added.orders] == [31]


def test_a_deleted_parent_is_none(session: Session) -> None:
    order = session.get(Order, 21)
    assert order is not None
    assert order.customer is None


def test_bulk_updates_and_deletes_leave_deleted_rows_alone(session: Session) -> None:
    assert session.execute(update(Order).values(total=5)).rowcount == 2
    assert session.execute(delete(Note).where(Note.order_id.in_(select(Order.id)))).rowcount == 2
    assert session.execute(delete(Order)).rowcount == 2
    assert session.execute(text("SELECT id, total FROM orders")).all() == [(12, 0)]
    assert session.execute(delete(Note)).rowcount == 1
    assert session.execute(delete(Order).execution_options(**ALL)).rowcount == 1


def test_core_statements_are_left_as_they_are(session: Session) -> None:
    assert len(session.execute(select(Order.__table__.c.id)).all()) == 3
    assert len(session.execute(text("SELECT id FROM orders")).all()) == 3


def test_the_mixin_declares_the_guard_and_puts_its_columns_last() -> None:
    assert Customer.__table__.info["sqlguard"] == {"mode": "soft"}
    assert Customer.__table__.comment == "who buys"
    assert [column.name for column in Order.__table__.columns] == [
        "id",
        "customer_id",
        "total",
        "deleted_at",
        "deleted_by_agent",
    ]
    assert "sqlguard" not in Note.__table__.info


def test_a_declaration_of_the_models_own_is_kept() -> None:
    class Fresh(DeclarativeBase):
        pass

    class Log(SoftDeleteMixin, Fresh):
        __tablename__ = "log"
        __table_args__ = ({"info": {"sqlguard": {"mode": "soft", "unique": "keep"}}},)
        id: Mapped[int] = mapped_column(primary_key=True)

    assert Log.__table__.info["sqlguard"] == {"mode": "soft", "unique": "keep"}


def test_models_that_are_dataclasses(database: Database) -> None:
    class Fresh(MappedAsDataclass, DeclarativeBase):
        pass

    class Item(SoftDeleteMixin, Fresh):
        __tablename__ = "dataclass_items"
        id: Mapped[int] = mapped_column(primary_key=True)
        name: Mapped[str] = mapped_column(default="x")

    engine = create_engine("postgresql+psycopg://", creator=lambda: database.connect(autocommit=False))
    Fresh.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all([Item(id=1), Item(id=2)])
        session.flush()
        session.execute(text("UPDATE dataclass_items SET deleted_at = now() WHERE id = 2"))
        session.commit()
        assert session.scalars(select(Item.id)).all() == [1]
    engine.dispose()


def test_async_sessions_are_filtered(session: Session, database: Database) -> None:
    url = database.dsn.replace("postgresql://", "postgresql+asyncpg://")

    async def ids() -> tuple[list[int], list[int]]:
        engine = create_async_engine(url, poolclass=NullPool)
        async with AsyncSession(engine) as opened:
            some = (await opened.scalars(select(Order.id).order_by(Order.id))).all()
            every = (await opened.scalars(select(Order.id).execution_options(**ALL))).all()
        await engine.dispose()
        return list(some), sorted(every)

    assert asyncio.run(ids()) == ([11, 21], [11, 12, 21])
