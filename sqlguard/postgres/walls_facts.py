"""
What the catalogs say about the tables that may be guarded: read once, for all of them, in a few queries.

The one idea: 400 tables cost as many queries as one. Everything that the pre-flight judges and everything that
the walls compare with what they want is in these values.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, LiteralString

import psycopg
from psycopg.rows import dict_row

# The version of the walls that this package makes; a table guarded by an older one is brought up by `guard`.
VERSION = 2

_RELATIONS = """
    SELECT c.oid::bigint AS oid, n.nspname::text AS schema, c.relname::text AS name, c.relkind::text AS kind,
           c.relispartition AS is_partition, r.rolname::text AS owner,
           c.relrowsecurity AS row_security, c.relforcerowsecurity AS row_security_forced,
           c.relreplident::text AS replica_identity,
           pg_has_role(current_user, c.relowner, 'USAGE') AS operator_may,
           pg_has_role(d.nspowner, c.relowner, 'USAGE') AS definer_may,
           COALESCE((SELECT s.rolsuper OR s.rolbypassrls FROM pg_roles s WHERE s.oid = d.nspowner), false)
               AS definer_bypasses,
           ARRAY(SELECT i.inhparent::bigint FROM pg_inherits i WHERE i.inhrelid = c.oid ORDER BY i.inhseqno)
               AS parents,
           ARRAY(SELECT i.inhrelid::bigint FROM pg_inherits i WHERE i.inhparent = c.oid ORDER BY 1) AS children,
           EXISTS (SELECT FROM pg_publication_rel p WHERE p.prrelid = c.oid)
               OR EXISTS (SELECT FROM pg_publication p WHERE p.puballtables) AS published,
           ARRAY(SELECT w.rulename::text FROM pg_rewrite w WHERE w.ev_class = c.oid AND w.ev_type <> '1') AS rules,
           e.extname::text AS extension
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_roles r ON r.oid = c.relowner
    JOIN pg_namespace d ON d.nspname = 'sqlguard'
    LEFT JOIN pg_depend x ON x.classid = 'pg_class'::regclass AND x.objid = c.oid AND x.objsubid = 0
        AND x.deptype = 'e'
    LEFT JOIN pg_extension e ON e.oid = x.refobjid
    WHERE c.relkind IN ('r', 'p') AND c.relpersistence <> 't'
        AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast', 'sqlguard')
    ORDER BY n.nspname, c.relname
"""
_COLUMNS = """
    SELECT a.attrelid::bigint AS relation, a.attname::text AS name,
           format_type(a.atttypid, a.atttypmod) AS type, a.attnotnull AS not_null, a.atthasdef AS has_default,
           a.attgenerated <> '' AS generated, col_description(a.attrelid, a.attnum) AS comment
    FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
    WHERE a.attnum > 0 AND NOT a.attisdropped AND c.oid = ANY (%(oids)s::oid[])
    ORDER BY a.attrelid, a.attnum
