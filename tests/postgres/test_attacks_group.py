"""What an agent makes in the name of its policy's group, which it may become before PostgreSQL 16, and what is left of it."""

from datetime import UTC, datetime

import psycopg
import pytest
from servers import Database
from task_world import shop

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
