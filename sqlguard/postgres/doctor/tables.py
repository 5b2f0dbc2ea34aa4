"""Wall 3: triggers, functions and row-level security of the guarded tables, compared with what should be there."""

from collections.abc import Iterator, Mapping

from sqlguard.postgres import walls_unique
from sqlguard.postgres.doctor.finding import Check, Connection, Finding, Severity
from sqlguard.postgres.walls_facts import VERSION, Facts, Relation, read_facts
from sqlguard.postgres.walls_policies import policy_changes
from sqlguard.postgres.walls_triggers import trigger_changes, wanted_functions, wanted_triggers

_WALL = "table"
_AGENTS = """
WITH agents AS (
    SELECT r.oid FROM pg_roles r
    WHERE r.rolname = 'sqlguard_agent' OR r.rolname IN (SELECT p.group_role FROM sqlguard.policy p))
"""

CHECKS = (
    Check(
        "unguarded-table",
        Severity.OPEN,
        _WALL,
        "policy `{more}` lets tasks write `{object}`, which is not guarded: nothing is captured, capped or undone",
        """SELECT DISTINCT c.oid::regclass AS object, string_agg(DISTINCT t.policy, '`, `') AS more,
                  'sqlguard guard ' || quote_ident(t.schema_name) || '.' || quote_ident(t.table_name) AS command,
                  c.oid::bigint AS relid
           FROM sqlguard.policy_table t JOIN pg_class c ON c.oid = t.relid
           WHERE (t.can_insert OR t.can_update OR t.delete_mode <> 'refuse') AND c.relkind IN ('r', 'p')
               AND t.version = (SELECT max(p.version) FROM sqlguard.policy p WHERE p.name = t.policy)
               AND NOT EXISTS (SELECT FROM sqlguard.guarded_table g
                               WHERE g.relid = c.oid OR g.relid IN (SELECT pg_partition_ancestors(c.oid)))
               AND NOT EXISTS (WITH RECURSIVE up AS (SELECT c.oid AS relid UNION SELECT i.inhparent FROM pg_inherits i
                                                     JOIN up ON i.inhrelid = up.relid)
                               SELECT FROM up JOIN sqlguard.guarded_table g USING (relid))
           GROUP BY c.oid, t.schema_name, t.table_name""",
    ),
    Check(
        "guarded-gone",
        Severity.NOTE,
        _WALL,
        "`{object}` was guarded and is no longer there; its journal stays",
        """SELECT g.schema_name || '.' || g.table_name AS object,
                  format('DELETE FROM sqlguard.guarded_table WHERE relid = %s', g.relid) AS sql
           FROM sqlguard.guarded_table g WHERE NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = g.relid)""",
    ),
    Check(
        "row-security-off",
        Severity.BROKEN,
        _WALL,
        "`{object}` has row scopes and row-level security is off: its tasks see all rows",
        """SELECT c.oid::regclass AS object, format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', c.oid::regclass) AS sql,
                  c.oid::bigint AS relid
           FROM pg_class c WHERE NOT c.relrowsecurity
               AND EXISTS (SELECT FROM pg_policy p WHERE p.polrelid = c.oid AND p.polname ^@ 'sg_rows_')""",
    ),
    Check(
        "view-owner-rights",
        Severity.OPEN,
        _WALL,
        "agents may read `{object}`, a view with its owner's rights: it shows deleted rows, and rows outside a task's "
        "scope, of {more}",
        _AGENTS.replace("WITH", "WITH RECURSIVE", 1)
        + """, shows AS (
                 SELECT w.ev_class AS view, d.refobjid AS base FROM pg_rewrite w
                 JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.objid = w.oid
                     AND d.refclassid = 'pg_class'::regclass AND d.refobjid <> w.ev_class
                 WHERE w.rulename = '_RETURN'),
             reaches AS (SELECT view, base FROM shows
                         UNION SELECT r.view, s.base FROM reaches r JOIN shows s ON s.view = r.base)
             SELECT v.oid::regclass AS object, string_agg(DISTINCT b.oid::regclass::text, ', ') AS more,
                    v.oid::bigint AS relid, format('ALTER VIEW %s SET (security_invoker = true)', v.oid::regclass) AS sql
             FROM reaches r JOIN pg_class v ON v.oid = r.view JOIN pg_class b ON b.oid = r.base
             WHERE v.relkind = 'v' AND b.relkind IN ('r', 'p') AND b.relrowsecurity
                 AND NOT coalesce(v.reloptions, '{}') && ARRAY['security_invoker=true', 'security_invoker=on',
                                                               'security_invoker=1', 'security_invoker=yes']
                 AND EXISTS (SELECT FROM agents a WHERE has_any_column_privilege(a.oid, v.oid, 'SELECT'))
             GROUP BY v.oid""",
    ),
    Check(
        "materialized-view",
        Severity.NOTE,
        _WALL,
        "agents may read `{object}`, which holds rows of {more} as they were when it was refreshed, whatever a task may "
        "see; leave it out of the policy if it must not",
        _AGENTS
        + """SELECT v.oid::regclass AS object, string_agg(DISTINCT b.oid::regclass::text, ', ') AS more, v.oid::bigint AS relid
             FROM pg_class v JOIN pg_rewrite w ON w.ev_class = v.oid
             JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.objid = w.oid
                 AND d.refclassid = 'pg_class'::regclass
             JOIN pg_class b ON b.oid = d.refobjid AND b.relrowsecurity
             WHERE v.relkind = 'm' AND EXISTS (SELECT FROM agents a WHERE has_any_column_privilege(a.oid, v.oid, 'SELECT'))
             GROUP BY v.oid""",
    ),
    Check(
        "scope-without-index",
        Severity.NOTE,
        _WALL,
        "the row scope of policy `{more}` is asked at every statement on `{object}`, and no index begins with its columns",
        """SELECT c.oid::regclass AS object, min(t.policy) AS more, c.oid::bigint AS relid,
                  format('CREATE INDEX%s ON %s (%s)', CASE c.relkind WHEN 'p' THEN '' ELSE ' CONCURRENTLY' END,
                         c.oid::regclass, string_agg(DISTINCT quote_ident(a.attname), ', ')) AS sql
           FROM sqlguard.policy_table t JOIN pg_class c ON c.oid = t.relid
           JOIN pg_policy p ON p.polrelid = c.oid AND p.polname = 'sg_rows_' || t.policy || '_' || t.version
           JOIN pg_depend d ON d.classid = 'pg_policy'::regclass AND d.objid = p.oid
               AND d.refclassid = 'pg_class'::regclass AND d.refobjid = c.oid AND d.refobjsubid > 0
           JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = d.refobjsubid AND a.attname !~ '^deleted_'
           WHERE t.row_scope IS NOT NULL
               AND t.version = (SELECT max(q.version) FROM sqlguard.policy q WHERE q.name = t.policy)
           GROUP BY c.oid, c.relkind
           HAVING NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisvalid AND i.indpred IS NULL
                                  AND i.indkey[0] = ANY (array_agg(a.attnum)))""",
    ),
    Check(
        "unique-only-partial",
        Severity.NOTE,
        _WALL,
        "who looks up `{object}` by {more} and does not say `deleted_at IS NULL`, as agents do by themselves,"
        " can't use its unique index: it holds live rows only",
        """SELECT c.oid::regclass AS object, string_agg(DISTINCT quote_ident(a.attname), ', ') AS more,
                  c.oid::bigint AS relid,
                  format('CREATE INDEX%s ON %s (%s)', CASE c.relkind WHEN 'p' THEN '' ELSE ' CONCURRENTLY' END,
                         c.oid::regclass, string_agg(DISTINCT quote_ident(a.attname), ', ')) AS sql
           FROM sqlguard.guarded_table g JOIN pg_class c ON c.oid = g.relid
           JOIN pg_index i ON i.indrelid = c.oid AND i.indisunique AND i.indpred IS NOT NULL AND i.indisvalid
           JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = ANY (i.indkey[0:i.indnkeyatts - 1])
           WHERE g.mode = 'soft' AND pg_get_expr(i.indpred, c.oid) = '(deleted_at IS NULL)'
               AND NOT EXISTS (SELECT FROM pg_index f WHERE f.indrelid = c.oid AND f.indisvalid AND f.indpred IS NULL
                                   AND f.indkey[0] = i.indkey[0])
           GROUP BY c.oid, c.relkind, i.indexrelid""",
    ),
    Check(
        "tombstones-without-index",
        Severity.NOTE,
        _WALL,
        "`{object}` has about {more} rows and no index of its deleted ones: purge and restore read all of it",
        """SELECT c.oid::regclass AS object, c.reltuples::bigint AS more, c.oid::bigint AS relid,
                  format('CREATE INDEX%s ON %s (deleted_at) WHERE deleted_at IS NOT NULL',
                         CASE c.relkind WHEN 'p' THEN '' ELSE ' CONCURRENTLY' END, c.oid::regclass) AS sql
           FROM sqlguard.guarded_table g JOIN pg_class c ON c.oid = g.relid
           JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'deleted_at'
           WHERE g.mode = 'soft' AND c.reltuples >= 50000
               AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indkey[0] = a.attnum)""",
    ),
)


