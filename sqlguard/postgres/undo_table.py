"""
One table as an undo sees it: its columns, keys, foreign keys and triggers, and how to name its rows in SQL.

Rows are found by the key's text, cast to the key's type and compared with the operator of its index; images
are PostgreSQL's own record text, cast back to the row type, so every type comes back exactly as it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import class_row

#: Aliases in our statements. They hold a blank, so that no column of a guarded table is mistaken for one.
ROW = sql.Identifier("sg row")
SRC = sql.Identifier("sg src")

_COLUMNS = """
    SELECT a.attname::text AS name, a.attnum::int AS number, format_type(a.atttypid, a.atttypmod) AS type,
           a.attgenerated <> '' AS generated, a.attidentity::text AS identity,
           n.nspname::text AS operator_schema, o.oprname::text AS operator
    FROM pg_catalog.pg_attribute a
    JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
    LEFT JOIN LATERAL (
        -- The equality that the default btree index of the type uses (of its base type for a domain).
        SELECT am.amopopr FROM pg_catalog.pg_opclass c
        JOIN pg_catalog.pg_am m ON m.oid = c.opcmethod AND m.amname = 'btree'
        JOIN pg_catalog.pg_amop am ON am.amopfamily = c.opcfamily AND am.amopstrategy = 3
            AND am.amoplefttype = c.opcintype AND am.amoprighttype = c.opcintype
        WHERE c.opcdefault AND c.opcintype = coalesce(nullif(t.typbasetype, 0), t.oid)
        LIMIT 1
    ) e ON true
    LEFT JOIN pg_catalog.pg_operator o ON o.oid = e.amopopr
    LEFT JOIN pg_catalog.pg_namespace n ON n.oid = o.oprnamespace
    WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped
    ORDER BY a.attnum
"""
# Triggers of other people that would act on what an undo writes; ours know an operator's session.
_TRIGGERS = """
    SELECT t.tgname::text, t.tgenabled::text FROM pg_catalog.pg_trigger t
    JOIN pg_catalog.pg_proc p ON p.oid = t.tgfoid
    JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
    WHERE t.tgrelid = %s AND NOT t.tgisinternal AND t.tgenabled IN ('O', 'A') AND n.nspname <> 'sqlguard'
    ORDER BY 1
"""
_KEYS = """
    SELECT c.conname::text AS name, c.conrelid::bigint AS child, c.confrelid::bigint AS parent,
           c.confdeltype::text AS on_delete, c.condeferrable AS deferrable,
           c.conrelid::regclass::text AS child_name, c.confrelid::regclass::text AS parent_name,
           ARRAY(SELECT a.attname::text FROM unnest(c.conkey) WITH ORDINALITY AS k (n, i)
                 JOIN pg_catalog.pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = k.n
                 ORDER BY k.i) AS columns,
           ARRAY(SELECT a.attname::text FROM unnest(c.confkey) WITH ORDINALITY AS k (n, i)
                 JOIN pg_catalog.pg_attribute a ON a.attrelid = c.confrelid AND a.attnum = k.n
                 ORDER BY k.i) AS ref_columns,
           ARRAY(SELECT format('%%I.%%s', n.nspname, o.oprname)
                 FROM unnest(c.conpfeqop) WITH ORDINALITY AS k (op, i)
                 JOIN pg_catalog.pg_operator o ON o.oid = k.op
                 JOIN pg_catalog.pg_namespace n ON n.oid = o.oprnamespace
                 ORDER BY k.i) AS operators,
           EXISTS (SELECT FROM sqlguard.guarded_table g
                   WHERE g.relid = c.confrelid AND g.mode = 'soft') AS parent_soft
    FROM pg_catalog.pg_constraint c
    WHERE c.contype = 'f' AND (c.conrelid = %(oid)s OR c.confrelid = %(oid)s)
    ORDER BY c.oid
"""
# Unique indexes with their key columns as expressions of the table's own columns.
_UNIQUES = """
    SELECT c.relname::text AS name,
           ARRAY(SELECT pg_catalog.pg_get_indexdef(i.indexrelid, n, false)
                 FROM generate_series(1, i.indnkeyatts) n) AS keys,
           pg_catalog.pg_get_expr(i.indpred, i.indrelid) AS predicate
    FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
    WHERE i.indrelid = %s AND i.indisunique AND i.indisvalid AND i.indimmediate
    ORDER BY i.indisprimary DESC, c.relname
