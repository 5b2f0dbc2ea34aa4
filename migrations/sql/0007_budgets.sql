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
