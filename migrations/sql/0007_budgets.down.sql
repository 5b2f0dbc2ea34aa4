-- The owner of the schema may drop the function, and the event triggers go with it, whoever put them up.
DROP FUNCTION IF EXISTS sqlguard.refuse_ddl() CASCADE;
DROP TABLE sqlguard.door_session;
DROP FUNCTION sqlguard.add_up_spent();
DROP FUNCTION sqlguard.lease_own_statements(integer, integer);
DROP FUNCTION sqlguard.lease_statements(text, integer, integer);
DROP TABLE sqlguard.statement_rate;
