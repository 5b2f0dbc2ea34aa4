"""
For the owner's own SQLAlchemy code: models of soft-deleted tables that do not show deleted rows.

The one idea: row-level security hides deleted rows from agents, not from the table's owner. A model with
SoftDeleteMixin is filtered by the session instead, in every ORM query, join, relationship load, bulk update
and bulk delete of any Session; `execution_options(include_deleted=True)` takes the filter off one query.
Text and Core statements, which name tables and not models, are left as they are.

    class Order(SoftDeleteMixin, Base):
        __tablename__ = "orders"
        ...

    session.scalars(select(Order))                                                   # without deleted orders
    session.scalars(select(Order).execution_options(include_deleted=True))           # all
    session.get(Order, 7, execution_options={"include_deleted": True})
"""

from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import DateTime, Table, Text, event
from sqlalchemy.orm import (
    Mapped,
    Mapper,
    ORMExecuteState,
    Session,
    declared_attr,
    mapped_column,
    with_loader_criteria,
)

from sqlguard.catalog import DELETED_AT, DELETED_BY_AGENT

#: The execution option that takes the filter off one query.
INCLUDE_DELETED = "include_deleted"
#: The key of `Table.info` that declares a guard; see `sqlguard.alembic`.
DECLARATION = "sqlguard"
#: Behind the columns of any model, as ALTER TABLE puts them behind those of the table.
_LAST = 9_999


class SoftDeleteMixin:
    """The bookkeeping columns of a table guarded as `soft`, and the declaration that it is to be guarded."""

    if TYPE_CHECKING:
        deleted_at: Mapped[datetime | None]
        deleted_by_agent: Mapped[str | None]
    else:
        # Without annotations, so that a model may be a dataclass; the columns are then no fields of it.
        @declared_attr
        def deleted_at(cls):  # noqa: ANN201, N805 (of the class, as SQLAlchemy calls it)
            return mapped_column(DELETED_AT, DateTime(timezone=True), nullable=True, sort_order=_LAST)

        @declared_attr
        def deleted_by_agent(cls):  # noqa: ANN201, N805
            return mapped_column(DELETED_BY_AGENT, Text, nullable=True, sort_order=_LAST)


@event.listens_for(SoftDeleteMixin, "instrument_class", propagate=True)
def _declare(mapper: Mapper[Any], _: type[Any]) -> None:
    """Declare the guard on the model's table, whatever `__table_args__` says besides."""
    if isinstance(mapper.local_table, Table):
        mapper.local_table.info.setdefault(DECLARATION, {"mode": "soft"})


@event.listens_for(Session, "do_orm_execute")
def _filter_deleted(state: ORMExecuteState) -> None:
    # A column load refreshes a row that the session already holds; without it the object could not be read.
    if not state.is_orm_statement or state.is_column_load or state.execution_options.get(INCLUDE_DELETED):
        return
    if state.is_select or state.is_update or state.is_delete:
        # Relationship loads are statements of their own here: an object that no query loaded has no option
        # that would reach them. (Joined loads are reached by the option of their query.)
        state.statement = state.statement.options(
            with_loader_criteria(SoftDeleteMixin, _is_live, include_aliases=True)
        )


def _is_live(model: type[SoftDeleteMixin]) -> Any:
    return model.deleted_at.is_(None)
