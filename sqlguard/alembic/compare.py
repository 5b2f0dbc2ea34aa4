"""
Autogenerate: what the models declare against what the catalog says, and Alembic's own findings without ours.

Runs after Alembic's comparison of tables. Guards come behind the tables and indexes of the same revision, so
that a downgrade lifts them first; guards that are lifted come before all else, as do those that are loosened
for a change of their table. Tables whose rows a delete in a declared table changes (CASCADE, SET NULL, SET
DEFAULT) count as declared too: guarding would take them along.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from alembic.autogenerate.api import AutogenContext
from alembic.operations import MigrateOperation, ops
from sqlalchemy import Table

from sqlguard.alembic.declared import Declaration, declaration
from sqlguard.alembic.filters import BOOKKEEPING, SCHEMA
from sqlguard.alembic.keep import Kept, without_ours
from sqlguard.alembic.operations import GuardOp, LoosenOp, Mode, UnguardOp, UniqueChoice
from sqlguard.alembic.session import psycopg_connection
from sqlguard.alembic.state import State, read_states

Name = tuple[str, str]
_REACHING = frozenset({"CASCADE", "SET NULL", "SET DEFAULT"})
#: A table that a soft delete reaches is guarded with it unless it is guarded already: so those come first.
_ORDER = ("journal", "soft", "auto")


class Kind(NamedTuple):
    """Guards of one kind go into one operation; `schema` is as the models write it."""

    mode: Mode
    unique: UniqueChoice
    accept: tuple[str, ...]
    fix_views: bool
    existing: Mode | None
    schema: str | None
    #: The table changes in the same revision.
    is_changed: bool

    def order(self) -> tuple[object, ...]:
        known = (self.existing or "", self.schema or "", self.is_changed)
        return (_ORDER.index(self.mode), self.unique, self.accept, self.fix_views, *known)


def leave_out_sqlguard(_: AutogenContext, __: ops.UpgradeOps, schemas: set[str | None]) -> Any:
    """Alembic's comparator for `schema`, before all others: what is in the schema `sqlguard` is not looked at."""
    schemas.discard(SCHEMA)


def compare_guards(
    context: AutogenContext, upgrade_ops: ops.UpgradeOps, schemas: Collection[str | None]
) -> Any:
    """Alembic's comparator for `schema`: add what is to be guarded or no longer, remove what is ours."""
    connection = context.connection
    if connection is None or connection.dialect.name != "postgresql":
        return None
    default = connection.dialect.default_schema_name or "public"
    tables = {
        (table.schema or default, table.name): table
        for table in context.sorted_tables
        if context.run_object_filters(table, table.name, "table", False, None)  # noqa: FBT003
    }
    wanted = dict(_wanted(tables, default))
    with psycopg_connection(connection, context.opts.get("sqlguard_dsn")) as conn:
        states = read_states(conn)
    seen = {schema or default for schema in schemas}
    states = {name: state for name, state in states.items() if name[0] in seen or name in tables}
    dropped = {
        (op.schema or default, op.table_name) for op in upgrade_ops.ops if isinstance(op, ops.DropTableOp)
    }
    lifted = [name for name in states if name in dropped or _is_to_be_lifted(name, tables, wanted)]
    without_ours(upgrade_ops, _kept(tables, wanted, states, lifted), default)
    changed = {
        (op.schema or default, op.table_name)
        for op in upgrade_ops.ops
        if isinstance(op, ops.ModifyTableOps) and any(map(_changes_shape, op.ops))
    }
    referred = set(_referred(upgrade_ops.ops, default))
    guards = list(_guards(wanted, states, changed, referred, tables))
    loosened = [_made_way(guard) for guard in guards if guard.loosened]
    upgrade_ops.ops[:0] = [*_lifts(lifted, states, default), *loosened]
    upgrade_ops.ops.extend(guards)
    return None


def _wanted(tables: Mapping[Name, Table], default: str) -> Iterator[tuple[Name, Declaration]]:
    """Yield the declared tables, and those that deletes in them reach."""
    declared = {name: declaration(table) for name, table in tables.items()}
    found = {name: said for name, said in declared.items() if said is not None and said.mode is not None}
    waiting = list(found)
    while waiting:
        parent = waiting.pop()
        for name, table in tables.items():
            if name not in found and declared[name] is None and _is_reached(table, parent, default):
                found[name] = Declaration("auto")
                waiting.append(name)
    yield from found.items()


def _is_reached(table: Table, parent: Name, default: str) -> bool:
    return any(
        (key.referred_table.schema or default, key.referred_table.name) == parent
        for key in table.foreign_key_constraints
        if (key.ondelete or "").upper().split(" (")[0] in _REACHING
    )


