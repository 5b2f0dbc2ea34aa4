"""
The capture function of a relation that inherits, by row: the texts that `walls_capture` fills in.

A parent's transition table has lost the columns of its children, so there is no set to look at.
"""

from psycopg import sql

BODY = sql.SQL("""
DECLARE  -- version {version}
    change bigint := nextval('sqlguard.change_set_id_seq');
    shape bigint := sqlguard.shape_key({oid}::regclass);
    operation text := lower(TG_OP);
    nested boolean := false;
    old_key text[];
    new_key text[];
    before text;
    after bigint;
BEGIN
    IF TG_OP <> 'INSERT' THEN
        old_key := {old_key};
        before := (OLD.*)::text;
    END IF;
    IF TG_OP <> 'DELETE' THEN
        new_key := {new_key};
        after := hashtextextended((NEW.*)::text, 0);
    END IF;{soft}
    IF operation = 'update' AND new_key IS DISTINCT FROM old_key THEN
        operation := 'rekey';
    END IF;
    INSERT INTO sqlguard.row_change (change_set_id, key, new_key, before, after)
        VALUES (change, coalesce(old_key, new_key), CASE operation WHEN 'rekey' THEN new_key END, before,
                CASE WHEN operation <> 'soft_delete' THEN after END);
    PERFORM sqlguard.note_change(change, TG_RELID, {root}, TG_TABLE_SCHEMA, TG_TABLE_NAME, operation, 1,
                                 {columns}, shape, nested);
    IF operation = 'soft_delete' AND NOT nested AND sqlguard.is_referenced(TG_RELID) THEN
        PERFORM sqlguard.cascade(change);
    END IF;
    RETURN NULL;
END
""")

SOFT = sql.SQL("""
    IF TG_OP = 'INSERT' AND (NEW.deleted_at IS NOT NULL OR NEW.deleted_by_agent IS NOT NULL) THEN
        RAISE EXCEPTION 'deleted_at and deleted_by_agent of `%.%` are set by the database alone',
            TG_TABLE_SCHEMA, TG_TABLE_NAME USING ERRCODE = 'SG002', HINT = 'leave them out of the INSERT';
    ELSIF TG_OP = 'UPDATE' AND OLD.deleted_at IS NULL AND NEW.deleted_at = statement_timestamp() THEN
        IF NEW.deleted_by_agent IS DISTINCT FROM sqlguard.agent() THEN
            RAISE EXCEPTION 'deleted_at and deleted_by_agent of `%.%` are set by the database alone',
                TG_TABLE_SCHEMA, TG_TABLE_NAME USING ERRCODE = 'SG002', HINT = 'use DELETE to delete rows';
        END IF;
        operation := 'soft_delete';
        nested := EXISTS (SELECT FROM sqlguard.cascade_run c WHERE c.txid = pg_current_xact_id());
        {image}
    END IF;""")
