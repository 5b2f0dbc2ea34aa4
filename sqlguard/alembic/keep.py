"""
Takes out of a generated revision what would undo, piece by piece, what guarding keeps.

Alembic compares tables without knowing of guards: it would drop columns that no model has, and make a unique
constraint again that has become a partial index. What the models really changed stays in the revision.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alembic.operations import MigrateOperation, ops
from sqlalchemy import Index, Table, UniqueConstraint, text

from sqlguard.alembic.filters import BOOKKEEPING, SCHEMA
from sqlguard.postgres import walls_unique
from sqlguard.postgres.walls_facts import Index as Unique


@dataclass(frozen=True, slots=True)
class Kept:
    """
    What of one table is guarding's business: the bookkeeping columns that it adds and drops, and the unique
    indexes that it has made partial. `model` is the table of the models, if it is still there; `lifted` says
    that the guard goes before the rest of the revision.
    """

    columns: frozenset[str] = frozenset(BOOKKEEPING)
    replaced: Sequence[Unique] = ()
    model: Table | None = None
    lifted: bool = False


def without_ours(
    container: ops.OpContainer, kept: Mapping[tuple[str, str], Kept], default_schema: str
) -> None:
    """Remove from *container* the operations on what is *kept*, and all on the schema `sqlguard`."""
    left: list[MigrateOperation] = []
    for op in container.ops:
        if getattr(op, "schema", None) == SCHEMA:
            continue
        if isinstance(op, ops.ModifyTableOps):
            of_table = kept.get((op.schema or default_schema, op.table_name))
            if of_table is not None:
                op.ops[:] = [_unlifted(one, of_table) for one in op.ops if not _is_ours(one, of_table)]
            if not op.ops:
                continue
        left.append(op)
    container.ops[:] = left


def _is_ours(op: MigrateOperation, kept: Kept) -> bool:
    match op:
        case ops.AddColumnOp():
            return op.column.name in kept.columns
        case ops.DropColumnOp() | ops.AlterColumnOp():
            return op.column_name in kept.columns
        case ops.DropIndexOp():
            # Where the model has no such constraint any more, the index is meant to go.
            return any(unique.name == op.index_name and _is_wanted(unique, kept) for unique in kept.replaced)
        case ops.CreateUniqueConstraintOp():
            return _has_become_partial(op.constraint_name, op.columns, kept)
        case ops.CreateIndexOp():
            return bool(op.unique) and _has_become_partial(op.index_name, op.columns, kept)
        case _:
            return False


def _unlifted(op: MigrateOperation, kept: Kept) -> MigrateOperation:
    """Where the guard has been lifted, what was made partial is again what it was when *op* drops it."""
    if not (kept.lifted and isinstance(op, ops.DropIndexOp)):
        return op
    unique = next((unique for unique in kept.replaced if unique.name == op.index_name), None)
    if unique is None:
        return op
    was = walls_unique.original(unique)
    if was["constraint"] is not None:
        name, table = was["constraint"], op.table_name or ""
        again = ops.CreateUniqueConstraintOp(name, table, unique.columns, schema=op.schema)
        return ops.DropConstraintOp(name, table, type_="unique", schema=op.schema, _reverse=again)
    for one in (op, op._reverse):  # noqa: SLF001 (Alembic has no other way to say what a downgrade makes)
        if one is not None:
            one.kw["postgresql_where"] = was["predicate"] and text(was["predicate"])
    return op


def _is_wanted(unique: Unique, kept: Kept) -> bool:
    if kept.model is None:
        return False
    return any(name == unique.name or columns == unique.columns for name, columns in _uniques_of(kept.model))


def _uniques_of(table: Table) -> Iterable[tuple[Any, list[str]]]:
    for constraint in table.constraints:
        if isinstance(constraint, UniqueConstraint):
            yield constraint.name, [column.name for column in constraint.columns]
    for index in table.indexes:
        if isinstance(index, Index) and index.unique:
            yield index.name, [column.name for column in index.columns]


def _has_become_partial(name: Any, columns: Iterable[Any], kept: Kept) -> bool:
    names = [str(getattr(column, "name", column)) for column in columns]
    return any(unique.name == name or unique.columns == names for unique in kept.replaced)
