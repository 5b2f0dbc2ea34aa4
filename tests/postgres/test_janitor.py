"""The janitor: what is due ends in time, what a crash left is finished, what was tampered with ends."""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from servers import Database, create, drop
from task_world import World, refused, shop

from sqlguard.janitor import Janitor, SweepReport, database_time, sweep
from sqlguard.postgres import tasks
from sqlguard.postgres.sweep import LOCK

LATER = timedelta(minutes=2)


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with shop(database) as made:
        made.apply()
        yield made


def now(world: World) -> datetime:
    return database_time(world.op)


def wait_until(world: World, query: str, *params: object, seconds: float = 10) -> float:
    """Return how long it took until *query* gave true."""
    began = time.monotonic()
    while not world.value(query, *params):
        assert time.monotonic() - began < seconds, query
        time.sleep(0.02)
    return time.monotonic() - began


def test_nothing_is_due(world: World) -> None:
    opened = world.task()
    assert sweep(world.op, now(world)) == SweepReport()
    assert world.state(opened) == "open"


def test_what_has_expired_ends(world: World) -> None:
    short, long = world.task(ttl=timedelta(seconds=60)), world.task(ttl=timedelta(seconds=600))
    agent = world.login(short)
    done = sweep(world.op, now(world) + LATER)
    assert done == SweepReport(ended=(short.task.id,))
    assert refused(agent, "SELECT 1") == "57P01"
    assert tasks.find_task(world.op, short.task.id).end_reason == "expired"
    assert world.state(long) == "open"
    assert sweep(world.op, now(world) + LATER).idle


def test_the_thread_ends_a_task_within_two_seconds_of_its_expiry(world: World) -> None:
    with Janitor(world.database.owner_dsn):
        opened = world.task(ttl=timedelta(seconds=1))
        agent = world.login(opened)
        wait_until(world, "SELECT clock_timestamp() >= %s", opened.expires_at)
        deadline = time.monotonic() + 2
        # Its rights go a moment before the session itself: a statement in between is refused.
        while not agent.closed and time.monotonic() < deadline:
            with suppress(psycopg.Error):
                agent.execute("SELECT count(*) FROM orders")
            time.sleep(0.05)
        assert agent.closed
        # Sessions are ended first, so that nothing waits for their locks; who comes in meanwhile is ended, too.
        with pytest.raises(psycopg.OperationalError):
            while time.monotonic() < deadline:
                world.login(opened)
                time.sleep(0.05)
        assert time.monotonic() <= deadline


class Slow(psycopg.Connection[Any]):
    """A connection on which one statement takes longer than a task has left."""

    what = ""

    def execute(self, query: Any, *args: Any, **options: Any) -> Any:
        if self.what and self.what in str(query):
            super().execute("SELECT pg_sleep(1.2)")
        return super().execute(query, *args, **options)


@pytest.mark.parametrize("check", ["pg_blocking_pids", "pg_db_role_setting", "add_up_spent", "begin_period"])
def test_what_falls_due_while_a_pass_is_slow_ends_in_the_same_pass(world: World, check: str) -> None:
    opened = world.task(ttl=timedelta(seconds=1))
    with Slow.connect(world.database.owner_dsn, autocommit=True) as conn:
        conn.what = check
        done = sweep(conn, now(world))
    assert done == SweepReport(ended=(opened.task.id,))


def test_what_is_due_ends_before_anything_else_is_looked_at(world: World) -> None:
    opened = world.task(ttl=timedelta(seconds=60))
    with dying(world, 10**9) as conn, suppress(psycopg.OperationalError):
        conn.dies_of = "pg_blocking_pids"
        sweep(conn, now(world) + LATER)
    assert world.state(opened) == "ended"


def test_the_janitor_s_housework_waits_for_nobody(world: World) -> None:
    world.database.execute("UPDATE sqlguard.period SET began_at = '2020-01-01' WHERE number = 0")
    with world.database.connect() as other, other.transaction():
        other.execute("LOCK TABLE sqlguard.period, sqlguard.spent_below")
        began = time.monotonic()
        problems = sweep(world.op, now(world)).problems
        assert len(problems) == 2
        assert all("lock timeout" in problem for problem in problems)
        assert time.monotonic() - began < 5
    assert sweep(world.op, now(world)).idle


def test_the_thread_wakes_when_something_expires(world: World) -> None:
    opened = world.task(ttl=timedelta(seconds=2))
    with Janitor(world.database.owner_dsn, interval=60):
        wait_until(
            world, "SELECT state = 'ended' FROM sqlguard.task WHERE id = %s", opened.task.id, seconds=30
        )


def test_without_any_janitor_the_server_lets_nobody_in_two_seconds_after(world: World) -> None:
    opened = world.task(ttl=timedelta(seconds=1))
    wait_until(world, "SELECT clock_timestamp() > %s + interval '2.05 seconds'", opened.expires_at)
    with pytest.raises(psycopg.OperationalError):
        world.login(opened)


