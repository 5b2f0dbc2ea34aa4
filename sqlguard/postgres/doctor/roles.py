"""Wall 2: who may do more than a policy says. What is open to PUBLIC is open to every agent."""

from sqlguard.postgres.doctor.finding import Check, Severity

_WALL = "role"
#: Roles that agents are, or have the rights of: the fixed group, the policies' groups, the tasks' own.
_AGENTS = """
WITH agents AS (
    SELECT r.oid, r.rolname FROM pg_roles r
    WHERE r.rolname = 'sqlguard_agent' OR r.rolname IN (SELECT p.group_role FROM sqlguard.policy p)
        OR r.rolname IN (SELECT l.role FROM sqlguard.lease l WHERE l.state <> 'ended'))
"""
#: Schemas of the application: not PostgreSQL's, not ours.
_OWN = "n.nspname !~ '^pg_' AND n.nspname NOT IN ('information_schema', 'sqlguard')"
_NO_EXTENSION = "NOT EXISTS (SELECT FROM pg_depend x WHERE x.objid = p.oid AND x.classid = 'pg_proc'::regclass AND x.deptype = 'e')"

#: Guarding makes functions in PL/pgSQL and a restore a temporary table, both with the rights of this role.
_OPERATOR = "(SELECT o.nspowner::regrole::text FROM pg_namespace o WHERE o.nspname = 'sqlguard')"


def _rights(grantee: str, condition: str) -> str:
    """Return the query for relations on which everybody who is *grantee* has rights, and what takes them back."""
    return f"""SELECT c.oid::regclass AS object, string_agg(x.privilege_type, ', ' ORDER BY x.privilege_type) AS more,
                      format('REVOKE %s ON %s FROM {grantee}',
                             string_agg(x.privilege_type, ', ' ORDER BY x.privilege_type), c.oid::regclass) AS sql,
                      c.oid::bigint AS relid
               FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace, aclexplode(c.relacl) x
               WHERE {condition} AND c.relkind IN ('r', 'p', 'v', 'm', 'f') AND {_OWN}
               GROUP BY c.oid"""


