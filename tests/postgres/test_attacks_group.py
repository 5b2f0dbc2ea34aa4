"""What an agent makes in the name of its policy's group, which it may become before PostgreSQL 16, and what is left of it."""

from datetime import UTC, datetime

import psycopg
import pytest
from servers import Database
from task_world import POLICY, shop

from sqlguard.postgres.leases import has_grant_options
from sqlguard.postgres.sweep import sweep
from sqlguard.postgres.tasks import end_task, open_task


def test_nothing_runs_with_a_group_s_rights_when_its_task_is_over(database: Database) -> None:
    with shop(database) as world:
        world.apply()
        world.op.execute("CREATE SCHEMA workshop; GRANT USAGE, CREATE ON SCHEMA workshop TO PUBLIC")
        task = open_task(world.op, agent="mallory", policy="support")
        (group,) = world.op.execute(
            "SELECT group_role FROM sqlguard.lease WHERE role = %s", [task.role]
        ).fetchall()[0]
        agent = database.connect(database.dsn_for(task.role, task.password))
        if has_grant_options(world.op):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                agent.execute(f"SET ROLE {group}".encode())
            return
        agent.execute(f"SET ROLE {group}".encode())
        agent.execute(
            "CREATE FUNCTION workshop.look() RETURNS bigint LANGUAGE sql SECURITY DEFINER"
            " AS 'SELECT count(*) FROM public.orders';"
            "CREATE VIEW workshop.seen AS SELECT * FROM public.orders;"
            "GRANT SELECT ON workshop.seen TO PUBLIC"
        )
        end_task(world.op, task.task.id, "over")
        done = sweep(world.op, datetime.now(UTC))
        assert done.problems == ()
        with database.connect() as admin:
            admin.execute("CREATE ROLE sg_nobody LOGIN PASSWORD 'x'")
        with database.connect(database.dsn_for("sg_nobody", "x")) as nobody:
            for text in ("SELECT workshop.look()", "SELECT FROM workshop.seen"):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    nobody.execute(text.encode())
        members = "SELECT count(*) FROM pg_auth_members WHERE roleid = %s::regrole AND member = current_user::regrole"
        assert world.op.execute(members, [group]).fetchone() == (0,)


def test_a_row_scope_holds_whatever_role_its_session_takes(database: Database) -> None:
    """What PUBLIC may read, the group of all groups may read as well, and no row scope is for that one."""
    scope = POLICY.replace('[tables."public.orders"]', '[tables."public.orders"]\nrows = "customer_id = :c"')
    with shop(database) as world:
        world.op.execute("GRANT SELECT, UPDATE ON orders TO PUBLIC")
        world.apply(scope)
        task = open_task(world.op, agent="mallory", policy="support", params={"c": "42"})
        agent = database.connect(database.dsn_for(task.role, task.password))
        agent.execute("SET default_transaction_read_only = off")
        (group,) = world.op.execute("SELECT group_role FROM sqlguard.lease").fetchall()[0]
        for role, seen in (("NONE", 20), (group, 20), ("sqlguard_agent", 0)):
            try:
                agent.execute(f"SET ROLE {role}".encode())
            except psycopg.errors.InsufficientPrivilege:
                assert has_grant_options(world.op)
                continue
            assert agent.execute("SELECT count(*) FROM orders").fetchone() == (seen,)
            text = "UPDATE orders SET note = 'x' WHERE customer_id = 43"
            assert agent.execute(text.encode()).rowcount == 0
        # The last scope takes along what came with it.
        end_task(world.op, task.task.id, "over")
        world.apply(POLICY)
        names = (
            "SELECT polname FROM pg_policy WHERE polrelid = 'orders'::regclass AND polname ~ 'rows|unscoped'"
        )
        assert world.op.execute(names.encode()).fetchall() == []
