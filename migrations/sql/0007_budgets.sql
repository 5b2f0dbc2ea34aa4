-- Budgets of tasks and of all agents together, and refusals of DDL by task sessions.
-- How the walls ask for them is in 0004; here is what keeps them quick, and what needs a superuser to be put up.

-- Add up the change sets of all transactions that are over, once each; return how many rows were new. The janitor
-- calls it every second. Without a janitor the walls count for themselves, ever more slowly.
CREATE FUNCTION sqlguard.add_up_spent() RETURNS bigint
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
        DECLARE
            added bigint;
        BEGIN
            IF NOT pg_try_advisory_xact_lock(1936813159, 4) THEN
                RETURN 0;
            END IF;
            -- A copy of the database in another cluster counts its transactions anew.
            UPDATE sqlguard.spent_below b SET txid = pg_snapshot_xmin(pg_current_snapshot())
                WHERE b.txid > pg_snapshot_xmax(pg_current_snapshot());
            IF NOT EXISTS (SELECT FROM sqlguard.change_set c, sqlguard.spent_below b WHERE c.txid >= b.txid) THEN
                RETURN 0;
            END IF;
            -- One statement, hence one snapshot: no transaction below its xmin can add anything any more.
            WITH b AS MATERIALIZED (
                SELECT b.txid AS was, pg_snapshot_xmin(pg_current_snapshot()) AS now FROM sqlguard.spent_below b),
            s AS (
                INSERT INTO sqlguard.spent AS s (task_id, minute, rows)
                    SELECT c.task_id, date_trunc('minute', c.at), sum(c.rows)
                    FROM sqlguard.change_set c, b
                    WHERE c.txid >= b.was AND c.txid < b.now AND c.task_id IS NOT NULL
                    GROUP BY 1, 2
                    ON CONFLICT (task_id, minute) DO UPDATE SET rows = s.rows + excluded.rows
                    RETURNING s.rows),
            moved AS (UPDATE sqlguard.spent_below SET txid = b.now FROM b WHERE txid < b.now)
            SELECT count(*) INTO added FROM s;
            DELETE FROM sqlguard.spent s
                WHERE s.minute < clock_timestamp() - interval '2 hours'
                    AND NOT EXISTS (SELECT FROM sqlguard.task t WHERE t.id = s.task_id AND t.state <> 'ended');
            RETURN added;
        END
    $$;
REVOKE EXECUTE ON FUNCTION sqlguard.add_up_spent() FROM PUBLIC;

-- Sessions that came through a proxy, for `sqlguard doctor`: who is not here has gone past it. Losing this in a
-- crash loses nothing, since the sessions are gone as well.
CREATE UNLOGGED TABLE sqlguard.door_session (
    pid integer PRIMARY KEY,
    role name NOT NULL,
    joined_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()
);

-- Statements per minute, shared by every process through which a task sends: whoever runs short leases a slice here,
-- and spends it without asking. `taken[i]` statements count until `counted_until[i]`. One row per task, so its lock
-- is the order in which slices are given out.
CREATE TABLE sqlguard.statement_rate (
    task_id text PRIMARY KEY,
    counted_until timestamptz[] NOT NULL DEFAULT '{}',
    taken bigint[] NOT NULL DEFAULT '{}'
);

