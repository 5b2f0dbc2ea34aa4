"""A catalog made from a schema's text alone, for tests of the rewriter without a server."""

from pathlib import Path
from typing import Any

import postgast

from sqlguard.catalog import Catalog, Column, Function, Guard, Table, Type, Unique
from sqlguard.rewrite.marks import ASSIGNMENTS
from sqlguard.rewrite.once import BEFORE, BEHIND

FIXTURES = Path(__file__).resolve().parent / "fixtures" / "rewrite"
SOFT = frozenset({"customers", "orders", "items", "tags", "usr", "base", "part"})
#: What the guard's migration does to the schema of the fixtures besides columns and policies.
MIGRATION = (
    "ALTER TABLE usr DROP CONSTRAINT usr_email_key;"
    "CREATE UNIQUE INDEX usr_email_live ON usr (email) WHERE deleted_at IS NULL"
)
BOOKKEEPING = ("deleted_at", "deleted_by_agent")
_TIMESTAMPTZ, _TEXT = 1184, 25
#: What the fixtures write in short.
SHORT = {"<marks>": ASSIGNMENTS, "<once>": BEFORE, "</once>": BEHIND}


def in_full(text: str) -> str:
    """Return *text* with what it writes in short written out."""
    for short, meant in SHORT.items():
        text = text.replace(short, meant)
    return text


def fixture_catalog(**changes: Any) -> Catalog:
    """Return the catalog of `schema.sql` after it was guarded."""
    nodes = [s.stmt for s in postgast.parse((FIXTURES / "schema.sql").read_text(encoding="utf-8")).stmts]
    tables: dict[int, Table] = {}
    functions: dict[int, Function] = {}
    for number, node in enumerate(nodes, start=1):
        if node.HasField("create_stmt"):
            tables[number] = _table(number, node.create_stmt, tables)
        elif node.HasField("view_stmt"):
            tables[number] = _view(number, node.view_stmt)
        elif node.HasField("create_function_stmt"):
            functions[number] = Function(number, "public", "worth", (1000,), ("orders",))
    orders = next(t.oid for t in tables.values() if t.name == "orders")
    types = {1000: Type(1000, "public", "orders", "c", relation=orders)}
    return Catalog(**{"tables": tables, "functions": functions, "types": types, **changes})


def _table(oid: int, stmt: Any, tables: dict[int, Table]) -> Table:
    parents = [t for t in tables.values() if t.name in [r.range_var.relname for r in stmt.inh_relations]]
    for parent in parents:
        tables[parent.oid] = _with_child(parent, oid)
    columns = [c for parent in parents for c in parent.columns]
    uniques: list[Unique] = []
    for element in stmt.table_elts:
        name = element.column_def.colname
        if not name:
            keys = tuple(k.string.sval for k in element.constraint.keys)
            uniques.append(Unique(f"{stmt.relation.relname}_pkey", keys, primary=True, constraint=True))
            continue
        kinds = {c.constraint.contype for c in element.column_def.constraints}
        primary = postgast.pg_query_pb2.CONSTR_PRIMARY in kinds
        not_null = primary or postgast.pg_query_pb2.CONSTR_NOTNULL in kinds
        columns.append(Column(name, len(columns) + 1, _TEXT, "text", not_null))
        if primary:
            uniques.append(Unique(f"{stmt.relation.relname}_pkey", (name,), primary=True, constraint=True))
        if postgast.pg_query_pb2.CONSTR_UNIQUE in kinds:
            uniques.append(Unique("usr_email_live", (name,), predicate="(deleted_at IS NULL)"))
    soft = stmt.relation.relname in SOFT
    if soft:
        columns.append(Column("deleted_at", len(columns) + 1, _TIMESTAMPTZ, "timestamp with time zone"))
        columns.append(Column("deleted_by_agent", len(columns) + 1, _TEXT, "text"))
    return Table(
        oid,
        "public",
        stmt.relation.relname,
        "p" if stmt.HasField("partspec") else "r",
        tuple(columns),
        tuple(uniques),
        parents=tuple(p.oid for p in parents),
        guard=Guard("soft", 1, BOOKKEEPING) if soft else None,
    )


def _with_child(parent: Table, child: int) -> Table:
    return Table(
        parent.oid,
        parent.schema,
        parent.name,
        parent.kind,
        parent.columns,
        parent.uniques,
        children=(*parent.children, child),
        guard=parent.guard,
    )


def _view(oid: int, stmt: Any) -> Table:
    query = stmt.query.select_stmt
    names = [t.res_target.val.column_ref.fields[-1].string.sval for t in query.target_list]
    columns = tuple(Column(n, i, _TEXT, "text") for i, n in enumerate(names, start=1))
    definition = f"SELECT {', '.join(names)} FROM {query.from_clause[0].range_var.relname}"
    return Table(oid, "public", stmt.view.relname, "v", columns, definition=definition)