"""
# `match` finds the row `p` that has the key of `r`, a row of sqlguard.row_changes, by the key's own index.
_INDEXES = """
    SELECT i.indrelid::bigint AS relation, i.indexrelid::bigint AS oid, x.relname::text AS name,
           i.indisprimary AS is_primary, i.indisvalid AS valid, i.indimmediate AS immediate,
           i.indisexclusion AS exclusion, k.conname::text AS constraint_name,
           pg_get_expr(i.indpred, i.indrelid) AS predicate, pg_get_indexdef(i.indexrelid) AS definition,
           ARRAY(SELECT f.conname::text FROM pg_constraint f
                 WHERE f.contype = 'f' AND f.conindid = i.indexrelid) AS referenced_by,
           ARRAY(SELECT a.attname::text FROM unnest(i.indkey[0:i.indnkeyatts - 1]) WITH ORDINALITY AS q (n, o)
                 JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = q.n ORDER BY q.o) AS columns,
           ARRAY(SELECT format('OPERATOR(%%I.%%s)', on_.nspname, o.oprname)
                 FROM unnest(i.indclass::oid[]) WITH ORDINALITY AS q (class, o_)
                 JOIN pg_opclass oc ON oc.oid = q.class
                 JOIN pg_amop am ON am.amopfamily = oc.opcfamily AND am.amopstrategy = 3
                     AND am.amoplefttype = oc.opcintype AND am.amoprighttype = oc.opcintype
                 JOIN pg_operator o ON o.oid = am.amopopr JOIN pg_namespace on_ ON on_.oid = o.oprnamespace
                 ORDER BY q.o_) AS operators,
           i.indisreplident AS replica_identity, obj_description(x.oid, 'pg_class') AS comment,
           (SELECT s.spcname::text FROM pg_tablespace s WHERE s.oid = x.reltablespace) AS tablespace,
           CASE WHEN i.indisprimary THEN
               (SELECT string_agg(format('p.%%I OPERATOR(%%I.%%s) r.key[%%s]::%%s', a.attname, on_.nspname, o.oprname,
                                         q.o, format_type(a.atttypid, a.atttypmod)), ' AND ' ORDER BY q.o)
                FROM unnest(i.indkey[0:i.indnkeyatts - 1]) WITH ORDINALITY AS q (n, o)
                JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = q.n
                JOIN pg_opclass oc ON oc.oid = i.indclass[q.o - 1]
                JOIN pg_amop am ON am.amopfamily = oc.opcfamily AND am.amopstrategy = 3
                    AND am.amoplefttype = oc.opcintype AND am.amoprighttype = oc.opcintype
                JOIN pg_operator o ON o.oid = am.amopopr JOIN pg_namespace on_ ON on_.oid = o.oprnamespace)
           END AS match,
           pi.inhparent::bigint AS parent_index
    FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid
    JOIN pg_class c ON c.oid = i.indrelid
    LEFT JOIN pg_constraint k ON k.conindid = i.indexrelid AND k.contype IN ('p', 'u', 'x')
    LEFT JOIN pg_inherits pi ON pi.inhrelid = i.indexrelid
    WHERE (i.indisunique OR i.indisexclusion) AND c.oid = ANY (%(oids)s::oid[])
    ORDER BY x.relname
"""
_TRIGGERS = """
    SELECT t.tgrelid::bigint AS relation, t.tgname::text AS name, t.tgtype AS bits, t.tgenabled::text AS enabled,
           fn.nspname = 'sqlguard' AS ours, t.tgparentid <> 0 AS inherited,
           md5(pg_get_triggerdef(t.oid)) AS definition, obj_description(t.oid, 'pg_trigger') AS comment
    FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid JOIN pg_namespace fn ON fn.oid = p.pronamespace
    JOIN pg_class c ON c.oid = t.tgrelid
    WHERE NOT t.tgisinternal AND c.oid = ANY (%(oids)s::oid[])
    ORDER BY t.tgname
"""
_POLICIES = """
    SELECT p.polrelid::bigint AS relation, p.polname::text AS name, p.polcmd::text AS command,
           p.polpermissive AS permissive,
           ARRAY(SELECT COALESCE(r.rolname, 'public')::text FROM unnest(p.polroles) AS q (o)
                 LEFT JOIN pg_roles r ON r.oid = q.o) AS roles,
           pg_get_expr(p.polqual, p.polrelid) AS using, pg_get_expr(p.polwithcheck, p.polrelid) AS check
    FROM pg_policy p JOIN pg_class c ON c.oid = p.polrelid
    WHERE c.oid = ANY (%(oids)s::oid[])
