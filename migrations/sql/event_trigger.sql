-- Put up by `sqlguard migrate --event-trigger`, as a superuser; no revision, because no other role may.
--
-- INVARIANT: runs with the rights of whoever runs DDL, superusers too. So it is owned by a superuser and reads
-- nothing but pg_catalog: whatever else is in the schema `sqlguard` is the operator's, who must not become one.
CREATE OR REPLACE FUNCTION sqlguard.refuse_ddl() RETURNS event_trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
        DECLARE
            made record;
            refused boolean;
        BEGIN
            IF session_user LIKE 'sg\_tk\_%' THEN
                IF TG_EVENT = 'sql_drop' THEN
                    refused := EXISTS (SELECT FROM pg_event_trigger_dropped_objects() d
                                       WHERE d.original AND NOT d.is_temporary);
                ELSE
                    -- Temporary tables are the policy's business (the right TEMPORARY).
                    -- What its own functions grant (on the table of a COPY) is the guard's.
                    refused := EXISTS (SELECT FROM pg_event_trigger_ddl_commands() d
                                       WHERE (d.schema_name IS DISTINCT FROM 'pg_temp'
                                               OR d.object_type NOT IN ('table', 'index', 'sequence', 'view'))
                                           AND NOT (d.command_tag = 'GRANT' AND EXISTS (
                                               SELECT FROM pg_namespace n JOIN pg_roles r ON r.oid = n.nspowner
                                               WHERE n.nspname = 'sqlguard' AND r.rolname = current_user)));
                END IF;
                IF refused THEN
                    RAISE EXCEPTION '% is refused: tasks do not change the schema', TG_TAG
                        USING ERRCODE = 'SG002', HINT = 'describe the change to the operator';
                END IF;
                RETURN;
            END IF;
            IF TG_EVENT = 'sql_drop' THEN
                RETURN;
            END IF;
            FOR made IN
                SELECT DISTINCT c.oid::regclass AS new, i.inhparent::regclass AS parent
                FROM pg_event_trigger_ddl_commands() d
                JOIN pg_inherits i ON i.inhrelid = d.objid OR i.inhparent = d.objid
                JOIN pg_class c ON c.oid = i.inhrelid
                WHERE d.classid = 'pg_class'::regclass AND d.command_tag IN ('CREATE TABLE', 'ALTER TABLE')
                    AND EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = i.inhparent AND t.tgname = 'sqlguard_insert')
                    AND NOT EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = c.oid AND t.tgname = 'sqlguard_insert')
            LOOP
                RAISE WARNING 'table "%" is under the guarded table "%" and has no walls of its own yet', made.new, made.parent
                    USING HINT = format('run `sqlguard guard %s`', made.parent);
            END LOOP;
            -- Soft tables have the trigger `sqlguard_bookkeeping`; the other name is that of `catalog.live_parent_trigger`.
            FOR made IN
                SELECT DISTINCT k.conname AS key, k.conrelid::regclass AS new, k.confrelid::regclass AS parent
                FROM pg_event_trigger_ddl_commands() d JOIN pg_constraint k ON k.conrelid = d.objid
                WHERE d.classid = 'pg_class'::regclass AND d.command_tag IN ('CREATE TABLE', 'ALTER TABLE')
                    AND k.contype = 'f' AND k.conparentid = 0
                    AND EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = k.confrelid AND t.tgname = 'sqlguard_bookkeeping')
                    AND NOT EXISTS (
                        SELECT FROM pg_trigger t WHERE t.tgrelid = k.conrelid
                            AND t.tgname = format('sqlguard_%s_insert',
                                                  left(encode(sha256(convert_to(k.conname, 'UTF8')), 'hex'), 8)))
            LOOP
                RAISE WARNING 'foreign key "%" of table "%" takes deleted rows of "%" for its parents until that is guarded again',
                    made.key, made.new, made.parent
                    USING HINT = format('run `sqlguard guard %s`', made.parent);
            END LOOP;
        END
    $$;
DROP EVENT TRIGGER IF EXISTS sqlguard_refuse_ddl;
CREATE EVENT TRIGGER sqlguard_refuse_ddl ON ddl_command_end EXECUTE FUNCTION sqlguard.refuse_ddl();
DROP EVENT TRIGGER IF EXISTS sqlguard_refuse_drop;
CREATE EVENT TRIGGER sqlguard_refuse_drop ON sql_drop EXECUTE FUNCTION sqlguard.refuse_ddl();
