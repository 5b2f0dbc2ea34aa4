-- The shared half of the table walls. The other half, one capture function per guarded relation, is made by
-- `sqlguard guard` (sqlguard/postgres/walls_capture.py), because plans of static SQL are kept and those of
-- EXECUTE are not.
--
-- Who writes is known by session_user alone: SET ROLE and functions with their owner's rights don't change it.

-- How to read a before image: the columns of a relation as they are now. The id is made from the contents, so
-- that it is the same in every session and survives a roll-back.
--
-- INVARIANT: called only as `sqlguard.shape_key('<oid>'::regclass)` in the capture functions. IMMUTABLE is a
-- lie that makes the planner evaluate it once per cached plan; the regclass constant makes every ALTER TABLE
-- throw that plan away (seen on 15, 16 and 18).
CREATE FUNCTION sqlguard.shape_key(relation regclass) RETURNS bigint
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp SET quote_all_identifiers = off
    AS $$
        SELECT hashtextextended(relation::oid::text || string_agg(
                   a.attnum || ' ' || quote_ident(a.attname) || ' ' || format_type(a.atttypid, a.atttypmod),
                   ',' ORDER BY a.attnum), 0)
        FROM pg_attribute a
        WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped
    $$;

-- A row as the capture functions write it, for who compares rows with a search_path of his own: names in columns of
-- types like regclass follow that.
CREATE FUNCTION sqlguard.row_text(whole record) RETURNS text
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
    AS $$ BEGIN RETURN whole::text; END $$;

-- Two sessions that meet a new shape at the same time must not wait for each other's commit, as a unique index
-- would have them do. Rows with the same id are the same.
ALTER TABLE sqlguard.shape DROP CONSTRAINT shape_pkey;
CREATE INDEX shape_id ON sqlguard.shape (id);

-- One row per transaction that is busy with the referential actions of a soft delete. Nothing else could tell a
-- trigger so: settings and advisory locks can be made by the session itself.
CREATE UNLOGGED TABLE sqlguard.cascade_run (txid xid8 PRIMARY KEY);

-- Budgets ---------------------------------------------------------------------------------------------------

-- Rows that a task, and that all tasks together within an hour, may change; the same for every table of a policy
-- version, and here because the quick judgement reads this row anyway.
ALTER TABLE sqlguard.policy_table
    ADD COLUMN task_rows bigint CHECK (task_rows >= 0),
    ADD COLUMN hour_rows bigint CHECK (hour_rows >= 0);

-- What tasks have changed, added up by `sqlguard.add_up_spent` so that no write has to count all change sets:
-- those of transactions before `spent_below` are in here, and all others are not.
CREATE TABLE sqlguard.spent (
    task_id text NOT NULL,
    minute timestamptz NOT NULL,
    rows bigint NOT NULL,
    PRIMARY KEY (task_id, minute)
);
CREATE INDEX spent_minute ON sqlguard.spent (minute);
CREATE TABLE sqlguard.spent_below (
    txid xid8 NOT NULL,
    single boolean PRIMARY KEY DEFAULT true CHECK (single)
);
INSERT INTO sqlguard.spent_below (txid) VALUES ('0');

-- By minute, for one task (all its time) or, without one, for all tasks of the last hour.
CREATE FUNCTION sqlguard.spent_minutes(task text) RETURNS TABLE (minute timestamptz, rows numeric)
    LANGUAGE sql STABLE
    AS $$
        SELECT u.minute, sum(u.rows)
        FROM (SELECT s.minute, s.rows FROM sqlguard.spent s
              WHERE task IS NOT NULL AND s.task_id = task
              UNION ALL
              SELECT s.minute, s.rows FROM sqlguard.spent s
              WHERE task IS NULL AND s.minute >= date_trunc('minute', clock_timestamp() - interval '1 hour')
              UNION ALL
              SELECT date_trunc('minute', c.at), c.rows FROM sqlguard.change_set c
              WHERE c.txid >= (SELECT b.txid FROM sqlguard.spent_below b) AND c.task_id IS NOT NULL
                  AND (c.task_id = task OR task IS NULL AND c.at >= clock_timestamp() - interval '1 hour')) u
        GROUP BY u.minute
    $$;

-- How many rows may still be changed. Transactions that others have open are not counted before they commit.
CREATE FUNCTION sqlguard.budget_left(task text, task_rows bigint, hour_rows bigint) RETURNS bigint
    LANGUAGE plpgsql STABLE
    AS $$
        BEGIN
            RETURN least(
                CASE WHEN task_rows IS NOT NULL THEN
                    task_rows - (SELECT coalesce(sum(m.rows), 0) FROM sqlguard.spent_minutes(task) m) END,
                CASE WHEN hour_rows IS NOT NULL THEN
                    hour_rows - (SELECT coalesce(sum(m.rows), 0) FROM sqlguard.spent_minutes(NULL) m) END);
        END
    $$;

