-- Steps that are not SQL, and the feed that tells other systems of actions.
--
-- A step is an action like any other: kind `tool`, the tool's name as its statement, its arguments as params, and
-- what answers it as compensation. So the hash chain covers what an undo will do. What became of it, and of its
-- compensation, are events of the action; nothing is ever rewritten.

CREATE INDEX action_tool ON sqlguard.action (idempotency_key) WHERE kind = 'tool';

-- Journal the call of a tool and say whether it may be made: `repeats` is the action that made the very same call
-- before, with its result. An irreversible one needs an approval that was given to a refused call like it, and
-- uses it up.
CREATE FUNCTION sqlguard.begin_step(intent jsonb)
    RETURNS TABLE (action_id bigint, key text, repeats bigint, result jsonb)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        DECLARE
            wanted text := intent ->> 'idempotency_key';
            scope text;
            twin record;
            ticket bigint;
        BEGIN
            intent := intent || '{"kind": "tool", "verdict": "allow", "statement_hash": null}';
            action_id := sqlguard.record_intent(intent);
            key := coalesce(wanted, (SELECT a.task_id || ':' || a.id FROM sqlguard.action a WHERE a.id = begin_step.action_id));
            IF wanted IS NOT NULL THEN
                -- The task's chain is locked by now: of two calls with one key the second sees the first.
                SELECT sqlguard.key_scope(t) INTO scope FROM sqlguard.task t
                    JOIN sqlguard.action a ON a.task_id = t.id WHERE a.id = begin_step.action_id;
                SELECT a.id, a.statement, a.params, e.detail -> 'result' AS result, e.id AS ended INTO twin
                    FROM sqlguard.task t
                    JOIN sqlguard.action a ON a.task_id = t.id AND a.idempotency_key = wanted
                    LEFT JOIN sqlguard.event e ON e.action_id = a.id AND e.kind = 'committed' AND NOT e.detail ? 'repeats'
                    WHERE sqlguard.key_scope(t) = scope AND a.kind = 'tool' AND a.verdict = 'allow'
                        AND a.id <> begin_step.action_id
                    ORDER BY e.id NULLS LAST LIMIT 1;
                IF FOUND AND (twin.statement, twin.params) IS DISTINCT FROM
                    (intent ->> 'statement', nullif(intent -> 'params', 'null')) THEN
                    RAISE EXCEPTION 'the idempotency key was used for another call'
                        USING ERRCODE = 'SG002', HINT = 'give each call a key of its own';
                ELSIF FOUND AND twin.ended IS NOT NULL THEN
                    repeats := twin.id;
                    result := twin.result;
                    PERFORM sqlguard.record_event(action_id, 'committed', jsonb_build_object('repeats', twin.id));
                    RETURN NEXT;
                    RETURN;
                END IF;
            END IF;
            IF intent ->> 'tier' = 'irreversible' THEN
                ticket := sqlguard.approval_of(action_id);
                IF ticket IS NULL THEN
                    RAISE EXCEPTION '`%` can''t be taken back: a person has to approve the call', intent ->> 'statement'
                        USING ERRCODE = 'SG001', HINT = 'ask the operator, then make the same call again';
                END IF;
                PERFORM sqlguard.record_event(ticket, 'started', jsonb_build_object('used_by', action_id));
            END IF;
            PERFORM sqlguard.record_event(action_id, 'started', '{}');
            RETURN NEXT;
        END
    $$;

-- The refused call of the same task that is the same as *action*, was approved within the hour and not used yet.
CREATE FUNCTION sqlguard.approval_of(action bigint) RETURNS bigint
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT r.id FROM sqlguard.action a
        JOIN sqlguard.action r ON r.task_id = a.task_id AND r.kind = 'tool' AND r.verdict = 'approve'
            AND r.statement = a.statement AND r.params IS NOT DISTINCT FROM a.params
            AND r.compensation IS NOT DISTINCT FROM a.compensation
        WHERE a.id = action
            AND EXISTS (SELECT FROM sqlguard.event e WHERE e.action_id = r.id AND e.kind = 'approved'
                        AND e.at > clock_timestamp() - interval '1 hour')
            AND NOT EXISTS (SELECT FROM sqlguard.event e WHERE e.action_id = r.id AND e.kind = 'started')
        ORDER BY r.id LIMIT 1
    $$;