def check_walls(conn: Connection) -> Iterator[Finding]:
    """Compare the walls of every guarded table with what `sqlguard guard` would make of it now."""
    facts = read_facts(conn)
    modes = {g.relid: g.mode for g in facts.guarded.values()}
    seen: set[int] = set()
    for relid, guarded in facts.guarded.items():
        root = facts.relations.get(relid)
        if root is None:
            continue
        if guarded.version != VERSION:
            yield _guard(
                root,
                root,
                "wall-version",
                Severity.OPEN,
                f"has walls of version {guarded.version}; this sqlguard makes version {VERSION}",
            )
        children = [facts.relations[k.child] for k in facts.keys_to(root) if k.child in facts.relations]
        for relation in (*facts.tree(root), *children):
            if relation.oid not in seen:
                seen.add(relation.oid)
                yield from _relation(conn, facts, relation, root, modes)
        yield from _reached(facts, root, modes)
        if guarded.mode == "soft":
            yield from _uniques(facts, root, converted=guarded.options.get("unique") == "partial")


def _relation(
    conn: Connection, facts: Facts, relation: Relation, root: Relation, modes: Mapping[int, str]
) -> Iterator[Finding]:
    wanted = wanted_triggers(facts, relation, modes)
    there = {t.name: t for t in relation.triggers if t.ours}
    off = [t.name for t in there.values() if t.enabled not in ("O", "A")]
    missing = [w.name for w in wanted if w.name not in there]
    if off:
        yield _guard(
            relation, root, "wall-disabled", Severity.BROKEN, f"has disabled triggers: {', '.join(off)}"
        )
    if missing:
        text = f"lacks triggers: {', '.join(missing)} (a new table, partition, column or key?)"
        yield _guard(relation, root, "wall-missing", Severity.BROKEN, text)
    elif not off and trigger_changes(conn, relation, wanted):
        yield _guard(
            relation, root, "wall-changed", Severity.BROKEN, "has triggers that are not as they were made"
        )
    yield from _functions(conn, facts, relation, root, modes)
    mode = modes.get(facts.root(relation).oid)
    if mode is not None and policy_changes(relation, soft=mode == "soft"):
        text = "lacks row-level security, or policies of it: deleted rows could be seen"
        yield _guard(relation, root, "wall-policies", Severity.BROKEN, text)


