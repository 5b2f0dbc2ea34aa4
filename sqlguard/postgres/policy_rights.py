"""
Which rights a policy gives on the tables and functions that exist: policy and catalog in, a set of rights out.

The one idea: rights are a set. What the database gives a group now is another one, and the difference is what
`policy apply` does. No input or output here.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from sqlguard.catalog import Catalog, Column, Guard, Table
from sqlguard.errors import PolicyError
from sqlguard.policy.calls import rule_for
from sqlguard.policy.context import Context
from sqlguard.policy.guards import awaits_guard, guard_of
from sqlguard.policy.model import FunctionRule, Policy, TableRule

#: What a pattern can mean; sequences come with the tables that use them.
_KINDS = "rpvmf"
_WRITABLE = "rp"
OURS = "sqlguard"


@dataclass(frozen=True, slots=True, order=True)
class Right:
    """`kind`: database, schema, table, column, sequence or routine."""

    kind: str
    oid: int
    privilege: str
    column: str = ""


@dataclass(frozen=True, slots=True)
class TableGrant:
    """One table of a policy: its rule, its guard if it has one, the row scopes of its own and of its ancestors."""

    table: Table
    rule: TableRule
    guard: Guard | None = None
    scopes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wanted:
    rights: frozenset[Right]
    tables: tuple[TableGrant, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class World:
    """The database as far as rights depend on it; `bases`: the relations a view reads from, by the view's oid."""

    catalog: Catalog
    database: int
    schemas: Mapping[str, int]
    bases: Mapping[int, frozenset[int]]
    #: The sequences that a table's defaults take numbers from, by the table's oid.
    sequences: Mapping[int, frozenset[int]]


def wanted(policy: Policy, world: World, *, strict: bool = True) -> Wanted:
    """
    Return what *policy* gives. Raises PolicyError with everything that it names and that is not there.

    Not *strict*: what is not there any more is a warning, for a policy that was applied long ago.
    """
    faults = [*_unknown_tables(policy, world.catalog), *_unknown_functions(policy, world.catalog)]
    if faults and strict:
        raise PolicyError(
            f"policy `{policy.name}`: {faults[0]}",
            detail="\n".join(faults[1:]) or None,
            hint="correct the names in the policy file, or create what is missing first",
        )
    warnings = faults
    grants = [g for t in _relations(world.catalog) if (g := _grant(policy, t, world.catalog)) is not None]
    scoped = {oid for g in grants if g.scopes for oid in (g.table.oid,)}
    kept = []
    for grant in grants:
        withheld = _withheld(policy, grant, world, scoped)
        warnings += withheld.warnings
        if withheld.fault is not None and strict:
            raise PolicyError(f"policy `{policy.name}`: {withheld.fault}", hint=withheld.hint)
        if not withheld.withheld:
            kept.append(grant)
    rights = {Right("database", world.database, "CONNECT")}
    for grant in kept:
        found = list(_table_rights(grant, world, warnings))
        if found:
            rights |= {*found, Right("schema", world.schemas[grant.table.schema], "USAGE")}
    for function in world.catalog.functions.values():
        if function.schema != OURS and rule_for(function, Context(world.catalog, policy, None)) is not None:
            rights.add(Right("routine", function.oid, "EXECUTE"))
            rights.add(Right("schema", world.schemas[function.schema], "USAGE"))
    return Wanted(frozenset(rights), tuple(kept), tuple(dict.fromkeys(warnings)))


def _relations(catalog: Catalog) -> Iterator[Table]:
    for table in sorted(catalog.tables.values(), key=lambda t: (t.schema, t.name)):
        if table.kind in _KINDS and table.schema != OURS:
            yield table


def _matches(pattern: str, table: Table) -> bool:
    return fnmatchcase(table.qualified, _full(pattern))


def _full(pattern: str) -> str:
    return pattern if "." in pattern else f"public.{pattern}"


