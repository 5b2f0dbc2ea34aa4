"""
Reads what exists in the database into a Catalog, with few queries over whole catalogs.

Everything is read in one REPEATABLE READ transaction with an empty search_path, so that PostgreSQL prints
definitions with every name qualified. It works for a task's own role: pg_catalog is readable by all; the
guards, which are not, are then known by their triggers.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from sqlguard.catalog import (
    DELETED_AT,
    DELETED_BY_AGENT,
    Cast,
    Catalog,
    Column,
    ForeignKey,
    Function,
    Guard,
    Operator,
    Rule,
    Table,
    Trigger,
    Type,
    Unique,
)

Row = Sequence[Any]
_TRIGGER_EVENTS = {4: "insert", 8: "delete", 16: "update", 32: "truncate"}
_RULE_EVENTS = {"1": "select", "2": "update", "3": "insert", "4": "delete"}

#: Namespaces whose contents the snapshot leaves out (temporary ones belong to single sessions).
_OURS = r"""n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast')
    AND n.nspname NOT LIKE 'pg\_temp\_%' AND n.nspname NOT LIKE 'pg\_toast\_temp\_%'"""
_EXTENSION = """(SELECT e.extname FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid
    WHERE d.classid = '{catalog}'::regclass AND d.objid = {oid} AND d.deptype = 'e'
      AND d.refclassid = 'pg_extension'::regclass LIMIT 1)"""

_RELATIONS = f"""
SELECT c.oid::bigint, n.nspname, c.relname, c.relkind::text, c.relispartition, c.relrowsecurity, c.reltuples::float8,
       CASE WHEN c.relkind = 'v' THEN pg_get_viewdef(c.oid) END,
       coalesce('security_invoker=true' = ANY (c.reloptions) OR 'security_invoker=on' = ANY (c.reloptions), false),
       {_EXTENSION.format(catalog="pg_class", oid="c.oid")}
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE {_OURS} AND c.relkind IN ('r', 'p', 'v', 'm', 'f', 'S')"""
_COLUMNS = f"""
SELECT a.attrelid::bigint, a.attname, a.attnum, a.atttypid::bigint, format_type(a.atttypid, NULL), a.attnotnull,
       a.atthasdef, a.attgenerated <> '', a.attidentity::text
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE {_OURS} AND a.attnum > 0 AND NOT a.attisdropped AND c.relkind IN ('r', 'p', 'v', 'm', 'f', 'S')
ORDER BY a.attrelid, a.attnum"""
_UNIQUES = f"""
SELECT i.indrelid::bigint, ic.relname,
       ARRAY(SELECT a.attname FROM unnest(i.indkey::int2[]) WITH ORDINALITY AS k(attnum, place)
             LEFT JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum AND k.attnum > 0
             WHERE k.place <= i.indnkeyatts ORDER BY k.place),
       i.indisprimary, co.oid IS NOT NULL, NOT i.indimmediate, pg_get_expr(i.indpred, i.indrelid),
       {{nulls}}, i.indisvalid
FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_class ic ON ic.oid = i.indexrelid
LEFT JOIN pg_constraint co ON co.conindid = i.indexrelid AND co.contype IN ('p', 'u')
WHERE {_OURS} AND i.indisunique ORDER BY i.indrelid, ic.relname"""
_TRIGGERS = f"""
SELECT t.tgrelid::bigint, t.tgname, t.tgtype::int, t.tgfoid::bigint, fn.nspname, p.proname
FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_proc p ON p.oid = t.tgfoid JOIN pg_namespace fn ON fn.oid = p.pronamespace
WHERE {_OURS} AND NOT t.tgisinternal AND t.tgenabled <> 'D' ORDER BY t.tgrelid, t.tgname"""
_RULES = f"""
SELECT r.ev_class::bigint, r.rulename, r.ev_type::text, r.is_instead, pg_get_ruledef(r.oid)
FROM pg_rewrite r JOIN pg_class c ON c.oid = r.ev_class JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE {_OURS} AND r.rulename <> '_RETURN' AND r.ev_enabled <> 'D' ORDER BY r.ev_class, r.rulename"""
_INHERITS = "SELECT inhrelid::bigint, inhparent::bigint FROM pg_inherits ORDER BY inhrelid, inhseqno"
_FUNCTIONS = f"""
SELECT p.oid::bigint, n.nspname, p.proname, p.proargtypes::oid[]::bigint[],
       ARRAY(SELECT format_type(t, NULL) FROM unnest(p.proargtypes::oid[]) WITH ORDINALITY AS u(t, o) ORDER BY o),
       p.pronargdefaults, p.provariadic <> 0, p.prorettype::bigint, p.proretset, p.provolatile::text, p.prosecdef,
       l.lanname, CASE WHEN p.prosqlbody IS NULL THEN p.prosrc ELSE pg_get_function_sqlbody(p.oid) END,
       p.prokind::text, {_EXTENSION.format(catalog="pg_proc", oid="p.oid")},
       ARRAY(SELECT f FROM unnest(ARRAY[a.aggtransfn, a.aggfinalfn, a.aggcombinefn, a.aggserialfn, a.aggdeserialfn,
             a.aggmtransfn, a.aggminvtransfn, a.aggmfinalfn]::oid[]) AS f WHERE f <> 0)::bigint[],
       coalesce(p.proconfig, '{{{{}}}}'::text[])
FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace JOIN pg_language l ON l.oid = p.prolang
LEFT JOIN pg_aggregate a ON a.aggfnoid = p.oid
WHERE {_OURS}""".replace("{{", "{").replace("}}", "}")
_OPERATORS = f"""
SELECT o.oid::bigint, n.nspname, o.oprname, o.oprleft::bigint, o.oprright::bigint, o.oprcode::bigint,
       {_EXTENSION.format(catalog="pg_operator", oid="o.oid")}
FROM pg_operator o JOIN pg_namespace n ON n.oid = o.oprnamespace WHERE {_OURS}"""
#: Casts that come with the server have oids below FirstNormalObjectId.
_CASTS = """
SELECT castsource::bigint, casttarget::bigint, castfunc::bigint, castcontext::text
FROM pg_cast WHERE oid >= 16384"""
_TYPES = f"""
SELECT t.oid::bigint, n.nspname, t.typname, t.typtype::text, t.typrelid::bigint, t.typelem::bigint,
       t.typbasetype::bigint, {_EXTENSION.format(catalog="pg_type", oid="t.oid")},
       ARRAY(SELECT pg_get_constraintdef(co.oid) FROM pg_constraint co WHERE co.contypid = t.oid AND co.contype = 'c')
FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace WHERE {_OURS}"""
_FOREIGN_KEYS = f"""
SELECT co.conname, co.conrelid::bigint, {{names}}, co.confrelid::bigint, {{references}},
       co.confdeltype::text, co.confupdtype::text, {{set}}, co.condeferrable, co.condeferred