def _is_to_be_lifted(name: Name, tables: Mapping[Name, Table], wanted: Mapping[Name, Declaration]) -> bool:
    """
    Whether the models say that the guarded table *name* is not to be guarded.

    A project that declares no guard at all has put its guards on some other way, and keeps them.
    """
    table = tables.get(name)
    if table is None:
        return False
    return name not in wanted and (bool(wanted) or declaration(table) is not None)


def _kept(
    tables: Mapping[Name, Table],
    wanted: Mapping[Name, Declaration],
    states: Mapping[Name, State],
    lifted: Collection[Name],
) -> dict[Name, Kept]:
    kept: dict[Name, Kept] = {}
    for name, declared in wanted.items():
        if declared.mode == "soft" and name not in states:
            kept[name] = Kept(model=tables[name])
    for name, state in states.items():
        stays_soft = state.mode == "soft" and name not in lifted
        columns = frozenset(BOOKKEEPING if stays_soft else state.added_columns)
        kept[name] = Kept(columns, state.replaced, tables.get(name), lifted=name in lifted)
    return kept


def _changes_shape(op: MigrateOperation) -> bool:
    """Whether guarding depends on what *op* changes: columns, keys, foreign keys and unique indexes."""
    if isinstance(op, ops.CreateIndexOp):
        return bool(op.unique)
    return isinstance(
        op,
        ops.AddColumnOp
        | ops.DropColumnOp
        | ops.AlterColumnOp
        | ops.CreateUniqueConstraintOp
        | ops.CreateForeignKeyOp
        | ops.CreatePrimaryKeyOp
        | ops.DropConstraintOp,
    )


def _referred(operations: Iterable[MigrateOperation], default: str) -> Iterator[Name]:
    """Yield the tables that new foreign keys refer to: the walls of the parent stand behind a key, too."""
    for op in operations:
        if isinstance(op, ops.ModifyTableOps):
            yield from _referred(op.ops, default)
        elif isinstance(op, ops.CreateTableOp):
            for key in op.to_table().foreign_key_constraints:
                yield key.referred_table.schema or default, key.referred_table.name
        elif isinstance(op, ops.CreateForeignKeyOp):
            yield op.kw.get("referent_schema") or default, op.referent_table


def _lifts(lifted: list[Name], states: Mapping[Name, State], default: str) -> Iterator[UnguardOp]:
    kinds: dict[tuple[str, Any, str | None], list[str]] = defaultdict(list)
    for name in sorted(lifted):
        state = states[name]
        schema = None if name[0] == default else name[0]
        kinds[state.mode, state.unique, schema].append(name[1])
    for (mode, unique, schema), names in kinds.items():
        yield UnguardOp(names, schema=schema, mode=mode, unique=unique)  # type: ignore[arg-type]


def _guards(
    wanted: Mapping[Name, Declaration],
    states: Mapping[Name, State],
    changed: Collection[Name],
    referred: Collection[Name],
    tables: Mapping[Name, Table],
) -> Iterator[GuardOp]:
    kinds: dict[Kind, list[str]] = defaultdict(list)
    for name, declared in sorted(wanted.items()):
        state = states.get(name)
        is_referred = name in referred and state is not None and state.mode == "soft"
        if state is None or is_referred or _is_due(declared, state, is_changed=name in changed):
            kinds[_kind(declared, state, tables[name].schema, is_changed=name in changed)].append(name[1])
    for kind in sorted(kinds, key=Kind.order):
        guard = GuardOp(
            kinds[kind],
            schema=kind.schema,
            mode=kind.mode,
            unique=kind.unique,
            accept=kind.accept,
            fix_views=kind.fix_views,
            existing_mode=kind.existing,
        )
        guard.loosened = kind.is_changed
        yield guard


def _made_way(guard: GuardOp) -> LoosenOp:
    """Return what begins the revision that *guard* ends."""
    return LoosenOp(
        guard.tables,
        schema=guard.schema,
        mode=guard.existing_mode or "auto",
        next_mode=guard.mode,
        unique=guard.unique,
        accept=guard.accept,
        fix_views=guard.fix_views,
    )


def _is_due(declared: Declaration, state: State, *, is_changed: bool) -> bool:
    if declared.mode not in ("auto", state.mode) or is_changed or state.stale:
        return True
    if state.mode == "soft" and declared.fix_views and state.owner_views:
        return True
    # What was converted stays converted: only `keep` to `partial` is a step that guarding takes.
    return state.mode == "soft" and declared.unique == "partial" and state.unique == "keep"


def _kind(declared: Declaration, state: State | None, schema: str | None, *, is_changed: bool) -> Kind:
    existing: Any = state.mode if state else None
    mode: Any = existing if existing and declared.mode == "auto" else declared.mode or "auto"
    said = declared.unique, declared.accept, declared.fix_views
    return Kind(mode, *said, existing, schema, is_changed and state is not None)
