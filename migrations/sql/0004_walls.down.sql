DO $$
BEGIN
    IF EXISTS (SELECT FROM sqlguard.guarded_table) THEN
        RAISE EXCEPTION 'tables are still guarded' USING HINT = 'run `sqlguard unguard` for them first';
    END IF;
END $$;
DROP FUNCTION sqlguard.copy_target(oid, smallint[]), sqlguard.check_children(), sqlguard.refuse_violation(text, oid, oid, text[], text),
    sqlguard.still_refers(oid, text, text, text[]),
    sqlguard.act_on_reference(text, oid, oid, "char", boolean, text[], text[], text[], text[], text),
    sqlguard.act_on_references(sqlguard.change_set), sqlguard.mode_of(oid), sqlguard.target(oid), sqlguard.is_referenced(oid), sqlguard.rows_may_change(oid),
    sqlguard.references_to(oid), sqlguard.refuse_late(), sqlguard.refuse_unkept(oid, text, boolean), sqlguard.refuse_reaching(oid, oid),
    sqlguard.is_reaching(regclass, text), sqlguard.actions_of(oid, text), sqlguard.cascade(bigint), sqlguard.stamp(), sqlguard.refuse_stamp(), sqlguard.may_mark(),
    sqlguard.refuse_truncate(), sqlguard.check_share(bigint, xid8, oid, text, bigint, double precision),
    sqlguard.refuse_excess(bigint, xid8, text), sqlguard.refuse_frozen(oid, text), sqlguard.keep_shape(bigint, oid),
    sqlguard.note_change(bigint, oid, oid, text, text, text, bigint, text[], bigint, boolean),
    sqlguard.judge(oid, text, xid8, text), sqlguard.shape_key(regclass), sqlguard.row_text(record),
    sqlguard.refuse_over_budget(text, bigint, bigint, bigint), sqlguard.budget_left(text, bigint, bigint),
    sqlguard.spent_minutes(text);
DROP TABLE sqlguard.cascade_run, sqlguard.spent, sqlguard.spent_below;
ALTER TABLE sqlguard.policy_table DROP COLUMN task_rows, DROP COLUMN hour_rows;
ALTER TABLE sqlguard.shape DISABLE TRIGGER append_only;
DELETE FROM sqlguard.shape s USING sqlguard.shape t WHERE s.id = t.id AND s.ctid > t.ctid;
DROP INDEX sqlguard.shape_id;
ALTER TABLE sqlguard.shape ADD PRIMARY KEY (id), ENABLE TRIGGER append_only;
