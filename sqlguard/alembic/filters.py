"""
What autogenerate must leave alone, for `context.configure(include_object=…, include_name=…)`.

The comparator removes what concerns our objects from a generated revision by itself, with the catalog at hand;
these two are for projects that switch it off, and keep Alembic from reflecting what it need not see.
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import CheckConstraint, Column, Index, Table

from sqlguard.catalog import DELETED_AT, DELETED_BY_AGENT

SCHEMA = "sqlguard"
BOOKKEEPING = (DELETED_AT, DELETED_BY_AGENT)
#: How the names of what guarding adds to a table begin.
PREFIX = "sg_"


def include_name(name: str | None, type_: str, parent_names: Mapping[str, Any]) -> bool:
    """Leave out the schema `sqlguard` and what is in it."""
    if type_ == "schema":
        return name != SCHEMA
    return parent_names.get("schema_name") != SCHEMA


def include_object(  # Alembic's signature
    object_: Any,
    name: str | None,
    type_: str,  # noqa: ARG001
    reflected: bool,  # noqa: FBT001
    compare_to: Any,
) -> bool:
    """
    Leave out what guarding has added to the database and no model knows.

    Call it from a function of your own if you have one: `return mine(…) and include_object(…)`.
    """
    if not reflected or compare_to is not None:
        return True
    match object_:
        case Table():
            return object_.schema != SCHEMA
        case Column():
            return not (name in BOOKKEEPING and _is_soft(object_.table))
        case Index():
            return not (object_.table is not None and _is_ours(object_))
        case CheckConstraint():
            return not (name or "").startswith(PREFIX)
        case _:
            return True


def _is_soft(table: Any) -> bool:
    """Both columns, with their types: a `deleted_at` alone belongs to the application."""
    return all(column in table.columns for column in BOOKKEEPING)


def _is_ours(index: Index) -> bool:
    where = index.dialect_options["postgresql"]["where"]
    return (index.name or "").startswith(PREFIX) or (
        where is not None and DELETED_AT in str(where) and _is_soft(index.table)
    )