CHECKS = (
    Check(
        "operator-superuser",
        Severity.OPEN,
        _WALL,
        "`{object}` owns the schema sqlguard and is a superuser: what the walls run, they run with all rights. "
        "Let a role with CREATEROLE that owns the tables be the operator",
        # The first superuser of a cluster can't be anything else.
        """SELECT r.rolname AS object,
                  CASE WHEN r.oid <> 10 THEN format('ALTER ROLE %I NOSUPERUSER', r.rolname) END AS sql
           FROM pg_namespace n JOIN pg_roles r ON r.oid = n.nspowner WHERE n.nspname = 'sqlguard' AND r.rolsuper""",
    ),
    Check(
        "operator-bypasses-rls",
        Severity.OPEN,
        _WALL,
        "`{object}` owns the schema sqlguard and has BYPASSRLS, which no part of the guard needs",
        """SELECT r.rolname AS object, format('ALTER ROLE %I NOBYPASSRLS', r.rolname) AS sql
           FROM pg_namespace n JOIN pg_roles r ON r.oid = n.nspowner
           WHERE n.nspname = 'sqlguard' AND r.rolbypassrls AND NOT r.rolsuper""",
    ),
    Check(
        "agent-attribute",
        Severity.BROKEN,
        _WALL,
        "agents have the rights of `{object}`, which may {more}",
        _AGENTS
        + """SELECT a.rolname AS object, concat_ws(', ', CASE WHEN r.rolsuper THEN 'do anything (SUPERUSER)' END,
                  CASE WHEN r.rolbypassrls THEN 'pass row-level security (BYPASSRLS)' END,
                  CASE WHEN r.rolcreaterole THEN 'make roles (CREATEROLE)' END,
                  CASE WHEN r.rolcreatedb THEN 'make databases (CREATEDB)' END,
                  CASE WHEN r.rolreplication THEN 'read everything (REPLICATION)' END) AS more,
             format('ALTER ROLE %I', a.rolname) || CASE WHEN r.rolsuper THEN ' NOSUPERUSER' ELSE '' END
                 || CASE WHEN r.rolbypassrls THEN ' NOBYPASSRLS' ELSE '' END
                 || CASE WHEN r.rolcreaterole THEN ' NOCREATEROLE' ELSE '' END
                 || CASE WHEN r.rolcreatedb THEN ' NOCREATEDB' ELSE '' END
                 || CASE WHEN r.rolreplication THEN ' NOREPLICATION' ELSE '' END AS sql
             FROM agents a JOIN pg_roles r ON r.oid = a.oid
             WHERE r.rolsuper OR r.rolbypassrls OR r.rolcreaterole OR r.rolcreatedb OR r.rolreplication""",
    ),
    Check(
        "agent-membership",
        Severity.BROKEN,
        _WALL,
        "agents in `{object}` have the rights of `{more}` besides those of their policy",
        _AGENTS
        + """SELECT a.rolname AS object, g.rolname AS more, format('REVOKE %I FROM %I', g.rolname, a.rolname) AS sql
             FROM agents a JOIN pg_auth_members m ON m.member = a.oid JOIN pg_roles g ON g.oid = m.roleid
             WHERE NOT (g.rolname = 'sqlguard_agent' AND a.rolname IN (SELECT p.group_role FROM sqlguard.policy p))
                 AND NOT EXISTS (SELECT FROM sqlguard.lease l WHERE l.role = a.rolname AND l.group_role = g.rolname)""",
    ),
    Check(
        "agent-owner",
        Severity.BROKEN,
        _WALL,
        "`{object}` owns {more} in this database: an owner is not held by grants",
        _AGENTS
        + """SELECT a.rolname AS object, count(*) || ' object(s), such as ' || min(pg_describe_object(d.classid, d.objid, 0))
                 AS more, format('REASSIGN OWNED BY %I TO CURRENT_USER', a.rolname) AS sql
             FROM agents a JOIN pg_shdepend d ON d.refclassid = 'pg_authid'::regclass AND d.refobjid = a.oid
             WHERE d.deptype = 'o' AND d.dbid = (SELECT oid FROM pg_database WHERE datname = current_database())
                 AND NOT EXISTS (SELECT FROM pg_default_acl x WHERE x.oid = d.objid)
             GROUP BY a.rolname""",
    ),
    Check(
        "agents-right",
        Severity.BROKEN,
        _WALL,
        "every agent has {more} on `{object}`, whatever its policy says",
        _rights("sqlguard_agent", "x.grantee = 'sqlguard_agent'::regrole"),
    ),
    Check(
        "public-write",
        Severity.BROKEN,
        _WALL,
        "PUBLIC, and so every agent, has {more} on `{object}`",
        _rights("PUBLIC", "x.grantee = 0 AND x.privilege_type <> 'SELECT'"),
    ),
    Check(
        "public-read",
        Severity.OPEN,
        _WALL,
        "PUBLIC, and so every agent, may read `{object}`; grant it to the roles that need it instead",
        f"""SELECT c.oid::regclass AS object, format('REVOKE SELECT ON %s FROM PUBLIC', c.oid::regclass) AS sql,
                   c.oid::bigint AS relid
            FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace, aclexplode(c.relacl) x
            WHERE x.grantee = 0 AND x.privilege_type = 'SELECT' AND c.relkind IN ('r', 'p', 'v', 'm', 'f') AND {_OWN}""",
    ),
    Check(
        "public-temp",
        Severity.OPEN,
        _WALL,
        "any session, an agent's too, may make temporary tables and functions in `{object}`",
        f"""SELECT d.datname AS object, format('GRANT TEMPORARY ON DATABASE %1$I TO %2$s;'
                   ' REVOKE TEMPORARY ON DATABASE %1$I FROM PUBLIC', d.datname, {_OPERATOR}) AS sql
           FROM pg_database d, aclexplode(coalesce(d.datacl, acldefault('d', d.datdba))) x
           WHERE d.datname = current_database() AND x.grantee = 0 AND x.privilege_type = 'TEMPORARY'""",
    ),
    Check(
        "public-create",
        Severity.BROKEN,
        _WALL,
        "any session, an agent's too, may make tables and functions in schema `{object}`",
        """SELECT n.nspname AS object, format('REVOKE CREATE ON SCHEMA %I FROM PUBLIC', n.nspname) AS sql
           FROM pg_namespace n, aclexplode(n.nspacl) x
           WHERE n.nspname !~ '^pg_(toast|temp)' AND x.grantee = 0 AND x.privilege_type = 'CREATE'""",
    ),
    Check(
        "public-language",
        Severity.OPEN,
        _WALL,
        "any session, an agent's too, may run code of its own in `{object}` (DO). As a superuser",
        f"""SELECT l.lanname AS object, format('GRANT USAGE ON LANGUAGE %1$I TO %2$s;'
                   ' REVOKE USAGE ON LANGUAGE %1$I FROM PUBLIC', l.lanname, {_OPERATOR}) AS sql
           FROM pg_language l, aclexplode(coalesce(l.lanacl, acldefault('l', l.lanowner))) x
           WHERE l.lanispl AND l.lanpltrusted AND x.grantee = 0 AND x.privilege_type = 'USAGE'""",
    ),
    Check(
        "public-function",
        Severity.OPEN,
        _WALL,
        "PUBLIC, and so every agent, may call `{object}`, which is {more}; grant it to the roles that need it first",
        f"""SELECT p.oid::regprocedure AS object,
                   CASE WHEN p.prosecdef THEN 'run with its owner''s rights' ELSE 'volatile: it may have effects' END
                       AS more, format('REVOKE EXECUTE ON ROUTINE %s FROM PUBLIC', p.oid::regprocedure) AS sql
            FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace,
                 aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) x
            WHERE {_OWN} AND {_NO_EXTENSION} AND x.grantee = 0 AND x.privilege_type = 'EXECUTE'
                AND (p.provolatile = 'v' OR p.prosecdef) AND p.prorettype NOT IN ('trigger'::regtype, 'event_trigger'::regtype)""",
    ),
    Check(
        "public-large-objects",
        Severity.NOTE,
        _WALL,
        "any session may make large objects, which no guard captures, even in READ ONLY transactions. As a superuser",
        """SELECT 'pg_catalog.lo_*' AS object, 'REVOKE EXECUTE ON FUNCTION ' || string_agg(p.oid::regprocedure::text, ', '
                  ORDER BY p.oid) || ' FROM PUBLIC' AS sql
           FROM pg_proc p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) x
           WHERE p.pronamespace = 'pg_catalog'::regnamespace AND x.grantee = 0
               AND p.proname IN ('lo_creat', 'lo_create', 'lo_from_bytea', 'lo_put', 'lowrite', 'lo_unlink', 'lo_truncate',
                                 'lo_truncate64')
           HAVING count(*) > 0""",
    ),
    Check(
        "definer-function",
        Severity.OPEN,
        _WALL,
        "agents may call `{object}`, which runs with the rights of `{more}`: it sees deleted rows and rows outside a "
        "task's scope. What it writes is captured and capped",
        _AGENTS
        + f"""SELECT p.oid::regprocedure AS object, o.rolname AS more,
                  format('ALTER ROUTINE %s SECURITY INVOKER', p.oid::regprocedure) AS sql
             FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace JOIN pg_roles o ON o.oid = p.proowner
             WHERE {_OWN} AND {_NO_EXTENSION} AND p.prosecdef AND p.prorettype <> 'trigger'::regtype
                 AND EXISTS (SELECT FROM agents a WHERE has_function_privilege(a.oid, p.oid, 'EXECUTE'))""",
    ),
    Check(
        "definer-search-path",
        Severity.OPEN,
        _WALL,
        "`{object}` runs with the rights of `{more}` on names that its caller's search_path chooses",
        f"""SELECT p.oid::regprocedure AS object, o.rolname AS more,
                   format('ALTER ROUTINE %s SET search_path = pg_catalog, %I, pg_temp', p.oid::regprocedure, n.nspname) AS sql
            FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace JOIN pg_roles o ON o.oid = p.proowner
            WHERE {_OWN} AND {_NO_EXTENSION} AND p.prosecdef
                AND NOT EXISTS (SELECT FROM unnest(p.proconfig) s WHERE s ^@ 'search_path=')""",
    ),
    Check(
        "leaked-role",
        Severity.OPEN,
        _WALL,
        "login role `{object}` belongs to no living task; the janitor drops it, if one runs",
        """SELECT r.rolname AS object,
                  format('REASSIGN OWNED BY %1$I TO CURRENT_USER; DROP OWNED BY %1$I; DROP ROLE %1$I', r.rolname) AS sql
           FROM pg_roles r
           WHERE r.rolname LIKE 'sg\\_tk\\_%'
               AND EXISTS (SELECT FROM pg_auth_members m JOIN pg_roles g ON g.oid = m.roleid
                           JOIN sqlguard.policy p ON p.group_role = g.rolname WHERE m.member = r.oid)
               AND NOT EXISTS (SELECT FROM sqlguard.lease l WHERE l.role = r.rolname AND l.state <> 'ended')""",
    ),
    Check(
        "overdue-task",
        Severity.BROKEN,
        _WALL,
        "task `{object}` of `{more}` is over and has not been ended: no janitor runs (`sqlguard serve` has one)",
        """SELECT t.id AS object, t.agent AS more, 'sqlguard task end ' || t.id AS command
           FROM sqlguard.task t
           WHERE t.state <> 'ended' AND t.expires_at < clock_timestamp() - interval '10 seconds'""",
    ),
    Check(
        "stuck-lease",
        Severity.BROKEN,
        _WALL,
        "the login role `{object}` could not be removed: {more}",
        """SELECT l.role AS object, l.problem AS more, 'sqlguard task end ' || l.task_id AS command
           FROM sqlguard.lease l WHERE l.problem IS NOT NULL AND l.state <> 'ended'""",
    ),
)