FROM pg_constraint co JOIN pg_namespace n ON n.oid = co.connamespace
WHERE {_OURS} AND co.contype = 'f' ORDER BY co.conrelid, co.conname""".format(
    names="ARRAY(SELECT a.attname FROM unnest(co.conkey) WITH ORDINALITY u(k, o)"
    " JOIN pg_attribute a ON a.attrelid = co.conrelid AND a.attnum = u.k ORDER BY o)",
    references="ARRAY(SELECT a.attname FROM unnest(co.confkey) WITH ORDINALITY u(k, o)"
    " JOIN pg_attribute a ON a.attrelid = co.confrelid AND a.attnum = u.k ORDER BY o)",
    set="ARRAY(SELECT a.attname FROM unnest(co.confdelsetcols) WITH ORDINALITY u(k, o)"
    " JOIN pg_attribute a ON a.attrelid = co.conrelid AND a.attnum = u.k ORDER BY o)",
)
_SCHEMAS = f"SELECT n.nspname FROM pg_namespace n WHERE {_OURS}"
_GUARDS_READABLE = """
SELECT to_regclass('sqlguard.guarded_table') IS NOT NULL
   AND has_schema_privilege('sqlguard', 'USAGE')
   AND has_table_privilege('sqlguard.guarded_table', 'SELECT')"""
_GUARDS = "SELECT relid::bigint, mode, version FROM sqlguard.guarded_table"

#: Counts and sums of row versions: every change of a row that matters changes them.
_VERSION = f"""
WITH spaces AS (SELECT n.oid FROM pg_namespace n WHERE {_OURS}),
relations AS MATERIALIZED (SELECT c.oid, c.xmin FROM pg_class c WHERE c.relnamespace IN (SELECT oid FROM spaces))
SELECT concat_ws('/',
  (SELECT {{sum}} FROM pg_namespace t WHERE t.oid IN (SELECT oid FROM spaces)),
  (SELECT {{sum}} FROM relations t),
  (SELECT {{sum}} FROM pg_attribute t WHERE t.attrelid IN (SELECT oid FROM relations) AND t.attnum > 0),
  (SELECT {{sum}} FROM pg_index t WHERE t.indrelid IN (SELECT oid FROM relations)),
  (SELECT {{sum}} FROM pg_trigger t WHERE t.tgrelid IN (SELECT oid FROM relations)),
  (SELECT {{sum}} FROM pg_rewrite t WHERE t.ev_class IN (SELECT oid FROM relations)),
  (SELECT {{sum}} FROM pg_inherits t WHERE t.inhrelid IN (SELECT oid FROM relations)),
  (SELECT {{sum}} FROM pg_constraint t WHERE t.connamespace IN (SELECT oid FROM spaces)),
  (SELECT {{sum}} FROM pg_proc t WHERE t.pronamespace IN (SELECT oid FROM spaces)),
  (SELECT {{sum}} FROM pg_operator t WHERE t.oprnamespace IN (SELECT oid FROM spaces)),
  (SELECT {{sum}} FROM pg_type t WHERE t.typnamespace IN (SELECT oid FROM spaces)),
  (SELECT {{sum}} FROM pg_cast t WHERE t.oid >= 16384))""".format(
    sum="count(*) || ':' || coalesce(sum(t.xmin::text::bigint), 0)"
)
_GUARDS_VERSION = (
    "SELECT coalesce(string_agg(concat_ws(',', relid, mode, version), ';' ORDER BY relid), '')"
    " FROM sqlguard.guarded_table"
)


def catalog_version(conn: psycopg.Connection[Any]) -> str:
    """Return a text that is another one as soon as anything that a decision depends on has changed."""
    with conn.cursor(row_factory=tuple_row) as cursor:
        version = str(_one(cursor.execute(_VERSION)))
        if _one(cursor.execute(_GUARDS_READABLE)):
            version += "/" + str(_one(cursor.execute(_GUARDS_VERSION)))
    return version


def read_catalog(conn: psycopg.Connection[Any]) -> Catalog:
    """Return what exists outside pg_catalog and information_schema, as one consistent snapshot."""
    with _snapshot(conn), conn.cursor(row_factory=tuple_row) as cursor:
        reader = _Reader(cursor, conn.info.server_version)
        return reader.catalog(catalog_version(conn))


@contextmanager
def _snapshot(conn: psycopg.Connection[Any]) -> Iterator[None]:
    """Read as of one moment with an empty search_path, and leave the session as it was."""
    own = conn.info.transaction_status == TransactionStatus.IDLE
    if own:
        conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    try:
        before = _one(conn.cursor(row_factory=tuple_row).execute("SELECT current_setting('search_path')"))
        conn.execute("SELECT pg_catalog.set_config('search_path', '', true)")
        try:
            yield
        finally:
            if not own and conn.info.transaction_status == TransactionStatus.INTRANS:
                conn.execute("SELECT pg_catalog.set_config('search_path', %s, true)", [before])
    finally:
        if own:
            conn.execute("ROLLBACK")


def _one(cursor: psycopg.Cursor[Row]) -> Any:
    row = cursor.fetchone()
    return row[0] if row is not None else None


class _Reader:
    """One reading; the parts of a table are read for all tables at once and put together here."""

    def __init__(self, cursor: psycopg.Cursor[Row], server_version: int) -> None:
        self.cursor = cursor
        self.server_version = server_version

    def catalog(self, version: str) -> Catalog:
        return Catalog(
            version=version,
            server_version=self.server_version,
            tables=self._tables(),
            functions={f.oid: f for f in map(_function, self._rows(_FUNCTIONS))},
            operators=tuple(Operator(*row) for row in self._rows(_OPERATORS)),
            casts=tuple(Cast(*row) for row in self._rows(_CASTS)),
            types={row[0]: Type(*row[:8], checks=tuple(row[8])) for row in self._rows(_TYPES)},
            foreign_keys=tuple(_foreign_key(row) for row in self._rows(_FOREIGN_KEYS)),
            schemas=frozenset(row[0] for row in self._rows(_SCHEMAS)),
        )

    def _rows(self, query: str) -> list[Row]:
        return self.cursor.execute(query).fetchall()

    def _grouped(self, query: str) -> Mapping[int, list[Row]]:
        found: dict[int, list[Row]] = defaultdict(list)
        for row in self._rows(query):
            found[row[0]].append(row[1:])
        return found

    def _tables(self) -> dict[int, Table]:
        columns, rules = self._grouped(_COLUMNS), self._grouped(_RULES)
        uniques = self._grouped(_UNIQUES.format(nulls="i.indnullsnotdistinct"))
        triggers = self._grouped(_TRIGGERS)
        inherits = self._rows(_INHERITS)
        parents: dict[int, list[int]] = defaultdict(list)
        children: dict[int, list[int]] = defaultdict(list)
        for child, parent in inherits:
            parents[child].append(parent)
            children[parent].append(child)
        guards = self._guards(triggers)
        tables = {}
        for (
            oid,
            schema,
            name,
            kind,
            partition,
            secured,
            estimate,
            definition,
            invoker,
            extension,
        ) in self._rows(_RELATIONS):
            tables[oid] = Table(
                oid,
                schema,
                name,
                kind,
                columns=tuple(Column(*row) for row in columns.get(oid, ())),
                uniques=tuple(Unique(row[0], tuple(row[1]), *row[2:]) for row in uniques.get(oid, ())),
                triggers=tuple(_trigger(row) for row in triggers.get(oid, ())),
                rules=tuple(Rule(row[0], _RULE_EVENTS[row[1]], row[2], row[3]) for row in rules.get(oid, ())),
                parents=tuple(parents.get(oid, ())),
                children=tuple(children.get(oid, ())),
                is_partition=partition,
                row_security=secured,
                definition=definition,
                security_invoker=invoker,
                row_estimate=estimate,
                guard=guards.get(oid),
                extension=extension,
            )
        return tables

    def _guards(self, triggers: Mapping[int, list[Row]]) -> dict[int, Guard]:
        if _one(self.cursor.execute(_GUARDS_READABLE)):
            return {oid: _guard(mode, version) for oid, mode, version in self._rows(_GUARDS)}
        found = {}
        for oid, rows in triggers.items():
            functions = {name for _, _, _, schema, name in rows if schema == "sqlguard"}
            if functions:
                found[oid] = _guard("soft" if any("soft" in f for f in functions) else "journal", 1)
        return found


def _guard(mode: str, version: int) -> Guard:
    return Guard(mode, version, (DELETED_AT, DELETED_BY_AGENT) if mode == "soft" else ())


def _trigger(row: Row) -> Trigger:
    name, kind, function, schema, _ = row
    timing = "INSTEAD OF" if kind & 64 else "BEFORE" if kind & 2 else "AFTER"
    events = frozenset(event for bit, event in _TRIGGER_EVENTS.items() if kind & bit)
    return Trigger(name, events, timing, bool(kind & 1), function, ours=schema == "sqlguard")


def _function(row: Row) -> Function:
    return Function(
        *row[:3],
        arg_types=tuple(row[3]),
        arg_type_names=tuple(row[4]),
        defaults=row[5],
        variadic=row[6],
        return_type=row[7],
        returns_set=row[8],
        volatility=row[9],
        security_definer=row[10],
        language=row[11],
        source=row[12] or "",
        kind=row[13],
        extension=row[14],
        calls=tuple(row[15]),
        settings=tuple(row[16]),
    )


def _foreign_key(row: Row) -> ForeignKey:
    name, table, columns, references, ref_columns, on_delete, on_update, set_columns, deferrable, deferred = (
        row
    )
    return ForeignKey(
        name,
        table,
        tuple(columns),
        references,
        tuple(ref_columns),
        on_delete,
        on_update,
        tuple(set_columns),
        deferrable,
        deferred,
    )
