-- The group roles stay: other databases of the cluster may use them.
DROP FUNCTION sqlguard.agent(), sqlguard.current_task(), sqlguard.row_changes(bigint);
DROP TABLE sqlguard.undone, sqlguard.undo, sqlguard.shape, sqlguard.row_change, sqlguard.change_set,
    sqlguard.event, sqlguard.action, sqlguard.freeze, sqlguard.guarded_table, sqlguard.lease,
    sqlguard.task, sqlguard.policy_table, sqlguard.policy;
REVOKE USAGE ON SCHEMA sqlguard FROM PUBLIC;