"""
_KEYS = """
    SELECT k.conname::text AS name, k.conrelid::bigint AS child, k.confrelid::bigint AS parent,
           k.confdeltype::text AS on_delete, k.condeferrable AS deferrable, k.condeferred AS deferred,
           k.conpfeqop IS NULL OR (to_jsonb(k) ->> 'conperiod')::boolean IS TRUE AS temporal,
           ARRAY(SELECT a.attname::text FROM unnest(k.conkey) WITH ORDINALITY AS q (n, o)
                 JOIN pg_attribute a ON a.attrelid = k.conrelid AND a.attnum = q.n ORDER BY q.o) AS columns,
           ARRAY(SELECT a.attname::text FROM unnest(k.confkey) WITH ORDINALITY AS q (n, o)
                 JOIN pg_attribute a ON a.attrelid = k.confrelid AND a.attnum = q.n ORDER BY q.o) AS ref_columns,
           ARRAY(SELECT format('OPERATOR(%%I.%%s)', on_.nspname, o.oprname)
                 FROM unnest(k.conpfeqop) WITH ORDINALITY AS q (op, o_)
                 JOIN pg_operator o ON o.oid = q.op JOIN pg_namespace on_ ON on_.oid = o.oprnamespace
                 ORDER BY q.o_) AS operators
    FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid
    WHERE k.contype = 'f' AND k.conparentid = 0 AND c.oid = ANY (%(oids)s::oid[])
    ORDER BY k.oid
"""
# Views and functions that go on showing deleted rows, or break when columns are added.
_DEPENDENTS = """
    SELECT c.oid::bigint AS relation, v.oid::regclass::text AS name, v.relkind::text AS kind
    FROM pg_class c
    JOIN pg_depend d ON d.refclassid = 'pg_class'::regclass AND d.refobjid = c.oid
        AND d.classid = 'pg_rewrite'::regclass
    JOIN pg_rewrite w ON w.oid = d.objid JOIN pg_class v ON v.oid = w.ev_class AND v.oid <> c.oid
    WHERE c.oid = ANY (%(oids)s::oid[])
        AND NOT coalesce(v.reloptions, '{}') && ARRAY['security_invoker=true', 'security_invoker=on']
    UNION
    SELECT c.oid::bigint, p.oid::regprocedure::text, 'function'
    FROM pg_class c
    JOIN pg_proc p ON p.prorettype = c.reltype JOIN pg_language l ON l.oid = p.prolang AND l.lanname = 'sql'
    WHERE c.oid = ANY (%(oids)s::oid[])
    ORDER BY 1, 2
"""
_FUNCTIONS = """
    SELECT p.proname::text AS name, md5(p.prosrc) AS source, obj_description(p.oid, 'pg_proc') AS comment
    FROM pg_proc p WHERE p.pronamespace = 'sqlguard'::regnamespace
        AND (p.prorettype = 'trigger'::regtype OR p.proname ^@ 'held_')
"""
_GUARDED = "SELECT relid::bigint AS relid, mode, version, key_columns, options FROM sqlguard.guarded_table"


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type: str
    not_null: bool
    has_default: bool
    generated: bool
    comment: str | None


@dataclass(frozen=True, slots=True)
class Index:
    """A unique or exclusion index; `match` only for the primary key."""

    oid: int
    name: str
    is_primary: bool
    valid: bool
    immediate: bool
    exclusion: bool
    constraint_name: str | None
    predicate: str | None
    definition: str
    referenced_by: list[str]
    columns: list[str]
    #: What equality is, for each key; fewer columns than these where a key is an expression.
    operators: list[str]
    replica_identity: bool
    comment: str | None
    tablespace: str | None
    match: str | None
    parent_index: int | None


@dataclass(frozen=True, slots=True)
class Trigger:
    """`bits` is pg_trigger.tgtype: 1 row, 2 before, 4 insert, 8 delete, 16 update, 64 instead of."""

    name: str
    bits: int
    enabled: str
    ours: bool
    inherited: bool
    definition: str
    comment: str | None


@dataclass(frozen=True, slots=True)
class RowPolicy:
    name: str
    command: str
    permissive: bool
    roles: list[str]
    using: str | None
    check: str | None


@dataclass(frozen=True, slots=True)
class Key:
    """A foreign key; `on_delete`: a no action, r restrict, c cascade, n set null, d set default."""

    name: str
    child: int
    parent: int
    on_delete: str
    deferrable: bool
    deferred: bool
    temporal: bool
    columns: list[str]
    ref_columns: list[str]
    operators: list[str]


@dataclass(frozen=True, slots=True)
class Relation:
    """A table as it is; `kind` r or p."""

    oid: int
    schema: str
    name: str
    kind: str
    is_partition: bool
    owner: str
    row_security: bool
    row_security_forced: bool
    replica_identity: str
    operator_may: bool
    definer_may: bool
    definer_bypasses: bool
    parents: list[int]
    children: list[int]
    published: bool
    rules: list[str]
    extension: str | None
    columns: list[Column] = field(default_factory=list)
    indexes: list[Index] = field(default_factory=list)
    triggers: list[Trigger] = field(default_factory=list)
    policies: list[RowPolicy] = field(default_factory=list)
    #: (name, kind) of views and SQL functions over the table; kind is a relkind or `function`.
    dependents: list[tuple[str, str]] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def primary_key(self) -> Index | None:
        return next((i for i in self.indexes if i.is_primary), None)

    @property
    def key_columns(self) -> list[str]:
        primary = self.primary_key
        return primary.columns if primary else []

    def column(self, name: str) -> Column | None:
        return next((c for c in self.columns if c.name == name), None)

    def user_triggers(self, bits: int) -> list[Trigger]:
        """Return other people's triggers that have any of the event or timing *bits*."""
        return [t for t in self.triggers if not t.ours and not t.inherited and t.bits & bits]


