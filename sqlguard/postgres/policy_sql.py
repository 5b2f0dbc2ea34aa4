"""
Rights as SQL: what a group has now is read from the catalogs, and the difference to what it should have is
written as GRANT and REVOKE, one statement per object.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from sqlguard.catalog import Catalog
from sqlguard.postgres.policy_rights import Right, World

Connection = psycopg.Connection[Any]

_GIVEN = """
SELECT 'table', c.oid::bigint, x.privilege_type, ''::text
  FROM pg_class c, aclexplode(c.relacl) x WHERE x.grantee = %(group)s AND c.relkind <> 'S'
UNION ALL
SELECT 'sequence', c.oid::bigint, x.privilege_type, ''
  FROM pg_class c, aclexplode(c.relacl) x WHERE x.grantee = %(group)s AND c.relkind = 'S'
UNION ALL
SELECT 'column', a.attrelid::bigint, x.privilege_type, a.attname
  FROM pg_attribute a, aclexplode(a.attacl) x WHERE x.grantee = %(group)s AND NOT a.attisdropped
UNION ALL
SELECT 'schema', n.oid::bigint, x.privilege_type, ''
  FROM pg_namespace n, aclexplode(n.nspacl) x WHERE x.grantee = %(group)s
UNION ALL
SELECT 'routine', p.oid::bigint, x.privilege_type, ''
  FROM pg_proc p, aclexplode(p.proacl) x WHERE x.grantee = %(group)s
UNION ALL
SELECT 'database', d.oid::bigint, x.privilege_type, ''
  FROM pg_database d, aclexplode(d.datacl) x WHERE x.grantee = %(group)s AND d.datname = current_database()
"""
#: Whether this session may give a right, whether everybody has it already, and to whom the object belongs.
_GIVEABLE = """
SELECT w.kind, w.oid, w.privilege, w.column_name, o.owner::regrole::text,
  CASE w.kind
    WHEN 'table' THEN has_table_privilege(w.oid::oid, w.privilege || ' WITH GRANT OPTION')
    WHEN 'column' THEN has_table_privilege(w.oid::oid, w.privilege || ' WITH GRANT OPTION')
        -- A column that guarding will add comes with the table's own rights.
        OR (EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = w.oid::oid AND a.attname = w.column_name)
            AND has_column_privilege(w.oid::oid, w.column_name, w.privilege || ' WITH GRANT OPTION'))
    WHEN 'sequence' THEN has_sequence_privilege(w.oid::oid, w.privilege || ' WITH GRANT OPTION')
    WHEN 'schema' THEN has_schema_privilege(w.oid::oid, w.privilege || ' WITH GRANT OPTION')
    WHEN 'routine' THEN has_function_privilege(w.oid::oid, w.privilege || ' WITH GRANT OPTION')
    WHEN 'database' THEN has_database_privilege(w.oid::oid, w.privilege || ' WITH GRANT OPTION')
  END,
  CASE w.kind
    WHEN 'schema' THEN has_schema_privilege('public', w.oid::oid, w.privilege)
    WHEN 'routine' THEN has_function_privilege('public', w.oid::oid, w.privilege)
    WHEN 'database' THEN has_database_privilege('public', w.oid::oid, w.privilege)
    ELSE false
  END
FROM unnest(%s::text[], %s::bigint[], %s::text[], %s::text[]) AS w (kind, oid, privilege, column_name)
CROSS JOIN LATERAL (
    SELECT c.relowner AS owner FROM pg_class c WHERE c.oid = w.oid AND w.kind IN ('table', 'column', 'sequence')
    UNION ALL SELECT n.nspowner FROM pg_namespace n WHERE n.oid = w.oid AND w.kind = 'schema'
    UNION ALL SELECT p.proowner FROM pg_proc p WHERE p.oid = w.oid AND w.kind = 'routine'
    UNION ALL SELECT d.datdba FROM pg_database d WHERE d.oid = w.oid AND w.kind = 'database') o
