"""Many tasks at once, and applying a policy that is killed at any step: nothing is left, nothing half given."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from servers import Database
from task_world import POLICY, World, policy, shop

from sqlguard.errors import PolicyError
from sqlguard.postgres import tasks
from sqlguard.postgres.policy_apply import apply_policy

OTHER = POLICY.replace('delete = "soft"', 'delete = "soft"\nrows = "customer_id = :customer_id"')


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with shop(database) as made:
        made.apply()
        yield made


@pytest.mark.slow
def test_two_hundred_tasks_open_at_once(world: World) -> None:
    opened = [world.task() for _ in range(200)]
    assert len(world.roles()) == 201
    for number, task in enumerate(opened):
        with psycopg.connect(world.database.dsn_for(task.role, task.password), autocommit=True) as conn:
            assert conn.execute("UPDATE orders SET note = %s WHERE id = 1", [str(number)]).rowcount == 1
    # One group carries the rights: the lists of rights don't grow with the tasks.
    assert world.value("SELECT max(length(relacl::text)) FROM pg_class WHERE relname = 'orders'") < 200
    sessions = [world.login(task) for task in opened[:50]]
    for task in opened:
        assert tasks.end_task(world.op, task.task.id, "done").ended
    assert world.roles() == {"sg_po_support_1"}
    for conn in sessions:
        with pytest.raises(psycopg.OperationalError):
            conn.execute("SELECT 1")
    assert world.value("SELECT count(DISTINCT task_id) FROM sqlguard.change_set") == 200


class Dying(psycopg.Connection[Any]):
    """Breaks, as after kill -9, before its statement number `left`."""

    left = 10**9

    def execute(self, *args: Any, **options: Any) -> Any:
        if self.left <= 0:
            self.close()
            raise psycopg.OperationalError("killed")
        self.left -= 1
        return super().execute(*args, **options)


def rights(world: World) -> list[tuple[Any, ...]]:
    return world.database.execute(
        "SELECT 'acl', c.relname::text, c.relacl::text FROM pg_class c WHERE c.relnamespace = 'public'::regnamespace"
        " UNION ALL SELECT 'policy', p.polname::text, p.polroles::regrole[]::text FROM pg_policy p"
        " UNION ALL SELECT 'role', r.rolname::text, '' FROM pg_roles r WHERE r.rolname ~ '^sg_'"
        " UNION ALL SELECT 'version', p.name, p.version::text FROM sqlguard.policy p ORDER BY 1, 2, 3"
    )


def test_a_crash_at_any_step_of_applying_a_policy(world: World) -> None:
    before = rights(world)
    step = 0
    while True:
        conn = Dying.connect(world.database.owner_dsn, autocommit=True)
        conn.left = step
        done = False
        # A row scope that can't be tried out is a fault of the policy, whatever the reason.
        with suppress(psycopg.OperationalError, PolicyError):
            apply_policy(conn, policy(OTHER))
            done = True
        conn.close()
        if done:
            break
        assert rights(world) == before, step
        step += 1
    assert step >= 15
    assert ("version", "support", "2") in rights(world)
    assert world.apply(OTHER).statements == []