-- Called behind the change set that may be too much, which is counted with all others. Says when there is room
-- again, and of what others do only that they do it.
CREATE FUNCTION sqlguard.refuse_over_budget(task text, task_rows bigint, hour_rows bigint, changed bigint)
    RETURNS void LANGUAGE plpgsql
    AS $$
        DECLARE
            room_at timestamptz;
        BEGIN
            IF sqlguard.budget_left(task, task_rows, NULL) < 0 THEN
                RAISE EXCEPTION 'the task may change % rows in all, and this statement goes beyond them', task_rows
                    USING ERRCODE = 'SG006', HINT = 'the budget does not come back: end here, or ask for a new task';
            END IF;
            IF hour_rows IS NULL OR sqlguard.budget_left(NULL, NULL, hour_rows) >= 0 THEN
                RETURN;
            END IF;
            -- When so many of the oldest minutes have gone that the rest and this statement fit.
            SELECT min(o.minute) + interval '61 minutes' INTO room_at
            FROM (SELECT m.minute, sum(m.rows) OVER (ORDER BY m.minute) AS gone, sum(m.rows) OVER () AS total
                  FROM sqlguard.spent_minutes(NULL) m) o
            WHERE o.total - o.gone <= hour_rows - changed;
            RAISE EXCEPTION 'agents may change % rows an hour together, and this statement goes beyond them', hour_rows
                USING ERRCODE = 'SG006', HINT = CASE WHEN changed > hour_rows
                    THEN 'narrow the WHERE to fewer rows'
                    ELSE 'send it again after ' || to_char(room_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI') || ' UTC, or ask the operator'
                    END;
        END
    $$;

-- The quick half of the judgement, one look-up that the capture functions' plans take in (it is inlined, so it
-- must stay a plain STABLE query): how many rows may be changed without any further question. Null or no row:
-- ask `note_change`, which knows every reason.
CREATE FUNCTION sqlguard.judge(root oid, operation text, tx xid8, wanted text)
    RETURNS TABLE (task_id text, action_id bigint, remaining bigint)
    LANGUAGE sql STABLE
    AS $$
        SELECT t.id,
               (SELECT a.id FROM sqlguard.action a
                WHERE a.task_id = t.id
                    AND a.id = CASE WHEN wanted ~ '^[0-9]{1,18}$' THEN wanted::bigint END),
               CASE WHEN t.state = 'open' AND l.state IN ('live', 'creating')
                        AND t.expires_at > clock_timestamp() AND l.expires_at > clock_timestamp()
                        AND current_setting('transaction_isolation') = 'read committed'
                        AND NOT EXISTS (SELECT FROM sqlguard.freeze f WHERE f.thawed_at IS NULL)
                        -- Its earlier sets count as well; adding them up here would cost every other statement.
                        AND NOT EXISTS (SELECT FROM sqlguard.change_set c
                                        WHERE c.txid = tx AND c.statement_at = statement_timestamp())
                        AND (operation <> 'soft_delete' OR p.delete_mode = 'soft')
                    THEN least(coalesce(p.max_rows, 9223372036854775807),
                               CASE WHEN operation <> 'insert' AND p.max_share < 1 THEN 9 END,
                               CASE WHEN p.task_rows IS NOT NULL OR p.hour_rows IS NOT NULL
                                   THEN sqlguard.budget_left(t.id, p.task_rows, p.hour_rows) END)
               END
        FROM sqlguard.lease l
        JOIN sqlguard.task t ON t.id = l.task_id
        JOIN sqlguard.policy_table p
            ON p.policy = t.policy AND p.version = t.policy_version AND p.relid = root
        WHERE l.role = session_user
    $$;

