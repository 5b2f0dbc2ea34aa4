DROP FUNCTION sqlguard.add_up_spent();
