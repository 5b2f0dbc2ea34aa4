"""
A catalog for `sqlguard check` without a database: every table and column that a text names is taken to exist.

What can't be told without a database stays untold: keys, types, row counts, views, triggers, user functions.
A table is assumed to be guarded as the policy would have it deleted from.
"""

from typing import Any

import postgast

from sqlguard.catalog import Catalog, Column, Guard, Table
from sqlguard.policy.model import Policy

#: PostgreSQL's own objects have lower numbers (FirstNormalObjectId).
_FIRST_OID = 16_384
#: Far above what a person writes, far below what costs time.
_LONGEST = 100_000
_TEXT = 25


def assumed_catalog(text: str, policy: Policy) -> Catalog:
    """Return a catalog of the tables that *text* names, without columns; empty when it can't be parsed."""
    if len(text) > _LONGEST:
        return Catalog(version="assumed")
    try:
        tree = postgast.parse(text)
    except (postgast.PgQueryError, RecursionError, ValueError):
        return Catalog(version="assumed")
    columns = tuple(Column(n, i, _TEXT, "text") for i, n in enumerate(_columns(tree), start=1))
    default = next((s for s in policy.defaults.search_path if s != "pg_catalog"), "public")
    tables: dict[int, Table] = {}
    for number, name in enumerate(sorted(set(postgast.extract_tables(tree)))):
        schema, _, bare = name.rpartition(".")
        oid = _FIRST_OID + number
        guard = _guard(policy, schema or default, bare)
        tables[oid] = Table(oid, schema or default, bare, "r", columns, guard=guard)
    return Catalog(version="assumed", tables=tables, schemas=frozenset(t.schema for t in tables.values()))


def _guard(policy: Policy, schema: str, name: str) -> Guard | None:
    rule = policy.table_rule(schema, name)
    return Guard(rule.delete) if rule is not None and rule.delete != "refuse" else None


def _columns(tree: Any) -> list[str]:
    """Return every name that stands where a column may, each once."""
    found: dict[str, None] = {}
    for reference in postgast.find_nodes(tree, postgast.pg_query_pb2.ColumnRef):
        last = reference.fields[-1]
        if last.WhichOneof("node") == "string":
            found.setdefault(last.string.sval)
    for target in postgast.find_nodes(tree, postgast.pg_query_pb2.ResTarget):
        if target.name:
            found.setdefault(target.name)
    return list(found)