class Dying(psycopg.Connection[Any]):
    """A connection whose process dies before its n-th statement: it is closed, and nothing more is said."""

    left = 10**9
    dies_of: str | None = None

    def execute(self, *args: Any, **options: Any) -> Any:
        if self.left <= 0 or (self.dies_of and self.dies_of in str(args[0])):
            self.close()
            raise psycopg.OperationalError("killed")
        self.left -= 1
        return super().execute(*args, **options)


def dying(world: World, statements: int) -> Dying:
    conn = Dying.connect(world.database.owner_dsn, autocommit=True)
    conn.left = statements
    return conn


def steps_of(world: World, work: Any) -> int:
    with Dying.connect(world.database.owner_dsn, autocommit=True) as conn:
        work(conn)
        return 10**9 - conn.left


def converged(world: World) -> None:
    """Whatever was going on, after one pass there are no roles but the groups and nothing is half done."""
    sweep(world.op, now(world) + LATER)
    assert world.roles() == {"sg_po_support_1"}
    assert world.database.execute("SELECT DISTINCT state, verifier, problem FROM sqlguard.lease") in (
        [],
        [("ended", None, None)],
    )
    assert world.value("SELECT count(*) FROM sqlguard.task WHERE state <> 'ended'") == 0
    assert sweep(world.op, now(world) + LATER) == SweepReport()
    locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
    wait_until(world, f"SELECT ({locks}) = 0")


def test_a_crash_at_any_step_of_opening(world: World) -> None:
    ttl = timedelta(seconds=60)

    def work(conn: psycopg.Connection[Any]) -> None:
        tasks.open_task(conn, agent="a", policy="support", ttl=ttl)

    steps = steps_of(world, work)
    converged(world)
    assert steps >= 6
    for step in range(steps):
        with pytest.raises(psycopg.OperationalError, match="killed"):
            work(dying(world, step))
        converged(world)


def test_a_crash_at_any_step_of_a_further_lease(world: World) -> None:
    steps = None
    step = 0
    while steps is None or step < steps:
        opened = world.task(ttl=timedelta(seconds=60))
        if steps is None:
            steps = steps_of(world, lambda conn, task=opened.task.id: tasks.add_lease(conn, task, "exec"))
        else:
            with pytest.raises(psycopg.OperationalError, match="killed"):
                tasks.add_lease(dying(world, step), opened.task.id, "exec")
            step += 1
        converged(world)


def test_a_crash_at_any_step_of_ending(world: World) -> None:
    opened = world.task()
    session = world.login(opened)
    steps = steps_of(world, lambda conn: tasks.end_task(conn, opened.task.id, "done"))
    assert session.closed or refused(session, "SELECT 1")
    assert steps >= 8
    for step in range(steps):
        opened = world.task()
        session = world.login(opened)
        with suppress(psycopg.OperationalError):
            tasks.end_task(dying(world, step), opened.task.id, "done")
        sweep(world.op, now(world))
        # Before the first step was taken the task simply goes on.
        if world.state(opened) == "open":
            assert step <= 2
            tasks.end_task(world.op, opened.task.id, "done")
        assert refused(session, "SELECT 1") == "57P01"
        converged(world)


def test_a_crash_at_any_step_of_a_sweep(world: World) -> None:
    def prepare() -> None:
        world.login(world.task(ttl=timedelta(seconds=60))).close()
        tasks.add_lease(world.op, world.task(ttl=timedelta(seconds=60)).task.id, "exec")

    prepare()
    moment = now(world) + LATER
    steps = steps_of(world, lambda conn: sweep(conn, moment))
    for step in range(0, steps, 3):
        prepare()
        # A pass that is slower looks more often for what is due, so it may have more steps than this one has left.
        with suppress(psycopg.OperationalError), dying(world, step) as conn:
            sweep(conn, now(world) + LATER)
        wait_until(world, "SELECT pg_try_advisory_xact_lock(%s, %s)", *LOCK)
        converged(world)


def test_an_opening_that_goes_on_is_left_alone(world: World) -> None:
    opened = world.task()
    world.database.execute("UPDATE sqlguard.task SET state = 'opening'")
    world.database.execute("UPDATE sqlguard.lease SET state = 'creating'")
    assert sweep(world.op, now(world)).idle
    assert sweep(world.op, now(world) + timedelta(seconds=31)).ended == (opened.task.id,)
    assert tasks.find_task(world.op, opened.task.id).end_reason == "was never opened"