-- Give out *wanted* statements of a task, and up to *most* while there is plenty; `granted` is 0 when there is no
-- room, which there will be at `room_at`. Never more than the policy's rate in any minute: what is spent at once
-- counts for a minute, and of a larger slice all for a minute after the last moment at which it may be spent, which
-- is `lasts` seconds after it was asked for. An eighth of what is left, so that a small rate goes one by one.
-- Whoever waits for the row of a task that somebody keeps locked gives up: the doors refuse then.
CREATE FUNCTION sqlguard.lease_statements(task text, wanted integer, most integer,
        OUT granted bigint, OUT budget bigint, OUT room_at timestamptz, OUT wait double precision,
        OUT lasts double precision)
    RETURNS SETOF record
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '250ms'
    AS $$
        DECLARE
            held sqlguard.statement_rate;
            now timestamptz;
            ends timestamptz;
            spent bigint;
        BEGIN
            IF wanted IS NULL OR wanted < 1 THEN
                RAISE EXCEPTION 'a lease of statements must be for one at least' USING ERRCODE = '22023';
            END IF;
            lasts := 2;
            SELECT (p.document #>> '{budgets,statements_per_minute}')::bigint INTO budget
                FROM sqlguard.task t JOIN sqlguard.policy p ON p.name = t.policy AND p.version = t.policy_version
                WHERE t.id = lease_statements.task AND t.state <> 'ended';
            IF NOT FOUND THEN
                RETURN;
            END IF;
            INSERT INTO sqlguard.statement_rate (task_id)
                SELECT lease_statements.task
                WHERE NOT EXISTS (SELECT FROM sqlguard.statement_rate r WHERE r.task_id = lease_statements.task)
                ON CONFLICT DO NOTHING;
            SELECT r.* INTO held FROM sqlguard.statement_rate r WHERE r.task_id = lease_statements.task FOR UPDATE;
            -- By the clock of whoever holds the row, hence in order.
            now := clock_timestamp();
            SELECT coalesce(sum(u.n), 0), coalesce(array_agg(u.until), '{}'), coalesce(array_agg(u.n), '{}')
                INTO spent, held.counted_until, held.taken
                FROM unnest(held.counted_until, held.taken) AS u (until, n) WHERE u.until > now;
            IF budget IS NULL OR spent + wanted <= budget THEN
                granted := greatest(wanted, least(most, coalesce((budget - spent) / 8, most)));
                ends := now + interval '1 minute';
                IF granted > wanted THEN
                    ends := ends + lasts * interval '1 second';
                END IF;
                -- Whole seconds, rounded up, keep the row short.
                ends := date_trunc('second', ends + interval '999999 microseconds');
                IF ends = ANY (held.counted_until) THEN
                    held.taken[array_position(held.counted_until, ends)] :=
                        held.taken[array_position(held.counted_until, ends)] + granted;
                ELSE
                    held.counted_until := held.counted_until || ends;
                    held.taken := held.taken || granted;
                END IF;
                UPDATE sqlguard.statement_rate r SET counted_until = held.counted_until, taken = held.taken
                    WHERE r.task_id = lease_statements.task;
                IF NOT FOUND THEN
                    RETURN;
                END IF;
            ELSE
                granted := 0;
                SELECT min(u.until) INTO room_at
                    FROM (SELECT f.until, spent - sum(f.n) OVER (ORDER BY f.until) AS rest
                          FROM unnest(held.counted_until, held.taken) AS f (until, n)) u
                    WHERE u.rest + wanted <= budget;
                wait := extract(epoch FROM room_at - now);
            END IF;
            RETURN NEXT;
        END
    $$;
REVOKE EXECUTE ON FUNCTION sqlguard.lease_statements(text, integer, integer) FROM PUBLIC;

-- The same for the task whose session this is: a door that has no other connection than the task's own. A task that
-- calls it for nothing has fewer statements left, never more.
CREATE FUNCTION sqlguard.lease_own_statements(wanted integer, most integer,
        OUT granted bigint, OUT budget bigint, OUT room_at timestamptz, OUT wait double precision,
        OUT lasts double precision)
    RETURNS SETOF record
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT s.* FROM sqlguard.lease l CROSS JOIN LATERAL sqlguard.lease_statements(l.task_id, $1, $2) s
        WHERE l.role = session_user AND l.state = 'live'
    $$;
REVOKE EXECUTE ON FUNCTION sqlguard.lease_own_statements(integer, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION sqlguard.lease_own_statements(integer, integer) TO sqlguard_agent;