def _functions(
    conn: Connection, facts: Facts, relation: Relation, root: Relation, modes: Mapping[int, str]
) -> Iterator[Finding]:
    row = conn.execute("SELECT sqlguard.shape_key(%s::oid::regclass)", [relation.oid]).fetchone()
    shape = int(row[0]) if row else 0
    for function in wanted_functions(conn, facts, relation, modes, shape=shape):
        if not function.is_same(facts.functions.get(function.name)):
            changed = function.name in facts.functions
            what = "does not fit its columns as they are now, or was changed" if changed else "is not there"
            yield _guard(
                relation,
                root,
                "wall-function",
                Severity.OPEN if changed else Severity.BROKEN,
                f"has a capture function that {what}: `sqlguard.{function.name}`",
            )


def _reached(facts: Facts, root: Relation, modes: Mapping[int, str]) -> Iterator[Finding]:
    for key in facts.keys_to(root):
        child = facts.relations.get(key.child)
        if child is None or key.on_delete not in ("c", "n", "d"):
            continue
        top = facts.root(child)
        if top.oid not in modes:
            text = f"is reached by deletes in `{root.label}` and is not guarded: those deletes are refused"
            yield _guard(child, top, "reached-unguarded", Severity.NOTE, text)


def _uniques(facts: Facts, root: Relation, *, converted: bool) -> Iterator[Finding]:
    for relation, index in walls_unique.convertible(facts, root) if converted else ():
        text = f"has a unique rule that deleted rows still count in, newer than the guard: {index.name}"
        yield _guard(relation, root, "unique-of-deleted", Severity.NOTE, text)
    for relation, index in walls_unique.invalid(facts, root):
        text = f"has a unique index that is not valid and so keeps nothing out: {index.name}"
        yield _guard(relation, root, "unique-invalid", Severity.BROKEN, text)


def _guard(relation: Relation, root: Relation, code: str, severity: Severity, what: str) -> Finding:
    return Finding(
        code,
        severity,
        _WALL,
        relation.label,
        f"`{relation.label}` {what}",
        command=f"sqlguard guard {root.label}",
        table=root.oid,
    )
