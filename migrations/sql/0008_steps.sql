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
                SELECT r.id INTO ticket FROM sqlguard.refused_like(action_id) r WHERE r.state = 'approved' LIMIT 1;
                IF ticket IS NULL THEN
                    SELECT r.id INTO ticket FROM sqlguard.refused_like(action_id) r WHERE r.state = 'rejected' LIMIT 1;
                    IF FOUND THEN
                        RAISE EXCEPTION 'the call was rejected: %', sqlguard.step_rejection(ticket)
                            USING ERRCODE = 'SG002', HINT = 'a person has said no to this very call; do not make it again';
                    END IF;
                    RAISE EXCEPTION '`%` can''t be taken back: a person has to approve the call', intent ->> 'statement'
                        USING ERRCODE = 'SG001', HINT = 'ask the operator, then make the same call again';
                END IF;
                PERFORM sqlguard.record_event(ticket, 'started', jsonb_build_object('used_by', action_id));
            END IF;
            PERFORM sqlguard.record_event(action_id, 'started', '{}');
            RETURN NEXT;
        END
    $$;

-- How many people have to approve a call of an irreversible tool: the most that a gate for that tier asks for.
CREATE FUNCTION sqlguard.step_approvals(task text) RETURNS integer
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT greatest(max((g ->> 'approvals')::integer), 1)
        FROM sqlguard.task t
        JOIN sqlguard.policy p ON p.name = t.policy AND p.version = t.policy_version
        CROSS JOIN jsonb_array_elements(coalesce(p.document -> 'gates', '[]')) g
        WHERE t.id = task AND g ->> 'then' = 'approve' AND g #> '{when,tier}' ? 'irreversible'
    $$;

-- Approvals within the hour and since the last revocation, one per person.
CREATE FUNCTION sqlguard.step_approvers(action bigint) RETURNS text[]
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT coalesce(array_agg(DISTINCT e.by), '{}') FROM sqlguard.event e
        WHERE e.action_id = action AND e.kind = 'approved' AND e.at > clock_timestamp() - interval '1 hour'
            AND e.id > coalesce((SELECT max(r.id) FROM sqlguard.event r
                                 WHERE r.action_id = action AND r.kind = 'revoked'), 0)
    $$;

-- `open` `approved` `rejected` `used`
CREATE FUNCTION sqlguard.step_state(action bigint) RETURNS text
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT CASE
            WHEN EXISTS (SELECT FROM sqlguard.event e WHERE e.action_id = action AND e.kind = 'started') THEN 'used'
            WHEN EXISTS (SELECT FROM sqlguard.event e WHERE e.action_id = action AND e.kind = 'rejected') THEN 'rejected'
            WHEN cardinality(sqlguard.step_approvers(action)) >= (
                SELECT sqlguard.step_approvals(a.task_id) FROM sqlguard.action a WHERE a.id = action) THEN 'approved'
            ELSE 'open' END
    $$;

-- Calls like *action* of the same task that were refused until somebody decides; the approvals of one count for one call.
CREATE FUNCTION sqlguard.refused_like(action bigint) RETURNS TABLE (id bigint, state text)
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT r.id, sqlguard.step_state(r.id) FROM sqlguard.action a
        JOIN sqlguard.action r ON r.task_id = a.task_id AND r.kind = 'tool' AND r.verdict = 'approve'
            AND r.statement = a.statement AND r.params IS NOT DISTINCT FROM a.params
            AND r.compensation IS NOT DISTINCT FROM a.compensation
        WHERE a.id = action ORDER BY r.id
    $$;

CREATE FUNCTION sqlguard.step_rejection(action bigint) RETURNS text
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT e.detail ->> 'reason' FROM sqlguard.event e WHERE e.action_id = action AND e.kind = 'rejected' LIMIT 1
    $$;

-- What approvers are shown: calls that wait, or whose approval was not used yet. They see no other actions.
CREATE FUNCTION sqlguard.waiting_steps()
    RETURNS TABLE (action bigint, task text, agent text, at timestamptz, tool text, arguments jsonb, reason text,
                   confidence double precision, approvals_needed integer, approved_by text[], state text)
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT a.id, a.task_id, a.agent, a.at, a.statement, a.params, a.reason, a.confidence,
               sqlguard.step_approvals(a.task_id), sqlguard.step_approvers(a.id), s.state
        FROM sqlguard.action a CROSS JOIN LATERAL (SELECT sqlguard.step_state(a.id) AS state) s
        WHERE a.kind = 'tool' AND a.verdict = 'approve' AND s.state IN ('open', 'approved')
        ORDER BY a.id
    $$;

-- What has become of a refused call, for its own task's sessions and the operator; null for any other.
CREATE FUNCTION sqlguard.step_ticket(action bigint) RETURNS jsonb
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT jsonb_build_object('action', a.id, 'tool', a.statement, 'state', sqlguard.step_state(a.id),
            'approvals_needed', sqlguard.step_approvals(a.task_id), 'approved_by', sqlguard.step_approvers(a.id),
            'rejected_because', sqlguard.step_rejection(a.id))
        FROM sqlguard.action a
        WHERE a.id = step_ticket.action AND a.kind = 'tool' AND a.verdict = 'approve'
            AND CASE WHEN session_user::text LIKE 'sg\_tk\_%'
                     THEN a.task_id = (SELECT l.task_id FROM sqlguard.lease l WHERE l.role = session_user)
                     ELSE pg_has_role(session_user, current_user, 'MEMBER') END
    $$;

