DO $$
BEGIN
    IF EXISTS (SELECT FROM sqlguard.hold WHERE released_at IS NULL) THEN
        RAISE EXCEPTION 'rows are on hold' USING HINT = 'run `sqlguard release` for them first';
    END IF;
    IF EXISTS (SELECT FROM sqlguard.event WHERE kind = 'erased') THEN
        RAISE EXCEPTION 'the journal holds erasures, which only this version can verify'
            USING HINT = 'retire the tasks they belong to first';
    END IF;
END $$;
DROP FUNCTION sqlguard.note_erasure(bigint, text, text, bigint, bytea, bytea),
    sqlguard.erase_event(bigint, bigint, jsonb), sqlguard.erase_action(bigint, bigint, jsonb),
    sqlguard.erase_images(bigint, bigint[], bigint[], boolean);
CREATE OR REPLACE FUNCTION sqlguard.refuse_rewrite() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
        BEGIN
            IF current_user = 'sqlguard_retention' AND TG_OP = 'DELETE' THEN
                RETURN NULL;
            END IF;
            RAISE EXCEPTION 'the journal only grows: % on `%.%` is refused', TG_OP, TG_TABLE_SCHEMA, TG_TABLE_NAME
                USING ERRCODE = '42501', HINT = 'old entries go with `sqlguard.retire`, as sqlguard_retention';
        END
    $$;
REVOKE UPDATE (statement, executed, params, reason, step, compensation) ON sqlguard.action FROM CURRENT_USER;
REVOKE UPDATE (detail) ON sqlguard.event FROM CURRENT_USER;
REVOKE UPDATE (key, new_key, before, after, removal_id, chunk) ON sqlguard.row_change FROM CURRENT_USER;
DROP TABLE sqlguard.erasure_run, sqlguard.removed, sqlguard.removal, sqlguard.hold;
DROP INDEX sqlguard.event_erased, sqlguard.row_change_removed;
