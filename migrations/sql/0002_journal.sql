-- The journal's functions and walls. The tables themselves are in 0001; see docs/internals.md.

DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = 'sqlguard_retention') THEN
        BEGIN
            CREATE ROLE sqlguard_retention NOLOGIN NOINHERIT;
        EXCEPTION WHEN duplicate_object OR unique_violation THEN
            NULL;  -- made at this moment by the migration of another database
        END;
    END IF;
END $$;

-- Events are chained like actions, so that a removed `failed` is noticed as well as a removed intent.
ALTER TABLE sqlguard.event ADD COLUMN prev_hash bytea, ADD COLUMN hash bytea;

-- Where each task's two chains end. The row's lock is what serialises a task's entries; what was retired
-- leaves the hash that the oldest kept entry follows.
CREATE TABLE sqlguard.chain (
    task_id text PRIMARY KEY,
    actions bigint NOT NULL DEFAULT 0,
    action_hash bytea NOT NULL DEFAULT '',
    action_first bytea NOT NULL DEFAULT '',
    events bigint NOT NULL DEFAULT 0,
    event_hash bytea NOT NULL DEFAULT '',
    event_first bytea NOT NULL DEFAULT '',
    retired_at timestamptz
) WITH (fillfactor = 50);

-- An undo keeps change sets of its own, so that it can be undone; they belong to no task.
ALTER TABLE sqlguard.change_set
    ADD COLUMN undo_id bigint,
    ADD COLUMN reverts bigint,
    ALTER COLUMN task_id DROP NOT NULL;
CREATE INDEX change_set_undo ON sqlguard.change_set (undo_id) WHERE undo_id IS NOT NULL;
CREATE INDEX change_set_reverts ON sqlguard.change_set (reverts) WHERE reverts IS NOT NULL;
CREATE INDEX change_set_table ON sqlguard.change_set (relid, id);
CREATE INDEX change_set_action ON sqlguard.change_set (action_id) WHERE action_id IS NOT NULL;
-- A change set can be undone again after a redo, so one undo is not for ever.
ALTER TABLE sqlguard.undone DROP CONSTRAINT undone_pkey, ADD PRIMARY KEY (change_set_id, undo_id);
-- Rows that an undo left alone because somebody had changed them; they stay undoable.
CREATE TABLE sqlguard.undo_skipped (
    undo_id bigint NOT NULL,
    change_set_id bigint NOT NULL,
    row_change_id bigint NOT NULL,
    reason text NOT NULL,
    PRIMARY KEY (change_set_id, undo_id, row_change_id)
);

CREATE TABLE sqlguard.idempotency (
    scope text NOT NULL,
    key text NOT NULL,
    statement_hash text NOT NULL,
    task_id text NOT NULL,
    action_id bigint,
    txid xid8 NOT NULL DEFAULT pg_catalog.pg_current_xact_id(),
    tag text,
    columns jsonb,
    rows jsonb,
    created_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    expires_at timestamptz NOT NULL,
    PRIMARY KEY (scope, key)
);
CREATE INDEX idempotency_due ON sqlguard.idempotency (expires_at);

-- Append-only ---------------------------------------------------------------------------------------------

CREATE FUNCTION sqlguard.refuse_rewrite() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
        BEGIN
            IF current_user = 'sqlguard_retention' AND TG_OP = 'DELETE' THEN
                RETURN NULL;
            END IF;
            RAISE EXCEPTION 'the journal only grows: % on `%.%` is refused', TG_OP, TG_TABLE_SCHEMA, TG_TABLE_NAME
                USING ERRCODE = '42501', HINT = 'old entries go with `sqlguard.retire`, as sqlguard_retention';
        END
    $$;

DO $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['action', 'event', 'change_set', 'row_change', 'shape', 'undo', 'undone',
                                'undo_skipped'] LOOP
        EXECUTE pg_catalog.format(
            'CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON sqlguard.%I'
            ' FOR EACH STATEMENT EXECUTE FUNCTION sqlguard.refuse_rewrite()', name);
    END LOOP;
END $$;
-- A restore with session_replication_role = replica would skip ordinary triggers; these fire always.
DO $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['action', 'event', 'change_set', 'row_change'] LOOP
        EXECUTE pg_catalog.format('ALTER TABLE sqlguard.%I ENABLE ALWAYS TRIGGER append_only', name);
        EXECUTE pg_catalog.format(
            'REVOKE UPDATE, DELETE, TRUNCATE ON sqlguard.%I FROM PUBLIC, CURRENT_USER', name);
    END LOOP;
END $$;
GRANT SELECT, DELETE ON sqlguard.action, sqlguard.event, sqlguard.change_set, sqlguard.row_change
    TO sqlguard_retention;

-- Periods -------------------------------------------------------------------------------------------------

-- A period has the change sets from number * 2^32 on, and a partition of row_change. What is left of one that was
-- dropped is its row here: when it was, and how much was in it.
CREATE TABLE sqlguard.period (
    number integer PRIMARY KEY CHECK (number >= 0),
    began_at timestamptz,  -- null: it is still to come
    began_txid xid8,       -- transactions with change sets of the period before had their number by then
    dropped_at timestamptz,
    dropped_by text,
    change_sets bigint,
    rows numeric
);
GRANT SELECT ON sqlguard.period TO sqlguard_retention;