def is_exact(policy: Policy, table: Table) -> bool:
    """Say whether *policy* has a section for just this table."""
    return any(_full(pattern) == table.qualified for pattern in policy.tables)


def _grant(policy: Policy, table: Table, catalog: Catalog) -> TableGrant | None:
    rule = policy.table_rule(table.schema, table.name)
    if rule is None:
        return None
    scopes = []
    for relative in (table, *_ancestors(table, catalog)):
        its = policy.table_rule(relative.schema, relative.name)
        if its is not None and its.rows is not None and its.rows not in scopes:
            scopes.append(its.rows)
    if scopes and table.is_partition and not is_exact(policy, table):
        # Reached through its parent: a pattern names no partition that would need a row scope of its own.
        return None
    return TableGrant(table, rule, guard_of(table, catalog), tuple(scopes))


def _ancestors(table: Table, catalog: Catalog) -> Iterator[Table]:
    for oid in table.parents:
        parent = catalog.tables.get(oid)
        if parent is not None:
            yield parent
            yield from _ancestors(parent, catalog)


@dataclass(frozen=True, slots=True)
class _Withheld:
    withheld: bool = False
    warnings: tuple[str, ...] = ()
    fault: str | None = None
    hint: str | None = None


def _withheld(policy: Policy, grant: TableGrant, world: World, scoped: Iterable[int]) -> _Withheld:
    """Say whether a relation is a way round the row scopes of others, or can't have one itself."""
    table = grant.table
    if table.kind in _WRITABLE or not (grant.rule.select or grant.scopes):
        return _Withheld()
    shown = f"`{table.qualified}`"
    invoker = table.kind == "v" and table.security_invoker
    bases = frozenset() if invoker else _bases(table.oid, world)
    passed = sorted(world.catalog.tables[oid].qualified for oid in bases & frozenset(scoped))
    if passed or grant.scopes:
        what = (
            f"shows rows of {', '.join(passed)} without their row scope"
            if passed
            else "can't have a row scope"
        )
        hint = f"ALTER VIEW {table.qualified} SET (security_invoker = true)" if table.kind == "v" else None
        if grant.scopes and invoker:
            # The scopes of what it reads hold; a scope of its own would be silently missing.
            what = "can't have a row scope of its own"
            hint = "give the scope to the tables that it reads"
        fault = f"{shown} {what}" if is_exact(policy, table) else None
        return _Withheld(withheld=True, warnings=(f"{shown} {what}: not granted",), fault=fault, hint=hint)
    tombs = sorted(world.catalog.tables[oid].qualified for oid in bases & frozenset(world.catalog.soft))
    if tombs:
        return _Withheld(warnings=(f"{shown} shows deleted rows of {', '.join(tombs)} to who reads it",))
    return _Withheld()


def _bases(view: int, world: World) -> frozenset[int]:
    found: set[int] = set()
    todo = [view]
    while todo:
        for oid in world.bases.get(todo.pop(), ()):
            table = world.catalog.tables.get(oid)
            if oid not in found and table is not None:
                found.add(oid)
                todo.append(oid)
    return frozenset(found)