-- The whole judgement. Writes that go through while a task may not write are refused here, so it is asked even
-- when no row was changed. Returns nothing; raises SG004, SG005, SG006 or 42501.
CREATE FUNCTION sqlguard.note_change(
    change bigint, relation oid, root oid, relation_schema text, relation_name text, operation text, changed bigint,
    keys text[], shape bigint, nested boolean)
    RETURNS void LANGUAGE plpgsql
    AS $$
        DECLARE
            tx xid8 := pg_current_xact_id();
            wanted text := current_setting('sqlguard.action', true);
            it record;
        BEGIN
            SELECT t.id, t.policy, t.policy_version, t.state, l.state AS lease_state,
                   least(t.expires_at, l.expires_at) AS expires_at,
                   p.relid IS NOT NULL AS listed, p.max_rows, p.max_share, p.delete_mode, p.task_rows, p.hour_rows,
                   (SELECT a.id FROM sqlguard.action a
                    WHERE wanted ~ '^[0-9]{1,18}$' AND a.task_id = t.id
                        AND a.id = CASE WHEN wanted ~ '^[0-9]{1,18}$' THEN wanted::bigint END) AS action_id,
                   s.total, s.here,
                   EXISTS (SELECT FROM sqlguard.shape h WHERE h.id = shape) AS shape_known
                INTO it
                FROM sqlguard.lease l
                JOIN sqlguard.task t ON t.id = l.task_id
                LEFT JOIN sqlguard.policy_table p
                    ON p.policy = t.policy AND p.version = t.policy_version AND p.relid = root
                CROSS JOIN LATERAL (
                    SELECT coalesce(sum(c.rows), 0) AS total,
                           coalesce(sum(c.rows) FILTER (WHERE c.relid = relation AND c.op = operation), 0) AS here
                    FROM sqlguard.change_set c
                    WHERE c.txid = tx AND c.statement_at = statement_timestamp()) s
                WHERE l.role = session_user;
            IF NOT FOUND OR it.state <> 'open' OR it.lease_state NOT IN ('live', 'creating')
                OR it.expires_at <= clock_timestamp() THEN
                RAISE EXCEPTION 'the task of this session has ended'
                    USING ERRCODE = 'SG004', HINT = 'ask for a new task';
            END IF;
            PERFORM sqlguard.refuse_frozen(root, relation_schema || '.' || relation_name);
            IF changed = 0 THEN
                RETURN;
            END IF;
            IF operation = 'soft_delete' AND NOT nested AND it.delete_mode IS DISTINCT FROM 'soft' THEN
                RAISE EXCEPTION 'permission denied for table %', relation_name
                    USING ERRCODE = '42501', SCHEMA = relation_schema, TABLE = relation_name;
            END IF;
            IF NOT it.shape_known THEN
                PERFORM sqlguard.keep_shape(shape, relation);
            END IF;
            INSERT INTO sqlguard.change_set (id, action_id, task_id, txid, relid, schema_name, table_name, op,
                                             rows, key_columns, shape_id, depth)
                OVERRIDING SYSTEM VALUE
                VALUES (change, it.action_id, it.id, tx, relation, relation_schema, relation_name, operation,
                        changed, keys, shape, pg_trigger_depth() - 1);
            IF NOT it.listed THEN
                SELECT coalesce((d ->> 'max_rows')::bigint, 100), coalesce((d ->> 'max_share')::float8, 0.5),
                       (b ->> 'rows_per_task')::bigint, (b ->> 'rows_per_hour')::bigint
                    INTO it.max_rows, it.max_share, it.task_rows, it.hour_rows
                    FROM (SELECT p.document -> 'defaults' AS d, p.document -> 'budgets' AS b FROM sqlguard.policy p
                          WHERE p.name = it.policy AND p.version = it.policy_version) q;
            END IF;
            IF it.total + changed > it.max_rows THEN
                PERFORM sqlguard.refuse_excess(it.action_id, tx, format(
                    'the statement changes %s rows with `%s.%s`, more than the %s that the task may change at once',
                    it.total + changed, relation_schema, relation_name, it.max_rows));
            END IF;
            IF it.task_rows IS NOT NULL OR it.hour_rows IS NOT NULL THEN
                PERFORM sqlguard.refuse_over_budget(it.id, it.task_rows, it.hour_rows, changed);
            END IF;
            -- Below ten rows a share says nothing; rows that are added can't be a share of what was there.
            IF it.here + changed >= 10 AND operation <> 'insert' AND it.max_share < 1 THEN
                PERFORM sqlguard.check_share(it.action_id, tx, root, operation, (it.here + changed)::bigint, it.max_share);
            END IF;
        END
    $$;

-- With its own search_path: names of types must be qualified, whoever asks.
CREATE FUNCTION sqlguard.keep_shape(shape bigint, relation oid) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp SET quote_all_identifiers = off
    AS $$
        INSERT INTO sqlguard.shape (id, relid, columns, types, numbers)
            SELECT shape, relation, array_agg(a.attname::text ORDER BY a.attnum),
                   array_agg(format_type(a.atttypid, a.atttypmod) ORDER BY a.attnum),
                   array_agg(a.attnum ORDER BY a.attnum)
            FROM pg_attribute a
            WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped
    $$;