"""


@dataclass(frozen=True, slots=True)
class Column:
    """`operator` is the equality that its indexes use, None where the type has none."""

    name: str
    number: int
    type: str
    generated: bool
    identity: str
    operator_schema: str | None
    operator: str | None


@dataclass(frozen=True, slots=True)
class Key:
    """A foreign key, seen from either end."""

    name: str
    child: int
    parent: int
    on_delete: str
    deferrable: bool
    child_name: str
    parent_name: str
    columns: list[str]
    ref_columns: list[str]
    operators: list[str]
    parent_soft: bool

    def joins(self, child: sql.Composable, parent: sql.Composable) -> sql.Composable:
        """Return the condition that *child* (something with the key's columns) refers to alias *parent*."""
        pairs = zip(self.columns, self.ref_columns, self.operators, strict=True)
        return sql.SQL(" AND ").join(
            sql.SQL("{}.{} OPERATOR({}) {}.{}").format(
                parent, sql.Identifier(there), sql.SQL(operator), child, sql.Identifier(here)
            )
            for here, there, operator in pairs
        )


@dataclass(frozen=True, slots=True)
class Unique:
    name: str
    keys: list[str]
    predicate: str | None


@dataclass(frozen=True, slots=True)
class Target:
    """A table as it is now. `forced` says that row-level security binds even its owner."""

    oid: int
    schema: str
    name: str
    columns: tuple[Column, ...]
    triggers: tuple[tuple[str, str], ...] = ()
    parents: tuple[Key, ...] = ()
    children: tuple[Key, ...] = ()
    uniques: tuple[Unique, ...] = ()
    forced: bool = False
    soft: bool = False
    by_name: dict[str, Column] = field(default_factory=dict)

    @property
    def ident(self) -> sql.Composable:
        return sql.Identifier(self.schema, self.name)

    @property
    def label(self) -> str:
        return f"{self.schema}.{self.name}"

    def matches(self, key_columns: Sequence[str], key: sql.Composable) -> sql.Composable:
        """Return the condition that the row ROW has the key whose texts are the array *key*."""
        parts = []
        for position, name in enumerate(key_columns, 1):
            column = self.by_name[name]
            equals: sql.Composable = sql.SQL("=")
            if column.operator_schema and column.operator:
                equals = sql.SQL("OPERATOR({}.{})").format(
                    sql.Identifier(column.operator_schema), sql.SQL(column.operator)
                )
            parts.append(
                sql.SQL("{}.{} {} ({})[{}]::{}").format(
                    ROW, sql.Identifier(name), equals, key, sql.Literal(position), sql.SQL(column.type)
                )
            )
        return sql.SQL(" AND ").join(parts)

    def key_of(self, key_columns: Sequence[str], row: sql.Composable) -> sql.Composable:
        """Return the key of *row* as an array of texts, as the capture triggers write it."""
        if not key_columns:
            return sql.SQL("NULL::text[]")
        texts = [sql.SQL("{}.{}::text").format(row, sql.Identifier(name)) for name in key_columns]
        return sql.SQL("ARRAY[{}]").format(sql.SQL(", ").join(texts))

    def settable(self, names: Sequence[str]) -> list[str]:
        """Return the columns out of *names* that an UPDATE may set."""
        return [c.name for c in self.columns if c.name in names and not c.generated and c.identity != "a"]

    @property
    def identities(self) -> tuple[str, ...]:
        """The columns that no UPDATE may set: GENERATED ALWAYS AS IDENTITY."""
        return tuple(c.name for c in self.columns if c.identity == "a")

    def relaxed(self) -> "Target":
        """Return the table as it is while its identities may be set."""
        columns = tuple(replace(c, identity="d") if c.identity == "a" else c for c in self.columns)
        return replace(self, columns=columns, by_name={c.name: c for c in columns})

    def insertable(self, names: Sequence[str]) -> list[str]:
        return [c.name for c in self.columns if c.name in names and not c.generated]


def read_target(conn: psycopg.Connection[Any], relid: int, schema: str, name: str) -> Target | None:
    """
    Return the table with *relid*, or the one that has its name now; None when there is neither.

    Must run with `search_path = pg_catalog`, so that type names come out qualified.
    """
    row = conn.execute(
        "SELECT c.oid::bigint, n.nspname, c.relname, c.relforcerowsecurity,"
        " EXISTS (SELECT FROM sqlguard.guarded_table g WHERE g.relid = c.oid AND g.mode = 'soft')"
        " FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
        " WHERE c.oid = %(oid)s OR (n.nspname = %(schema)s AND c.relname = %(name)s)"
        " ORDER BY c.oid = %(oid)s DESC LIMIT 1",
        {"oid": relid, "schema": schema, "name": name},
    ).fetchone()
    if row is None:
        return None
    oid = row[0]
    with conn.cursor(row_factory=class_row(Column)) as cursor:
        columns = tuple(cursor.execute(_COLUMNS, [oid]).fetchall())
    with conn.cursor(row_factory=class_row(Key)) as keys:
        foreign = keys.execute(_KEYS, {"oid": oid}).fetchall()
    with conn.cursor(row_factory=class_row(Unique)) as indexes:
        uniques = tuple(indexes.execute(_UNIQUES, [oid]).fetchall())
    return Target(
        oid=oid,
        schema=row[1],
        name=row[2],
        columns=columns,
        triggers=tuple((t[0], t[1]) for t in conn.execute(_TRIGGERS, [oid])),
        parents=tuple(k for k in foreign if k.child == oid),
        children=tuple(k for k in foreign if k.parent == oid),
        uniques=uniques,
        forced=row[3],
        soft=row[4],
        by_name={c.name: c for c in columns},
    )
