-- Steps that are not SQL, and the feed that tells other systems of actions.
DROP TRIGGER notify_feeds ON sqlguard.event;
DROP TRIGGER notify_feeds ON sqlguard.action;
DROP FUNCTION sqlguard.notify_feeds();
DROP TABLE sqlguard.feed;
DROP FUNCTION sqlguard.decide_step(bigint, text, text), sqlguard.step_ticket(bigint), sqlguard.waiting_steps(),
    sqlguard.step_rejection(bigint), sqlguard.step_state(bigint), sqlguard.step_approvers(bigint),
    sqlguard.step_approvals(text), sqlguard.refused_like(bigint), sqlguard.begin_step(jsonb);
DROP INDEX sqlguard.action_tool;