@dataclass(frozen=True, slots=True)
class Guarded:
    relid: int
    mode: str
    version: int
    key_columns: list[str]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Facts:
    relations: dict[int, Relation]
    keys: list[Key]
    guarded: dict[int, Guarded]
    #: Trigger functions in the schema `sqlguard`, by name: md5 of the source, comment.
    functions: dict[str, tuple[str, str | None]]

    def root(self, relation: Relation) -> Relation:
        """Return the top of the tree that *relation* belongs to, by partitioning or inheritance."""
        while relation.parents and relation.parents[0] in self.relations:
            relation = self.relations[relation.parents[0]]
        return relation

    def tree(self, root: Relation) -> Iterator[Relation]:
        """Yield *root* and everything below it, parents first."""
        yield root
        for child in root.children:
            if child in self.relations:
                yield from self.tree(self.relations[child])

    def inherits(self, root: Relation) -> bool:
        """Whether the tree is an old-style inheritance tree, not a partitioned one."""
        return root.kind == "r" and bool(root.children)

    def keys_to(self, root: Relation) -> list[Key]:
        """Return the foreign keys that refer to any relation of the tree below *root*."""
        members = {r.oid for r in self.tree(root)}
        return [k for k in self.keys if k.parent in members]

    def keys_of(self, root: Relation) -> list[Key]:
        members = {r.oid for r in self.tree(root)}
        return [k for k in self.keys if k.child in members]


def read_facts(conn: psycopg.Connection[Any]) -> Facts:
    """Read all ordinary and partitioned tables outside system schemas. Needs the schema `sqlguard`."""
    with conn.transaction(), conn.cursor(row_factory=dict_row) as cursor:
        oids: list[int] = []

        def rows(query: LiteralString) -> list[dict[str, Any]]:
            return cursor.execute(query, {"oids": oids}).fetchall()

        # Names and types are then written with their schemas, for whoever reads them later.
        cursor.execute("SET LOCAL search_path = pg_catalog")
        relations = {row["oid"]: Relation(**row) for row in rows(_RELATIONS)}
        oids.extend(relations)
        for query, kind, where in (
            (_COLUMNS, Column, "columns"),
            (_INDEXES, Index, "indexes"),
            (_TRIGGERS, Trigger, "triggers"),
            (_POLICIES, RowPolicy, "policies"),
        ):
            for row in rows(query):
                relation = relations.get(row.pop("relation"))
                if relation is not None:
                    getattr(relation, where).append(kind(**row))
        for row in rows(_DEPENDENTS):
            relations[row["relation"]].dependents.append((row["name"], row["kind"]))
        return Facts(
            relations,
            [Key(**row) for row in rows(_KEYS)],
            {row["relid"]: Guarded(**row) for row in rows(_GUARDED)},
            {row["name"]: (row["source"], row["comment"]) for row in rows(_FUNCTIONS)},
        )
