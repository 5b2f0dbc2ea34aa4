"""SQLAlchemy through the proxy, with both drivers: an ORM's day."""

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa
from end_to_end.wired import Agent, Wired
from sqlalchemy import orm
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine


class Base(orm.DeclarativeBase):
    pass


class Customer(Base):
    __tablename__ = "customers"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    name: orm.Mapped[str]
    email: orm.Mapped[str]
    city: orm.Mapped[str | None]
    joined_on: orm.Mapped[Any] = orm.mapped_column(sa.Date)
    orders: orm.Mapped[list["Order"]] = orm.relationship(back_populates="customer", passive_deletes="all")


class Order(Base):
    __tablename__ = "orders"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    customer_id: orm.Mapped[int] = orm.mapped_column(sa.ForeignKey("customers.id"))
    note: orm.Mapped[str | None]
    customer: orm.Mapped[Customer] = orm.relationship(back_populates="orders")


def work(session: orm.Session) -> dict[str, Any]:
    """What both drivers have to do alike."""
    seen: dict[str, Any] = {}
    customer = session.scalars(
        sa.select(Customer).where(Customer.id == 90).options(orm.selectinload(Customer.orders))
    ).one()
    seen["orders"] = len(customer.orders)
    customer.city = "Quito"
    session.flush()
    order = customer.orders[0]
    order.note = "by the ORM"
    with session.begin_nested() as nested:
        order.note = "never"
        session.flush()
        nested.rollback()
    session.delete(customer)
    session.flush()
    seen["left"] = session.scalar(sa.select(sa.func.count()).where(Customer.id == 90))
    seen["deleted"] = session.execute(sa.delete(Customer).where(Customer.id.in_([91, 92]))).rowcount
    seen["updated"] = (
        session.execute(sa.update(Order).where(Order.id < 4).values(note="bulk").returning(Order.id))
        .scalars()
        .all()
    )
    session.execute(sa.insert(Customer), [new(700 + n) for n in range(5)])
    session.commit()
    return seen


def new(number: int) -> dict[str, Any]:
    import datetime  # noqa: PLC0415

    return {
        "id": number,
        "name": f"New {number}",
        "email": f"new{number}@shop.example",
        "city": None,
        "joined_on": datetime.date(2024, 1, 1),
    }


def check(world: Wired, seen: dict[str, Any]) -> None:
    assert seen == {"orders": 4, "left": 0, "deleted": 2, "updated": [1, 2, 3]}
    gone = world.owner.execute("SELECT id FROM customers WHERE deleted_at IS NOT NULL ORDER BY id").fetchall()
    assert gone == [(90,), (91,), (92,)]
    assert world.value("SELECT count(*) FROM customers WHERE id >= 700") == 5


def test_psycopg(wired_world: Wired, agent: Agent) -> None:
    engine = sa.create_engine(agent.dsn.replace("postgresql:", "postgresql+psycopg:"))
    try:
        with orm.Session(engine) as session:
            check(wired_world, work(session))
        with engine.connect() as conn:
            assert sa.inspect(conn).get_pk_constraint("orders")["constrained_columns"] == ["id"]
            assert {c["name"] for c in sa.inspect(conn).get_columns("orders")} >= {"id", "customer_id"}
            with pytest.raises(sa.exc.DatabaseError):
                conn.execute(sa.text("DROP TABLE orders"))
    finally:
        engine.dispose()


def test_asyncpg(wired_world: Wired, agent: Agent) -> None:
    async def inside() -> dict[str, Any]:
        engine = create_async_engine(agent.dsn.replace("postgresql:", "postgresql+asyncpg:"))
        try:
            async with AsyncSession(engine) as session:
                return await session.run_sync(work)
        finally:
            await engine.dispose()

    check(wired_world, asyncio.run(inside()))


def test_a_pool_pings_and_recycles(agent: Agent) -> None:
    engine = sa.create_engine(
        agent.dsn.replace("postgresql:", "postgresql+psycopg:"),
        pool_pre_ping=True,
        pool_size=2,
        pool_recycle=1,
    )
    try:
        for _ in range(5):
            with engine.connect() as conn:
                assert conn.scalar(sa.text("SELECT 1")) == 1
    finally:
        engine.dispose()
