-- Steps that are not SQL, and the feed that tells other systems of actions.
DROP TRIGGER notify_feeds ON sqlguard.event;
DROP TRIGGER notify_feeds ON sqlguard.action;
DROP FUNCTION sqlguard.notify_feeds();
DROP TABLE sqlguard.feed;
DROP FUNCTION sqlguard.waiting_steps();
DROP FUNCTION sqlguard.approve_step(bigint, text);
DROP FUNCTION sqlguard.approval_of(bigint);
DROP FUNCTION sqlguard.begin_step(jsonb);
DROP INDEX sqlguard.action_tool;
