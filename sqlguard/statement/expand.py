"""
What stands behind a name: views down to their tables, auto-updatable views, rewrite rules.

Definitions come from the catalog with every name qualified (it reads them with an empty search_path), so
they are walked with an empty one. The result is kept per catalog: a view is walked once.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sqlguard.catalog import Table
from sqlguard.errors import NotUnderstood, SqlguardError
from sqlguard.statement import casts
from sqlguard.statement.model import Call, Relation, Session, Write
from sqlguard.statement.names import Entry
from sqlguard.statement.text import parse

if TYPE_CHECKING:
    from sqlguard.statement.walk import Body, Walk

_EMPTY = Session(search_path=())


@dataclass(frozen=True, slots=True)
class View:
    """`base` and `columns` (the view's name -> the table's) are set when PostgreSQL could write through it."""

    reads: tuple[Relation, ...]
    calls: tuple[Call, ...]
    base: Table | None = None
    base_is_view: bool = False
    columns: tuple[tuple[str, str], ...] = ()


def read_view(walk: "Walk", table: Table) -> None:
    """Add what reading *table*, a view, reads and calls."""
    view = _view(walk, table)
    for relation in view.reads:
        walk.views[relation.schema, relation.name, relation.via] = relation
    for call in view.calls:
        walk.call(call)


def _view(walk: "Walk", table: Table) -> View:
    known = walk.index.expansions
    key = ("view", table.oid)
    if key not in known:
        # A view that reads itself can't exist; a definition that claims so ends here.
        known[key] = NotUnderstood(f"view `{table.qualified}` reads itself", rules=("view",))
        try:
            known[key] = _expand(walk, table)
        except SqlguardError as fault:
            known[key] = NotUnderstood(
                f"view `{table.qualified}` can't be looked into",
                hint="read its tables instead",
                detail=fault.message,
                rules=("view", *fault.rules),
            )
    found = known[key]
    if isinstance(found, SqlguardError):
        raise found
    return found  # type: ignore[no-any-return]


def _expand(walk: "Walk", table: Table) -> View:
    if table.definition is None:
        raise NotUnderstood("its definition is not known")
    (parsed,) = parse(table.definition)
    select = parsed.tree.get("SelectStmt")
    if select is None:
        raise NotUnderstood("its definition is no SELECT")
    inner = type(walk)(walk.catalog, _EMPTY)
    inner.node(parsed.tree)
    casts.note(inner)
    reads = tuple(replace(r, via=r.via or table.qualified) for r in inner.relations())
    base, columns = _updatable(walk, table, select)
    return View(reads, tuple(inner.calls), base, base is not None and base.kind == "v", columns)


def _updatable(
    walk: "Walk", table: Table, select: "Body"
) -> tuple[Table | None, tuple[tuple[str, str], ...]]:
    """Return the one table below a view that PostgreSQL can write through, and which column is which."""
    sources = select.get("fromClause", [])
    shapes = (
        "groupClause",
        "havingClause",
        "distinctClause",
        "larg",
        "withClause",
        "limitCount",
        "limitOffset",
    )
    if len(sources) != 1 or "RangeVar" not in sources[0] or any(s in select for s in shapes):
        return None, ()
    body = sources[0]["RangeVar"]
    base = walk.catalog.table(body.get("schemaname"), body["relname"], ())
    if base is None:
        return None, ()
    pairs = []
    for column, target in zip(table.columns, select.get("targetList", ()), strict=False):
        value = target["ResTarget"].get("val", {}).get("ColumnRef")
        if value is not None and "String" in value["fields"][-1]:
            pairs.append((column.name, value["fields"][-1]["String"]["sval"]))
    return base, tuple(pairs)


def base_of(walk: "Walk", table: Table) -> tuple[Table, dict[str, str]] | None:
    """Return the table below an updatable view, and the table's name of each of the view's columns."""
    if table.kind != "v":
        return table, {c.name: c.name for c in table.columns}
    view = _view(walk, table)
    if view.base is None:
        return None
    below = base_of(walk, view.base)
    if below is None:
        return None
    base, columns = below
    return base, {mine: columns[theirs] for mine, theirs in view.columns if theirs in columns}


def write_view(walk: "Walk", table: Table, write: Write) -> None:
    """Note a write through a view as one of the table below it."""
    read_view(walk, table)
    if any(t.timing.lower().startswith("instead") and write.op in t.events for t in table.triggers):
        walk.facts.setdefault("instead", []).append((table.qualified, write.op))
        walk.writes.append(replace(write, columns=None))
        return
    if table.rules:
        rules(walk, table, write.op)
    found = base_of(walk, table)
    if found is None:
        raise NotUnderstood(
            f"view `{table.qualified}` can't be written through", hint="write to its table", rules=("view",)
        )
    base, names = found
    columns = write.columns
    if columns is not None:
        columns = tuple(names.get(c, c) for c in columns)
    target = Relation(base.schema, base.name, base.oid, only=write.table.only)
    walk.writes.append(replace(write, table=target, columns=columns, view=write.table))
    if base.rules:
        rules(walk, base, write.op)


def rules(walk: "Walk", table: Table, op: str) -> None:
    """
    Add what the rewrite rules for a write of *table* do besides.

    An INSTEAD rule replaces the statement, so that the one that was judged does not run: `instead` says so.
    """
    for rule in table.rules:
        if rule.event != op:
            continue
        shown = f"{table.qualified}.{rule.name}"
        if rule.instead or rule.definition is None:
            walk.facts.setdefault("instead", []).append((table.qualified, op))
            continue
        key = ("rule", table.oid, rule.name)
        known = walk.index.expansions
        if key not in known:
            # A rule that sets itself off is refused by PostgreSQL; here it ends with what is known so far.
            known[key] = ((), (), (), {})
            known[key] = _rule(walk, table, rule.definition)
        reads, writes, calls, facts = known[key]
        for relation in reads:
            walk.views[relation.schema, relation.name, shown] = replace(relation, via=shown)
        walk.writes += [replace(w, rule=shown) for w in writes]
        for call in calls:
            walk.call(call)
        for name, found in facts.items():
            walk.facts.setdefault(name, found)


def _rule(walk: "Walk", table: Table, definition: str) -> tuple[Any, Any, Any, Any]:
    (parsed,) = parse(definition)
    rule = parsed.tree["RuleStmt"]
    inner = type(walk)(walk.catalog, _EMPTY)
    columns = walk.index.columns[table.oid]
    inner.level.entries += [Entry("old", columns), Entry("new", columns)]
    for action in rule.get("actions", ()):
        inner.node(action)
    if "whereClause" in rule:
        inner.node(rule["whereClause"])
    casts.note(inner)
    inner.facts.pop("types", None)
    inner.facts.pop("arrays", None)
    return inner.relations(), tuple(inner.writes), tuple(inner.calls), inner.facts
