"""
What exists in the guarded database: a frozen snapshot that the guard resolves names against.

The one idea: every question about a name is asked of this value, never of the server, so that a decision
is a pure function of text, session and snapshot. The snapshot is read by `sqlguard.postgres.catalog_reader`.
It holds everything outside `pg_catalog` and `information_schema`; what those contain is known from
`sqlguard.functions` (functions, operators, casts) or treated as a catalog read (relations).
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

#: PostgreSQL's FirstNormalObjectId: what has a smaller oid came with the server.
FIRST_NORMAL_OID = 16_384
SYSTEM_SCHEMAS = frozenset({"pg_catalog", "information_schema", "pg_toast"})
#: Bookkeeping columns of a table that is guarded as `soft`; agents neither see nor write them.
DELETED_AT = "deleted_at"
DELETED_BY_AGENT = "deleted_by_agent"
#: Comment on the bookkeeping columns that were added by guarding; one that was there before is the application's.
BOOKKEEPING_COMMENT = "set by sqlguard when a row is deleted"


def live_parent_trigger(key: str, event: str) -> str:
    """Return the name of the trigger by which the foreign key *key* to a soft table sees live parents only."""
    return f"sqlguard_{hashlib.sha256(key.encode()).hexdigest()[:8]}_{event}"


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    attnum: int
    type_oid: int
    type_name: str
    not_null: bool = False
    has_default: bool = False
    generated: bool = False
    #: `a` for GENERATED ALWAYS AS IDENTITY, `d` for BY DEFAULT, empty otherwise.
    identity: str = ""


@dataclass(frozen=True, slots=True)
class Unique:
    """A unique or primary key index; `columns` holds None where the key is an expression."""

    name: str
    columns: tuple[str | None, ...]
    primary: bool = False
    constraint: bool = False
    deferrable: bool = False
    predicate: str | None = None
    nulls_not_distinct: bool = False
    valid: bool = True


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """`on_delete`, `on_update`: a no action, r restrict, c cascade, n set null, d set default."""

    name: str
    table: int
    columns: tuple[str, ...]
    references: int
    ref_columns: tuple[str, ...]
    on_delete: str = "a"
    on_update: str = "a"
    set_columns: tuple[str, ...] = ()
    deferrable: bool = False
    deferred: bool = False


@dataclass(frozen=True, slots=True)
class Trigger:
    name: str
    events: frozenset[str]
    timing: str
    for_each_row: bool
    function: int
    ours: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """A rewrite rule other than a view's own; `event` is `select`, `insert`, `update` or `delete`."""

    name: str
    event: str
    instead: bool
    #: The CREATE RULE statement.
    definition: str | None = None


