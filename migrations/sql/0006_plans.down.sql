-- Plans and approvals: what a dry run saw, and who let it pass.
DROP FUNCTION sqlguard.plan_statements(bigint), sqlguard.last_plan(), sqlguard.ticket(bigint),
    sqlguard.plan_document(sqlguard.plan), sqlguard.decide_plan(bigint, text, text, text), sqlguard.is_approver(name),
    sqlguard.redeem_plan(bigint, text, bigint, bigint, jsonb), sqlguard.plan_state(sqlguard.plan),
    sqlguard.approvers(bigint), sqlguard.record_plan(jsonb, text, text, jsonb),
    sqlguard.append_event(bigint, text, jsonb), sqlguard.forced_outcome(bigint, jsonb),
    sqlguard.plan_outcome(bigint, jsonb, integer),
    sqlguard.weigh(bigint, boolean), sqlguard.shares(xid8, bigint, boolean), sqlguard.rows_before(oid, bigint, bigint),
    sqlguard.change_digest(xid8, bigint, jsonb, jsonb), sqlguard.written_lines(xid8, bigint, jsonb),
    sqlguard.all_lasts(oid, text, jsonb, jsonb), sqlguard.code_lines(xid8, bigint, jsonb), sqlguard.fires_on(smallint, text),
    sqlguard.late_rows(oid, text, text[], boolean[], boolean[]), sqlguard.made_lasts(oid, xid8, bigint, jsonb),
    sqlguard.own_image(oid), sqlguard.lasting_key(text, boolean[]), sqlguard.change_groups(xid8, bigint, jsonb),
    sqlguard.lasting(oid, text[], text, jsonb), sqlguard.users_triggers(oid),
    sqlguard.same_row(oid, text[], text), sqlguard.row_hash(text[], text[], text),
    sqlguard.sequences_by_action(bigint, jsonb), sqlguard.note_sequences(bigint), sqlguard.bound_digest(text, bigint),
    sqlguard.noted_sequences(), sqlguard.meaning(),
    sqlguard.touched(xid8, bigint, jsonb), sqlguard.names_of(oid, text), sqlguard.unguarded(oid[]), sqlguard.held(),
    sqlguard.begin_plan(),
    sqlguard.count_written(), sqlguard.force_constraints(), sqlguard.signature(text);
CREATE OR REPLACE FUNCTION sqlguard.refuse_excess(action bigint, tx xid8, message text) RETURNS void
    LANGUAGE plpgsql
    AS $$
        BEGIN
            RAISE EXCEPTION '%', message
                USING ERRCODE = 'SG006', HINT = 'narrow the WHERE to fewer rows';
        END
    $$;
DROP TABLE sqlguard.plan_run, sqlguard.plan_secret, sqlguard.plan_decision, sqlguard.plan;
DROP FUNCTION sqlguard.check_plan_run();