-- `approve`, `reject` or `revoke`; returns the state that the call is in then. Never over the agent's own channel:
-- session_user can't be changed by a session.
CREATE FUNCTION sqlguard.decide_step(action bigint, decision text, reason text DEFAULT NULL) RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s'
    AS $$
        DECLARE
            a sqlguard.action;
            state text;
        BEGIN
            SELECT x.* INTO a FROM sqlguard.action x WHERE x.id = decide_step.action;
            IF a.id IS NULL OR a.kind IS DISTINCT FROM 'tool' OR a.verdict IS DISTINCT FROM 'approve' THEN
                RAISE EXCEPTION 'action % does not wait for an approval', action
                    USING ERRCODE = 'SG002', HINT = 'see `sqlguard step list`';
            END IF;
            IF EXISTS (SELECT FROM sqlguard.lease l WHERE l.role = session_user)
                OR session_user = (SELECT t.opened_by FROM sqlguard.task t WHERE t.id = a.task_id)
                    AND NOT pg_has_role(session_user, current_user, 'MEMBER') THEN
                RAISE EXCEPTION 'nobody approves what was asked for by himself' USING ERRCODE = '42501';
            END IF;
            -- From here on nobody uses the approval up or decides as well.
            PERFORM sqlguard.lock_chain(a.task_id);
            state := sqlguard.step_state(action);
            IF state = 'used' THEN
                RAISE EXCEPTION 'the approval of action % was used', action
                    USING ERRCODE = 'SG002', HINT = 'each call needs an approval of its own';
            ELSIF state = 'rejected' THEN
                RAISE EXCEPTION 'action % was rejected', action
                    USING ERRCODE = 'SG002', HINT = 'a rejection is for good';
            ELSIF decision = 'approve' AND session_user = ANY (sqlguard.step_approvers(action)) THEN
                RAISE EXCEPTION '`%` has approved action % already', session_user, action
                    USING ERRCODE = 'SG002', HINT = CASE state WHEN 'open' THEN 'another person has to approve it too'
                        ELSE 'the call may be made now' END;
            ELSIF decision = 'reject' AND coalesce(btrim(reason), '') = '' THEN
                RAISE EXCEPTION 'a rejection needs a reason' USING ERRCODE = 'SG002', HINT = 'the agent reads it';
            ELSIF decision = 'revoke' AND sqlguard.step_approvers(action) = '{}' THEN
                RAISE EXCEPTION 'action % has no approval that could be revoked', action
                    USING ERRCODE = 'SG002', HINT = 'see `sqlguard step list`';
            ELSIF decision NOT IN ('approve', 'reject', 'revoke') THEN
                RAISE EXCEPTION 'a decision is approve, reject or revoke' USING ERRCODE = '22023';
            END IF;
            PERFORM sqlguard.append(a.task_id, action,
                CASE decision WHEN 'approve' THEN 'approved' WHEN 'reject' THEN 'rejected' ELSE 'revoked' END,
                jsonb_strip_nulls(jsonb_build_object('reason', reason)));
            RETURN sqlguard.step_state(action);
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

-- A NOTIFY makes commits wait for one another, so nothing is notified while nobody follows. Whoever may insert here may
-- read there, and names are qualified: every write comes by, and pinned settings would cost it.
CREATE FUNCTION sqlguard.notify_feeds() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
        BEGIN
            IF EXISTS (SELECT FROM sqlguard.feed) THEN
                PERFORM pg_catalog.pg_notify('sqlguard_journal', TG_TABLE_NAME);
            END IF;
            RETURN NULL;
        END
    $$;
CREATE TRIGGER notify_feeds AFTER INSERT ON sqlguard.action
    FOR EACH STATEMENT EXECUTE FUNCTION sqlguard.notify_feeds();
CREATE TRIGGER notify_feeds AFTER INSERT ON sqlguard.event
    FOR EACH STATEMENT EXECUTE FUNCTION sqlguard.notify_feeds();

REVOKE ALL ON FUNCTION
    sqlguard.begin_step(jsonb), sqlguard.refused_like(bigint), sqlguard.step_approvals(text),
    sqlguard.step_approvers(bigint), sqlguard.step_state(bigint), sqlguard.step_rejection(bigint),
    sqlguard.step_ticket(bigint), sqlguard.decide_step(bigint, text, text), sqlguard.waiting_steps(),
    sqlguard.notify_feeds()
    FROM PUBLIC;
GRANT EXECUTE ON FUNCTION sqlguard.begin_step(jsonb), sqlguard.step_ticket(bigint) TO sqlguard_agent;
GRANT EXECUTE ON FUNCTION sqlguard.decide_step(bigint, text, text), sqlguard.waiting_steps() TO sqlguard_approver;
