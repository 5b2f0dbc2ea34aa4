-- Row scopes of applied policies use task_parameter(): drop them first, with their group roles.
DROP FUNCTION sqlguard.current_login(), sqlguard.task_parameter(text);
ALTER TABLE sqlguard.policy_table DROP COLUMN scope_params;
DROP TABLE sqlguard.proxy;
DROP INDEX sqlguard.lease_group;
ALTER TABLE sqlguard.lease DROP COLUMN retry_at, DROP COLUMN settings, DROP COLUMN kind;