"""
_NAMES = """
SELECT n.oid::bigint, n.nspname, NULL FROM pg_namespace n
UNION ALL
SELECT d.oid::bigint, d.datname, NULL FROM pg_database d WHERE d.datname = current_database()
"""
_BASES = """
SELECT DISTINCT r.ev_class::bigint, d.refobjid::bigint
FROM pg_rewrite r JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid
WHERE r.rulename = '_RETURN' AND d.refclassid = 'pg_class'::regclass AND d.refobjid <> r.ev_class
"""
#: Sequences that defaults name; identity columns need no right on theirs.
_SEQUENCES = """
SELECT DISTINCT a.adrelid::bigint, d.refobjid::bigint
FROM pg_attrdef a JOIN pg_depend d ON d.classid = 'pg_attrdef'::regclass AND d.objid = a.oid
JOIN pg_class s ON s.oid = d.refobjid AND s.relkind = 'S'
WHERE d.refclassid = 'pg_class'::regclass
"""


def read_world(conn: Connection, catalog: Catalog) -> World:
    return World(
        catalog,
        database=_one(conn, "SELECT oid::bigint FROM pg_database WHERE datname = current_database()"),
        schemas=dict(conn.execute("SELECT nspname, oid::bigint FROM pg_namespace").fetchall()),
        bases=_grouped(conn, _BASES),
        sequences=_grouped(conn, _SEQUENCES),
    )


def _one(conn: Connection, query: str) -> int:
    row = conn.execute(query).fetchone()
    assert row is not None  # noqa: S101 (there always is a current database)
    return int(row[0])


def _grouped(conn: Connection, query: str) -> Mapping[int, frozenset[int]]:
    found: dict[int, set[int]] = defaultdict(set)
    for key, value in conn.execute(query).fetchall():
        found[key].add(value)
    return {key: frozenset(values) for key, values in found.items()}


def given(conn: Connection, group: int) -> frozenset[Right]:
    """Return what the group role with that oid has in this database, by itself and not through others."""
    return frozenset(Right(*row) for row in conn.execute(_GIVEN, {"group": group}).fetchall())


@dataclass(frozen=True, slots=True)
class Giveable:
    """`lacking`: the GRANTs that the operator needs first; `public`: what everybody has and need not be given."""

    lacking: tuple[str, ...]
    public: frozenset[Right]


def giveable(conn: Connection, rights: Iterable[Right]) -> Giveable:
    """Find out which of *rights* this session may give."""
    sorted_rights = sorted(rights)
    columns = [[getattr(r, part) for r in sorted_rights] for part in ("kind", "oid", "privilege", "column")]
    lacking, public = [], set()
    operator = conn.execute("SELECT current_user::regrole::text").fetchone()
    assert operator is not None  # noqa: S101 (every session has a user)
    for *parts, owner, may, everybody in conn.execute(_GIVEABLE, columns).fetchall():
        if may:
            continue
        if everybody:
            public.add(Right(*parts))
        else:
            lacking.append(f"GRANT {owner} TO {operator[0]}")
    return Giveable(tuple(dict.fromkeys(lacking)), frozenset(public))


class Writer:
    """Writes rights as SQL; names are looked up once."""

    def __init__(self, conn: Connection, catalog: Catalog) -> None:
        self._conn = conn
        self._catalog = catalog
        self._named = {oid: name for oid, name, _ in conn.execute(_NAMES).fetchall()}

    def grants(self, rights: Iterable[Right], group: str) -> Iterator[sql.Composed]:
        yield from self._statements("GRANT {} ON {} TO {}", rights, group)

    def revocations(self, rights: Iterable[Right], group: str) -> Iterator[sql.Composed]:
        yield from self._statements("REVOKE {} ON {} FROM {}", rights, group)

    def _statements(self, form: str, rights: Iterable[Right], group: str) -> Iterator[sql.Composed]:
        objects: dict[tuple[str, int], list[Right]] = defaultdict(list)
        for right in sorted(rights, key=self._order):
            kind = "table" if right.kind == "column" else right.kind
            objects[kind, right.oid].append(right)
        for (kind, oid), some in objects.items():
            yield sql.SQL(form).format(_privileges(some), self._object(kind, oid), sql.Identifier(group))

    def _order(self, right: Right) -> tuple[str, str, str, int]:
        """Containers first, then by name, and columns in the table's order."""
        rank = {"database": "0", "schema": "1", "table": "2", "column": "2", "sequence": "3", "routine": "4"}
        table = self._catalog.tables.get(right.oid)
        column = table.column(right.column) if table is not None else None
        name = table.qualified if table is not None else str(right.oid)
        return rank[right.kind], name, right.privilege, column.attnum if column is not None else 0

    def _object(self, kind: str, oid: int) -> sql.Composed:
        table = self._catalog.tables.get(oid)
        if table is not None:
            word = "SEQUENCE" if kind == "sequence" else "TABLE"
            return sql.SQL(word + " {}").format(sql.Identifier(table.schema, table.name))
        function = self._catalog.functions.get(oid)
        if function is not None and kind == "routine":
            # The types' names come from format_type() with an empty search_path: SQL as they stand.
            arguments = sql.SQL(", ".join(function.arg_type_names))
            return sql.SQL("ROUTINE {}({})").format(sql.Identifier(function.schema, function.name), arguments)
        if oid in self._named and kind in ("schema", "database"):
            return sql.SQL(kind.upper() + " {}").format(sql.Identifier(self._named[oid]))
        return self._foreign(kind, oid)

    def _foreign(self, kind: str, oid: int) -> sql.Composed:
        """An object outside the catalog snapshot, on which somebody has given a right by hand."""
        query = {
            "routine": "SELECT 'ROUTINE ' || %s::bigint::oid::regprocedure::text",
            "sequence": "SELECT 'SEQUENCE ' || %s::bigint::oid::regclass::text",
        }.get(kind, "SELECT 'TABLE ' || %s::bigint::oid::regclass::text")
        row = self._conn.execute(query, [oid]).fetchone()
        return sql.Composed([sql.SQL(row[0] if row else "")])


def _privileges(rights: Iterable[Right]) -> sql.Composed:
    whole: list[str] = []
    by_column: dict[str, list[str]] = defaultdict(list)
    for right in rights:
        if right.kind == "column":
            by_column[right.privilege].append(right.column)
        else:
            whole.append(right.privilege)
    parts: list[sql.Composable] = [sql.SQL(privilege) for privilege in whole]
    parts += [
        sql.SQL(privilege + " ({})").format(sql.SQL(", ").join(map(sql.Identifier, names)))
        for privilege, names in by_column.items()
    ]
    return sql.SQL(", ").join(parts)