CREATE FUNCTION sqlguard.add_period(number integer) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        DECLARE
            name text := 'row_change_' || number;
        BEGIN
            -- Attached, not made as a partition: whoever writes does not wait.
            EXECUTE format('CREATE TABLE sqlguard.%I (LIKE sqlguard.row_change INCLUDING DEFAULTS)', name);
            EXECUTE format('CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON sqlguard.%I'
                           ' FOR EACH STATEMENT EXECUTE FUNCTION sqlguard.refuse_rewrite()', name);
            EXECUTE format('ALTER TABLE sqlguard.%I ENABLE ALWAYS TRIGGER append_only', name);
            EXECUTE format('REVOKE UPDATE, DELETE, TRUNCATE ON sqlguard.%I FROM PUBLIC, CURRENT_USER', name);
            EXECUTE format('ALTER TABLE sqlguard.row_change ATTACH PARTITION sqlguard.%I FOR VALUES FROM (%s) TO (%s)',
                           name, number::bigint << 32, (number::bigint + 1) << 32);
            INSERT INTO sqlguard.period (number) VALUES (number);
        END
    $$;

-- Begin a new period if the current one is older than *age*, and say which one it is then. Numbers don't roll back, so
-- they only jump to a period that was committed before.
CREATE FUNCTION sqlguard.begin_period(age interval) RETURNS integer
    -- Who calls it has tasks to end, and comes again.
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '200ms'
    AS $$
        DECLARE
            current integer := (SELECT last_value >> 32 FROM sqlguard.change_set_id_seq);
            following integer;
        BEGIN
            IF (SELECT p.began_at > clock_timestamp() - age FROM sqlguard.period p WHERE p.number = current) THEN
                RETURN current;
            END IF;
            LOCK TABLE sqlguard.period IN SHARE ROW EXCLUSIVE MODE;
            current := (SELECT last_value >> 32 FROM sqlguard.change_set_id_seq);
            following := (SELECT p.number FROM sqlguard.period p WHERE p.number = current + 1 AND p.began_at IS NULL);
            IF (SELECT p.began_at > clock_timestamp() - age FROM sqlguard.period p WHERE p.number = current) THEN
                RETURN current;
            ELSIF following IS NOT NULL THEN
                PERFORM setval('sqlguard.change_set_id_seq', following::bigint << 32);
                UPDATE sqlguard.period p SET began_at = clock_timestamp(), began_txid = pg_current_xact_id()
                    WHERE p.number = following;
                current := following;
            END IF;
            PERFORM sqlguard.add_period(current + 1);
            RETURN current;
        END
    $$;

-- Drop a period whose changes are all of tasks that ended before *cutoff*, or of undos from before it; says whether.
CREATE FUNCTION sqlguard.drop_period(period integer, cutoff timestamptz) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s'
    AS $$
        DECLARE
            first bigint := period::bigint << 32;
            last bigint := ((period::bigint + 1) << 32) - 1;
        BEGIN
            -- Nobody at work can still have a number of it.
            IF NOT EXISTS (SELECT FROM sqlguard.period p WHERE p.number = period + 1 AND p.began_at < cutoff
                           AND p.began_txid < pg_snapshot_xmin(pg_current_snapshot()))
                OR NOT EXISTS (SELECT FROM sqlguard.period p WHERE p.number = period AND p.dropped_at IS NULL)
                OR EXISTS (SELECT FROM sqlguard.change_set c LEFT JOIN sqlguard.task t ON t.id = c.task_id
                           WHERE c.id BETWEEN first AND last
                               AND CASE WHEN c.task_id IS NULL THEN c.at >= cutoff
                                   ELSE t.state IS DISTINCT FROM 'ended' OR t.ended_at >= cutoff END)
            THEN
                RETURN false;
            END IF;
            UPDATE sqlguard.period p SET dropped_at = clock_timestamp(), dropped_by = session_user,
                    (change_sets, rows) = (SELECT count(*), coalesce(sum(c.rows), 0) FROM sqlguard.change_set c
                                           WHERE c.id BETWEEN first AND last)
                WHERE p.number = period;
            EXECUTE format('DROP TABLE sqlguard.%I', 'row_change_' || period);
            RETURN true;
        END
    $$;

SELECT sqlguard.add_period(0), sqlguard.add_period(1);
UPDATE sqlguard.period SET began_at = pg_catalog.clock_timestamp(), began_txid = pg_catalog.pg_current_xact_id()
    WHERE number = 0;
GRANT SELECT ON sqlguard.task TO sqlguard_retention;
GRANT SELECT, UPDATE ON sqlguard.chain TO sqlguard_retention;

-- Entries and their hashes --------------------------------------------------------------------------------