CREATE FUNCTION sqlguard.refuse_frozen(root oid, relation text) RETURNS void
    LANGUAGE plpgsql
    AS $$
        DECLARE
            frozen record;
        BEGIN
            SELECT f.reason, f.until_at INTO frozen FROM sqlguard.freeze f
                WHERE f.thawed_at IS NULL AND (f.until_at IS NULL OR f.until_at > clock_timestamp())
                    AND (f.tables IS NULL OR relation = ANY (f.tables)
                         OR EXISTS (SELECT FROM sqlguard.guarded_table g
                                    WHERE g.relid = root AND g.schema_name || '.' || g.table_name = ANY (f.tables)))
                LIMIT 1;
            IF FOUND THEN
                RAISE EXCEPTION 'writes are frozen%: %',
                    coalesce(' until ' || to_char(frozen.until_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI') || ' UTC', ''),
                    frozen.reason
                    USING ERRCODE = 'SG005', HINT = 'reads go on; send the write again when the freeze has ended';
            END IF;
            -- A snapshot from before a freeze can't show it. Sequences don't follow snapshots.
            IF current_setting('transaction_isolation') <> 'read committed'
                AND (SELECT q.is_called AND q.last_value > coalesce((SELECT max(f.id) FROM sqlguard.freeze f), 0)
                     FROM sqlguard.freeze_id_seq q) THEN
                RAISE EXCEPTION 'could not serialize access due to a freeze that began after this transaction'
                    USING ERRCODE = '40001', HINT = 'roll back and send the transaction again';
            END IF;
        END
    $$;

-- A plan that a person approved may go over the caps once: in the first transaction that writes for its action.
CREATE FUNCTION sqlguard.refuse_excess(action bigint, tx xid8, message text) RETURNS void
    LANGUAGE plpgsql
    AS $$
        BEGIN
            IF EXISTS (SELECT FROM sqlguard.event e WHERE e.action_id = action AND e.kind = 'approved'
                           AND e.by NOT LIKE 'sg\_tk\_%')
                AND NOT EXISTS (SELECT FROM sqlguard.change_set c WHERE c.action_id = action AND c.txid <> tx) THEN
                RETURN;
            END IF;
            RAISE EXCEPTION '%', message
                USING ERRCODE = 'SG006', HINT = 'narrow the WHERE to fewer rows, or have a preview approved';
        END
    $$;

-- Compare with the rows that were live before the statement. Counting stops as soon as there are enough, so it
-- costs about changed / share rows; past a million of them the planner's estimate has to do.
CREATE FUNCTION sqlguard.check_share(
    action bigint, tx xid8, root oid, operation text, changed bigint, share double precision)
    RETURNS void LANGUAGE plpgsql
    AS $$
        DECLARE
            removed bigint := CASE WHEN operation IN ('delete', 'soft_delete') THEN changed ELSE 0 END;
            needed bigint := ceil(changed / greatest(share, 1e-9)) - removed;
            soft boolean := EXISTS (SELECT FROM sqlguard.guarded_table g WHERE g.relid = root AND g.mode = 'soft');
            estimate double precision := (SELECT c.reltuples FROM pg_class c WHERE c.oid = root);
            live bigint;
            exact boolean := needed <= 1000000 OR estimate <= 0;
        BEGIN
            IF exact THEN
                EXECUTE format('SELECT count(*) FROM (SELECT FROM %s%s LIMIT %s) s', root::regclass,
                               CASE WHEN soft THEN ' WHERE deleted_at IS NULL' ELSE '' END, greatest(needed, 0))
                    INTO live;
            ELSE
                live := estimate;
            END IF;
            IF live < needed THEN
                PERFORM sqlguard.refuse_excess(action, tx, format(
                    'the statement changes %s of the %s%s rows of `%s`, more than the share of %s %% that the task may change at once',
                    changed, CASE WHEN exact THEN '' ELSE 'about ' END, live + removed, root::regclass,
                    round((share * 100)::numeric, 1)));
            END IF;
        END
    $$;

CREATE FUNCTION sqlguard.refuse_truncate() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
        BEGIN
            RAISE EXCEPTION 'TRUNCATE of `%.%` is refused: it leaves no rows to keep', TG_TABLE_SCHEMA, TG_TABLE_NAME
                USING ERRCODE = 'SG002', HINT = 'use DELETE with a WHERE';
        END
    $$;

-- The bookkeeping columns of a soft table are the database's: what is not exactly a soft delete of a live row
-- is refused. Fires (AFTER ROW, by its WHEN) only for what has to be refused.
CREATE FUNCTION sqlguard.refuse_stamp() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
        BEGIN
            RAISE EXCEPTION 'deleted_at and deleted_by_agent of `%.%` are set by the database alone',
                TG_TABLE_SCHEMA, TG_TABLE_NAME
                USING ERRCODE = 'SG002', HINT = 'use DELETE to delete rows; ask the operator to restore them';
        END
    $$;

-- For tables whose own BEFORE UPDATE triggers would change a row while it is deleted: fires last and puts the
-- old row back, with the stamp.
CREATE FUNCTION sqlguard.stamp() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
        BEGIN
            NEW := OLD;
            NEW.deleted_at := statement_timestamp();
            NEW.deleted_by_agent := sqlguard.agent();
            RETURN NEW;
        END
    $$;

-- Whether the statement of the client could be one that marks rows: it names the column, or executes one that is not in
-- its text. What the policies of a soft table let a statement see of the rows that it marked hangs on it.
--
-- INVARIANT: IMMUTABLE is a lie that makes the planner put the answer in the place of the call. What is left for a
-- statement that reads is `deleted_at IS NULL`, from which PostgreSQL infers partial indexes over live rows (seen on
-- 15, 16 and 18); with the grace it can't use any. The text of a statement is the same whenever it is planned, so a kept plan is
-- right. Where the answer is wrong the marking is refused (42501): nothing is shown that was hidden.
CREATE FUNCTION sqlguard.may_mark() RETURNS boolean
    LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
    AS $$
        DECLARE
            said text := pg_catalog.lower(pg_catalog.current_query());
        BEGIN
            RETURN (pg_catalog.strpos(said, 'deleted_at') OPERATOR(pg_catalog.>) 0
                    OR pg_catalog.strpos(said, 'execute') OPERATOR(pg_catalog.>) 0) IS NOT FALSE;
        END
    $$;

-- Referential actions of soft deletes ----------------------------------------------------------------------

-- PostgreSQL queues the actions of one statement level by level. So do we: the captured change sets of the
-- transaction are the queue, in the order of their ids, and only the outermost delete works on it.
CREATE FUNCTION sqlguard.cascade(first_change bigint) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        DECLARE
            tx xid8 := pg_current_xact_id();
            following bigint := first_change;
            c sqlguard.change_set;
        BEGIN
            INSERT INTO sqlguard.cascade_run (txid) VALUES (tx);
            LOOP
                SELECT s.* INTO c FROM sqlguard.change_set s
                    WHERE s.txid = tx AND s.id >= following AND s.op = 'soft_delete'
                        AND s.statement_at = statement_timestamp()
                    ORDER BY s.id LIMIT 1;
                EXIT WHEN NOT FOUND;
                PERFORM sqlguard.act_on_references(c);
                following := c.id + 1;
            END LOOP;
            DELETE FROM sqlguard.cascade_run WHERE txid = tx;
        END
    $$;

-- The foreign keys that refer to rows of a relation, by the action triggers that PostgreSQL keeps for them, in the
-- order in which it fires these. A partition's rows are its root's too.
CREATE FUNCTION sqlguard.references_to(relation oid)
    RETURNS TABLE (name text, child oid, parent oid, action "char", can_defer boolean, columns text[],
                   set_columns text[], ref_columns text[], operators text[])
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT c.conname::text, c.conrelid, c.confrelid, c.confdeltype, c.condeferrable,
               ARRAY(SELECT a.attname::text FROM unnest(c.conkey) WITH ORDINALITY k (n, i)
                     JOIN pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = k.n ORDER BY k.i),
               ARRAY(SELECT a.attname::text FROM unnest(coalesce(c.confdelsetcols, c.conkey)) WITH ORDINALITY k (n, i)
                     JOIN pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = k.n ORDER BY k.i),
               ARRAY(SELECT a.attname::text FROM unnest(c.confkey) WITH ORDINALITY k (n, i)
                     JOIN pg_attribute a ON a.attrelid = c.confrelid AND a.attnum = k.n ORDER BY k.i),
               ARRAY(SELECT format('OPERATOR(%I.%s)', n.nspname, o.oprname)
                     FROM unnest(c.conpfeqop) WITH ORDINALITY k (op, i)
                     JOIN pg_operator o ON o.oid = k.op JOIN pg_namespace n ON n.oid = o.oprnamespace ORDER BY k.i)
        FROM pg_trigger t JOIN pg_constraint c ON c.oid = t.tgconstraint
        WHERE t.tgrelid IN (SELECT relation
                            UNION SELECT pg_partition_ancestors(relation)
                            UNION SELECT p.relid FROM pg_partition_tree(relation) p)
            AND t.tgisinternal AND t.tgconstrrelid <> 0 AND (t.tgtype & 8) <> 0
            AND c.contype = 'f' AND c.conparentid = 0
        ORDER BY t.tgname
    $$;

-- Whether a BEFORE ROW trigger of someone else can change a row while it is being deleted. One that has come since the
-- table was guarded would really do so, because nothing puts the row back. STABLE, so that it is asked once per
-- statement where it matters.
CREATE FUNCTION sqlguard.rows_may_change(relation oid) RETURNS boolean
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        DECLARE
            other text := (SELECT t.tgname FROM pg_trigger t
                           WHERE t.tgrelid = relation AND NOT t.tgisinternal AND (t.tgtype & 19) = 19
                               AND t.tgname <> 'zz_sqlguard_stamp' AND t.tgenabled <> 'D' LIMIT 1);
        BEGIN
            IF other IS NOT NULL AND NOT EXISTS (
                SELECT FROM pg_trigger t WHERE t.tgrelid = relation AND t.tgname = 'zz_sqlguard_stamp') THEN
                RAISE EXCEPTION 'trigger `%` of `%` has come after the table was guarded', other, relation::regclass
                    USING ERRCODE = 'SG002',
                        HINT = format('ask the operator to run `sqlguard guard %s` again', relation::regclass);
            END IF;
            RETURN other IS NOT NULL;
        END
    $$;

-- Foreign keys whose referential actions change rows of other tables when rows of a relation are deleted (or, with
-- 'update', when a key changes: a CASCADE then is taken back by the undo of the key).
CREATE FUNCTION sqlguard.actions_of(relation oid, operation text)
    RETURNS TABLE (child oid, columns text[], is_kept boolean)
    -- PL/pgSQL, because it keeps its plan.
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
    AS $$
        BEGIN
            RETURN QUERY
                SELECT c.conrelid,
                       ARRAY(SELECT a.attname::text FROM unnest(c.confkey) k (n)
                             JOIN pg_attribute a ON a.attrelid = c.confrelid AND a.attnum = k.n),
                       EXISTS (SELECT FROM sqlguard.guarded_table g
                               WHERE g.relid = c.conrelid OR g.relid IN (SELECT pg_partition_ancestors(c.conrelid)))
                FROM (SELECT relation AS oid UNION SELECT p.relid FROM pg_partition_tree(relation) p) r
                CROSS JOIN LATERAL (SELECT t.tgconstraint FROM pg_trigger t
                                    WHERE t.tgrelid = r.oid AND t.tgisinternal AND t.tgconstrrelid <> 0 OFFSET 0) t
                JOIN pg_constraint c ON c.oid = t.tgconstraint
                WHERE c.contype = 'f' AND CASE operation WHEN 'delete' THEN c.confdeltype IN ('c', 'n', 'd')
                                                         ELSE c.confupdtype IN ('n', 'd') END;
        END
    $$;

-- Whether a statement on a relation can change rows that its own capture does not see, by foreign keys and by
-- children that inherit. Nearly never, so `refuse_unkept` has to be asked where it is so only.
--
-- INVARIANT: IMMUTABLE is the same lie as that of `shape_key`: a new key, and a new child, throw the plans of what they
-- refer to away (seen on 15, 16 and 18).
CREATE FUNCTION sqlguard.is_reaching(relation regclass, operation text) RETURNS boolean
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT EXISTS (SELECT FROM sqlguard.actions_of(relation, operation))
            OR EXISTS (SELECT FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhparent
                       WHERE i.inhparent = relation AND c.relkind = 'r')
    $$;

-- Tables that came after the guard and have no walls: nothing would keep the rows that go with this statement.
-- *by_row*: the children that inherit have capture triggers of their own. Returns the columns that must not change.
CREATE FUNCTION sqlguard.refuse_unkept(relation oid, operation text, by_row boolean) RETURNS text[]
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        DECLARE
            unkept oid;
            kept_still text[];
        BEGIN
            WITH RECURSIVE below AS (
                SELECT i.inhrelid FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhparent
                WHERE i.inhparent = relation AND c.relkind = 'r'
                UNION SELECT i.inhrelid FROM below b JOIN pg_inherits i ON i.inhparent = b.inhrelid)
            SELECT b.inhrelid INTO unkept FROM below b
                WHERE NOT by_row OR NOT EXISTS (SELECT FROM pg_trigger t
                                                WHERE t.tgrelid = b.inhrelid AND t.tgname = 'sqlguard_insert') LIMIT 1;
            IF NOT FOUND AND operation = 'delete' THEN
                SELECT a.child INTO unkept FROM sqlguard.actions_of(relation, operation) a WHERE NOT a.is_kept LIMIT 1;
            END IF;
            IF unkept IS NOT NULL THEN
                PERFORM sqlguard.refuse_reaching(relation, unkept);
            END IF;
            IF operation = 'update' THEN
                SELECT array_agg(DISTINCT c) INTO kept_still
                    FROM sqlguard.actions_of(relation, operation) a, unnest(a.columns) c WHERE NOT a.is_kept;
            END IF;
            RETURN kept_still;
        END
    $$;

CREATE FUNCTION sqlguard.refuse_reaching(relation oid, unkept oid) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        BEGIN
            RAISE EXCEPTION 'the statement would change rows of `%`, which is not guarded', coalesce(unkept, (
                    SELECT a.child FROM sqlguard.actions_of(relation, 'update') a WHERE NOT a.is_kept LIMIT 1))::regclass
                USING ERRCODE = 'SG002', HINT = format('ask the operator to run `sqlguard guard %s` again', relation::regclass);
        END
    $$;

-- For tables whose children inherit, with capture triggers by row: before the statement.
CREATE FUNCTION sqlguard.refuse_late() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
        BEGIN
            IF sqlguard.refuse_unkept(TG_RELID, lower(TG_OP), true) IS NOT NULL THEN
                PERFORM sqlguard.refuse_reaching(TG_RELID, NULL);
            END IF;
            RETURN NULL;
        END
    $$;

-- Whether any foreign key refers to rows of a relation: asked at every soft delete, so asked cheaply.
CREATE FUNCTION sqlguard.is_referenced(relation oid) RETURNS boolean
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        BEGIN
            RETURN EXISTS (SELECT FROM pg_trigger t
                           WHERE t.tgrelid = relation AND t.tgisinternal AND t.tgconstrrelid <> 0 AND (t.tgtype & 8) <> 0)
                OR EXISTS (SELECT FROM pg_partition_tree(relation) p JOIN pg_trigger t ON t.tgrelid = p.relid
                           WHERE t.tgisinternal AND t.tgconstrrelid <> 0 AND (t.tgtype & 8) <> 0);
        END
    $$;

-- `ONLY` where PostgreSQL's own actions say it: everywhere but on a partitioned table.
CREATE FUNCTION sqlguard.target(relation oid) RETURNS text
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT CASE WHEN c.relkind = 'p' THEN '' ELSE 'ONLY ' END || format('%I.%I', n.nspname, c.relname)
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = relation
    $$;

-- The mode of the tree that a relation belongs to; null when it is not guarded.
CREATE FUNCTION sqlguard.mode_of(relation oid) RETURNS text
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
    AS $$
        SELECT g.mode FROM sqlguard.guarded_table g
        WHERE g.relid = relation OR g.relid IN (SELECT pg_partition_ancestors(relation))
        LIMIT 1
    $$;

CREATE FUNCTION sqlguard.act_on_references(c sqlguard.change_set) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
        DECLARE
            match text := (SELECT g.options ->> 'key_match' FROM sqlguard.guarded_table g
                           WHERE g.relid = c.relid OR g.relid IN (SELECT pg_partition_ancestors(c.relid)) LIMIT 1);
            marked text := format('p.deleted_at = %L', statement_timestamp());
            source text := '';
            locked oid[] := '{}';
            k record;
        BEGIN
            IF match IS NOT NULL THEN
                marked := format('%s AND %s', match, marked);
                source := format(', sqlguard.row_changes(%s) r', c.id);
            END IF;
            FOR k IN SELECT * FROM sqlguard.references_to(c.relid) LOOP
                -- Waits for children that are being inserted (they hold FOR KEY SHARE); what follows sees them,
                -- because each statement here takes a new snapshot.
                IF NOT k.parent = ANY (locked) THEN
                    EXECUTE format('SELECT FROM %s p%s WHERE %s FOR UPDATE OF p', sqlguard.target(k.parent), source, marked);
                    locked := locked || k.parent;
                END IF;
                PERFORM sqlguard.act_on_reference(k.name, k.child, k.parent, k.action, k.can_defer, k.columns,
                    k.set_columns, k.ref_columns, k.operators,
                    format('SELECT p.* FROM %s p%s WHERE %s', sqlguard.target(k.parent), source, marked));
            END LOOP;
        END
    $$;

CREATE FUNCTION sqlguard.act_on_reference(
    name text, child oid, parent oid, action "char", can_defer boolean, columns text[], set_columns text[],
    ref_columns text[], operators text[], parents text)
    RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
        DECLARE
            mode text := sqlguard.mode_of(child);
            refers text := (
                SELECT string_agg(format('s.%I %s c.%I', ref_columns[i], operators[i], columns[i]), ' AND ')
                FROM generate_subscripts(columns, 1) i)
                || CASE mode WHEN 'soft' THEN ' AND c.deleted_at IS NULL' ELSE '' END;
        BEGIN
            IF action IN ('c', 'n', 'd') AND mode IS NULL THEN
                IF sqlguard.still_refers(child, parents, refers, ref_columns) IS NOT NULL THEN
                    RAISE EXCEPTION 'the delete would change rows of `%`, which is not guarded', child::regclass
                        USING ERRCODE = 'SG002', HINT = format('ask the operator to run `sqlguard guard %s`', child::regclass);
                END IF;
            ELSIF action = 'c' AND mode = 'soft' THEN
                EXECUTE format('UPDATE %s c SET deleted_at = statement_timestamp(), deleted_by_agent = %L FROM (%s) s WHERE %s',
                               sqlguard.target(child), sqlguard.agent(), parents, refers);
            ELSIF action = 'c' THEN
                EXECUTE format('DELETE FROM %s c USING (%s) s WHERE %s', sqlguard.target(child), parents, refers);
            ELSIF action IN ('n', 'd') THEN
                EXECUTE format('UPDATE %s c SET %s FROM (%s) s WHERE %s', sqlguard.target(child),
                    (SELECT string_agg(format('%I = %s', n, CASE action WHEN 'n' THEN 'NULL' ELSE 'DEFAULT' END), ', ')
                     FROM unnest(set_columns) n),
                    parents, refers);
            END IF;
            -- A default may be the deleted key itself. Deferrable keys have a constraint trigger for their check, but
            -- for those that have come since the table was guarded: they are checked now.
            IF action IN ('r', 'd') OR (action = 'a' AND NOT (can_defer AND EXISTS (
                SELECT FROM pg_trigger t JOIN pg_proc f ON f.oid = t.tgfoid
                WHERE t.tgrelid = parent AND f.proname = 'check_children'
                    AND f.pronamespace = 'sqlguard'::regnamespace
                    AND t.tgargs = convert_to(act_on_reference.name, getdatabaseencoding()) || decode('00', 'hex')))) THEN
                PERFORM sqlguard.refuse_violation(name, child, parent, ref_columns,
                    sqlguard.still_refers(child, parents, refers, ref_columns));
            END IF;
        END
    $$;

-- The key of a deleted parent that a live child refers to, as text; null when there is none.
CREATE FUNCTION sqlguard.still_refers(child oid, parents text, refers text, ref_columns text[]) RETURNS text
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
        DECLARE
            found text;
        BEGIN
            EXECUTE format('SELECT concat_ws('', '', %s) FROM (%s) s JOIN %s c ON %s LIMIT 1 FOR KEY SHARE OF c',
                           (SELECT string_agg(format('s.%I', n), ', ') FROM unnest(ref_columns) n),
                           parents, sqlguard.target(child), refers)
                INTO found;
            RETURN found;
        END
    $$;

-- In PostgreSQL's own words, so that clients that read them go on reading them.
CREATE FUNCTION sqlguard.refuse_violation(name text, child oid, parent oid, ref_columns text[], key text)
    RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
        DECLARE
            child_name text;
            child_schema text;
            shown boolean;
        BEGIN
            IF key IS NULL THEN
                RETURN;
            END IF;
            SELECT relname, relnamespace::regnamespace::text INTO child_name, child_schema FROM pg_class WHERE oid = child;
            -- Values are for who may read them: rows that a cascade has reached need not be that.
            shown := (SELECT bool_and(has_column_privilege(session_user, parent, c, 'SELECT')) FROM unnest(ref_columns) c)
                AND NOT EXISTS (
                    SELECT FROM pg_policy p JOIN sqlguard.lease l ON l.role = session_user
                    JOIN pg_roles g ON g.rolname = l.group_role AND g.oid = ANY (p.polroles)
                    WHERE p.polrelid = parent OR p.polrelid IN (SELECT pg_partition_ancestors(parent)));
            RAISE EXCEPTION 'update or delete on table "%" violates foreign key constraint "%" on table "%"',
                (SELECT relname FROM pg_class WHERE oid = parent), name, child_name
                USING ERRCODE = '23503', SCHEMA = child_schema, TABLE = child_name, CONSTRAINT = name,
                    DETAIL = format('Key %sis still referenced from table "%s".', CASE WHEN shown
                        THEN format('(%s)=(%s) ', array_to_string(ref_columns, ', '), key) ELSE '' END, child_name);
        END
    $$;

-- The NO ACTION check of a DEFERRABLE key: a constraint trigger on the parent, deferred as the key is.
CREATE FUNCTION sqlguard.check_children() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        DECLARE
            k record;
            live text;
            key text;
        BEGIN
            -- Anyone may make a table of his own and this its trigger, and a row policy of that table would then be
            -- asked with the owner's rights.
            IF sqlguard.mode_of(TG_RELID) IS DISTINCT FROM 'soft' THEN
                RAISE EXCEPTION 'table `%.%` is not guarded as soft', TG_TABLE_SCHEMA, TG_TABLE_NAME
                    USING ERRCODE = '42501';
            END IF;
            SELECT r.* INTO k FROM sqlguard.references_to(TG_RELID) r WHERE r.name = TG_ARGV[0] AND r.action = 'a';
            IF NOT FOUND THEN
                RETURN NULL;
            END IF;
            live := CASE sqlguard.mode_of(k.child) WHEN 'soft' THEN ' AND c.deleted_at IS NULL' ELSE '' END;
            EXECUTE format('SELECT concat_ws('', '', %s) FROM %s c WHERE %s%s LIMIT 1 FOR KEY SHARE OF c',
                           (SELECT string_agg(format('($1).%I', n), ', ') FROM unnest(k.ref_columns) n),
                           sqlguard.target(k.child),
                           (SELECT string_agg(format('($1).%I %s c.%I', k.ref_columns[i], k.operators[i], k.columns[i]),
                                              ' AND ') FROM generate_subscripts(k.columns, 1) i),
                           live)
                INTO key USING NEW;
            PERFORM sqlguard.refuse_violation(k.name, k.child, k.parent, k.ref_columns, key);
            RETURN NULL;
        END
    $$;

-- PostgreSQL has no COPY FROM for tables with row-level security. So the rows of such a COPY go to a table of their own
-- first, with *columns* (by number) of *relation*, and from there by INSERT. Made here, because agents make no temporary
-- tables; for columns that the session may INSERT.
CREATE FUNCTION sqlguard.copy_target(relation oid, columns smallint[]) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
        DECLARE
            chosen text[] := (SELECT array_agg(format('t.%I', a.attname) ORDER BY u.place)
                              FROM unnest(columns) WITH ORDINALITY AS u (number, place)
                              JOIN pg_attribute a ON a.attrelid = relation AND a.attnum = u.number AND a.attnum > 0
                              WHERE NOT a.attisdropped
                                  AND has_column_privilege(session_user, relation, u.number, 'INSERT'));
        BEGIN
            IF coalesce(cardinality(chosen), 0) < cardinality(columns) THEN
                RAISE EXCEPTION 'permission denied for table %', relation::regclass USING ERRCODE = '42501',
                    HINT = 'name the columns: those that the policy grants, and none that is GENERATED ALWAYS';
            END IF;
            IF to_regclass('pg_temp.sqlguard_copy') IS NOT NULL THEN
                DROP TABLE pg_temp.sqlguard_copy;
            END IF;
            EXECUTE format('CREATE TEMP TABLE sqlguard_copy ON COMMIT DROP AS SELECT %s FROM %s t WITH NO DATA',
                           array_to_string(chosen, ', '), relation::regclass);
            EXECUTE format('GRANT SELECT, INSERT ON pg_temp.sqlguard_copy TO %I', session_user);
        END
    $$;
REVOKE EXECUTE ON FUNCTION sqlguard.copy_target(oid, smallint[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION sqlguard.copy_target(oid, smallint[]) TO sqlguard_agent;

-- Only the walls themselves call these; the triggers' functions can't be called by hand at all.
REVOKE EXECUTE ON FUNCTION
    sqlguard.spent_minutes(text), sqlguard.budget_left(text, bigint, bigint),
    sqlguard.refuse_over_budget(text, bigint, bigint, bigint),
    sqlguard.judge(oid, text, xid8, text),
    sqlguard.note_change(bigint, oid, oid, text, text, text, bigint, text[], bigint, boolean),
    sqlguard.keep_shape(bigint, oid), sqlguard.refuse_frozen(oid, text),
    sqlguard.refuse_excess(bigint, xid8, text),
    sqlguard.check_share(bigint, xid8, oid, text, bigint, double precision),
    sqlguard.cascade(bigint), sqlguard.act_on_references(sqlguard.change_set),
    sqlguard.act_on_reference(text, oid, oid, "char", boolean, text[], text[], text[], text[], text),
    sqlguard.still_refers(oid, text, text, text[])
    FROM PUBLIC;