def _table_rights(grant: TableGrant, world: World, warnings: list[str]) -> Iterator[Right]:
    table, rule = grant.table, grant.rule
    hidden = grant.guard.bookkeeping if grant.guard else ()
    if table.is_partition and table.oid in world.catalog.soft and grant.guard is None:
        # Row-level security of its parent does not hide deleted rows of a partition that is read by its own name.
        warnings.append(f"{_late(table)}: nothing is granted")
        return
    if rule.select is True:
        yield Right("table", table.oid, "SELECT")
    elif rule.select:
        yield from _columns(table, "SELECT", (*rule.select, *hidden))
    if table.kind not in _WRITABLE:
        if (rule.insert or rule.update or rule.delete != "refuse") and table.kind != "v":
            warnings.append(f"`{table.qualified}` can't be guarded: no write is granted")
        return
    if grant.guard is None:
        # Nothing captures, caps or freezes a write there, so with the proxy taken away it could not be undone.
        if rule.insert or rule.update or rule.delete != "refuse":
            warnings.append(
                f"{_late(table)}: no write is granted"
                if awaits_guard(table, world.catalog)
                else f"`{table.qualified}` is not guarded: no write is granted;"
                f" run `sqlguard guard {table.qualified}`, then apply the policy again"
            )
        return
    if rule.insert:
        yield from _columns(table, "INSERT", _listed(rule.insert, _writable(table), hidden))
        yield from (Right("sequence", oid, "USAGE") for oid in world.sequences.get(table.oid, ()))
    if rule.update:
        yield from _columns(table, "UPDATE", _listed(rule.update, _writable(table), hidden))
    yield from _delete_rights(grant, warnings)


def _late(table: Table) -> str:
    mend = "guard the parent again, then apply the policy again"
    return f"`{table.qualified}` came after its parent was guarded ({mend})"


def _delete_rights(grant: TableGrant, warnings: list[str]) -> Iterator[Right]:
    table, guard = grant.table, grant.guard
    assert guard is not None  # noqa: S101 (the caller has looked)
    if grant.rule.delete == "refuse":
        return
    # Wall 1 asks for the table's own mode: a policy that says the other one gives no less, and no more.
    if grant.rule.delete != guard.mode:
        warnings.append(
            f"`{table.qualified}` is guarded as {guard.mode}, the policy says {grant.rule.delete}:"
            " no delete is granted"
        )
    elif guard.mode == "soft":
        yield from _columns(table, "UPDATE", guard.bookkeeping)
    else:
        yield Right("table", table.oid, "DELETE")


def _columns(table: Table, privilege: str, names: Iterable[str]) -> Iterator[Right]:
    for name in names:
        if table.column(name) is not None:
            yield Right("column", table.oid, privilege, name)


def _listed(given: bool | tuple[str, ...], able: Iterable[Column], hidden: Iterable[str]) -> list[str]:  # noqa: FBT001
    bookkeeping = frozenset(hidden)
    names = [c.name for c in able] if given is True else list(given or ())
    return [name for name in names if name not in bookkeeping]


def _writable(table: Table) -> Iterator[Column]:
    return (c for c in table.columns if not c.generated and c.identity != "a")


def _unknown_tables(policy: Policy, catalog: Catalog) -> Iterator[str]:
    for pattern, rule in policy.tables.items():
        matched = [t for t in _relations(catalog) if _matches(pattern, t)]
        if not matched:
            exact = "*" not in pattern and "?" not in pattern and "[" not in pattern
            yield f"there is no table `{_full(pattern)}`" if exact else f"no table matches `{pattern}`"
            continue
        for key in ("select", "insert", "update"):
            listed = getattr(rule, key)
            for name in listed if isinstance(listed, tuple) else ():
                if not any(t.column(name) for t in matched):
                    yield f"`{pattern}` has no column `{name}`, which its `{key}` lists"
                elif key != "select" and any(t.guard and name in t.guard.bookkeeping for t in matched):
                    yield f"column `{name}` of `{pattern}` is kept by sqlguard: take it out of `{key}`"


def _unknown_functions(policy: Policy, catalog: Catalog) -> Iterator[str]:
    for key, rule in policy.functions.items():
        if not _known(key, catalog):
            yield f"there is no function `{key}`"
        if rule.compensation is not None and not _known(rule.compensation, catalog):
            yield f"there is no function `{rule.compensation}`, the compensation of `{key}`"


def _known(key: str, catalog: Catalog) -> bool:
    alone = Policy.model_construct(name="alone", functions={key: FunctionRule()})
    context = Context(catalog, alone, None)
    return any(rule_for(function, context) is not None for function in catalog.functions.values())
