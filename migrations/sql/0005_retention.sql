-- Retention: legal holds, purges, and the erasure of what the journal knows of one row.
--
-- The journal only grows; an erasure is the one exception, and it grows the journal too. What it blanks is
-- written down as an `erased` event of the task's own chain: which entry, the hash of what was there and the
-- hash of what is there now. `sqlguard journal verify` then goes on with the hash that was there, so that an
-- erasure is told from tampering, and an erasure that nobody wrote down is still found.

-- Rows that must not be removed for good: all of a table, one key, or all for which a condition is true.
CREATE TABLE sqlguard.hold (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    relid oid NOT NULL,
    schema_name text NOT NULL,
    table_name text NOT NULL,
    key text[],
    condition text,
    reason text NOT NULL,
    held_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    held_by text NOT NULL DEFAULT session_user,
    released_at timestamptz,
    released_by text,
    CHECK (key IS NULL OR condition IS NULL)
);
CREATE INDEX hold_on ON sqlguard.hold (relid) WHERE released_at IS NULL;

CREATE TABLE sqlguard.removal (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind text NOT NULL CHECK (kind IN ('purge', 'erase')),
    at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    by text NOT NULL DEFAULT session_user,
    reason text,
    scope jsonb NOT NULL DEFAULT '{}'
);

-- How many rows of a table a removal took, written in the transaction that took them; `change_set_id` says
-- which soft delete had marked them, so that an undo can say where they have gone.
CREATE TABLE sqlguard.removed (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    removal_id bigint NOT NULL,
    relid oid NOT NULL,
    schema_name text NOT NULL,
    table_name text NOT NULL,
    change_set_id bigint,
    rows bigint NOT NULL,
    at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()
);
CREATE INDEX removed_removal ON sqlguard.removed (removal_id);
CREATE INDEX removed_change_set ON sqlguard.removed (change_set_id) WHERE change_set_id IS NOT NULL;
CREATE INDEX removed_relation ON sqlguard.removed (relid) WHERE change_set_id IS NOT NULL;

-- Whose image a removal blanked. Nearly all rows have none, and the index then costs nothing.
CREATE INDEX row_change_removed ON sqlguard.row_change (change_set_id) WHERE removal_id IS NOT NULL;

CREATE INDEX event_erased ON sqlguard.event ((detail ->> 'chain'), ((detail ->> 'entry')::bigint))
    WHERE kind = 'erased';

-- The narrow way through the wall ---------------------------------------------------------------------------

-- One row while one of the functions below is at work in a transaction; they remove it before they return.
CREATE UNLOGGED TABLE sqlguard.erasure_run (txid xid8 PRIMARY KEY);

CREATE OR REPLACE FUNCTION sqlguard.refuse_rewrite() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
        BEGIN
            IF current_user = 'sqlguard_retention' AND TG_OP = 'DELETE' THEN
                RETURN NULL;
            END IF;
            IF TG_OP = 'UPDATE' AND TG_TABLE_NAME IN ('action', 'event', 'row_change')
                AND EXISTS (SELECT FROM sqlguard.erasure_run r WHERE r.txid = pg_current_xact_id()) THEN
                RETURN NULL;
            END IF;
            RAISE EXCEPTION 'the journal only grows: % on `%.%` is refused', TG_OP, TG_TABLE_SCHEMA, TG_TABLE_NAME
                USING ERRCODE = '42501', HINT = 'old entries go with `sqlguard.retire`, as sqlguard_retention';
        END
    $$;

CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON sqlguard.removal
    FOR EACH STATEMENT EXECUTE FUNCTION sqlguard.refuse_rewrite();
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON sqlguard.removed
    FOR EACH STATEMENT EXECUTE FUNCTION sqlguard.refuse_rewrite();

-- What can be blanked at all: not who, when, or what became of it.
GRANT UPDATE (statement, executed, params, reason, step, compensation) ON sqlguard.action TO CURRENT_USER;
GRANT UPDATE (detail) ON sqlguard.event TO CURRENT_USER;
GRANT UPDATE (key, new_key, before, after, removal_id, chunk) ON sqlguard.row_change TO CURRENT_USER;

