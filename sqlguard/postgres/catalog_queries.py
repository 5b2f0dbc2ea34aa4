"""
The queries of the catalog reader: one per kind of object, each over all of them at once.
"""

from sqlguard.catalog import BOOKKEEPING_COMMENT, DELETED_AT, DELETED_BY_AGENT

# ruff: noqa: S608  the queries are put together from constants of this module

#: Namespaces whose contents the snapshot leaves out (temporary ones belong to single sessions).
_OURS = r"""n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast')
    AND n.nspname NOT LIKE 'pg\_temp\_%' AND n.nspname NOT LIKE 'pg\_toast\_temp\_%'"""
_EXTENSION = """(SELECT e.extname FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid
    WHERE d.classid = '{catalog}'::regclass AND d.objid = {oid} AND d.deptype = 'e'
      AND d.refclassid = 'pg_extension'::regclass LIMIT 1)"""

RELATIONS = f"""
SELECT c.oid::bigint, n.nspname, c.relname, c.relkind::text, c.relispartition, c.relrowsecurity, c.reltuples::float8,
       coalesce('security_invoker=true' = ANY (c.reloptions) OR 'security_invoker=on' = ANY (c.reloptions), false),
       {_EXTENSION.format(catalog="pg_class", oid="c.oid")}
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE {_OURS} AND c.relkind IN ('r', 'p', 'v', 'm', 'f', 'S')"""
#: These print what is stored by opening what it speaks of as that is now: what has gone since the snapshot is an error.
VIEW_DEFINITIONS = "SELECT v, pg_get_viewdef(v::oid) FROM unnest(%s::bigint[]) AS v"
RULE_DEFINITIONS = "SELECT r, pg_get_ruledef(r::oid) FROM unnest(%s::bigint[]) AS r"
COLUMNS = f"""
SELECT a.attrelid::bigint, a.attname, a.attnum, a.atttypid::bigint, format_type(a.atttypid, NULL), a.attnotnull,
       a.atthasdef, a.attgenerated <> '', a.attidentity::text
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE {_OURS} AND a.attnum > 0 AND NOT a.attisdropped AND c.relkind IN ('r', 'p', 'v', 'm', 'f', 'S')
ORDER BY a.attrelid, a.attnum"""
UNIQUES = f"""
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
TRIGGERS = f"""
SELECT t.tgrelid::bigint, t.tgname, t.tgtype::int, t.tgfoid::bigint, fn.nspname, p.proname
FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_proc p ON p.oid = t.tgfoid JOIN pg_namespace fn ON fn.oid = p.pronamespace
WHERE {_OURS} AND NOT t.tgisinternal AND t.tgenabled <> 'D' ORDER BY t.tgrelid, t.tgname"""
RULES = f"""
SELECT r.ev_class::bigint, r.rulename, r.ev_type::text, r.is_instead, r.oid::bigint
FROM pg_rewrite r JOIN pg_class c ON c.oid = r.ev_class JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE {_OURS} AND r.rulename <> '_RETURN' AND r.ev_enabled <> 'D' ORDER BY r.ev_class, r.rulename"""
INHERITS = "SELECT inhrelid::bigint, inhparent::bigint FROM pg_inherits ORDER BY inhrelid, inhseqno"
#: Besides ours: what somebody has put into pg_catalog, and built-in functions that our operators and aggregates use.
FUNCTIONS = f"""
SELECT p.oid::bigint, n.nspname, p.proname, p.proargtypes::oid[]::bigint[],
       ARRAY(SELECT format_type(t, NULL) FROM unnest(p.proargtypes::oid[]) WITH ORDINALITY AS u(t, o) ORDER BY o),
       p.pronargdefaults, p.provariadic <> 0, p.prorettype::bigint, p.proretset, p.provolatile::text, p.prosecdef,
       l.lanname, coalesce(CASE WHEN p.prosqlbody IS NULL THEN p.prosrc ELSE pg_get_function_sqlbody(p.oid) END, ''),
       p.prokind::text, {_EXTENSION.format(catalog="pg_proc", oid="p.oid")},
       ARRAY(SELECT f FROM unnest(ARRAY[a.aggtransfn, a.aggfinalfn, a.aggcombinefn, a.aggserialfn, a.aggdeserialfn,
             a.aggmtransfn, a.aggminvtransfn, a.aggmfinalfn]::oid[]) AS f WHERE f <> 0)::bigint[],
       coalesce(p.proconfig, '{{{{}}}}'::text[]),
       (coalesce(p.proallargtypes, p.proargtypes::oid[]) || coalesce(a.aggtranstype, p.prorettype))::bigint[],
       coalesce(pg_get_expr(p.proargdefaults, 0), ''), coalesce(p.proargnames, '{{{{}}}}'::text[]),
       coalesce(p.proargmodes::text[], '{{{{}}}}'::text[])
FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace JOIN pg_language l ON l.oid = p.prolang
LEFT JOIN pg_aggregate a ON a.aggfnoid = p.oid
WHERE ({_OURS}) OR (p.oid >= 16384 AND n.nspname IN ('pg_catalog', 'information_schema')) OR p.oid IN (
    SELECT o.oprcode::oid FROM pg_operator o WHERE o.oid >= 16384
    UNION SELECT c.castfunc FROM pg_cast c WHERE c.oid >= 16384
    UNION SELECT f FROM pg_aggregate g CROSS JOIN LATERAL unnest(ARRAY[g.aggtransfn, g.aggfinalfn, g.aggcombinefn,
          g.aggserialfn, g.aggdeserialfn, g.aggmtransfn, g.aggminvtransfn, g.aggmfinalfn]::oid[]) AS f
          WHERE g.aggfnoid >= 16384)""".replace("{{", "{").replace("}}", "}")
OPERATORS = f"""
SELECT o.oid::bigint, n.nspname, o.oprname, o.oprleft::bigint, o.oprright::bigint, o.oprcode::bigint,
       {_EXTENSION.format(catalog="pg_operator", oid="o.oid")}
FROM pg_operator o JOIN pg_namespace n ON n.oid = o.oprnamespace
WHERE ({_OURS}) OR (o.oid >= 16384 AND n.nspname = 'pg_catalog')"""
#: Casts that come with the server have oids below FirstNormalObjectId.
CASTS = """
SELECT castsource::bigint, casttarget::bigint, castfunc::bigint, castcontext::text
FROM pg_cast WHERE oid >= 16384"""
TYPES = f"""
SELECT t.oid::bigint, n.nspname, t.typname, t.typtype::text, t.typrelid::bigint, t.typelem::bigint,
       t.typbasetype::bigint, {_EXTENSION.format(catalog="pg_type", oid="t.oid")},
       ARRAY(SELECT pg_get_constraintdef(co.oid) FROM pg_constraint co WHERE co.contypid = t.oid AND co.contype = 'c'),
       ARRAY(SELECT a.atttypid::bigint FROM pg_attribute a
             WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
             UNION SELECT r.rngsubtype::bigint FROM pg_range r WHERE r.rngtypid = t.oid
             UNION SELECT r.rngtypid::bigint FROM pg_range r WHERE r.rngmultitypid = t.oid)
FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace WHERE {_OURS}"""
FOREIGN_KEYS = f"""
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
SCHEMAS = f"SELECT n.nspname FROM pg_namespace n WHERE {_OURS}"
GUARDS_READABLE = """
SELECT EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
               WHERE n.nspname = 'sqlguard' AND c.relname = 'guarded_table'
                 AND has_schema_privilege(n.oid, 'USAGE') AND has_any_column_privilege(c.oid, 'SELECT'))"""
BOOKKEEPING = f"""
SELECT a.attrelid::bigint, a.attname FROM pg_description d
JOIN pg_attribute a ON a.attrelid = d.objoid AND a.attnum = d.objsubid
WHERE d.classoid = 'pg_class'::regclass AND d.description = '{BOOKKEEPING_COMMENT}'
    AND a.attname IN ('{DELETED_AT}', '{DELETED_BY_AGENT}') AND NOT a.attisdropped
ORDER BY 1, 2"""
_VIEWS_ACCEPTED = "coalesce(options -> 'accept' ? 'view_shows_deleted_rows', false)"
GUARDS = f"SELECT relid::bigint, mode, version, {_VIEWS_ACCEPTED} FROM sqlguard.guarded_table"

#: Counts and sums of row versions: every change of a row that matters changes them.
VERSION = f"""
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
GUARDS_VERSION = (
    f"SELECT coalesce(string_agg(concat_ws(',', relid, mode, version, {_VIEWS_ACCEPTED}), ';' ORDER BY relid), '')"
    " FROM sqlguard.guarded_table"
)