@pytest.mark.parametrize(
    "statement",
    [
        "ALTER ROLE CURRENT_USER SET search_path = pg_temp",
        "ALTER ROLE CURRENT_USER SET statement_timeout = 0",
        "ALTER ROLE CURRENT_USER RESET ALL",
        (
            "DO $$ BEGIN EXECUTE format('ALTER ROLE CURRENT_USER IN DATABASE %I SET work_mem = 64',"
            " current_database()); END $$"
        ),
    ],
)
def test_a_task_that_changes_its_role_s_settings_ends(world: World, statement: str) -> None:
    opened, other = world.task(), world.task()
    agent = world.login(opened)
    agent.execute(statement.encode())
    done = sweep(world.op, now(world))
    assert done.changed == (opened.task.id,)
    assert refused(agent, "SELECT 1") == "57P01"
    assert "settings were changed" in (tasks.find_task(world.op, opened.task.id).end_reason or "")
    assert world.state(other) == "open"


def test_a_task_that_changes_its_password_ends_where_the_janitor_can_see_it(world: World) -> None:
    opened = world.task()
    world.login(opened).execute("ALTER ROLE CURRENT_USER PASSWORD 'mine for ever'")
    assert sweep(world.op, now(world)).idle  # no superuser: it can't know
    assert sweep(world.database.connect(), now(world)).changed == (opened.task.id,)


def test_orphans_that_are_ours_go_and_others_stay(world: World) -> None:
    opened = world.task()
    world.login(opened)
    world.database.execute("CREATE ROLE sg_tk_of_somebody_else LOGIN")
    world.database.execute("DELETE FROM sqlguard.lease")
    done = sweep(world.op, now(world))
    assert done.orphans == (opened.role,)
    assert world.roles() == {"sg_po_support_1", "sg_tk_of_somebody_else"}


def test_two_janitors_take_turns(world: World) -> None:
    opened = world.task(ttl=timedelta(seconds=1))
    with world.database.connect() as other:
        other.execute("SELECT pg_advisory_lock(%s, %s)", LOCK)
        assert sweep(world.op, now(world) + LATER) == SweepReport(busy=True)
        assert world.state(opened) == "open"
    with Janitor(world.database.owner_dsn, interval=0.1), Janitor(world.database.owner_dsn, interval=0.1):
        wait_until(world, "SELECT state = 'ended' FROM sqlguard.task")
        assert sum(t.name == "sqlguard-janitor" for t in threading.enumerate()) == 2
    assert not [t for t in threading.enumerate() if t.name == "sqlguard-janitor"]


def test_two_may_end_the_same_task_at_once(world: World) -> None:
    for _ in range(5):
        opened = world.task()
        world.login(opened)
        reports: list[tasks.EndReport] = []

        def end(task: str = opened.task.id, found: list[tasks.EndReport] = reports) -> None:
            with psycopg.connect(world.database.owner_dsn, autocommit=True) as conn:
                found.append(tasks.end_task(conn, task, "done"))

        threads = [threading.Thread(target=end) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [r.problems for r in reports] == [(), (), ()]
        assert all(r.ended for r in reports)
    converged(world)


def test_the_thread_outlives_a_database_that_is_away(world: World) -> None:
    with Janitor(world.database.owner_dsn, interval=0.1):
        wait_until(
            world,
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE usename = 'app_owner' AND query LIKE '%%min(t.expires_at)%%')",
        )
        world.database.execute(
            "SELECT pg_terminate_backend(pid, 1000) FROM pg_stat_activity"
            " WHERE usename = 'app_owner' AND query LIKE '%%min(t.expires_at)%%'"
        )
        opened = world.task(ttl=timedelta(seconds=1))
        wait_until(world, "SELECT state = 'ended' FROM sqlguard.task WHERE id = %s", opened.task.id)


def test_a_wrong_dsn_is_waited_for_not_died_of(world: World) -> None:
    parts = {**conninfo_to_dict(world.database.owner_dsn), "port": "1"}
    janitor = Janitor(make_conninfo(**parts), interval=0.05)
    janitor.start()
    time.sleep(0.2)
    assert janitor._thread is not None
    assert janitor._thread.is_alive()
    janitor.stop()
    janitor.stop()


def test_what_can_not_be_removed_is_tried_again_later_and_holds_nothing_up(world: World) -> None:
    stuck, fine = world.task(ttl=timedelta(seconds=60)), world.task(ttl=timedelta(seconds=60))
    elsewhere = Database(world.database.server, f"{world.database.name}_elsewhere")
    create(elsewhere.server, elsewhere.name)
    try:
        # The operator sees a database at a time; what a role is given in another one keeps the role there.
        elsewhere.execute("CREATE TABLE kept ()")
        elsewhere.execute(f"GRANT SELECT ON kept TO {stuck.role}")
        moment = now(world)
        done = sweep(world.op, moment + LATER)
        assert set(done.ended) == {stuck.task.id, fine.task.id}
        assert stuck.role in done.problems[0]
        assert sweep(world.op, moment).idle  # not every second
    finally:
        elsewhere.close()
        drop(elsewhere.server, elsewhere.name)
    assert sweep(world.op, moment + LATER).leases == (stuck.role,)
    assert world.roles() == {"sg_po_support_1"}
