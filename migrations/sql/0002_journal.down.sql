-- The role stays: other databases of the cluster may use it.
DROP FUNCTION sqlguard.drop_period(integer, timestamptz), sqlguard.begin_period(interval), sqlguard.add_period(integer);
DROP TABLE sqlguard.period;
DROP FUNCTION sqlguard.retire(timestamptz), sqlguard.keep_count(text, text, oid), sqlguard.keep_result(text, text, jsonb, jsonb),
    sqlguard.keep_answer(text, text, jsonb, jsonb),
    sqlguard.claim_key_or_stop(text, text, bigint),
    sqlguard.claim_key(text, text, bigint, interval), sqlguard.took_key(text, text, bigint, interval), sqlguard.find_key(text, text),
    sqlguard.transaction_samples(integer, bigint), sqlguard.transaction_changes(),
    sqlguard.record_event(bigint, text, jsonb), sqlguard.refuse_second_end(text, bigint), sqlguard.record_group(jsonb, jsonb), sqlguard.record_intent(jsonb),
    sqlguard.append(text, bigint, text, jsonb), sqlguard.add_entries(text, jsonb[], jsonb[]), sqlguard.task_of(text), sqlguard.lock_chain(text),
    sqlguard.intended(sqlguard.task, jsonb),
    sqlguard.refuse_unlisted_answers(sqlguard.task, text), sqlguard.refuse_other_statement(text, text), sqlguard.key_scope(sqlguard.task),
    sqlguard.refuse_unless_alive(sqlguard.task, text[]), sqlguard.authorised_task(text),
    sqlguard.chained(bytea, text[]), sqlguard.event_values(sqlguard.event),
    sqlguard.action_values(sqlguard.action), sqlguard.utc(timestamptz);
DROP FUNCTION sqlguard.refuse_rewrite() CASCADE;
DROP TABLE sqlguard.idempotency, sqlguard.undo_skipped, sqlguard.chain;
ALTER TABLE sqlguard.undone DROP CONSTRAINT undone_pkey;
DELETE FROM sqlguard.undone a USING sqlguard.undone b
    WHERE a.change_set_id = b.change_set_id AND a.undo_id < b.undo_id;
ALTER TABLE sqlguard.undone ADD PRIMARY KEY (change_set_id);
DROP INDEX sqlguard.change_set_action, sqlguard.change_set_table;
ALTER TABLE sqlguard.change_set DROP COLUMN reverts, DROP COLUMN undo_id;
ALTER TABLE sqlguard.event DROP COLUMN hash, DROP COLUMN prev_hash;
GRANT UPDATE, DELETE, TRUNCATE ON sqlguard.action, sqlguard.event, sqlguard.change_set, sqlguard.row_change
    TO CURRENT_USER;
