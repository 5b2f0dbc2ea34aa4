-- Tasks and leases: what ending one needs, and what a task's own session may know of itself.

-- `kind` says what a lease is for (`task`: the agent's own; `connection`, `preview` …: further ones).
-- `settings` is what the role was made with: a session can change its own role's, and then the task ends.
-- What could not be removed is tried again at `retry_at`.
ALTER TABLE sqlguard.lease
    ADD COLUMN kind text NOT NULL DEFAULT 'task',
    ADD COLUMN settings text[],
    ADD COLUMN retry_at timestamptz;
CREATE INDEX lease_group ON sqlguard.lease (group_role) WHERE state <> 'ended';

-- Where proxies listen, for `task open` to print. A row stays behind a proxy that was killed.
CREATE TABLE sqlguard.proxy (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    address text NOT NULL,
    started_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    started_by text NOT NULL DEFAULT session_user
);

-- The parameters of a row scope and the types that PostgreSQL found for them.
ALTER TABLE sqlguard.policy_table ADD COLUMN scope_params jsonb NOT NULL DEFAULT '{}';

-- A parameter of the session's task, for row-level security. By session_user, which a session can't change;
-- null when the task is over, so that a row scope then shows nothing.
CREATE FUNCTION sqlguard.task_parameter(name text) RETURNS text
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT t.params ->> $1
        FROM sqlguard.lease l JOIN sqlguard.task t ON t.id = l.task_id
        WHERE l.role = session_user AND l.state = 'live' AND t.state = 'open'
            AND t.expires_at > statement_timestamp()
    $$;

-- All that the guard must know of the session's own login; no row when it is no task's.
CREATE FUNCTION sqlguard.current_login()
    RETURNS TABLE (role text, verifier text, lease_expires_at timestamptz, lease_state text, group_role text,
                   id text, agent text, agent_version text, policy text, policy_version integer, purpose text,
                   params jsonb, state text, opened_at timestamptz, expires_at timestamptz,
                   ended_at timestamptz, end_reason text, document jsonb, plan_only boolean)
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT l.role::text, NULL, l.expires_at, l.state, l.group_role::text,
            t.id, t.agent, t.agent_version, t.policy, t.policy_version, t.purpose,
            t.params, t.state, t.opened_at, t.expires_at, t.ended_at, t.end_reason, p.document, t.plan_only
        FROM sqlguard.lease l
        JOIN sqlguard.task t ON t.id = l.task_id
        JOIN sqlguard.policy p ON p.name = t.policy AND p.version = t.policy_version
        WHERE l.role = session_user
    $$;

REVOKE ALL ON FUNCTION sqlguard.task_parameter(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION sqlguard.task_parameter(text) TO sqlguard_agent;