@dataclass(frozen=True, slots=True)
class Guard:
    """`mode` is soft or journal; `bookkeeping` are the columns that agents must not see (none in journal)."""

    mode: str
    version: int = 1
    bookkeeping: tuple[str, ...] = ()
    #: Whether the operator has said that views may go on showing deleted rows.
    views_accepted: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """
    A relation; `kind`: r table, p partitioned, v view, m materialized view, f foreign, S sequence.

    `parents` and `children` are oids by inheritance or partitioning, direct ones only; `definition` is SQL.
    """

    oid: int
    schema: str
    name: str
    kind: str
    columns: tuple[Column, ...] = ()
    uniques: tuple[Unique, ...] = ()
    triggers: tuple[Trigger, ...] = ()
    rules: tuple[Rule, ...] = ()
    parents: tuple[int, ...] = ()
    children: tuple[int, ...] = ()
    is_partition: bool = False
    row_security: bool = False
    definition: str | None = None
    security_invoker: bool = False
    #: pg_class.reltuples; -1 when never analysed. An estimate: never a blast radius.
    row_estimate: float = -1.0
    guard: Guard | None = None
    extension: str | None = None

    @property
    def qualified(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def primary_key(self) -> tuple[str, ...]:
        for unique in self.uniques:
            if unique.primary:
                return tuple(c for c in unique.columns if c is not None)
        return ()

    def column(self, name: str) -> Column | None:
        return next((c for c in self.columns if c.name == name), None)

    @property
    def visible_columns(self) -> tuple[str, ...]:
        """The columns that an agent sees, in order."""
        hidden = self.guard.bookkeeping if self.guard else ()
        return tuple(c.name for c in self.columns if c.name not in hidden)


@dataclass(frozen=True, slots=True)
class Function:
    """`kind` is pg_proc.prokind: f function, p procedure, a aggregate, w window."""

    oid: int
    schema: str
    name: str
    arg_types: tuple[int, ...]
    arg_type_names: tuple[str, ...]
    #: How many arguments may be left out from the right.
    defaults: int = 0
    variadic: bool = False
    return_type: int = 0
    returns_set: bool = False
    volatility: str = "v"
    security_definer: bool = False
    language: str = "sql"
    source: str = ""
    kind: str = "f"
    extension: str | None = None
    #: Functions an aggregate calls (transition, final, combine …), as oids.
    calls: tuple[int, ...] = ()
    #: `SET name = value` of the function's own definition, as `name=value`.
    settings: tuple[str, ...] = ()
    #: Types of every argument, in and out, and of an aggregate's state, as oids.
    types: tuple[int, ...] = ()
    #: The defaults of arguments that may be left out, as SQL, with commas between them.
    default_arguments: str = ""
    #: Names of every argument, and how each is passed: i in, o out, b both, v variadic, t a column of the result.
    arg_names: tuple[str, ...] = ()
    arg_modes: tuple[str, ...] = ()

    @property
    def signature(self) -> str:
        return f"{self.schema}.{self.name}({','.join(self.arg_type_names)})"


@dataclass(frozen=True, slots=True)
class Operator:
    oid: int
    schema: str
    name: str
    left: int
    right: int
    function: int
    extension: str | None = None


@dataclass(frozen=True, slots=True)
class Cast:
    source: int
    target: int
    #: 0 when the cast is binary-coercible or goes through text.
    function: int
    context: str


@dataclass(frozen=True, slots=True)
class Type:
    """`kind` is pg_type.typtype: b base, c composite, d domain, e enum, r range, m multirange, p pseudo."""

    oid: int
    schema: str
    name: str
    kind: str
    relation: int = 0
    element: int = 0
    base: int = 0
    extension: str | None = None
    #: CHECK constraints of a domain, as SQL: they run functions too.
    checks: tuple[str, ...] = ()
    #: Types of a composite's attributes, of a range's bounds, of a multirange's ranges.
    parts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Catalog:
    """`version` changes whenever anything that a decision may depend on has changed."""

    version: str = ""
    server_version: int = 180000
    tables: Mapping[int, Table] = field(default_factory=dict)
    functions: Mapping[int, Function] = field(default_factory=dict)
    operators: tuple[Operator, ...] = ()
    casts: tuple[Cast, ...] = ()
    types: Mapping[int, Type] = field(default_factory=dict)
    foreign_keys: tuple[ForeignKey, ...] = ()
    schemas: frozenset[str] = frozenset({"public"})

    @cached_property
    def _by_name(self) -> Mapping[tuple[str, str], Table]:
        return {(t.schema, t.name): t for t in self.tables.values()}

    @cached_property
    def _functions_by_name(self) -> Mapping[str, tuple[Function, ...]]:
        found: dict[str, list[Function]] = {}
        for function in self.functions.values():
            found.setdefault(function.name, []).append(function)
        return {name: tuple(some) for name, some in found.items()}

    @cached_property
    def _references_to(self) -> Mapping[int, tuple[ForeignKey, ...]]:
        found: dict[int, list[ForeignKey]] = {}
        for key in self.foreign_keys:
            found.setdefault(key.references, []).append(key)
        return {oid: tuple(keys) for oid, keys in found.items()}

    @cached_property
    def _references_from(self) -> Mapping[int, tuple[ForeignKey, ...]]:
        found: dict[int, list[ForeignKey]] = {}
        for key in self.foreign_keys:
            found.setdefault(key.table, []).append(key)
        return {oid: tuple(keys) for oid, keys in found.items()}

    def table(self, schema: str | None, name: str, search_path: Sequence[str]) -> Table | None:
        """Resolve a relation name as PostgreSQL does; None when it is in no schema of the path."""
        if schema is not None:
            return self._by_name.get((schema, name))
        for candidate in search_path:
            found = self._by_name.get((candidate, name))
            if found is not None:
                return found
        return None

    def functions_named(self, schema: str | None, name: str) -> tuple[Function, ...]:
        """Every function outside pg_catalog with that name, in any schema or in *schema*."""
        some = self._functions_by_name.get(name, ())
        return some if schema is None else tuple(f for f in some if f.schema == schema)

    def references_to(self, oid: int) -> tuple[ForeignKey, ...]:
        """Foreign keys whose parent is *oid*."""
        return self._references_to.get(oid, ())

    def references_from(self, oid: int) -> tuple[ForeignKey, ...]:
        """Foreign keys whose child is *oid*."""
        return self._references_from.get(oid, ())

    def descendants(self, oid: int) -> Iterator[Table]:
        """Yield every partition or inheritance child below *oid*, depth first."""
        table = self.tables.get(oid)
        for child in table.children if table else ():
            if child in self.tables:
                yield self.tables[child]
                yield from self.descendants(child)

    @cached_property
    def soft(self) -> Mapping[int, Table]:
        """The tables guarded as `soft`, by themselves or by an ancestor: oid -> the table that has the guard."""
        return {t.oid: g for t in self.tables.values() if (g := self._soft_guard(t)) is not None}

    @cached_property
    def soft_names(self) -> frozenset[str]:
        """The names of the soft tables, whatever schema they are in."""
        return frozenset(self.tables[oid].name for oid in self.soft)

    @cached_property
    def soft_bookkeeping(self) -> frozenset[str]:
        """Lower-case names of the columns that some soft table hides, as a text may contain them."""
        hidden = (name for t in self.soft.values() if t.guard is not None for name in t.guard.bookkeeping)
        return frozenset(name.lower().replace('"', '""') for name in hidden)

    @cached_property
    def soft_spellings(self) -> tuple[bytes, ...]:
        """
        Lower-case UTF-8 of every name by which a text can reach a soft table.

        Its own, a parent's, any view's, and a function's that returns its rows.
        """
        if not self.soft:
            return ()
        names = {t.name for t in self.tables.values() if t.kind in "vm"}
        for oid in self.soft:
            names |= {t.name for t in self._lineage(self.tables[oid])}
        rows = {t.oid for t in self.types.values() if t.relation in self.soft}
        rows |= {t.oid for t in self.types.values() if t.element in rows}
        names |= {f.name for f in self.functions.values() if f.return_type in rows}
        return tuple(sorted(name.replace('"', '""').encode().lower() for name in names))

    def _soft_guard(self, table: Table) -> Table | None:
        if table.guard is not None:
            return table if table.guard.mode == "soft" else None
        parents = (self.tables[oid] for oid in table.parents if oid in self.tables)
        return next((g for p in parents if (g := self._soft_guard(p)) is not None), None)

    def _lineage(self, table: Table) -> Iterator[Table]:
        yield table
        for oid in table.parents:
            if oid in self.tables:
                yield from self._lineage(self.tables[oid])

    def guarded(self) -> Iterable[Table]:
        return (t for t in self.tables.values() if t.guard is not None)
