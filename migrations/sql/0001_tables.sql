-- The schema `sqlguard`: see docs/internals.md for what each table is for.
-- Hot tables carry no foreign keys: a check locks the parent row, and all writes of a task would meet there.

CREATE SCHEMA IF NOT EXISTS sqlguard;
COMMENT ON SCHEMA sqlguard IS 'policies, tasks, journal and undo of sqlguard';

-- Roles belong to the cluster: another database may have made them already.
DO $$
DECLARE
    wanted text;
BEGIN
    FOREACH wanted IN ARRAY ARRAY['sqlguard_agent', 'sqlguard_approver', 'sqlguard_kept'] LOOP
        IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = wanted) THEN
            BEGIN
                EXECUTE pg_catalog.format('CREATE ROLE %I NOLOGIN NOINHERIT', wanted);
            EXCEPTION WHEN duplicate_object OR unique_violation THEN
                NULL;  -- made at this moment by the migration of another database
            END;
        END IF;
    END LOOP;
END $$;

-- Names are no secret and triggers of any session look here; the tables stay closed.
GRANT USAGE ON SCHEMA sqlguard TO PUBLIC;

CREATE TABLE sqlguard.policy (
    name text NOT NULL,
    version integer NOT NULL CHECK (version > 0),
    document jsonb NOT NULL,
    group_role name NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    applied_by text NOT NULL DEFAULT session_user,
    PRIMARY KEY (name, version)
);

-- What the walls need of a policy, worked out once when it is applied: one row per policy version and table.
CREATE TABLE sqlguard.policy_table (
    policy text NOT NULL,
    version integer NOT NULL,
    relid oid NOT NULL,
    schema_name text NOT NULL,
    table_name text NOT NULL,
    can_select boolean NOT NULL DEFAULT false,
    can_insert boolean NOT NULL DEFAULT false,
    can_update boolean NOT NULL DEFAULT false,
    delete_mode text NOT NULL DEFAULT 'refuse' CHECK (delete_mode IN ('soft', 'journal', 'refuse')),
    max_rows bigint CHECK (max_rows >= 0),
    max_share double precision CHECK (max_share BETWEEN 0 AND 1),
    on_excess text NOT NULL DEFAULT 'approve' CHECK (on_excess IN ('approve', 'refuse')),
    classes text[] NOT NULL DEFAULT '{}',
    row_scope text,
    PRIMARY KEY (policy, version, relid),
    FOREIGN KEY (policy, version) REFERENCES sqlguard.policy (name, version) ON DELETE CASCADE
);

CREATE TABLE sqlguard.task (
    id text PRIMARY KEY,
    agent text NOT NULL,
    agent_version text,
    policy text NOT NULL,
    policy_version integer NOT NULL,
    purpose text,
    params jsonb NOT NULL DEFAULT '{}',
    state text NOT NULL DEFAULT 'opening' CHECK (state IN ('opening', 'open', 'ending', 'ended')),
    opened_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    opened_by text NOT NULL DEFAULT session_user,
    expires_at timestamptz NOT NULL,
    max_expires_at timestamptz NOT NULL,
    ended_at timestamptz,
    end_reason text,
    -- Nothing of it commits but approved plans.
    plan_only boolean NOT NULL DEFAULT false,
    FOREIGN KEY (policy, policy_version) REFERENCES sqlguard.policy (name, version),
    CHECK (expires_at <= max_expires_at)
);
CREATE INDEX task_due ON sqlguard.task (expires_at) WHERE state <> 'ended';

CREATE TABLE sqlguard.lease (
    role name PRIMARY KEY,
    task_id text NOT NULL REFERENCES sqlguard.task (id),
    group_role name NOT NULL,
    verifier text,
    state text NOT NULL DEFAULT 'creating' CHECK (state IN ('creating', 'live', 'ending', 'ended')),
    created_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    expires_at timestamptz NOT NULL,
    ended_at timestamptz,
    problem text
);
CREATE INDEX lease_task ON sqlguard.lease (task_id);
CREATE INDEX lease_due ON sqlguard.lease (expires_at) WHERE state <> 'ended';

CREATE TABLE sqlguard.guarded_table (
    relid oid PRIMARY KEY,
    schema_name text NOT NULL,
    table_name text NOT NULL,
    mode text NOT NULL CHECK (mode IN ('soft', 'journal')),
    version integer NOT NULL,
    key_columns text[] NOT NULL DEFAULT '{}',
    options jsonb NOT NULL DEFAULT '{}',
    guarded_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    guarded_by text NOT NULL DEFAULT session_user,
    UNIQUE (schema_name, table_name)
);
-- What is guarded is no secret: it shows in pg_catalog. A task's own connection judges by it (Python door).
GRANT SELECT (relid, mode, version, options) ON sqlguard.guarded_table TO PUBLIC;

CREATE TABLE sqlguard.freeze (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tables text[],
    until_at timestamptz,
    reason text NOT NULL,
    frozen_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    frozen_by text NOT NULL DEFAULT session_user,
    thawed_at timestamptz,
    thawed_by text
);
-- Nearly always empty, so every write of every agent can look here.
CREATE INDEX freeze_on ON sqlguard.freeze (id) WHERE thawed_at IS NULL;

CREATE TABLE sqlguard.action (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task_id text NOT NULL,
    role name NOT NULL,
    at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    agent text NOT NULL,
    agent_version text,
    policy text NOT NULL,
    policy_version integer NOT NULL,
    idempotency_key text,
    reason text,
    confidence double precision,
    step text,
    kind text,
    tier text,
    verdict text,
    sqlstate text,
    rules text[] NOT NULL DEFAULT '{}',
    tables text[] NOT NULL DEFAULT '{}',
    statement text,
    executed text,
    params jsonb,
    compensation text,
    via text,
    backend_pid integer,
    client_addr text,
    prev_hash bytea,
    hash bytea
);
CREATE INDEX action_task ON sqlguard.action (task_id, id);

