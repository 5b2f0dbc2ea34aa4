"""Tasks and their login roles on a real server: what one may, and that nothing is left of it."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from servers import Database
from task_world import World, refused, shop

from sqlguard.errors import NotConfigured, PolicyError, TaskEnded
from sqlguard.postgres import leases, tasks
from sqlguard.postgres.control import read_login
from sqlguard.postgres.tasks import OpenedTask
from sqlguard.wire.scram import Verifier


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with shop(database) as made:
        made.apply()
        yield made


def test_a_task_has_a_role_whose_secret_is_nowhere(world: World) -> None:
    opened = world.task(purpose="ticket 7", agent_version="m1", ttl=timedelta(minutes=2))
    assert opened.password not in repr(opened)
    row = world.database.execute("SELECT rolpassword FROM pg_authid WHERE rolname = %s", [opened.role])
    login = read_login(world.op, opened.role)
    assert login is not None
    assert row[0][0] == login.verifier
    assert login.verifier == str(Verifier.make(opened.password, Verifier.parse(login.verifier).salt))
    assert login.task == opened.task
    assert (login.task.purpose, login.task.agent_version) == ("ticket 7", "m1")
    left = opened.expires_at - datetime.now(UTC)
    assert timedelta(seconds=115) < left <= timedelta(seconds=120)


def test_the_role_is_as_small_as_it_can_be(world: World) -> None:
    opened = world.task()
    row = world.database.execute(
        "SELECT rolsuper, rolcreatedb, rolcreaterole, rolreplication, rolbypassrls, rolconnlimit, rolcanlogin,"
        " rolvaliduntil - interval '2 seconds' FROM pg_roles WHERE rolname = %s",
        [opened.role],
    )
    assert row == [(False, False, False, False, False, 3, True, opened.expires_at)]
    groups = world.database.execute(
        "SELECT m.roleid::regrole::text FROM pg_auth_members m WHERE m.member = %s::regrole", [opened.role]
    )
    assert groups == [("sg_po_support_1",)]
    agent = world.login(opened)
    assert agent.execute("SHOW statement_timeout").fetchone() == ("5s",)
    assert agent.execute("SHOW lock_timeout").fetchone() == ("5s",)
    assert agent.execute("SHOW idle_in_transaction_session_timeout").fetchone() == ("5min",)
    assert agent.execute("SHOW search_path").fetchone() == ("public",)
    for statement in ("CREATE TABLE t ()", "TRUNCATE orders", "SELECT * FROM secrets", "CREATE ROLE x"):
        assert refused(agent, statement) == "42501"
    assert refused(agent, "SELECT * FROM sqlguard.task") == "42501"


def test_a_member_can_not_become_the_group_where_the_server_knows_how_to_forbid_it(world: World) -> None:
    agent = world.login(world.task())
    if world.op.info.server_version >= 160000:
        assert refused(agent, "SET ROLE sg_po_support_1") == "42501"
    else:
        agent.execute("SET ROLE sg_po_support_1")
        assert agent.execute("SELECT (sqlguard.current_task()).agent").fetchone() == ("tester",)


def test_the_end_reaches_an_open_session_and_the_next_log_in(world: World) -> None:
    opened = world.task()
    agent = world.login(opened)
    agent.execute("SELECT * FROM orders")
    began = time.monotonic()
    report = tasks.end_task(world.op, opened.task.id, "done")
    with pytest.raises(psycopg.OperationalError):
        agent.execute("SELECT * FROM orders")
    with pytest.raises(psycopg.OperationalError):
        world.login(opened)
    assert time.monotonic() - began < 2
    assert report == tasks.EndReport(opened.task.id, roles=(opened.role,))
    assert opened.role not in world.roles()
    assert world.database.execute("SELECT state, verifier, problem FROM sqlguard.lease") == [
        ("ended", None, None)
    ]
    ended = tasks.list_tasks(world.op, all=True)[0]
    assert (ended.state, ended.end_reason) == ("ended", "done")
    assert tasks.list_tasks(world.op) == []


def test_revoking_alone_stops_an_open_session_at_its_next_statement(world: World) -> None:
    opened = world.task()
    agent = world.login(opened)
    with world.op.transaction():
        assert leases.close_role(world.op, opened.role) == []
    assert refused(agent, "SELECT * FROM orders") == "42501"


def test_ending_twice_is_ending_once(world: World) -> None:
    opened = world.task()
    tasks.end_task(world.op, opened.task.id, "first")
    again = tasks.end_task(world.op, opened.task.id, "second")
    assert again == tasks.EndReport(opened.task.id)
    assert tasks.find_task(world.op, opened.task.id).end_reason == "first"


def test_a_transaction_in_the_middle_is_rolled_back(world: World) -> None:
    opened = world.task()
    agent = world.login(opened)
    agent.execute("BEGIN")
    agent.execute("UPDATE orders SET note = 'half' WHERE id = 1")
    tasks.end_task(world.op, opened.task.id, "done")
    assert world.value("SELECT count(*) FROM orders WHERE note = 'half'") == 0


def test_what_an_agent_made_is_kept_not_dropped(world: World) -> None:
    world.database.execute("CREATE SCHEMA scratch")
    world.database.execute("GRANT ALL ON SCHEMA scratch TO PUBLIC")
    opened = world.task()
    agent = world.login(opened)
    agent.execute("CREATE TABLE scratch.notes AS SELECT 1 AS n")
    agent.execute("SELECT lo_create(424242)")
    report = tasks.end_task(world.op, opened.task.id, "done")
    assert report.ended
    assert report.problems == ()
    assert sorted(report.kept) == ["large object 424242", "table scratch.notes"]
    assert opened.role not in world.roles()
    assert world.value("SELECT n FROM scratch.notes") == 1
    assert world.value("SELECT tableowner FROM pg_tables WHERE tablename = 'notes'") == "sqlguard_kept"


def test_what_it_made_in_another_database_is_said_and_keeps_only_a_dead_role(
    world: World, server: object
) -> None:
    opened = world.task()
    other = psycopg.connect(
        world.database.server.dsn("postgres", opened.role, opened.password), autocommit=True
    )
    other.execute("SELECT lo_create(4711)")
    report = tasks.end_task(world.op, opened.task.id, "done")
    try:
        assert report.ended
        assert len(report.problems) == 1
        assert "database `postgres`" in report.problems[0]
        assert world.value("SELECT problem FROM sqlguard.lease") == report.problems[0]
        assert refused(other, "SELECT 1") == "57P01"
        with pytest.raises(psycopg.OperationalError):
            world.login(opened)
        assert world.value("SELECT rolcanlogin FROM pg_roles WHERE rolname = %s", opened.role) is False
    finally:
        with psycopg.connect(world.database.server.dsn("postgres"), autocommit=True) as conn:
            conn.execute(f'REASSIGN OWNED BY "{opened.role}" TO CURRENT_USER')
            conn.execute("SELECT lo_unlink(4711)")
    assert tasks.end_task(world.op, opened.task.id, "again").problems == ()
    assert opened.role not in world.roles()


def test_a_prepared_transaction_ends_with_its_task(world: World) -> None:
    opened = world.task()
    agent = world.login(opened)
    agent.execute("BEGIN")
    agent.execute("SELECT * FROM orders")
    agent.execute("PREPARE TRANSACTION 'later'")
    report = tasks.end_task(world.op, opened.task.id, "done")
    assert (report.ended, report.problems) == (True, ())
    assert world.database.execute("SELECT count(*) FROM pg_prepared_xacts") == [(0,)]
    assert opened.role not in world.roles()
    assert world.op.execute("SELECT current_user = session_user").fetchone() == (True,)


def test_two_hundred_tasks_leave_nothing(world: World) -> None:
    def acls() -> list[tuple[object, ...]]:
        return world.database.execute(
            "SELECT sum(length(coalesce(relacl::text, ''))) FROM pg_class UNION ALL"
            " SELECT count(*) FROM pg_auth_members UNION ALL SELECT count(*) FROM pg_shdepend UNION ALL"
            " SELECT count(*) FROM pg_db_role_setting"
        )

    before = acls(), world.roles()
    for _ in range(200):
        tasks.end_task(world.op, world.task().task.id, "done")
    assert (acls(), world.roles()) == before
    assert world.value("SELECT count(*) FROM sqlguard.task WHERE state = 'ended'") == 200


def test_a_task_is_renewed_up_to_its_policy_s_longest_time(world: World) -> None:
    opened = world.task(ttl=timedelta(seconds=60))
    renewed = tasks.renew_task(world.op, opened.task.id, timedelta(minutes=10))
    assert renewed.expires_at - opened.expires_at > timedelta(minutes=8)
    assert world.value("SELECT rolvaliduntil FROM pg_roles WHERE rolname = %s", opened.role) == (
        renewed.expires_at + timedelta(seconds=2)
    )
    longest = tasks.renew_task(world.op, opened.task.id, timedelta(days=900_000_000))
    assert opened.task.opened_at is not None
    assert longest.expires_at == opened.task.opened_at + timedelta(hours=1)
    tasks.end_task(world.op, opened.task.id, "done")
    with pytest.raises(TaskEnded):
        tasks.renew_task(world.op, opened.task.id, timedelta(minutes=1))
    with pytest.raises(NotConfigured, match="no task"):
        tasks.renew_task(world.op, "nowhere", timedelta(minutes=1))


def test_a_further_lease_is_the_same_task_and_ends_alone_or_with_it(world: World) -> None:
    opened = world.task()
    role, password = tasks.add_lease(world.op, opened.task.id, "preview")
    agent = world.database.connect(world.database.dsn_for(role, password))
    assert agent.execute("SELECT (sqlguard.current_task()).id").fetchone() == (opened.task.id,)
    assert world.value("SELECT kind FROM sqlguard.lease WHERE role = %s", role) == "preview"
    assert tasks.end_lease(world.op, role).ended
    assert refused(agent, "SELECT 1") == "57P01"
    assert world.state(opened) == "open"
    world.login(opened).execute("SELECT 1")
    second, _ = tasks.add_lease(world.op, opened.task.id, "exec")
    assert sorted(tasks.end_task(world.op, opened.task.id, "done").roles) == sorted([opened.role, second])
    assert not world.roles() & {opened.role, role, second}
    with pytest.raises(TaskEnded):
        tasks.add_lease(world.op, opened.task.id, "exec")


def test_errors_say_what_to_do(world: World) -> None:
    with pytest.raises(PolicyError, match="never applied"):
        world.task(policy="nobody")
    with pytest.raises(NotConfigured, match="one second"):
        world.task(ttl=timedelta())
    with pytest.raises(NotConfigured, match="has an agent"):
        world.task(agent=" ")
    with world.op.transaction(), pytest.raises(NotConfigured, match="outside a transaction"):
        world.task()
    assert world.value("SELECT count(*) FROM sqlguard.task") == 0


def test_a_connection_that_is_not_in_autocommit_commits_all_the_same(world: World) -> None:
    conn = world.database.connect(world.database.owner_dsn, autocommit=False)
    opened = tasks.open_task(conn, agent="a", policy="support")
    assert world.state(opened) == "open"
    assert not conn.autocommit


def test_without_createrole_nothing_is_half_open(world: World) -> None:
    world.database.execute("CREATE ROLE sg_weak LOGIN PASSWORD 'x'")
    world.database.execute("GRANT app_owner TO sg_weak")
    conn = world.database.connect(world.database.dsn_for("sg_weak", "x"))
    with pytest.raises(NotConfigured, match="may not do that"):
        tasks.open_task(conn, agent="a", policy="support")
    assert world.database.execute("SELECT state, end_reason FROM sqlguard.task") == [
        ("ended", "could not be opened")
    ]
    assert world.database.execute("SELECT state FROM sqlguard.lease") == [("ended",)]


def test_a_superuser_ends_what_another_operator_opened(world: World) -> None:
    opened = world.task()
    agent = world.login(opened)
    boss = world.database.connect()
    assert tasks.end_task(boss, opened.task.id, "stop").problems == ()
    assert refused(agent, "SELECT 1") == "57P01"
    assert opened.role not in world.roles()


def test_a_policy_of_an_ended_task_is_not_needed_to_list_it(world: World) -> None:
    opened: OpenedTask = world.task(params={"customer_id": "42"})
    tasks.end_task(world.op, opened.task.id, "done")
    found = tasks.find_task(world.op, opened.task.id)
    assert found.params == {"customer_id": "42"}
