-- Plans and approvals: what a dry run saw, and who let it pass. See docs/plans.md.
--
-- A plan is bound to a digest over the rows that its run changed. The digest is made here, from the captured change
-- rows, in the transaction of the run; when an approved plan is redeemed it is made again, in the transaction that
-- commits. So whatever a session says of itself, what was approved and what is committed are the same rows.

CREATE TABLE sqlguard.plan (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task_id text NOT NULL,
    role name NOT NULL,
    -- The first action of the run; what is decided about the plan is in the journal under it.
    action_id bigint NOT NULL,
    scope text NOT NULL,
    agent text NOT NULL,
    policy text NOT NULL,
    policy_version integer NOT NULL,
    purpose text,
    search_path text[] NOT NULL,
    statements jsonb NOT NULL,
    statement_hash text NOT NULL,
    -- Of the whole transaction; otherwise of one action in it.
    is_block boolean NOT NULL,
    digest text NOT NULL,
    rows bigint NOT NULL,
    tier text NOT NULL,
    classes text[] NOT NULL DEFAULT '{}',
    reasons text[] NOT NULL DEFAULT '{}',
    approvals integer NOT NULL CHECK (approvals > 0),
    report jsonb NOT NULL,
    -- The plan that this one was made in place of, because the rows were no longer the same.
    drift_of bigint,
    made_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    made_by text NOT NULL DEFAULT session_user,
    expires_at timestamptz NOT NULL,
    committed_at timestamptz,
    committed_by text,
    committed_action bigint,
    txid xid8
);
CREATE INDEX plan_wanted ON sqlguard.plan (scope, statement_hash);
CREATE INDEX plan_drift ON sqlguard.plan (drift_of) WHERE drift_of IS NOT NULL;
CREATE INDEX plan_action ON sqlguard.plan (action_id);

CREATE TABLE sqlguard.plan_decision (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    plan_id bigint NOT NULL REFERENCES sqlguard.plan (id),
    decision text NOT NULL CHECK (decision IN ('approve', 'reject', 'revoke')),
    digest text NOT NULL,
    reason text,
    at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    by text NOT NULL DEFAULT session_user
);
CREATE INDEX plan_decision_plan ON sqlguard.plan_decision (plan_id);
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON sqlguard.plan_decision
    FOR EACH STATEMENT EXECUTE FUNCTION sqlguard.refuse_rewrite();

-- Transactions that went over a cap on the way to a plan: such a one can only be committed with an approved plan.
CREATE UNLOGGED TABLE sqlguard.plan_run (
    txid xid8 NOT NULL,
    action_id bigint NOT NULL,
    reasons text[] NOT NULL,
    plan_id bigint,
    -- Of the rows as they were when the plan was taken, without what is written into them: a block may go on with those.
    digest text,
    PRIMARY KEY (txid, action_id)
);

-- What outcomes are signed with, so that a report which was carried by a task's own session is known to be ours.
CREATE TABLE sqlguard.plan_secret (secret bytea NOT NULL);
INSERT INTO sqlguard.plan_secret
    SELECT pg_catalog.sha256(pg_catalog.convert_to(pg_catalog.string_agg(pg_catalog.gen_random_uuid()::text, ''), 'UTF8'))
    FROM pg_catalog.generate_series(1, 8);

CREATE FUNCTION sqlguard.signature(message text) RETURNS text
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        BEGIN
            RETURN (SELECT encode(sha256(s.secret || sha256(s.secret || convert_to(message, 'UTF8'))), 'hex')
                    FROM sqlguard.plan_secret s);
        END
    $$;

-- Caps -----------------------------------------------------------------------------------------------------