-- Blank the images of rows, and their keys too if *keys*; returns how many. One in a chunk leaves it for a row of its own.
CREATE FUNCTION sqlguard.erase_images(removal bigint, change_sets bigint[], row_changes bigint[], keys boolean)
    RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        DECLARE
            done bigint;
        BEGIN
            INSERT INTO sqlguard.erasure_run (txid) VALUES (pg_current_xact_id());
            INSERT INTO sqlguard.row_change (change_set_id, id, key)
                SELECT r.change_set_id, w.id, CASE WHEN NOT keys THEN r.chunk[(w.id - 1) % 1000 + 1]::text[] END
                FROM unnest(change_sets, row_changes) AS w (change_set_id, id)
                JOIN sqlguard.row_change r ON r.change_set_id = w.change_set_id AND r.id = -((w.id - 1) / 1000)
                WHERE r.chunk[(w.id - 1) % 1000 + 1] IS NOT NULL;
            UPDATE sqlguard.row_change r
                SET chunk = (SELECT array_agg(CASE WHEN u.place <> ALL (w.places) THEN u.key END ORDER BY u.place)
                             FROM unnest(r.chunk) WITH ORDINALITY AS u (key, place))
                FROM (SELECT x.change_set_id, -((x.id - 1) / 1000) AS id, array_agg((x.id - 1) % 1000 + 1) AS places
                      FROM unnest(change_sets, row_changes) AS x (change_set_id, id) GROUP BY 1, 2) w
                WHERE r.change_set_id = w.change_set_id AND r.id = w.id AND r.chunk IS NOT NULL;
            UPDATE sqlguard.row_change r
                SET before = NULL, after = NULL, removal_id = removal,
                    key = CASE WHEN keys THEN NULL ELSE r.key END,
                    new_key = CASE WHEN keys THEN NULL ELSE r.new_key END
                FROM unnest(change_sets, row_changes) AS w (change_set_id, id)
                WHERE r.change_set_id = w.change_set_id AND r.id = w.id;
            GET DIAGNOSTICS done = ROW_COUNT;
            DELETE FROM sqlguard.erasure_run WHERE txid = pg_current_xact_id();
            RETURN done;
        END
    $$;

-- Give an action the texts of *blanked* (statement, executed, params, reason, step, compensation; what it does
-- not name stays) and write the erasure to the task's chain.
CREATE FUNCTION sqlguard.erase_action(removal bigint, action bigint, blanked jsonb) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET extra_float_digits = 1
    AS $$
        DECLARE
            a sqlguard.action;
        BEGIN
            SELECT x.* INTO STRICT a FROM sqlguard.action x WHERE x.id = erase_action.action;
            IF blanked ? 'statement' THEN a.statement := blanked ->> 'statement'; END IF;
            IF blanked ? 'executed' THEN a.executed := blanked ->> 'executed'; END IF;
            IF blanked ? 'params' THEN a.params := nullif(blanked -> 'params', 'null'); END IF;
            IF blanked ? 'reason' THEN a.reason := blanked ->> 'reason'; END IF;
            IF blanked ? 'step' THEN a.step := blanked ->> 'step'; END IF;
            IF blanked ? 'compensation' THEN a.compensation := blanked ->> 'compensation'; END IF;
            INSERT INTO sqlguard.erasure_run (txid) VALUES (pg_current_xact_id());
            UPDATE sqlguard.action x
                SET statement = a.statement, executed = a.executed, params = a.params, reason = a.reason,
                    step = a.step, compensation = a.compensation
                WHERE x.id = a.id;
            DELETE FROM sqlguard.erasure_run WHERE txid = pg_current_xact_id();
            PERFORM sqlguard.note_erasure(removal, a.task_id, 'action', a.id, a.hash,
                sqlguard.chained(coalesce(a.prev_hash, ''), sqlguard.action_values(a)));
        END
    $$;

CREATE FUNCTION sqlguard.erase_event(removal bigint, event bigint, blanked jsonb) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        DECLARE
            e sqlguard.event;
        BEGIN
            SELECT x.* INTO STRICT e FROM sqlguard.event x WHERE x.id = erase_event.event;
            IF e.kind = 'erased' THEN
                RAISE EXCEPTION 'event % is the record of an erasure', event USING ERRCODE = '42501';
            END IF;
            e.detail := blanked;
            INSERT INTO sqlguard.erasure_run (txid) VALUES (pg_current_xact_id());
            UPDATE sqlguard.event x SET detail = e.detail WHERE x.id = e.id;
            DELETE FROM sqlguard.erasure_run WHERE txid = pg_current_xact_id();
            PERFORM sqlguard.note_erasure(removal, e.task_id, 'event', e.id, e.hash,
                sqlguard.chained(coalesce(e.prev_hash, ''), sqlguard.event_values(e)));
        END
    $$;

-- An event of no action: it says nothing about what became of one.
CREATE FUNCTION sqlguard.note_erasure(removal bigint, task text, chain text, entry bigint, was bytea, is_now bytea)
    RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s'
    AS $$
        BEGIN
            PERFORM sqlguard.append(task, NULL, 'erased', jsonb_build_object('removal', removal, 'chain', chain,
                'entry', entry, 'was', encode(was, 'hex'), 'now', encode(is_now, 'hex')));
        END
    $$;

-- The operator alone: the owner of the schema and its members.
REVOKE ALL ON FUNCTION
    sqlguard.erase_images(bigint, bigint[], bigint[], boolean), sqlguard.erase_action(bigint, bigint, jsonb),
    sqlguard.erase_event(bigint, bigint, jsonb), sqlguard.note_erasure(bigint, text, text, bigint, bytea, bytea)
    FROM PUBLIC;