-- What approvers are shown: calls that wait, or whose approval was not used yet. They see no other actions.
CREATE FUNCTION sqlguard.waiting_steps()
    RETURNS TABLE (action bigint, task text, agent text, at timestamptz, tool text, arguments jsonb, reason text,
                   confidence double precision, approved boolean)
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT a.id, a.task_id, a.agent, a.at, a.statement, a.params, a.reason, a.confidence,
               EXISTS (SELECT FROM sqlguard.event e WHERE e.action_id = a.id AND e.kind = 'approved')
        FROM sqlguard.action a
        WHERE a.kind = 'tool' AND a.verdict = 'approve'
            AND NOT EXISTS (SELECT FROM sqlguard.event e WHERE e.action_id = a.id AND e.kind = 'started')
        ORDER BY a.id
    $$;

-- Never over the agent's own channel: session_user can't be changed by a session.
CREATE FUNCTION sqlguard.approve_step(action bigint, note text DEFAULT NULL) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s'
    AS $$
        DECLARE
            a sqlguard.action;
        BEGIN
            SELECT x.* INTO a FROM sqlguard.action x WHERE x.id = action;
            IF a.id IS NULL OR a.kind IS DISTINCT FROM 'tool' OR a.verdict IS DISTINCT FROM 'approve' THEN
                RAISE EXCEPTION 'action % does not wait for an approval', action
                    USING ERRCODE = 'SG002', HINT = 'see `sqlguard step list`';
            END IF;
            IF EXISTS (SELECT FROM sqlguard.lease l WHERE l.role = session_user)
                OR session_user = (SELECT t.opened_by FROM sqlguard.task t WHERE t.id = a.task_id)
                    AND NOT pg_has_role(session_user, current_user, 'MEMBER') THEN
                RAISE EXCEPTION 'nobody approves what was asked for by himself' USING ERRCODE = '42501';
            END IF;
            IF EXISTS (SELECT FROM sqlguard.event x WHERE x.action_id = action AND x.kind = 'started') THEN
                RAISE EXCEPTION 'the approval of action % was used', action
                    USING ERRCODE = 'SG002', HINT = 'each call needs an approval of its own';
            END IF;
            PERFORM sqlguard.append(a.task_id, action, 'approved', jsonb_strip_nulls(jsonb_build_object('note', note)));
        END
    $$;

-- The feed -------------------------------------------------------------------------------------------------

-- Who follows, and how far: every entry up to *position* was delivered but those in *gaps*, which are numbers that
-- had been taken by transactions still at work ([number, the first transaction that began later]).
CREATE TABLE sqlguard.feed (
    name text PRIMARY KEY,
    action_position bigint NOT NULL DEFAULT 0,
    action_gaps jsonb NOT NULL DEFAULT '[]',
    event_position bigint NOT NULL DEFAULT 0,
    event_gaps jsonb NOT NULL DEFAULT '[]',
    created_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    delivered_at timestamptz
);

-- A NOTIFY makes commits wait for one another, so nothing is notified while nobody follows.
CREATE FUNCTION sqlguard.notify_feeds() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        BEGIN
            IF EXISTS (SELECT FROM sqlguard.feed) THEN
                PERFORM pg_notify('sqlguard_journal', TG_TABLE_NAME);
            END IF;
            RETURN NULL;
        END
    $$;
CREATE TRIGGER notify_feeds AFTER INSERT ON sqlguard.action
    FOR EACH STATEMENT EXECUTE FUNCTION sqlguard.notify_feeds();
CREATE TRIGGER notify_feeds AFTER INSERT ON sqlguard.event
    FOR EACH STATEMENT EXECUTE FUNCTION sqlguard.notify_feeds();

REVOKE ALL ON FUNCTION
    sqlguard.begin_step(jsonb), sqlguard.approval_of(bigint), sqlguard.approve_step(bigint, text),
    sqlguard.waiting_steps(), sqlguard.notify_feeds()
    FROM PUBLIC;
GRANT EXECUTE ON FUNCTION sqlguard.begin_step(jsonb) TO sqlguard_agent;
GRANT EXECUTE ON FUNCTION sqlguard.approve_step(bigint, text), sqlguard.waiting_steps() TO sqlguard_approver;