-- Where the policy says so, a session that is making a plan may go over a cap: its transaction can't be committed
-- then, but with an approved plan. Anybody may say that he is making a plan: it takes, it does not give.
CREATE OR REPLACE FUNCTION sqlguard.refuse_excess(action bigint, tx xid8, message text) RETURNS void
    LANGUAGE plpgsql
    AS $$
        DECLARE
            choice text := (
                SELECT coalesce(p.on_excess, d.document #>> '{defaults,on_excess}', 'approve')
                FROM sqlguard.change_set c
                JOIN sqlguard.task t ON t.id = c.task_id
                JOIN sqlguard.policy d ON d.name = t.policy AND d.version = t.policy_version
                LEFT JOIN sqlguard.policy_table p ON p.policy = t.policy AND p.version = t.policy_version
                    AND (p.relid = c.relid OR p.relid IN (SELECT pg_partition_ancestors(c.relid)))
                WHERE c.txid = tx ORDER BY c.id DESC, p.on_excess DESC LIMIT 1);
        BEGIN
            IF choice = 'approve' AND action IS NOT NULL AND current_setting('sqlguard.plan', true) = 'on' THEN
                INSERT INTO sqlguard.plan_run AS r (txid, action_id, reasons) VALUES (tx, action, ARRAY[message])
                    ON CONFLICT ON CONSTRAINT plan_run_pkey DO UPDATE SET reasons = r.reasons || excluded.reasons
                    -- What is done after a plan was redeemed is not of the plan.
                    WHERE r.plan_id IS NULL;
                IF FOUND THEN
                    RETURN;
                END IF;
            END IF;
            RAISE EXCEPTION '%', message
                USING ERRCODE = 'SG006', HINT = CASE choice
                    WHEN 'approve' THEN 'narrow the WHERE to fewer rows, or have a preview approved'
                    ELSE 'narrow the WHERE to fewer rows' END;
        END
    $$;

CREATE FUNCTION sqlguard.check_plan_run() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        DECLARE
            r sqlguard.plan_run;
            p sqlguard.plan;
        BEGIN
            SELECT * INTO r FROM sqlguard.plan_run x WHERE x.txid = NEW.txid AND x.action_id = NEW.action_id;
            IF NOT FOUND THEN
                RETURN NULL;
            ELSIF r.plan_id IS NULL THEN
                RAISE EXCEPTION '%', r.reasons[1]
                    USING ERRCODE = 'SG006', HINT = 'have a preview approved, then send it again';
            END IF;
            SELECT * INTO p FROM sqlguard.plan x WHERE x.id = r.plan_id;
            IF r.digest IS DISTINCT FROM sqlguard.change_digest(
                    r.txid, CASE WHEN NOT p.is_block THEN p.committed_action END, NULL,
                    sqlguard.unguarded((sqlguard.held()).unguarded)) THEN
                RAISE EXCEPTION 'more was changed than plan % says', p.id
                    USING ERRCODE = 'SG003', HINT = 'commit the plan by itself, in a transaction of its own';
            END IF;
            DELETE FROM sqlguard.plan_run x WHERE x.txid = NEW.txid AND x.action_id = NEW.action_id;
            RETURN NULL;
        END
    $$;
CREATE CONSTRAINT TRIGGER approved AFTER INSERT ON sqlguard.plan_run
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION sqlguard.check_plan_run();

-- SET CONSTRAINTS ALL IMMEDIATE, but for the one above: a preview goes over a cap and is rolled back. With the
-- caller's rights: the triggers that it fires are not ours.
CREATE FUNCTION sqlguard.force_constraints() RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
        DECLARE
            names text := (
                SELECT string_agg(DISTINCT format('%s.%I', c.connamespace::regnamespace, c.conname), ', ')
                FROM pg_constraint c
                WHERE c.condeferrable AND c.connamespace <> 'sqlguard'::regnamespace
                    AND (c.connamespace = pg_my_temp_schema() OR c.connamespace::regnamespace::text !~ '^pg_temp_'));
        BEGIN
            IF names IS NOT NULL THEN
                EXECUTE 'SET CONSTRAINTS ' || names || ' IMMEDIATE';
            END IF;
        END
    $$;

-- What a run changed ---------------------------------------------------------------------------------------
--
-- Most runs change few rows: to plan these queries anew in every run, which PostgreSQL does where a constant might help,
-- costs more than they do. So they are planned once per session (plan_cache_mode), and nothing is asked for that a simpler
-- question has answered.

-- Rows per table that this session has written since its counters were last read by the server: number of the table ->
-- inserted, updated, deleted. Only differences mean anything.
CREATE FUNCTION sqlguard.count_written() RETURNS jsonb
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        BEGIN
            -- Nearly all tables have none, so nothing else is asked of those.
            RETURN (
                SELECT coalesce(jsonb_object_agg(c.oid::text, jsonb_build_array(
                    pg_stat_get_xact_tuples_inserted(c.oid), pg_stat_get_xact_tuples_updated(c.oid),
                    pg_stat_get_xact_tuples_deleted(c.oid))), '{}')
                FROM pg_class c
                WHERE c.relkind = 'r' AND c.relpersistence <> 't'
                    AND c.relnamespace NOT IN ('sqlguard'::regnamespace, 'pg_catalog'::regnamespace)
                    AND pg_stat_get_xact_tuples_inserted(c.oid) + pg_stat_get_xact_tuples_updated(c.oid)
                        + pg_stat_get_xact_tuples_deleted(c.oid) > 0);
        END
    $$;

-- Before the statement whose effects are going to be weighed.
CREATE FUNCTION sqlguard.begin_plan() RETURNS void
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        BEGIN
            PERFORM set_config('sqlguard.plan', 'on', true),
                    set_config('sqlguard.counted', sqlguard.count_written()::text, true);
        END
    $$;

-- What the transaction has locked: tables, and the sequences that it has used, because it keeps a lock on each. What those
-- stand at tells whether they were used again. *unguarded* are the tables that nobody guards and it may have written. (One
-- look at the server's locks, which is as dear as they are many.)
CREATE FUNCTION sqlguard.held(OUT locks jsonb, OUT moved jsonb, OUT unguarded oid[])
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        BEGIN
            SELECT coalesce(jsonb_agg(DISTINCT jsonb_build_object('table', c.oid::regclass::text, 'mode', l.mode))
                                FILTER (WHERE c.relkind <> 'S' AND l.mode <> 'AccessShareLock'), '[]'),
                   coalesce(jsonb_object_agg(c.oid::regclass::text, CASE
                       WHEN has_sequence_privilege(c.oid, 'USAGE, SELECT') THEN pg_sequence_last_value(c.oid) END)
                                FILTER (WHERE c.relkind = 'S'), '{}'),
                   coalesce(array_agg(DISTINCT c.oid)
                                FILTER (WHERE c.relkind = 'r' AND c.relpersistence <> 't' AND l.mode <> 'AccessShareLock'
                                    AND NOT EXISTS (SELECT FROM pg_trigger t
                                                    WHERE t.tgrelid = c.oid AND t.tgname = 'sqlguard_insert')), '{}')
                INTO locks, moved, unguarded
                FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
                WHERE l.pid = pg_backend_pid() AND l.locktype = 'relation' AND c.relkind IN ('r', 'p', 'v', 'm', 'S')
                    AND c.relnamespace NOT IN ('sqlguard'::regnamespace, 'pg_catalog'::regnamespace)
                    AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database());
        END
    $$;

-- What was written since `begin_plan` into *tables*, which nobody guards: see `held`.
CREATE FUNCTION sqlguard.unguarded(tables oid[]) RETURNS jsonb
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        DECLARE
            before jsonb;
        BEGIN
            IF tables = '{}' THEN
                RETURN '[]';
            END IF;
            before := coalesce(nullif(current_setting('sqlguard.counted', true), ''), '{}');
            RETURN (
                SELECT coalesce(jsonb_agg(jsonb_build_object('table', q.name, 'inserted', q.i, 'updated', q.u,
                                                             'deleted', q.d) ORDER BY q.name), '[]')
                FROM (SELECT format('%s.%s', n.nspname, c.relname) AS name,
                             pg_stat_get_xact_tuples_inserted(c.oid)
                                 - coalesce((before -> c.oid::text ->> 0)::bigint, 0) AS i,
                             pg_stat_get_xact_tuples_updated(c.oid)
                                 - coalesce((before -> c.oid::text ->> 1)::bigint, 0) AS u,
                             pg_stat_get_xact_tuples_deleted(c.oid)
                                 - coalesce((before -> c.oid::text ->> 2)::bigint, 0) AS d
                      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                      WHERE c.oid = ANY (tables) AND n.nspname NOT LIKE 'pg\_%' AND n.nspname <> 'information_schema') q
                WHERE q.i + q.u + q.d > 0);
        END
    $$;

-- The name of a table, with its schema, and those of the tables that it is a partition of.
CREATE FUNCTION sqlguard.names_of(relation oid, name text) RETURNS text[]
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        BEGIN
            IF pg_partition_root(relation) IS NULL THEN
                RETURN ARRAY[name];
            END IF;
            RETURN name || ARRAY(SELECT n.nspname || '.' || c.relname
                                 FROM pg_partition_ancestors(relation) p JOIN pg_class c ON c.oid = p.relid
                                 JOIN pg_namespace n ON n.oid = c.relnamespace);
        END
    $$;

-- All tables that were changed, partitions by the names of the tables that they are of, too: a policy has its classes
-- by name.
CREATE FUNCTION sqlguard.touched(tx xid8, only_action bigint, outside jsonb) RETURNS jsonb
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        DECLARE
            names text[] := ARRAY(
                SELECT DISTINCT unnest(sqlguard.names_of(s.relid, s.schema_name || '.' || s.table_name))
                FROM sqlguard.change_set s WHERE s.txid = tx AND (only_action IS NULL OR s.action_id = only_action));
        BEGIN
            IF outside <> '[]' THEN
                names := names || ARRAY(
                    SELECT unnest(sqlguard.names_of(c.oid, u ->> 'table')) FROM jsonb_array_elements(outside) u
                        LEFT JOIN (pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace)
                            ON c.relispartition AND n.nspname || '.' || c.relname = u ->> 'table');
            END IF;
            IF cardinality(names) > 1 THEN
                names := ARRAY(SELECT DISTINCT name FROM unnest(names) name ORDER BY name);
            END IF;
            RETURN to_jsonb(names);
        END
    $$;

-- The settings of the session that say what a text means as a value, or a value as a text. Under others the same
-- statement writes something else.
CREATE FUNCTION sqlguard.meaning() RETURNS jsonb
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT jsonb_object_agg(name, current_setting(name)) FROM unnest(ARRAY[
            'DateStyle', 'IntervalStyle', 'TimeZone', 'bytea_output', 'default_text_search_config', 'extra_float_digits',
            'lc_monetary', 'lc_numeric', 'lc_time', 'xmlbinary', 'xmloption']) AS name
    $$;

-- After each statement of a block that becomes one plan: which sequences it moved, and under which settings it ran. Of
-- these a hash over all statements so far is enough.
CREATE FUNCTION sqlguard.note_sequences(action bigint) RETURNS void
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        DECLARE
            noted jsonb := sqlguard.noted_sequences();
            found jsonb := (sqlguard.held()).moved;
            moved jsonb := (SELECT jsonb_agg(e.key ORDER BY e.key) FROM jsonb_each(found) e
                            WHERE noted #> ARRAY['last', e.key] IS DISTINCT FROM e.value);
        BEGIN
            IF moved IS NOT NULL THEN
                noted := noted || jsonb_build_object('last', found, 'moved',
                    noted -> 'moved' || jsonb_build_object('action', action, 'sequences', moved));
            END IF;
            PERFORM set_config('sqlguard.sequences', (noted || jsonb_build_object('settings',
                encode(sha256(convert_to(concat(noted ->> 'settings', sqlguard.meaning()), 'UTF8')), 'hex')))::text, true);
        END
    $$;
CREATE FUNCTION sqlguard.noted_sequences() RETURNS jsonb
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT coalesce(nullif(current_setting('sqlguard.sequences', true), ''), '{"last": {}, "moved": []}')::jsonb
    $$;

-- What a plan is bound to: the digest of its *rows*, and the settings under which it ran.
CREATE FUNCTION sqlguard.bound_digest(rows text, only_action bigint) RETURNS text
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT encode(sha256(convert_to(concat(rows, E'\n', sqlguard.meaning(),
            CASE WHEN only_action IS NULL THEN sqlguard.noted_sequences() ->> 'settings' END), 'UTF8')), 'hex')
    $$;

-- Of one row. An array's text says where it ends, so no two rows have the same text. Each argument stands here once and
-- nothing is stricter than it has to be, so that the planner takes it in: a call per row would cost more than the hash.
CREATE FUNCTION sqlguard.row_hash(key text[], new_key text[], image text) RETURNS bytea
    LANGUAGE sql STABLE
    AS $$
        SELECT pg_catalog.sha256(pg_catalog.convert_to(
            pg_catalog.concat(key::text, '|', new_key::text, coalesce('|' OPERATOR(pg_catalog.||) image, '-')), 'UTF8'))
    $$;

-- How a change set's rows are found in their table again; by the key that they had, or that they have now.
CREATE FUNCTION sqlguard.same_row(relation oid, key_columns text[], key text) RETURNS text
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT string_agg(format('"sg row".%I = (%s)[%s]::%s', k.name, key, k.n, format_type(a.atttypid, a.atttypmod)), ' AND ')
        FROM unnest(key_columns) WITH ORDINALITY AS k (name, n)
        JOIN pg_attribute a ON a.attrelid = relation AND a.attname = k.name
    $$;

-- Triggers that nobody but the users made, on a table and on all partitions of it.
CREATE FUNCTION sqlguard.users_triggers(relation oid) RETURNS SETOF pg_catalog.pg_trigger
    LANGUAGE sql STABLE ROWS 3 SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT t.* FROM pg_trigger t JOIN pg_proc f ON f.oid = t.tgfoid
        WHERE NOT t.tgisinternal AND f.pronamespace <> 'sqlguard'::regnamespace AND t.tgrelid IN (
            SELECT relation UNION SELECT p.relid::oid FROM pg_partition_tree(relation) p)
    $$;

-- Whether a trigger with these bits (4 INSERT, 8 DELETE, 16 UPDATE) fires on a change of this kind.
CREATE FUNCTION sqlguard.fires_on(bits smallint, op text) RETURNS boolean
    LANGUAGE sql IMMUTABLE
    AS $$
        SELECT bits & CASE op WHEN 'insert' THEN 4 WHEN 'delete' THEN 8 ELSE 16 END <> 0
    $$;

-- Which parts of a new row's key another run over the same rows would give it again. Where the guard does not say so, what
-- looks as if the database or a clock gave it counts as not lasting.
CREATE FUNCTION sqlguard.lasting(relation oid, key_columns text[], op text, known jsonb) RETURNS boolean[]
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        BEGIN
            RETURN (
                SELECT array_agg(CASE
                        WHEN op = 'insert' AND known ? 'insert' THEN known #> '{insert,lasts}' ? k.name
                        WHEN op = 'rekey' AND known ? 'update' THEN NOT known #> '{update,moves}' ? k.name
                        ELSE NOT a.atthasdef AND a.attidentity = '' AND NOT t.is_filled
                            AND format_type(a.atttypid, NULL) !~ '^(time|date|uuid)'
                    END ORDER BY k.n)
                FROM unnest(key_columns) WITH ORDINALITY AS k (name, n)
                JOIN pg_attribute a ON a.attrelid = relation AND a.attname = k.name
                CROSS JOIN (SELECT EXISTS (
                    -- Before each row.
                    SELECT FROM sqlguard.users_triggers(relation) u
                    WHERE u.tgtype & 3 = 3 AND sqlguard.fires_on(u.tgtype, op)) AS is_filled) t);
        END
    $$;

-- What a run changed, in groups of like change sets. *known* is what the guard tells of the statement (`rewrite.steady`),
-- null for what triggers and functions did.
CREATE FUNCTION sqlguard.change_groups(tx xid8, only_action bigint, steady jsonb)
    RETURNS TABLE (schema_name text, table_name text, op text, relid oid, root oid, key_columns text[], known jsonb,
                   ids bigint[], rows bigint, lasts boolean[])
    LANGUAGE plpgsql STABLE ROWS 3 SET search_path = pg_catalog, pg_temp
    AS $$
        #variable_conflict use_column
        BEGIN
            RETURN QUERY
                SELECT g.schema_name, g.table_name, g.op, g.relid, coalesce(pg_partition_root(g.relid)::oid, g.relid),
                       g.key_columns, k.known, g.ids, g.rows,
                       CASE WHEN g.op IN ('insert', 'rekey') THEN sqlguard.lasting(g.relid, g.key_columns, g.op, k.known) END
                FROM (SELECT s.schema_name, s.table_name, s.op, s.relid, s.key_columns, s.action_id, s.depth = 0 AS is_own,
                             array_agg(s.id ORDER BY s.id) AS ids, sum(s.rows)::bigint AS rows
                      FROM sqlguard.change_set s
                      WHERE s.txid = tx AND (only_action IS NULL OR s.action_id = only_action)
                      GROUP BY 1, 2, 3, 4, 5, 6, 7) g
                LEFT JOIN LATERAL (
                    SELECT steady #> ARRAY[g.action_id::text, 'tables', n.relation::text] AS known
                    FROM (SELECT g.relid UNION SELECT p.relid::oid FROM pg_partition_ancestors(g.relid) p) n (relation)
                    WHERE g.is_own AND steady #> ARRAY[g.action_id::text, 'tables', n.relation::text] IS NOT NULL
                    LIMIT 1) k ON true;
        END
    $$;

-- The parts of a key that last, as an expression.
CREATE FUNCTION sqlguard.lasting_key(key text, lasts boolean[]) RETURNS text
    LANGUAGE sql IMMUTABLE
    AS $$
        SELECT CASE WHEN true = ALL (lasts) THEN key
            WHEN true = ANY (lasts) THEN pg_catalog.format('ARRAY[%s]', (
                SELECT pg_catalog.string_agg(
                    CASE WHEN l.is_lasting THEN pg_catalog.format('(%s)[%s]', key, l.n) ELSE 'NULL::text' END, ', '
                    ORDER BY l.n)
                FROM pg_catalog.unnest(lasts) WITH ORDINALITY AS l (is_lasting, n)))
            ELSE 'NULL::text[]' END
    $$;

-- The exact rows: of each its table, its key and how it was before the run. What the run itself has made has no before
-- that counts, whether it was inserted or is changed a second time (by a trigger): its values may be another clock's or
-- another sequence's by then. So for it, and for what is inserted, the parts of the key that last have to do, or the number
-- of rows. The rows' order means nothing. What is written into the rows is added for the columns in *steady* (action ->
-- what the guard tells of it), and the code that has a part in it. *outside* is `unguarded`.
CREATE FUNCTION sqlguard.change_digest(tx xid8, only_action bigint, steady jsonb, outside jsonb) RETURNS text
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    -- Of sets of rows of an unknown size the server expects the worst, and would compile.
    SET plan_cache_mode = 'force_generic_plan' SET jit = 'off'
    SET "DateStyle" = 'ISO, YMD' SET "IntervalStyle" = 'postgres' SET "TimeZone" = 'UTC' SET lc_monetary = 'C'
    SET extra_float_digits = 1 SET bytea_output = 'hex' SET work_mem = '64MB'
    AS $$
        DECLARE
            lines text[] := '{}';
            part bytea;
            c record;
        BEGIN
            FOR c IN
                SELECT g.*, sum(CASE WHEN g.op IN ('insert', 'update', 'rekey') THEN cardinality(g.ids) ELSE 0 END)
                           OVER (PARTITION BY g.root) > (g.op IN ('insert', 'update', 'rekey'))::integer AS is_late
                FROM sqlguard.change_groups(tx, only_action, steady) g
            LOOP
                part := NULL;
                IF c.op = 'insert' THEN
                    IF true = ANY (c.lasts) THEN
                        EXECUTE format($q$
                            SELECT array_send(array_agg(q.h)) FROM (
                                SELECT sqlguard.row_hash(%s, NULL, NULL) AS h
                                FROM unnest($1) AS s (id) CROSS JOIN LATERAL sqlguard.row_changes(s.id) r ORDER BY 1) q
                            $q$, sqlguard.lasting_key('r.key', c.lasts)) INTO part USING c.ids;
                    END IF;
                ELSIF c.is_late THEN
                    EXECUTE sqlguard.late_rows(c.relid, c.op, c.key_columns, c.lasts,
                                               sqlguard.made_lasts(c.root, tx, only_action, steady))
                        INTO part USING c.ids, tx, only_action, c.root;
                ELSIF c.op = 'soft_delete' AND cardinality(c.key_columns) > 0 THEN
                    EXECUTE format($q$
                        SELECT array_send(array_agg(q.h)) FROM (
                            SELECT sqlguard.row_hash(r.key, NULL, coalesce(r.before, %s)) AS h
                            FROM unnest($1) AS s (id) CROSS JOIN LATERAL sqlguard.row_changes(s.id) r
                            LEFT JOIN ONLY %s AS "sg row" ON %s ORDER BY 1) q
                        $q$, sqlguard.own_image(c.relid), c.relid::regclass,
                        sqlguard.same_row(c.relid, c.key_columns, 'r.key')) INTO part USING c.ids;
                ELSIF c.op = 'rekey' AND NOT true = ALL (c.lasts) THEN
                    EXECUTE format($q$
                        SELECT array_send(array_agg(q.h)) FROM (
                            SELECT sqlguard.row_hash(r.key, %s, r.before) AS h
                            FROM unnest($1) AS s (id) CROSS JOIN LATERAL sqlguard.row_changes(s.id) r ORDER BY 1) q
                        $q$, sqlguard.lasting_key('r.new_key', c.lasts)) INTO part USING c.ids;
                ELSE
                    SELECT array_send(array_agg(q.h)) INTO part FROM (
                        SELECT sqlguard.row_hash(r.key, r.new_key, r.before) AS h
                        FROM unnest(c.ids) AS s (id) CROSS JOIN LATERAL sqlguard.row_changes(s.id) r
                        ORDER BY 1) q;
                END IF;
                lines := lines || jsonb_build_array(c.schema_name, c.table_name, c.op, c.rows,
                                                    encode(sha256(coalesce(part, '')), 'hex'))::text;
            END LOOP;
            lines := lines || sqlguard.code_lines(tx, only_action, steady)
                || CASE WHEN steady IS NOT NULL THEN sqlguard.written_lines(tx, only_action, steady) END
                || ARRAY(SELECT jsonb_build_array(u -> 'table', u -> 'inserted', u -> 'updated', u -> 'deleted')::text
                         FROM jsonb_array_elements(outside) u);
            RETURN encode(sha256(convert_to(
                coalesce((SELECT string_agg(l, E'\n' ORDER BY l COLLATE "C") FROM unnest(lines) l), ''), 'UTF8')), 'hex');
        END
    $$;

-- A row that was deleted softly and is its own image, as it was before.
CREATE FUNCTION sqlguard.own_image(relation oid) RETURNS text
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT format('ROW(%s)::text', string_agg(format('"sg row".%I', a.attname), ', ' ORDER BY a.attnum))
        FROM pg_attribute a
        WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped
            AND a.attname NOT IN ('deleted_at', 'deleted_by_agent')
    $$;

-- What lasts of the keys that a run has given to rows of a table: what does so in every change set.
CREATE FUNCTION sqlguard.made_lasts(root oid, tx xid8, only_action bigint, steady jsonb) RETURNS boolean[]
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT array_agg(q.lasts ORDER BY q.n)
        FROM (SELECT l.n, bool_and(l.lasts) AS lasts
              FROM sqlguard.change_groups(tx, only_action, steady) g
              CROSS JOIN LATERAL unnest(g.lasts) WITH ORDINALITY AS l (lasts, n)
              WHERE g.root = made_lasts.root GROUP BY 1) q
    $$;

-- The query for the rows of change sets ($1) some of which the run may have made or changed before. What a trigger does to
-- a row comes after what its statement did to it, but is kept first: so within an action the outer change is the earlier one.
-- Without a key a row is known by the hash that sets of up to 1,000 rows keep of it.
CREATE FUNCTION sqlguard.late_rows(relation oid, op text, key_columns text[], lasts boolean[], made boolean[]) RETURNS text
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT format($q$
            SELECT array_send(array_agg(q.h)) FROM (
                SELECT sqlguard.row_hash(CASE WHEN m.is_new THEN %1$s ELSE r.key END, %2$s,
                                         CASE WHEN m.since IS NULL THEN %3$s END) AS h
                FROM unnest($1) AS i (id) JOIN sqlguard.change_set s USING (id)
                CROSS JOIN LATERAL sqlguard.row_changes(s.id) r
                LEFT JOIN (
                    SELECT %4$s AS mark, min(ARRAY[coalesce(x.action_id, 0), x.depth, x.id]) AS since,
                           bool_or(x.op <> 'update') AS is_new
                    FROM sqlguard.change_set x CROSS JOIN LATERAL sqlguard.row_changes(x.id) e
                    WHERE x.txid = $2 AND ($3 IS NULL OR x.action_id = $3) AND x.op IN ('insert', 'update', 'rekey')
                        AND coalesce(pg_partition_root(x.relid)::oid, x.relid) = $4
                    GROUP BY 1) m ON m.mark = %5$s AND m.since < ARRAY[coalesce(s.action_id, 0), s.depth, s.id]
                %6$s ORDER BY 1) q
            $q$,
            sqlguard.lasting_key('r.key', made), sqlguard.lasting_key('r.new_key', coalesce(lasts, '{}')),
            CASE WHEN op = 'soft_delete' AND k.has_key THEN format('coalesce(r.before, %s)', sqlguard.own_image(relation))
                ELSE 'r.before' END,
            CASE WHEN k.has_key THEN 'coalesce(e.new_key, e.key)' ELSE 'e.after' END,
            CASE WHEN k.has_key THEN 'r.key' ELSE 'hashtextextended(r.before, 0)' END,
            CASE WHEN op = 'soft_delete' AND k.has_key THEN format('LEFT JOIN ONLY %s AS "sg row" ON %s', relation::regclass,
                                                     sqlguard.same_row(relation, key_columns, 'r.key')) END)
        FROM (SELECT cardinality(key_columns) > 0 AS has_key) k
    $$;

-- What is written depends on it without being a row: of the tables that were changed, and of views that are written
-- through, the defaults that the statement leaves values to, what is generated, the triggers with the functions that they
-- call; the functions that the statement calls itself.
CREATE FUNCTION sqlguard.code_lines(tx xid8, only_action bigint, steady jsonb) RETURNS text[]
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        BEGIN
            RETURN (
                WITH changed AS (
                    SELECT g.relid, g.op,
                           CASE WHEN g.op IN ('insert', 'update', 'rekey') THEN coalesce(g.known -> 'given', '[]') END AS given
                    FROM sqlguard.change_groups(tx, only_action, steady) g
                    UNION ALL
                    SELECT v.oid::oid, 'view', '[]'
                        FROM jsonb_each(steady) a, jsonb_array_elements_text(a.value -> 'views') AS v (oid)
                ), fired AS (
                    SELECT t.* FROM changed c CROSS JOIN LATERAL sqlguard.users_triggers(c.relid) t
                        WHERE c.op = 'view' OR sqlguard.fires_on(t.tgtype, c.op)
                ), used AS (
                    SELECT f::oid AS oid FROM jsonb_each(steady) a, jsonb_array_elements_text(a.value -> 'code') AS f
                    UNION
                    SELECT t.tgfoid FROM fired t
                ), lines AS (
                    -- OFFSET 0: by index for each of the few rows, not a look at all of the catalog for many.
                    SELECT jsonb_build_array('default', c.relid::regclass, d.attname, d.attgenerated, d.said)
                        FROM changed c CROSS JOIN LATERAL (
                            SELECT a.attname, a.attgenerated, pg_get_expr(d.adbin, d.adrelid) AS said
                            FROM pg_attrdef d JOIN pg_attribute a ON a.attrelid = c.relid AND a.attnum = d.adnum
                            WHERE d.adrelid = c.relid OFFSET 0) d
                        WHERE c.given IS NOT NULL AND NOT c.given ? d.attname
                    UNION
                    SELECT jsonb_build_array('trigger', t.tgenabled, pg_get_triggerdef(t.oid)) FROM fired t
                    UNION
                    SELECT jsonb_build_array('view', c.relid::regclass, pg_get_viewdef(c.relid))
                        FROM changed c WHERE c.op = 'view'
                    UNION
                    SELECT jsonb_build_array('function', f.oid::regprocedure, pg_get_functiondef(f.oid))
                        FROM used u CROSS JOIN LATERAL (
                            SELECT p.oid FROM pg_proc p WHERE p.oid = u.oid AND p.prokind <> 'a' OFFSET 0) f
                )
                SELECT coalesce(array_agg(l.line::text), '{}') FROM lines AS l (line));
        END
    $$;

-- What was written into steady columns, a line per change set that the statement itself has made. It is read from the
-- table: a row that was changed again in the same transaction has other values by now, and then nothing is said. Without a
-- key the row is not found again: there the hashes that small sets keep of whole rows have to do, if all of it lasts.
CREATE FUNCTION sqlguard.written_lines(tx xid8, only_action bigint, steady jsonb) RETURNS text[]
    LANGUAGE plpgsql VOLATILE
    AS $$
        DECLARE
            lines text[] := '{}';
            part bytea;
            names text[];
            c record;
        BEGIN
            FOR c IN
                SELECT s.id, s.schema_name, s.table_name, s.op, s.relid, s.key_columns, k.relkind, g.known,
                       g.known -> CASE s.op WHEN 'insert' THEN 'insert' ELSE 'update' END AS written
                FROM sqlguard.change_groups(tx, only_action, steady) g CROSS JOIN LATERAL unnest(g.ids) AS i (id)
                JOIN sqlguard.change_set s USING (id) JOIN pg_class k ON k.oid = s.relid
                WHERE s.op IN ('insert', 'update', 'rekey') AND g.known -> 'compared' = 'true'
                    AND NOT EXISTS (SELECT FROM sqlguard.change_set x
                                    WHERE x.txid = tx AND x.relid = s.relid AND x.op <> 'insert' AND x.id <> s.id
                                        AND (x.id > s.id OR x.depth > 0))
            LOOP
                names := NULL;
                IF coalesce(cardinality(c.key_columns), 0) = 0 THEN
                    CONTINUE WHEN NOT sqlguard.all_lasts(c.relid, c.op, c.known, c.written);
                    SELECT array_send(array_agg(r.after ORDER BY r.after)) INTO part FROM sqlguard.row_changes(c.id) r;
                ELSE
                    names := ARRAY(SELECT a.attname::text FROM pg_attribute a
                                   WHERE a.attrelid = c.relid AND NOT a.attisdropped AND a.attgenerated = ''
                                       AND c.written -> 'lasts' ? a.attname ORDER BY a.attname);
                    CONTINUE WHEN cardinality(names) = 0;
                    EXECUTE format($q$
                        SELECT array_send(array_agg(q.h)) FROM (
                            SELECT sqlguard.row_hash(CASE WHEN $2 THEN r.key END, NULL, ROW(%s)::text) AS h
                            FROM sqlguard.row_changes($1) r JOIN %s%s AS "sg row" ON %s ORDER BY 1) q
                        $q$, (SELECT string_agg(format('"sg row".%I', name), ', ') FROM unnest(names) AS name),
                        CASE WHEN c.relkind = 'p' THEN '' ELSE 'ONLY ' END, c.relid::regclass,
                        sqlguard.same_row(c.relid, c.key_columns, 'coalesce(r.new_key, r.key)'))
                        INTO part USING c.id, c.op <> 'insert';
                END IF;
                lines := lines || jsonb_build_array('written', c.schema_name, c.table_name, c.op, to_jsonb(names),
                                                    encode(sha256(coalesce(part, '')), 'hex'))::text;
            END LOOP;
            RETURN lines;
        END
    $$;

-- Whether all that a new row holds is the statement's, a constant or made of both.
CREATE FUNCTION sqlguard.all_lasts(relation oid, op text, known jsonb, written jsonb) RETURNS boolean
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT coalesce(bool_and(CASE
                WHEN written -> 'moves' ? a.attname THEN false
                WHEN op <> 'insert' OR a.attgenerated <> '' OR written -> 'lasts' ? a.attname THEN true
                ELSE NOT known -> 'given' ? a.attname AND a.attidentity = '' AND coalesce(d.adbin::text LIKE '{CONST %', true)
            END), false)
        FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
        WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped
    $$;

-- The rows of a table before the transaction's own deletes. Past a million the planner's estimate has to do; *enough*
-- says from how many on it does for whoever does not decide by it.
CREATE FUNCTION sqlguard.rows_before(root oid, removed bigint, enough bigint, OUT n bigint, OUT is_exact boolean)
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        DECLARE
            estimate double precision;
            kind "char";
            live bigint;
        BEGIN
            SELECT c.reltuples, c.relkind INTO estimate, kind FROM pg_class c WHERE c.oid = root;
            IF kind = 'p' THEN
                estimate := (SELECT sum(c.reltuples) FROM pg_partition_tree(root) p JOIN pg_class c ON c.oid = p.relid
                             WHERE p.isleaf);
            END IF;
            is_exact := estimate <= least(enough, 1000000);
            IF NOT is_exact THEN
                n := estimate;
                RETURN;
            END IF;
            EXECUTE format('SELECT count(*) FROM %s%s', root::regclass,
                           CASE sqlguard.mode_of(root) WHEN 'soft' THEN ' WHERE deleted_at IS NULL' ELSE '' END)
                INTO live;
            n := live + removed;
        END
    $$;

-- Counting costs a small part of what the changes did: beyond twenty times the rows that were changed it is not worth it,
-- unless it *decides*.
CREATE FUNCTION sqlguard.shares(tx xid8, only_action bigint, decides boolean)
    RETURNS TABLE (name text, rows bigint, of_rows bigint, share double precision, is_exact boolean)
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        #variable_conflict use_column
        BEGIN
            RETURN QUERY
                SELECT q.root::regclass::text, q.rows, b.n,
                       round((q.rows / greatest(b.n, q.rows, 1)::numeric), 4)::float8, b.is_exact
                FROM (SELECT coalesce(pg_partition_root(s.relid)::oid, s.relid) AS root, sum(s.rows)::bigint AS rows,
                             coalesce(sum(s.rows) FILTER (WHERE s.op IN ('delete', 'soft_delete')), 0)::bigint AS removed
                      FROM sqlguard.change_set s
                      WHERE s.txid = tx AND s.op <> 'insert' AND (only_action IS NULL OR s.action_id = only_action)
                      GROUP BY 1) q
                CROSS JOIN LATERAL sqlguard.rows_before(
                    q.root, q.removed, CASE WHEN decides THEN 1000000 ELSE greatest(10000, 20 * q.rows) END) b
                ORDER BY 1;
        END
    $$;

-- What the gates need to know of a statement that has run: little, because every write may be asked.
CREATE FUNCTION sqlguard.weigh(only_action bigint, with_share boolean) RETURNS text
    LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = 'force_generic_plan'
    AS $$
        SELECT jsonb_build_object(
            'rows', (SELECT coalesce(sum(c.rows), 0) FROM sqlguard.transaction_changes() c
                     WHERE only_action IS NULL OR c.action_id = only_action)
                    + (SELECT coalesce(sum((u ->> 'inserted')::bigint + (u ->> 'updated')::bigint
                                           + (u ->> 'deleted')::bigint), 0) FROM jsonb_array_elements(o.outside) u),
            'tables', sqlguard.touched(pg_current_xact_id_if_assigned(), only_action, o.outside),
            'share', CASE WHEN with_share THEN
                (SELECT max(s.share) FROM sqlguard.shares(pg_current_xact_id_if_assigned(), only_action, true) s) END,
            'excess', (SELECT coalesce(jsonb_agg(x.reason), '[]') FROM sqlguard.plan_run r, unnest(r.reasons) AS x (reason)
                       WHERE r.txid = pg_current_xact_id_if_assigned() AND r.plan_id IS NULL
                           AND (only_action IS NULL OR r.action_id = only_action)))::text
        FROM (SELECT sqlguard.unguarded((sqlguard.held()).unguarded) AS outside OFFSET 0) o
    $$;

-- Of a block what was noted, as far as it names sequences that were moved: a session may have noted what it likes.
-- `action` is null for what moves only when deferred constraints are forced.
CREATE FUNCTION sqlguard.sequences_by_action(only_action bigint, moved jsonb) RETURNS jsonb
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        DECLARE
            noted jsonb;
        BEGIN
            IF moved = '{}' THEN
                RETURN '[]';
            END IF;
            noted := sqlguard.noted_sequences();
            RETURN coalesce((
                SELECT jsonb_agg(jsonb_build_object('action', (m ->> 'action')::bigint, 'sequences', (
                    SELECT jsonb_agg(s) FROM jsonb_array_elements_text(m -> 'sequences') s WHERE moved ? s)))
                FROM jsonb_array_elements(noted -> 'moved') m WHERE only_action IS NULL), '[]') || coalesce((
                SELECT jsonb_build_array(jsonb_build_object('action', only_action,
                                                            'sequences', jsonb_agg(e.key ORDER BY e.key)))
                FROM jsonb_each(moved) e
                WHERE only_action IS NOT NULL OR noted #> ARRAY['last', e.key] IS DISTINCT FROM e.value
                HAVING count(*) > 0), '[]');
        END
    $$;

-- Everything that a plan says of its run, with a signature. Called in the run's transaction by the task's session.
CREATE FUNCTION sqlguard.plan_outcome(only_action bigint, steady jsonb DEFAULT NULL, max_samples integer DEFAULT 10)
    RETURNS TABLE (outcome text, signed text)
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = 'force_generic_plan'
    AS $$
        DECLARE
            tx xid8 := pg_current_xact_id_if_assigned();
            own record;
            h record := sqlguard.held();
            outside jsonb := sqlguard.unguarded(h.unguarded);
            affected jsonb;
            shares jsonb;
            samples jsonb;
            excess jsonb;
            sequences jsonb := '[]';
            report jsonb;
        BEGIN
            SELECT l.task_id AS task,
                   jsonb_path_exists(p.document, '$.gates[*].when.share ? (@ != null)') AS wants_share
                INTO own
                FROM sqlguard.lease l JOIN sqlguard.task t ON t.id = l.task_id
                JOIN sqlguard.policy p ON p.name = t.policy AND p.version = t.policy_version
                WHERE l.role = session_user;
            -- PostgreSQL's own cascades fire triggers at the depth of the statement: what it does not name is nested.
            affected := (
                SELECT coalesce(jsonb_agg(jsonb_build_object('table', q.name, 'op', q.op, 'rows', q.rows,
                                                             'nested', q.nested) ORDER BY q.n), '[]')
                FROM (SELECT s.schema_name || '.' || s.table_name AS name, s.op, sum(s.rows)::bigint AS rows,
                             bool_and(s.depth > 0 OR NOT a.tables
                                      && sqlguard.names_of(s.relid, s.schema_name || '.' || s.table_name)) AS nested,
                             min(s.id) AS n
                      FROM sqlguard.change_set s LEFT JOIN sqlguard.action a ON a.id = s.action_id
                      WHERE s.txid = tx AND (only_action IS NULL OR s.action_id = only_action)
                      GROUP BY 1, 2) q);
            shares := (
                SELECT coalesce(jsonb_agg(jsonb_strip_nulls(jsonb_build_object(
                    'table', s.name, 'rows', s.rows, 'of', s.of_rows, 'share', s.share,
                    'estimated', CASE WHEN NOT s.is_exact THEN true END))), '[]')
                FROM sqlguard.shares(tx, only_action, own.wants_share) s);
            samples := (
                SELECT coalesce(jsonb_agg(jsonb_build_object('table', s.schema_name || '.' || s.table_name,
                    'op', s.op, 'key', s.key, 'after', s.after, 'before',
                    CASE s.op WHEN 'soft_delete' THEN coalesce(s.before,
                        s.after || (SELECT coalesce(jsonb_object_agg(k, NULL), '{}') FROM jsonb_object_keys(s.after) k
                                    WHERE k IN ('deleted_at', 'deleted_by_agent')))
                    ELSE s.before END)), '[]')
                FROM sqlguard.transaction_samples(max_samples, only_action) s);
            excess := (
                SELECT coalesce(jsonb_agg(x.reason), '[]') FROM sqlguard.plan_run r, unnest(r.reasons) AS x (reason)
                WHERE r.txid = tx AND (only_action IS NULL OR r.action_id = only_action));
            IF h.moved <> '{}' THEN
                sequences := (SELECT jsonb_agg(k ORDER BY k) FROM jsonb_object_keys(h.moved) k);
            END IF;
            report := jsonb_build_object(
                'affected', affected, 'unguarded', outside, 'tables', sqlguard.touched(tx, only_action, outside),
                'shares', shares, 'samples', samples,
                'sequences', sequences,
                'sequences_by_action', sqlguard.sequences_by_action(only_action, h.moved),
                'locks', h.locks, 'excess', excess, 'settings', sqlguard.meaning());
            outcome := jsonb_build_object(
                'task', own.task, 'at', extract(epoch FROM clock_timestamp()), 'report', report, 'is_block', only_action IS NULL,
                'digest', sqlguard.bound_digest(sqlguard.change_digest(tx, only_action, steady, outside), only_action))::text;
            signed := sqlguard.signature(outcome);
            RETURN NEXT;
        END
    $$;

-- The same for a run that ends here. With the caller's rights, see `force_constraints`.
CREATE FUNCTION sqlguard.forced_outcome(only_action bigint, steady jsonb, OUT outcome text, OUT signed text)
    LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp
    AS $$
        BEGIN
            PERFORM sqlguard.force_constraints();
            SELECT o.outcome, o.signed INTO outcome, signed FROM sqlguard.plan_outcome(only_action, steady) o;
        END
    $$;

-- Plans ----------------------------------------------------------------------------------------------------

CREATE FUNCTION sqlguard.append_event(action bigint, kind text, detail jsonb) RETURNS bigint
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s'
    AS $$
        DECLARE
            task text;
        BEGIN
            SELECT a.task_id INTO STRICT task FROM sqlguard.action a WHERE a.id = append_event.action;
            RETURN sqlguard.append(task, action, kind, detail);
        END
    $$;

-- Store what a run would have done. By the operator, or by a task's own session for itself: what it says of the
-- run is signed, and how many approvals it asks for is then the policy's highest number. *previewed*, if its action came to
-- no more than this plan: what its end says besides.
CREATE FUNCTION sqlguard.record_plan(document jsonb, outcome text, signed text, previewed jsonb DEFAULT NULL)
    RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s'
    SET plan_cache_mode = 'force_generic_plan'
    AS $$
        DECLARE
            t sqlguard.task;
            o jsonb := outcome::jsonb;
            made bigint;
            lifetime interval := coalesce((document ->> 'lifetime')::interval, '1 hour');
            needed integer := greatest(coalesce((document ->> 'approvals')::integer, 1), 1);
            action bigint := (document ->> 'action_id')::bigint;
        BEGIN
            IF signed IS DISTINCT FROM sqlguard.signature(outcome)
                OR (o ->> 'at')::float8 < extract(epoch FROM clock_timestamp()) - 600 THEN
                RAISE EXCEPTION 'this is no outcome of a run' USING ERRCODE = '42501';
            END IF;
            SELECT * INTO STRICT t FROM sqlguard.task x WHERE x.id = sqlguard.authorised_task(o ->> 'task');
            IF NOT EXISTS (SELECT FROM sqlguard.action a WHERE a.id = action AND a.task_id = t.id) THEN
                RAISE EXCEPTION 'the plan belongs to no action of its task' USING ERRCODE = '22023';
            END IF;
            IF session_user::text LIKE 'sg\_tk\_%' THEN
                needed := greatest(needed, (
                    SELECT max((g ->> 'approvals')::integer) FROM sqlguard.policy p,
                        jsonb_array_elements(coalesce(p.document -> 'gates', '[]')) g
                    WHERE p.name = t.policy AND p.version = t.policy_version));
                lifetime := least(lifetime, (
                    SELECT coalesce((p.document #>> '{defaults,plan_ttl}')::interval, '1 hour') FROM sqlguard.policy p
                    WHERE p.name = t.policy AND p.version = t.policy_version));
            END IF;
            -- A plan that was made in place of another one ends that one when it is committed.
            IF document ->> 'drift_of' IS NOT NULL THEN
                PERFORM FROM sqlguard.plan p WHERE p.id = (document ->> 'drift_of')::bigint
                    AND p.scope = sqlguard.key_scope(t);
                IF NOT FOUND THEN
                    RAISE EXCEPTION 'plan % is none of this task''s agent', document ->> 'drift_of' USING ERRCODE = '22023';
                END IF;
            END IF;
            -- An agent that asks again gets the same ticket.
            SELECT p.id INTO made FROM sqlguard.plan p
                WHERE p.scope = sqlguard.key_scope(t) AND p.statement_hash = document ->> 'statement_hash'
                    AND p.policy_version = t.policy_version AND p.purpose IS NOT DISTINCT FROM t.purpose
                    AND p.digest = o ->> 'digest' AND p.is_block = (o ->> 'is_block')::boolean
                    AND p.approvals = needed AND sqlguard.plan_state(p) = 'open'
                ORDER BY p.id DESC LIMIT 1;
            IF NOT FOUND THEN
                INSERT INTO sqlguard.plan (task_id, role, action_id, scope, agent, policy, policy_version, purpose,
                    search_path, statements, statement_hash, is_block, digest, rows, tier, classes, reasons, approvals,
                    report, drift_of, expires_at)
                VALUES (t.id, coalesce(CASE WHEN session_user::text LIKE 'sg\_tk\_%' THEN session_user::text END,
                                       document ->> 'role', ''),
                    action, sqlguard.key_scope(t), t.agent, t.policy, t.policy_version, t.purpose,
                    ARRAY(SELECT jsonb_array_elements_text(document -> 'search_path')), document -> 'statements',
                    document ->> 'statement_hash', (o ->> 'is_block')::boolean, o ->> 'digest',
                    (SELECT coalesce(sum((a ->> 'rows')::bigint), 0) FROM jsonb_array_elements(o #> '{report,affected}') a)
                    + (SELECT coalesce(sum((u ->> 'inserted')::bigint + (u ->> 'updated')::bigint + (u ->> 'deleted')::bigint), 0)
                       FROM jsonb_array_elements(o #> '{report,unguarded}') u),
                    coalesce(document ->> 'tier', 'irreversible'),
                    ARRAY(SELECT jsonb_array_elements_text(coalesce(document -> 'classes', '[]'))),
                    ARRAY(SELECT jsonb_array_elements_text(coalesce(document -> 'reasons', '[]'))),
                    needed, o -> 'report', (document ->> 'drift_of')::bigint,
                    clock_timestamp() + least(lifetime, '7 days'))
                RETURNING id INTO made;
                PERFORM pg_notify('sqlguard_plans', made::text);
            END IF;
            IF previewed IS NOT NULL THEN
                PERFORM sqlguard.refuse_second_end(t.id, action);
            END IF;
            PERFORM sqlguard.add_entries(t.id, NULL, array_remove(ARRAY[
                jsonb_build_object('action', action, 'kind', 'planned', 'detail', jsonb_build_object('plan', made)),
                CASE WHEN previewed IS NOT NULL THEN jsonb_build_object(
                    'action', action, 'kind', 'previewed', 'detail', previewed || jsonb_build_object('plan', made)) END], NULL));
            RETURN made;
        END
    $$;

-- Approvals since the last revocation, one per person.
CREATE FUNCTION sqlguard.approvers(plan bigint) RETURNS text[]
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT coalesce(array_agg(DISTINCT d.by), '{}') FROM sqlguard.plan_decision d
        WHERE d.plan_id = plan AND d.decision = 'approve'
            AND d.id > coalesce((SELECT max(r.id) FROM sqlguard.plan_decision r
                                 WHERE r.plan_id = plan AND r.decision = 'revoke'), 0)
    $$;

-- `open` `approved` `rejected` `expired` `superseded` (the plan made in its place was committed) `committed`. Under another policy version an approval means nothing: see
-- `redeem_plan`.
CREATE FUNCTION sqlguard.plan_state(p sqlguard.plan) RETURNS text
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT CASE
            WHEN p.committed_at IS NOT NULL THEN 'committed'
            WHEN EXISTS (SELECT FROM sqlguard.plan_decision d WHERE d.plan_id = p.id AND d.decision = 'reject') THEN 'rejected'
            WHEN EXISTS (SELECT FROM sqlguard.plan x WHERE x.drift_of = p.id AND x.committed_at IS NOT NULL) THEN 'superseded'
            WHEN p.expires_at <= clock_timestamp() THEN 'expired'
            WHEN cardinality(sqlguard.approvers(p.id)) >= p.approvals THEN 'approved'
            ELSE 'open' END
    $$;

-- In the run's transaction, by the task's session: take the approval of *wanted_plan*, or of the newest approved plan
-- for the same statements of the same agent, policy version, parameters and purpose. Whoever comes second waits here
-- for the first, and finds it used up.
CREATE FUNCTION sqlguard.redeem_plan(wanted_plan bigint, wanted_hash text, only_action bigint, first_action bigint,
                                     steady jsonb DEFAULT NULL)
    RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = 'force_generic_plan'
    AS $$
        DECLARE
            t sqlguard.task;
            p sqlguard.plan;
            tx xid8 := pg_current_xact_id();
            outside jsonb := sqlguard.unguarded((sqlguard.held()).unguarded);
            found_digest text;
        BEGIN
            SELECT task.* INTO t FROM sqlguard.lease l JOIN sqlguard.task ON task.id = l.task_id
                WHERE l.role = session_user AND l.state = 'live' AND task.state = 'open';
            IF NOT FOUND THEN
                RAISE EXCEPTION 'only a task''s session can commit a plan' USING ERRCODE = '42501';
            END IF;
            FOR p IN
                SELECT x.* FROM sqlguard.plan x
                WHERE x.scope = sqlguard.key_scope(t) AND x.policy_version = t.policy_version
                    AND x.purpose IS NOT DISTINCT FROM t.purpose AND x.committed_at IS NULL
                    AND x.is_block = (only_action IS NULL)
                    AND CASE WHEN wanted_plan IS NULL THEN x.statement_hash = wanted_hash ELSE x.id = wanted_plan END
                    AND sqlguard.plan_state(x) = 'approved'
                ORDER BY x.id DESC FOR UPDATE
            LOOP
                found_digest := coalesce(found_digest, sqlguard.bound_digest(
                    sqlguard.change_digest(tx, only_action, steady, outside), only_action));
                EXIT WHEN p.digest = found_digest;
            END LOOP;
            IF p.id IS NULL THEN
                RETURN '{"found": false}';
            END IF;
            IF found_digest <> p.digest OR sqlguard.plan_state(p) <> 'approved' THEN
                RETURN jsonb_build_object('found', true, 'plan', p.id, 'equal', false, 'report', p.report)::text;
            END IF;
            UPDATE sqlguard.plan x SET committed_at = clock_timestamp(), committed_by = session_user, txid = tx,
                committed_action = coalesce(only_action, first_action) WHERE x.id = p.id;
            UPDATE sqlguard.plan_run r SET plan_id = p.id,
                    digest = sqlguard.change_digest(tx, only_action, NULL, outside)
                WHERE r.txid = tx AND (only_action IS NULL OR r.action_id = only_action);
            RETURN jsonb_build_object('found', true, 'plan', p.id, 'equal', true)::text;
        END
    $$;

-- Decisions of people --------------------------------------------------------------------------------------

-- Whether a person with this login was made an approver. The implicit membership that PostgreSQL 16 gives to whoever
-- made the role, without any of its rights, does not count.
CREATE FUNCTION sqlguard.is_approver(login name) RETURNS boolean
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        WITH RECURSIVE up AS (
            SELECT r.oid FROM pg_roles r WHERE r.rolname = login
            UNION
            SELECT m.roleid FROM up JOIN pg_auth_members m ON m.member = up.oid
            WHERE coalesce((to_jsonb(m) ->> 'inherit_option')::boolean, true)
                OR coalesce((to_jsonb(m) ->> 'set_option')::boolean, true))
        SELECT EXISTS (SELECT FROM up JOIN pg_roles r ON r.oid = up.oid WHERE r.rolname = 'sqlguard_approver')
    $$;

-- By session_user alone: SET ROLE and functions with their owner's rights don't change it. A session of the task can
-- keep its plan and its chain locked for as long as it likes, and no person has to wait for that.
CREATE FUNCTION sqlguard.decide_plan(wanted bigint, decision text, seen_digest text, reason text) RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s'
    AS $$
        DECLARE
            p sqlguard.plan;
            t sqlguard.task;
            state text;
        BEGIN
            IF session_user::text LIKE 'sg\_tk\_%'
                OR EXISTS (SELECT FROM sqlguard.lease l WHERE l.role = session_user)
                OR NOT sqlguard.is_approver(session_user::name) THEN
                RAISE EXCEPTION '`%` is no approver', session_user
                    USING ERRCODE = '42501', HINT = 'decide with the login of a person who is a member: '
                        'an administrator says GRANT sqlguard_approver TO that login';
            END IF;
            SELECT x.* INTO p FROM sqlguard.plan x WHERE x.id = wanted FOR UPDATE;
            IF NOT FOUND THEN
                RAISE EXCEPTION 'there is no plan %', wanted USING ERRCODE = 'SG002', HINT = 'see `sqlguard plan list`';
            END IF;
            SELECT x.* INTO t FROM sqlguard.task x WHERE x.id = p.task_id;
            state := sqlguard.plan_state(p);
            IF state NOT IN ('open', 'approved') THEN
                RAISE EXCEPTION 'plan % is %', p.id, state
                    USING ERRCODE = 'SG002', HINT = 'have the statement previewed again';
            END IF;
            IF decision = 'approve' THEN
                IF session_user IN (t.opened_by, p.made_by) THEN
                    RAISE EXCEPTION '`%` opened the task or previewed for it, and can''t approve for it', session_user
                        USING ERRCODE = '42501', HINT = 'another member of sqlguard_approver has to decide';
                ELSIF seen_digest IS DISTINCT FROM p.digest THEN
                    RAISE EXCEPTION 'what was looked at is not plan %', p.id
                        USING ERRCODE = 'SG003', HINT = 'look at the plan again';
                ELSIF session_user = ANY (sqlguard.approvers(p.id)) THEN
                    RAISE EXCEPTION '`%` has approved plan % already', session_user, p.id
                        USING ERRCODE = 'SG002', HINT = 'another person has to approve it too';
                ELSIF state = 'approved' THEN
                    RAISE EXCEPTION 'plan % is approved already', p.id USING ERRCODE = 'SG002';
                ELSIF EXISTS (SELECT FROM sqlguard.policy x WHERE x.name = p.policy AND x.version > p.policy_version)
                    AND NOT EXISTS (SELECT FROM sqlguard.task x WHERE x.state = 'open' AND x.policy = p.policy
                                    AND x.policy_version = p.policy_version AND sqlguard.key_scope(x) = p.scope) THEN
                    RAISE EXCEPTION 'plan % was made under an older version of policy `%`', p.id, p.policy
                        USING ERRCODE = 'SG002', HINT = 'have the statement previewed again';
                END IF;
            ELSIF decision = 'reject' AND coalesce(btrim(reason), '') = '' THEN
                RAISE EXCEPTION 'a rejection needs a reason' USING ERRCODE = 'SG002', HINT = 'the agent reads it';
            ELSIF decision = 'revoke' AND cardinality(sqlguard.approvers(p.id)) = 0 THEN
                RAISE EXCEPTION 'plan % has no approval that could be revoked', p.id USING ERRCODE = 'SG002';
            END IF;
            INSERT INTO sqlguard.plan_decision (plan_id, decision, digest, reason)
                VALUES (p.id, decide_plan.decision, p.digest, decide_plan.reason);
            -- A new version of the row: a transaction with an older snapshot, which can't see the decision, then
            -- can't take the plan.
            UPDATE sqlguard.plan x SET digest = x.digest WHERE x.id = p.id;
            PERFORM sqlguard.append_event(p.action_id,
                CASE decision WHEN 'approve' THEN 'approved' WHEN 'reject' THEN 'rejected' ELSE 'revoked' END,
                jsonb_build_object('plan', p.id, 'digest', p.digest, 'reason', reason));
            PERFORM pg_notify('sqlguard_plans', p.id::text);
            RETURN sqlguard.plan_state(p);
        EXCEPTION WHEN lock_not_available THEN
            RAISE EXCEPTION 'a session of the task keeps plan % locked', wanted
                USING ERRCODE = '55P03', HINT = format('try again, or end the task first: `sqlguard task end %s`', (
                    SELECT x.task_id FROM sqlguard.plan x WHERE x.id = wanted));
        END
    $$;

-- Reading --------------------------------------------------------------------------------------------------

CREATE FUNCTION sqlguard.plan_document(p sqlguard.plan) RETURNS jsonb
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT jsonb_build_object(
            'plan', p.id, 'state', sqlguard.plan_state(p), 'task', p.task_id, 'agent', p.agent, 'policy', p.policy,
            'policy_version', p.policy_version, 'purpose', p.purpose, 'action', p.action_id,
            'statements', (SELECT coalesce(jsonb_agg(jsonb_build_object('statement', s -> 'statement',
                                                     'params', s -> 'params', 'action', s -> 'action')), '[]')
                           FROM jsonb_array_elements(p.statements) s),
            'is_block', p.is_block, 'digest', p.digest, 'affected_rows', p.rows, 'tier', p.tier, 'classes', p.classes,
            'reasons', p.reasons, 'approvals_needed', p.approvals, 'approved_by', sqlguard.approvers(p.id),
            'rejected_because', (SELECT d.reason FROM sqlguard.plan_decision d
                                 WHERE d.plan_id = p.id AND d.decision = 'reject' LIMIT 1),
            -- The rows are always the database's own word. Statements, reasons and tier are whose this says.
            'reported_by', CASE WHEN p.made_by LIKE 'sg\_tk\_%' THEN 'task' ELSE 'guard' END,
            'drift_of', p.drift_of, 'made_at', p.made_at, 'expires_at', p.expires_at,
            'committed_at', p.committed_at, 'committed_action', p.committed_action) || p.report
    $$;

-- A ticket as its agent may see it: any session of the same agent, policy and parameters.
CREATE FUNCTION sqlguard.ticket(wanted bigint) RETURNS jsonb
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT sqlguard.plan_document(p) FROM sqlguard.plan p
            JOIN sqlguard.lease l ON l.role = session_user JOIN sqlguard.task t ON t.id = l.task_id
        WHERE p.id = wanted AND p.scope = sqlguard.key_scope(t)
    $$;
-- What this login was told last: whoever asks again is told of a plan that was made before, maybe by an earlier task.
CREATE FUNCTION sqlguard.last_plan() RETURNS text
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT sqlguard.ticket((
            SELECT (e.detail ->> 'plan')::bigint FROM sqlguard.event e JOIN sqlguard.action a ON a.id = e.action_id
            WHERE e.kind = 'planned' AND a.role = session_user
                AND e.task_id = (SELECT l.task_id FROM sqlguard.lease l WHERE l.role = session_user)
            ORDER BY e.id DESC LIMIT 1))::text
    $$;
-- What is needed to run a plan again, for a session of its agent.
CREATE FUNCTION sqlguard.plan_statements(wanted bigint) RETURNS jsonb
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT jsonb_build_object('statements', p.statements, 'is_block', p.is_block, 'state', sqlguard.plan_state(p),
                                  'search_path', p.search_path)
        FROM sqlguard.plan p JOIN sqlguard.lease l ON l.role = session_user JOIN sqlguard.task t ON t.id = l.task_id
        WHERE p.id = wanted AND p.scope = sqlguard.key_scope(t) AND p.policy_version = t.policy_version
            AND p.purpose IS NOT DISTINCT FROM t.purpose
    $$;

REVOKE ALL ON FUNCTION
    sqlguard.signature(text), sqlguard.check_plan_run(), sqlguard.force_constraints(), sqlguard.count_written(),
    sqlguard.begin_plan(), sqlguard.held(), sqlguard.unguarded(oid[]), sqlguard.names_of(oid, text),
    sqlguard.touched(xid8, bigint, jsonb),
    sqlguard.meaning(), sqlguard.bound_digest(text, bigint), sqlguard.noted_sequences(), sqlguard.note_sequences(bigint),
    sqlguard.sequences_by_action(bigint, jsonb), sqlguard.same_row(oid, text[], text),
    sqlguard.written_lines(xid8, bigint, jsonb), sqlguard.change_digest(xid8, bigint, jsonb, jsonb),
    sqlguard.change_groups(xid8, bigint, jsonb), sqlguard.lasting(oid, text[], text, jsonb), sqlguard.users_triggers(oid),
    sqlguard.lasting_key(text, boolean[]), sqlguard.own_image(oid), sqlguard.made_lasts(oid, xid8, bigint, jsonb),
    sqlguard.late_rows(oid, text, text[], boolean[], boolean[]), sqlguard.code_lines(xid8, bigint, jsonb),
    sqlguard.fires_on(smallint, text), sqlguard.all_lasts(oid, text, jsonb, jsonb),
    sqlguard.row_hash(text[], text[], text),
    sqlguard.rows_before(oid, bigint, bigint), sqlguard.shares(xid8, bigint, boolean), sqlguard.weigh(bigint, boolean),
    sqlguard.plan_outcome(bigint, jsonb, integer), sqlguard.forced_outcome(bigint, jsonb),
    sqlguard.append_event(bigint, text, jsonb),
    sqlguard.record_plan(jsonb, text, text, jsonb), sqlguard.approvers(bigint), sqlguard.plan_state(sqlguard.plan),
    sqlguard.redeem_plan(bigint, text, bigint, bigint, jsonb), sqlguard.is_approver(name),
    sqlguard.decide_plan(bigint, text, text, text), sqlguard.plan_document(sqlguard.plan), sqlguard.ticket(bigint),
    sqlguard.last_plan(), sqlguard.plan_statements(bigint)
    FROM PUBLIC;
GRANT EXECUTE ON FUNCTION
    sqlguard.force_constraints(), sqlguard.begin_plan(), sqlguard.note_sequences(bigint), sqlguard.weigh(bigint, boolean),
    sqlguard.plan_outcome(bigint, jsonb, integer), sqlguard.forced_outcome(bigint, jsonb),
    sqlguard.record_plan(jsonb, text, text, jsonb),
    sqlguard.redeem_plan(bigint, text, bigint, bigint, jsonb), sqlguard.ticket(bigint), sqlguard.last_plan(),
    sqlguard.plan_statements(bigint)
    TO sqlguard_agent;
GRANT SELECT ON sqlguard.plan, sqlguard.plan_decision TO sqlguard_approver;
GRANT EXECUTE ON FUNCTION
    sqlguard.decide_plan(bigint, text, text, text), sqlguard.plan_state(sqlguard.plan), sqlguard.approvers(bigint),
    sqlguard.plan_document(sqlguard.plan)
    TO sqlguard_approver;