-- The same text whatever DateStyle and TimeZone say: it enters the hash. (These are STABLE so that they are inlined.)
CREATE FUNCTION sqlguard.utc(timestamptz) RETURNS text
    LANGUAGE sql STABLE STRICT PARALLEL SAFE
    AS $$ SELECT pg_catalog.to_char($1 AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') $$;

-- One text per field, in the order of sqlguard.journal.ACTION_FIELDS.
CREATE FUNCTION sqlguard.action_values(a sqlguard.action) RETURNS text[]
    LANGUAGE sql STABLE
    AS $$
        SELECT ARRAY[
            a.id::text, a.task_id, a.role::text, sqlguard.utc(a.at), a.agent, a.agent_version, a.policy,
            a.policy_version::text, a.idempotency_key, a.reason, a.confidence::text, a.step, a.kind, a.tier,
            a.verdict, a.sqlstate, a.rules::text, a.tables::text, a.statement, a.executed, a.params::text,
            a.compensation, a.via, a.backend_pid::text, a.client_addr]
    $$;

-- In the order of sqlguard.journal.EVENT_FIELDS.
CREATE FUNCTION sqlguard.event_values(e sqlguard.event) RETURNS text[]
    LANGUAGE sql STABLE
    AS $$
        SELECT ARRAY[e.id::text, e.action_id::text, e.task_id, sqlguard.utc(e.at), e.kind, e.detail::text, e.by]
    $$;

CREATE FUNCTION sqlguard.chained(previous bytea, entry text[]) RETURNS bytea
    LANGUAGE sql STABLE
    AS $$
        SELECT pg_catalog.sha256(
            previous || pg_catalog.convert_to(pg_catalog.to_jsonb(entry)::text, 'UTF8'))
    $$;

-- Which task the caller may write for: its own when it is a task's session, any when it is the operator.
-- Must only be called by functions with the owner's rights: current_user is the owner here.
CREATE FUNCTION sqlguard.authorised_task(wanted text) RETURNS text
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        DECLARE
            own text := (SELECT l.task_id FROM sqlguard.lease l WHERE l.role = session_user);
        BEGIN
            IF own IS NULL AND pg_has_role(session_user, current_user, 'MEMBER') THEN
                RETURN wanted;
            ELSIF own IS NULL OR own IS DISTINCT FROM coalesce(wanted, own) THEN
                RAISE EXCEPTION 'this session may not write to the journal of task `%`', wanted
                    USING ERRCODE = '42501', HINT = 'use the task''s own credential';
            END IF;
            RETURN own;
        END
    $$;

CREATE FUNCTION sqlguard.refuse_unless_alive(t sqlguard.task, wanted text[]) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        DECLARE
            cold sqlguard.freeze;
        BEGIN
            IF t.state <> 'open' OR t.expires_at <= clock_timestamp() THEN
                RAISE EXCEPTION 'task `%` has ended', t.id
                    USING ERRCODE = 'SG004', HINT = 'ask for a new task';
            END IF;
            SELECT * INTO cold FROM sqlguard.freeze f
                WHERE f.thawed_at IS NULL AND (f.until_at IS NULL OR f.until_at > clock_timestamp())
                    AND (f.tables IS NULL OR f.tables && wanted)
                LIMIT 1;
            IF FOUND THEN
                RAISE EXCEPTION 'writes are frozen: %', cold.reason
                    USING ERRCODE = 'SG005',
                        HINT = 'reads go on; send the write again when the freeze has ended';
            END IF;
        END
    $$;

CREATE FUNCTION sqlguard.key_scope(t sqlguard.task) RETURNS text
    LANGUAGE sql STABLE
    -- The agent under the same policy and parameters: a renewed or reopened task finds its keys, a task for
    -- another customer does not find another customer's rows.
    AS $$ SELECT pg_catalog.jsonb_build_array(t.agent, t.policy, t.params)::text $$;

CREATE FUNCTION sqlguard.refuse_other_statement(kept text, given text) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
    AS $$
        BEGIN
            IF kept <> given THEN
                RAISE EXCEPTION 'the idempotency key was used for another statement'
                    USING ERRCODE = 'SG002', HINT = 'give each statement a key of its own';
            END IF;
        END
    $$;

-- A function of the database that answers an action is called by an undo, with the operator's rights. What a task's
-- own session writes down as an answer is only believed where the policy lists it as one.
CREATE FUNCTION sqlguard.refuse_unlisted_answers(t sqlguard.task, answers text) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        DECLARE
            unlisted text;
        BEGIN
            IF answers IS NULL OR session_user::text NOT LIKE 'sg\_tk\_%' THEN
                RETURN;
            END IF;
            SELECT q.answer ->> 'name' INTO unlisted
                FROM jsonb_array_elements(CASE jsonb_typeof(answers::jsonb) WHEN 'array' THEN answers::jsonb ELSE '[]' END)
                    AS q (answer)
                WHERE q.answer ->> 'where' IS DISTINCT FROM 'tool' AND NOT EXISTS (
                    SELECT FROM sqlguard.policy p, jsonb_each(coalesce(p.document -> 'functions', '{}')) f
                    WHERE p.name = t.policy AND p.version = t.policy_version
                        AND f.value ->> 'compensation' = q.answer ->> 'name')
                LIMIT 1;
            IF FOUND THEN
                RAISE EXCEPTION 'the policy lists no compensation `%`', unlisted
                    USING ERRCODE = '42501', HINT = 'name it in the policy, under the function that it answers';
            END IF;
        END
    $$;

-- What an intent says, as an entry of the task's chain that has no place in it yet; raises what refuses it. Who writes,
-- for which task and under which policy is never taken from the intent.
CREATE FUNCTION sqlguard.intended(t sqlguard.task, intent jsonb) RETURNS sqlguard.action
    LANGUAGE plpgsql
    AS $$
        DECLARE
            a sqlguard.action := jsonb_populate_record(NULL::sqlguard.action, intent);
        BEGIN
            a.rules := coalesce(a.rules, '{}');
            a.tables := coalesce(a.tables, '{}');
            -- What was refused is written down even when the task has ended or all is frozen.
            IF a.verdict IN ('allow', 'rewrite') THEN
                PERFORM sqlguard.refuse_unless_alive(t, a.tables);
            END IF;
            IF intent ->> 'statement_hash' IS NOT NULL THEN
                PERFORM sqlguard.refuse_other_statement(k.statement_hash, intent ->> 'statement_hash')
                    FROM sqlguard.idempotency k
                    WHERE k.scope = sqlguard.key_scope(t) AND k.key = a.idempotency_key
                        AND k.expires_at > clock_timestamp();
            END IF;
            IF a.compensation IS NOT NULL THEN
                PERFORM sqlguard.refuse_unlisted_answers(t, a.compensation);
            END IF;
            a.task_id := t.id;
            a.agent := t.agent;
            a.agent_version := t.agent_version;
            a.policy := t.policy;
            a.policy_version := t.policy_version;
            a.role := CASE WHEN session_user::text LIKE 'sg\_tk\_%' THEN session_user::text ELSE coalesce(a.role, '') END;
            a.backend_pid := coalesce(a.backend_pid, pg_backend_pid());
            -- Only a door knows where the client is: to the server a session through the proxy comes from the proxy.
            IF session_user::text LIKE 'sg\_tk\_%' THEN
                a.client_addr := NULL;
            END IF;
            RETURN a;
        END
    $$;

-- The end of a task's chains, locked: nobody else adds to them before the transaction ends. With the caller's patience:
-- a session of the task can keep it locked for as long as it likes.
CREATE FUNCTION sqlguard.lock_chain(task text) RETURNS sqlguard.chain
    LANGUAGE plpgsql
    AS $$
        DECLARE
            c sqlguard.chain;
        BEGIN
            SELECT x.* INTO c FROM sqlguard.chain x WHERE x.task_id = task FOR UPDATE;
            IF NOT FOUND THEN
                INSERT INTO sqlguard.chain (task_id) VALUES (task) ON CONFLICT DO NOTHING;
                SELECT x.* INTO c FROM sqlguard.chain x WHERE x.task_id = task FOR UPDATE;
            END IF;
            RETURN c;
        END
    $$;

CREATE FUNCTION sqlguard.task_of(wanted text) RETURNS sqlguard.task
    LANGUAGE plpgsql STABLE
    AS $$
        DECLARE
            t sqlguard.task;
        BEGIN
            SELECT x.* INTO t FROM sqlguard.task x WHERE x.id = wanted;
            IF NOT FOUND THEN
                RAISE EXCEPTION 'there is no task `%`', wanted USING ERRCODE = 'SG004', HINT = 'ask for a new task';
            END IF;
            RETURN t;
        END
    $$;

-- The one place where entries get their numbers, times and hashes, behind the ends of their task's chains: what
-- `intended` takes, and events (action, kind, detail). Returns the numbers of the actions, then those of the events. With
-- the caller's path and patience; where there are intents, with his extra_float_digits = 1, because numbers enter the hash.
CREATE FUNCTION sqlguard.add_entries(task text, intents jsonb[], ends jsonb[]) RETURNS bigint[]
    LANGUAGE plpgsql
    AS $$
        DECLARE
            -- Numbers and times are taken under the lock, so they rise along the chain.
            c sqlguard.chain := sqlguard.lock_chain(task);
            t sqlguard.task;
            a sqlguard.action;
            e sqlguard.event;
            actions sqlguard.action[];
            events sqlguard.event[];
            numbers bigint[];
            one jsonb;
        BEGIN
            IF intents IS NOT NULL THEN
                t := sqlguard.task_of(task);
                FOREACH one IN ARRAY intents LOOP
                    a := sqlguard.intended(t, one);
                    a.id := nextval('sqlguard.action_id_seq');
                    a.at := clock_timestamp();
                    a.prev_hash := c.action_hash;
                    c.action_hash := sqlguard.chained(a.prev_hash, sqlguard.action_values(a));
                    c.actions := c.actions + 1;
                    a.hash := c.action_hash;
                    actions := actions || a;
                    numbers := numbers || a.id;
                END LOOP;
                INSERT INTO sqlguard.action OVERRIDING SYSTEM VALUE SELECT * FROM unnest(actions);
            END IF;
            IF ends IS NOT NULL THEN
                e.task_id := task;
                e.by := session_user;
                FOREACH one IN ARRAY ends LOOP
                    e.id := nextval('sqlguard.event_id_seq');
                    e.action_id := (one ->> 'action')::bigint;
                    e.at := clock_timestamp();
                    e.kind := one ->> 'kind';
                    e.detail := coalesce(one -> 'detail', '{}');
                    e.prev_hash := c.event_hash;
                    c.event_hash := sqlguard.chained(e.prev_hash, sqlguard.event_values(e));
                    c.events := c.events + 1;
                    e.hash := c.event_hash;
                    events := events || e;
                    numbers := numbers || e.id;
                END LOOP;
                INSERT INTO sqlguard.event OVERRIDING SYSTEM VALUE SELECT * FROM unnest(events);
            END IF;
            UPDATE sqlguard.chain x
                SET actions = c.actions, action_hash = c.action_hash, events = c.events, event_hash = c.event_hash
                WHERE x.task_id = task;
            RETURN numbers;
        END
    $$;

-- One event. Who has to look at what is there once nobody else can add to it calls `lock_chain` before.
CREATE FUNCTION sqlguard.append(task text, action bigint, kind text, detail jsonb) RETURNS bigint
    LANGUAGE sql
    AS $$
        SELECT (sqlguard.add_entries(
            task, NULL, ARRAY[pg_catalog.jsonb_build_object('action', action, 'kind', kind, 'detail', detail)]))[1]
    $$;

-- Whoever writes for many tasks must not wait for one that keeps its chain locked.
CREATE FUNCTION sqlguard.record_intent(intent jsonb) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET extra_float_digits = 1
    SET lock_timeout = '1s'
    AS $$
        BEGIN
            RETURN (sqlguard.add_entries((sqlguard.task_of(sqlguard.authorised_task(intent ->> 'task_id'))).id,
                                         ARRAY[intent], NULL))[1];
        END
    $$;

-- Intents and events in one commit, all or none; returns the intents' ids in their order. An end that gets lost in a
-- crash is settled from the change sets, so a group of events alone does not wait for the disk. The operator's alone, so
-- nobody is asked for his rights here, and each chain is locked, read and moved on once for all its entries.
CREATE FUNCTION sqlguard.record_group(intents jsonb, events jsonb) RETURNS bigint[]
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET extra_float_digits = 1
    SET lock_timeout = '1s'
    AS $$
        DECLARE
            ids bigint[] := array_fill(NULL::bigint, ARRAY[jsonb_array_length(intents)]);
            numbers bigint[];
            one record;
            entry jsonb := intents -> 0;
            owner text := entry ->> 'task_id';
            listed jsonb[];
        BEGIN
            IF cardinality(ids) = 0 THEN
                PERFORM set_config('synchronous_commit', 'off', true);
            END IF;
            -- Most groups are of intents of one task or of one end: there is nothing to sort, which takes a query.
            IF events = '[]' THEN
                FOR n IN 1 .. cardinality(ids) LOOP
                    EXIT WHEN entry ->> 'task_id' IS DISTINCT FROM owner;
                    listed := listed || entry;
                    entry := intents -> n;
                END LOOP;
                IF owner IS NOT NULL AND cardinality(listed) = cardinality(ids) THEN
                    RETURN sqlguard.add_entries(owner, listed, NULL);
                END IF;
            ELSIF intents = '[]' AND jsonb_array_length(events) = 1 THEN
                owner := (SELECT x.task_id FROM sqlguard.action x WHERE x.id = (events -> 0 ->> 'action')::bigint);
                IF owner IS NOT NULL THEN
                    PERFORM sqlguard.add_entries(owner, NULL, ARRAY[events -> 0]);
                    RETURN ids;
                END IF;
            END IF;
            -- Tasks are locked in one order everywhere, or two groups could wait for each other. An action's task is looked
            -- up one by one: the planner, which does not know how few there are, would join with all of the journal.
            FOR one IN
                SELECT q.task, array_agg(q.entry ORDER BY q.n) FILTER (WHERE q.is_intent) AS intents,
                       array_agg(q.n ORDER BY q.n) FILTER (WHERE q.is_intent) AS places,
                       array_agg(q.entry ORDER BY q.n) FILTER (WHERE NOT q.is_intent) AS ends
                FROM (
                    SELECT u.entry ->> 'task_id' AS task, true AS is_intent, u.n, u.entry
                    FROM jsonb_array_elements(intents) WITH ORDINALITY AS u (entry, n)
                    UNION ALL
                    SELECT (SELECT x.task_id FROM sqlguard.action x WHERE x.id = (u.entry ->> 'action')::bigint),
                           false, u.n, u.entry
                    FROM jsonb_array_elements(events) WITH ORDINALITY AS u (entry, n)
                ) q GROUP BY q.task ORDER BY q.task
            LOOP
                IF one.task IS NULL THEN
                    RAISE EXCEPTION 'there is no action or task for %', coalesce(one.intents, one.ends)
                        USING ERRCODE = '22023';
                END IF;
                numbers := sqlguard.add_entries(one.task, one.intents, one.ends);
                FOR place IN 1 .. coalesce(cardinality(one.places), 0) LOOP
                    ids[one.places[place]] := numbers[place];
                END LOOP;
            END LOOP;
            RETURN ids;
        END
    $$;

-- The newest end counts, so a task's own session writes one, and none behind the guard's.
CREATE FUNCTION sqlguard.refuse_second_end(task text, action bigint) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
        BEGIN
            IF session_user::text LIKE 'sg\_tk\_%' THEN
                PERFORM sqlguard.lock_chain(task);
                IF EXISTS (SELECT FROM sqlguard.event x WHERE x.action_id = refuse_second_end.action
                           AND x.kind IN ('committed', 'failed', 'previewed', 'reconciled')) THEN
                    RAISE EXCEPTION 'action % has ended already', action USING ERRCODE = '42501';
                END IF;
            END IF;
        END
    $$;

CREATE FUNCTION sqlguard.record_event(action bigint, kind text, detail jsonb DEFAULT '{}') RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s'
    AS $$
        DECLARE
            task text := (SELECT a.task_id FROM sqlguard.action a WHERE a.id = record_event.action);
        BEGIN
            IF task IS NULL THEN
                RAISE EXCEPTION 'there is no action %', action USING ERRCODE = '22023';
            END IF;
            PERFORM sqlguard.authorised_task(task);
            IF kind NOT IN ('previewed', 'started', 'committed', 'failed')
                AND NOT pg_has_role(session_user, current_user, 'MEMBER') THEN
                RAISE EXCEPTION 'a task may not say that an action was `%`', kind USING ERRCODE = '42501';
            END IF;
            IF kind <> 'started' THEN
                PERFORM sqlguard.refuse_second_end(task, action);
            END IF;
            RETURN sqlguard.append(task, action, kind, detail);
        END
    $$;

-- What the current transaction has changed so far -----------------------------------------------------------

CREATE FUNCTION sqlguard.transaction_changes()
    RETURNS TABLE (action_id bigint, schema_name text, table_name text, op text, rows bigint)
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT c.action_id, c.schema_name, c.table_name, c.op, c.rows
        FROM sqlguard.change_set c
        WHERE c.txid = pg_current_xact_id_if_assigned()
            AND c.task_id = (SELECT l.task_id FROM sqlguard.lease l WHERE l.role = session_user)
        ORDER BY c.id
    $$;

-- Up to max_rows rows per change set of the current transaction (or of one action in it), with the columns that the session
-- may read; of rows outside the task's row scope, which cascades and functions may have changed, nothing is shown. The
-- questions to the catalog are planned once per session, as in 0006; what is asked of the table itself is not.
CREATE FUNCTION sqlguard.transaction_samples(max_rows integer DEFAULT 10, only_action bigint DEFAULT NULL)
    RETURNS TABLE (action_id bigint, schema_name text, table_name text, op text, key jsonb,
                   before jsonb, after jsonb)
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = 'force_generic_plan'
    SET "DateStyle" = 'ISO, YMD' SET "IntervalStyle" = 'postgres' SET "TimeZone" = 'UTC' SET lc_monetary = 'C'
    AS $$
        DECLARE
            own record;
            c record;
            relations oid[];
            readable text;
            same text;
            shows_key boolean;
            shows_all boolean;
            scope text;
            kept record;
            picture text;
            shown text;
            image text;
            query text;
        BEGIN
            SELECT l.task_id AS task, to_regrole(quote_ident(l.group_role))::oid AS team INTO own
                FROM sqlguard.lease l WHERE l.role = session_user;
            FOR c IN
                SELECT s.id, s.action_id, s.schema_name, s.table_name, s.relid, s.op, s.key_columns
                FROM sqlguard.change_set s
                WHERE s.txid = pg_current_xact_id_if_assigned() AND s.task_id = own.task
                    AND (only_action IS NULL OR s.action_id = only_action)
                ORDER BY s.id
            LOOP
                SELECT string_agg(format('"sg row".%I', a.attname), ', ') FILTER (WHERE a.is_readable),
                       string_agg(format('"sg row".%I = (r.key::text[])[%s]::%s', a.attname, a.place, a.type), ' AND ')
                           FILTER (WHERE a.place > 0),
                       bool_and(a.is_readable) FILTER (WHERE a.place > 0), bool_and(a.is_readable)
                    INTO readable, same, shows_key, shows_all
                    FROM (SELECT t.attname, array_position(c.key_columns, t.attname::text) AS place,
                                 format_type(t.atttypid, t.atttypmod) AS type,
                                 has_column_privilege(session_user, c.relid, t.attnum, 'SELECT') AS is_readable
                          FROM pg_attribute t WHERE t.attrelid = c.relid AND t.attnum > 0 AND NOT t.attisdropped
                          OFFSET 0) a;
                relations := ARRAY[c.relid];
                IF pg_partition_root(c.relid) IS NOT NULL THEN
                    relations := ARRAY(SELECT p.relid::oid FROM pg_partition_ancestors(c.relid) p);
                END IF;
                scope := (SELECT string_agg(format('(%s)', pg_get_expr(p.polqual, p.polrelid)), ' AND ')
                    FROM pg_policy p WHERE p.polrelid = ANY (relations) AND own.team = ANY (p.polroles));
                SELECT array_agg(r.key::text) AS old_keys, array_agg(coalesce(r.new_key, r.key)::text) AS keys,
                       array_agg(r.before) AS images
                    INTO kept FROM (SELECT * FROM sqlguard.row_changes(c.id) LIMIT max_rows) r;
                IF scope IS NULL AND shows_all THEN
                    picture := '(SELECT to_jsonb("sg row".*) FROM ';
                    shown := ' LIMIT 1)';
                    image := format('to_jsonb(r.before::%s)', c.relid::regclass);
                ELSE
                    picture := format('(SELECT nullif(to_jsonb("sg seen".*), ''{}'') FROM (SELECT %s FROM ', readable);
                    shown := format(' AND %s LIMIT 1) AS "sg seen")', coalesce(scope, 'true'));
                    image := format('%sunnest(ARRAY[r.before::%s]) AS "sg row" WHERE r.before IS NOT NULL%s', picture,
                                    c.relid::regclass, shown);
                END IF;
                query := format(
                    'SELECT $1, $2, $3, $4, CASE WHEN $5 THEN to_jsonb(r.old_key::text[]) END, %s AS before, %s AS after'
                    ' FROM unnest($6, $7, $8) AS r (old_key, key, before)',
                    CASE WHEN array_remove(kept.images, NULL) = '{}' THEN 'NULL::jsonb' ELSE image END,
                    CASE WHEN c.op = 'delete' OR same IS NULL THEN 'NULL::jsonb'
                        ELSE format('%s%s AS "sg row" WHERE %s%s', picture, c.relid::regclass, same, shown) END);
                IF scope IS NOT NULL THEN
                    query := format('SELECT * FROM (%s OFFSET 0) q WHERE q.before IS NOT NULL OR q.after IS NOT NULL', query);
                END IF;
                RETURN QUERY EXECUTE query
                    USING c.action_id, c.schema_name, c.table_name, c.op, shows_key, kept.old_keys, kept.keys, kept.images;
            END LOOP;
        END
    $$;

-- Idempotency keys: see sqlguard/postgres/idempotency.py for the order in which an executor calls these -----

CREATE FUNCTION sqlguard.find_key(key text, statement_hash text)
    RETURNS TABLE (action_id bigint, tag text, columns jsonb, rows jsonb)
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        DECLARE
            k sqlguard.idempotency;
        BEGIN
            SELECT i.* INTO k FROM sqlguard.idempotency i
                JOIN sqlguard.lease l ON l.role = session_user
                JOIN sqlguard.task t ON t.id = l.task_id
                WHERE i.scope = sqlguard.key_scope(t) AND i.key = find_key.key
                    AND i.expires_at > clock_timestamp();
            IF FOUND THEN
                PERFORM sqlguard.refuse_other_statement(k.statement_hash, find_key.statement_hash);
                RETURN QUERY SELECT k.action_id, k.tag, k.columns, k.rows;
            END IF;
        END
    $$;

-- Whether the key is ours now, for the transaction. Waits for a twin that is at work with it.
CREATE FUNCTION sqlguard.took_key(key text, statement_hash text, action bigint, lifetime interval) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
        BEGIN
            INSERT INTO sqlguard.idempotency AS i (scope, key, statement_hash, task_id, action_id, expires_at)
                SELECT sqlguard.key_scope(t), took_key.key, took_key.statement_hash, t.id, action,
                       clock_timestamp() + lifetime
                FROM sqlguard.lease l JOIN sqlguard.task t ON t.id = l.task_id WHERE l.role = session_user
                ON CONFLICT ON CONSTRAINT idempotency_pkey DO UPDATE
                    SET statement_hash = excluded.statement_hash, task_id = excluded.task_id,
                        action_id = excluded.action_id, txid = excluded.txid, tag = NULL, columns = NULL,
                        rows = NULL, created_at = excluded.created_at, expires_at = excluded.expires_at
                    WHERE i.expires_at <= clock_timestamp();
            RETURN FOUND;
        END
    $$;

-- In the write's own transaction, before the write.
CREATE FUNCTION sqlguard.claim_key(key text, statement_hash text, action bigint, lifetime interval DEFAULT '7 days')
    RETURNS TABLE (claimed boolean, action_id bigint, tag text, columns jsonb, rows jsonb)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        DECLARE
            t sqlguard.task;
            k sqlguard.idempotency;
        BEGIN
            IF sqlguard.took_key(key, statement_hash, action, lifetime) THEN
                RETURN QUERY SELECT true, action, NULL::text, NULL::jsonb, NULL::jsonb;
                RETURN;
            END IF;
            SELECT task.* INTO t FROM sqlguard.lease l JOIN sqlguard.task ON task.id = l.task_id
                WHERE l.role = session_user;
            IF NOT FOUND THEN
                RAISE EXCEPTION 'only a task''s session can claim an idempotency key' USING ERRCODE = '42501';
            END IF;
            SELECT i.* INTO k FROM sqlguard.idempotency i
                WHERE i.scope = sqlguard.key_scope(t) AND i.key = claim_key.key;
            PERFORM sqlguard.refuse_other_statement(k.statement_hash, claim_key.statement_hash);
            RETURN QUERY SELECT false, k.action_id, k.tag, k.columns, k.rows;
        END
    $$;

-- The same for who sends the write along with the claim: an error skips what stands behind it.
CREATE FUNCTION sqlguard.claim_key_or_stop(key text, statement_hash text, action bigint) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        BEGIN
            IF NOT sqlguard.took_key(key, statement_hash, action, '7 days') THEN
                RAISE EXCEPTION 'the idempotency key was used before' USING ERRCODE = 'SG010';
            END IF;
        END
    $$;

-- What a repeat will be answered with. With the caller's path.
CREATE FUNCTION sqlguard.keep_answer(key text, tag text, columns jsonb, rows jsonb) RETURNS void
    LANGUAGE plpgsql
    AS $$
        BEGIN
            UPDATE sqlguard.idempotency i
                SET tag = keep_answer.tag, columns = keep_answer.columns, rows = keep_answer.rows
                FROM sqlguard.lease l JOIN sqlguard.task t ON t.id = l.task_id
                WHERE l.role = session_user AND i.scope = sqlguard.key_scope(t) AND i.key = keep_answer.key
                    AND i.txid = pg_current_xact_id_if_assigned() AND i.tag IS NULL;
            IF NOT FOUND THEN
                RAISE EXCEPTION 'the idempotency key was not claimed in this transaction'
                    USING ERRCODE = '55000';
            END IF;
        END
    $$;

-- In the same transaction, after the write: what a repeat will be answered with.
CREATE FUNCTION sqlguard.keep_result(key text, tag text, columns jsonb DEFAULT NULL, rows jsonb DEFAULT NULL)
    RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        BEGIN
            PERFORM sqlguard.keep_answer(key, tag, columns, rows);
        END
    $$;

-- The same for who sends it along with the write, the only one of the transaction, which gives no rows: its answer is *verb*
-- and the number of rows that the capture has counted. Raises SG011 unless that is one number, of the table *relation*.
CREATE FUNCTION sqlguard.keep_count(key text, verb text, relation oid) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        DECLARE
            counted bigint;
        BEGIN
            SELECT CASE WHEN count(*) = 1 AND min(c.relid) = relation THEN min(c.rows) END INTO counted
                FROM sqlguard.change_set c WHERE c.txid = pg_current_xact_id_if_assigned() AND c.depth = 0;
            IF counted IS NULL THEN
                RAISE EXCEPTION 'the answer to the write is not known before it is given' USING ERRCODE = 'SG011';
            END IF;
            PERFORM sqlguard.keep_answer(key, verb || ' ' || counted, NULL, NULL);
        END
    $$;

-- Retention -----------------------------------------------------------------------------------------------

-- Remove the entries of tasks that ended before *cutoff*: whole periods are dropped, what is left of such tasks in others
-- is deleted. The chains' ends stay and can be verified. Must be called as sqlguard_retention (SET ROLE).
CREATE FUNCTION sqlguard.retire(cutoff timestamptz) RETURNS bigint
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
        DECLARE
            removed bigint;
            old text[] := ARRAY(SELECT t.id FROM sqlguard.task t WHERE t.state = 'ended' AND t.ended_at < cutoff);
            gone integer;
        BEGIN
            FOR gone IN SELECT p.number FROM sqlguard.period p WHERE p.began_at < cutoff AND p.dropped_at IS NULL
                        ORDER BY p.number LOOP
                IF sqlguard.drop_period(gone, cutoff) THEN
                    DELETE FROM sqlguard.change_set c
                        WHERE c.id BETWEEN gone::bigint << 32 AND ((gone::bigint + 1) << 32) - 1;
                END IF;
            END LOOP;
            DELETE FROM sqlguard.row_change r USING sqlguard.change_set c
                WHERE c.id = r.change_set_id AND c.task_id = ANY (old);
            DELETE FROM sqlguard.change_set c WHERE c.task_id = ANY (old);
            DELETE FROM sqlguard.event e WHERE e.task_id = ANY (old);
            DELETE FROM sqlguard.action a WHERE a.task_id = ANY (old);
            GET DIAGNOSTICS removed = ROW_COUNT;
            UPDATE sqlguard.chain c
                SET actions = 0, events = 0, action_first = c.action_hash, event_first = c.event_hash,
                    retired_at = clock_timestamp()
                WHERE c.task_id = ANY (old) AND c.retired_at IS NULL;
            RETURN removed;
        END
    $$;

REVOKE ALL ON FUNCTION
    sqlguard.refuse_rewrite(), sqlguard.utc(timestamptz), sqlguard.action_values(sqlguard.action),
    sqlguard.event_values(sqlguard.event), sqlguard.chained(bytea, text[]), sqlguard.authorised_task(text),
    sqlguard.refuse_unless_alive(sqlguard.task, text[]), sqlguard.key_scope(sqlguard.task),
    sqlguard.refuse_other_statement(text, text), sqlguard.refuse_unlisted_answers(sqlguard.task, text),
    sqlguard.intended(sqlguard.task, jsonb), sqlguard.lock_chain(text), sqlguard.task_of(text),
    sqlguard.add_entries(text, jsonb[], jsonb[]), sqlguard.append(text, bigint, text, jsonb),
    sqlguard.record_intent(jsonb), sqlguard.record_group(jsonb, jsonb), sqlguard.refuse_second_end(text, bigint),
    sqlguard.record_event(bigint, text, jsonb), sqlguard.transaction_changes(), sqlguard.transaction_samples(integer, bigint),
    sqlguard.find_key(text, text), sqlguard.took_key(text, text, bigint, interval),
    sqlguard.claim_key(text, text, bigint, interval),
    sqlguard.claim_key_or_stop(text, text, bigint), sqlguard.keep_answer(text, text, jsonb, jsonb),
    sqlguard.keep_result(text, text, jsonb, jsonb), sqlguard.keep_count(text, text, oid), sqlguard.retire(timestamptz),
    sqlguard.add_period(integer), sqlguard.begin_period(interval), sqlguard.drop_period(integer, timestamptz)
    FROM PUBLIC;
GRANT EXECUTE ON FUNCTION
    sqlguard.record_intent(jsonb), sqlguard.record_event(bigint, text, jsonb),
    sqlguard.transaction_changes(), sqlguard.transaction_samples(integer, bigint), sqlguard.find_key(text, text),
    sqlguard.claim_key(text, text, bigint, interval), sqlguard.claim_key_or_stop(text, text, bigint),
    sqlguard.keep_result(text, text, jsonb, jsonb), sqlguard.keep_count(text, text, oid)
    TO sqlguard_agent;
REVOKE ALL ON FUNCTION sqlguard.drop_period(integer, timestamptz) FROM CURRENT_USER;
GRANT EXECUTE ON FUNCTION sqlguard.retire(timestamptz), sqlguard.drop_period(integer, timestamptz) TO sqlguard_retention;