CREATE TABLE sqlguard.event (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    action_id bigint,
    task_id text,
    at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    kind text NOT NULL
        CHECK (kind IN ('previewed', 'approved', 'started', 'committed', 'failed', 'undone', 'reconciled', 'erased',
                        'planned', 'rejected', 'revoked', 'compensating', 'compensated', 'mitigated', 'uncompensated')),
    detail jsonb NOT NULL DEFAULT '{}',
    by text NOT NULL DEFAULT session_user
);
CREATE INDEX event_action ON sqlguard.event (action_id);
CREATE INDEX event_task ON sqlguard.event (task_id);
CREATE INDEX event_planned ON sqlguard.event (task_id, id) WHERE kind = 'planned';

CREATE TABLE sqlguard.change_set (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    action_id bigint,
    task_id text NOT NULL,
    txid xid8 NOT NULL DEFAULT pg_catalog.pg_current_xact_id(),
    statement_at timestamptz NOT NULL DEFAULT pg_catalog.statement_timestamp(),
    at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    relid oid NOT NULL,
    schema_name text NOT NULL,
    table_name text NOT NULL,
    op text NOT NULL,  -- insert, update, delete, soft_delete, rekey; PostgreSQL reads a CHECK anew in every statement
    rows bigint NOT NULL,
    key_columns text[],
    shape_id bigint NOT NULL,
    depth integer NOT NULL DEFAULT 0
);
CREATE INDEX change_set_txid ON sqlguard.change_set (txid, statement_at);
CREATE INDEX change_set_task ON sqlguard.change_set (task_id, action_id);

-- The one table with a row per changed row: one index, no checks, ids from a cached sequence. Its partitions are periods
-- of time (see 0002): the numbers of change sets rise, and each period has numbers of its own.
-- A soft delete of many rows, each of which is its own image, has a row per 1,000 keys instead: `sqlguard.row_changes`
-- reads both.
CREATE SEQUENCE sqlguard.row_change_id_seq CACHE 64;
CREATE TABLE sqlguard.row_change (
    id bigint NOT NULL DEFAULT pg_catalog.nextval('sqlguard.row_change_id_seq'),
    change_set_id bigint NOT NULL,
    key text[],
    new_key text[],
    before text,
    after bigint,  -- a hash of the new row's text, so that an undo sees who changed it before the agent did again
    removal_id bigint,  -- whose erasure blanked it
    chunk text[],  -- keys as texts, of the rows with the ids 1 - 1000 * id and on; null for a row that has one of its own
    PRIMARY KEY (change_set_id, id)
) PARTITION BY RANGE (change_set_id);
ALTER SEQUENCE sqlguard.row_change_id_seq OWNED BY sqlguard.row_change.id;

-- The rows of a change set, each with an id and a key of its own. Chunks have ids from 0 downwards, so one index finds
-- either kind alone. It is inlined, so it must stay a plain STABLE query; who asks for several sets joins it LATERAL.
CREATE FUNCTION sqlguard.row_changes(change_set bigint)
    RETURNS TABLE (id bigint, change_set_id bigint, key text[], new_key text[], before text, after bigint,
                   removal_id bigint)
    LANGUAGE sql STABLE
    AS $$
        SELECT r.id, r.change_set_id, r.key, r.new_key, r.before, r.after, r.removal_id
        FROM sqlguard.row_change r WHERE r.change_set_id = change_set AND r.id > 0
        UNION ALL
        SELECT u.place - 1000 * r.id, r.change_set_id, u.key::text[], NULL, NULL, NULL, NULL
        FROM sqlguard.row_change r CROSS JOIN LATERAL pg_catalog.unnest(r.chunk) WITH ORDINALITY AS u (key, place)
        WHERE r.change_set_id = change_set AND r.id <= 0 AND u.key IS NOT NULL
    $$;
REVOKE EXECUTE ON FUNCTION sqlguard.row_changes(bigint) FROM PUBLIC;

-- `id` is made from the other columns (see `sqlguard.shape_id`), so every session finds the same one.
CREATE TABLE sqlguard.shape (
    id bigint PRIMARY KEY,
    relid oid NOT NULL,
    columns text[] NOT NULL,
    types text[] NOT NULL,
    numbers smallint[] NOT NULL  -- attnum: what stays of a column that gets another name
);

CREATE TABLE sqlguard.undo (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    by text NOT NULL DEFAULT session_user,
    scope jsonb NOT NULL,
    report jsonb NOT NULL DEFAULT '{}'
);
CREATE TABLE sqlguard.undone (
    change_set_id bigint PRIMARY KEY,
    undo_id bigint NOT NULL REFERENCES sqlguard.undo (id)
);

-- The task of the session, whatever role it has SET: session_user can't be changed by the session.
CREATE FUNCTION sqlguard.current_task() RETURNS sqlguard.task
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT t.* FROM sqlguard.lease l JOIN sqlguard.task t ON t.id = l.task_id WHERE l.role = session_user
    $$;

-- What a soft delete writes into deleted_by_agent; null for sessions that are no task's.
CREATE FUNCTION sqlguard.agent() RETURNS text
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT t.agent FROM sqlguard.lease l JOIN sqlguard.task t ON t.id = l.task_id WHERE l.role = session_user
    $$;
