"""
`python -m benchmarks.endurance [--tasks 10000] [--open 1000] [--minutes 20] [--pg VERSION]`: what many tasks leave.

Tasks are opened and ended one after another, with a write each; then as many as asked for are open at once, all of them
log in, read and write, and end. What must hold is checked, not measured: no role, no membership and no longer ACL is
left, VACUUM gives back what rows of ended roles took, and the last task is opened about as fast as the first.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import psycopg
from rich.console import Console

from benchmarks.world import World, serve, twins
from sqlguard.dsn import url
from sqlguard.postgres.tasks import OpenedTask, end_task, open_task

_SHARED = ("pg_authid", "pg_auth_members", "pg_db_role_setting", "pg_shdepend")
_LEFT = """
SELECT (SELECT count(*) FROM pg_roles WHERE rolname ~ '^sg_tk_'), (SELECT count(*) FROM pg_auth_members),
       (SELECT sum(length(coalesce(relacl::text, ''))) FROM pg_class), (SELECT count(*) FROM pg_db_role_setting),
       (SELECT count(*) FROM pg_shdepend)
"""
_SIZE = "SELECT sum(pg_relation_size(c.oid)) FROM pg_class c WHERE c.relname = ANY (%s)"
_WRITE = "UPDATE t SET note = 'seen' WHERE id = %s"


@dataclass(frozen=True, slots=True)
class Limits:
    tasks: int
    open: int
    seconds: float


def login(world: World, task: OpenedTask) -> psycopg.Connection[tuple[object, ...]]:
    dsn = url(
        host="127.0.0.1",
        port=world.server.port,
        user=task.role,
        password=task.password,
        dbname=world.name,
    )
    return psycopg.connect(dsn, autocommit=True)


def write(world: World, task: OpenedTask, row: int) -> None:
    with login(world, task) as conn:
        assert conn.execute(_WRITE, [row]).rowcount == 1


def one_after_another(world: World, limits: Limits) -> Iterator[str]:
    before = world.owner.execute(_LEFT).fetchone()
    times: list[float] = []
    until = time.monotonic() + limits.seconds
    for number in range(limits.tasks):
        if time.monotonic() > until:
            break
        started = time.perf_counter()
        task = open_task(world.owner, agent="bench", policy="bench", ttl=timedelta(minutes=5))
        times.append(time.perf_counter() - started)
        if number % 20 == 0:
            write(world, task, 1 + number % 1000)
        assert end_task(world.owner, task.task.id, "done").ended
        if number % 500 == 499:
            world.owner.execute(f"VACUUM {', '.join(_SHARED)}")
    assert world.owner.execute(_LEFT).fetchone() == before, "something is left"
    world.owner.execute(f"VACUUM {', '.join(_SHARED)}")
    row = world.owner.execute(_SIZE, [list(_SHARED)]).fetchone()
    tenth = max(1, len(times) // 10)
    first, last = statistics.median(times[:tenth]), statistics.median(times[-tenth:])
    yield f"{len(times)} tasks one after another: no role, no membership, no ACL left"
    yield f"task open: {first * 1e3:.1f} ms for the first tenth, {last * 1e3:.1f} ms for the last"
    yield f"shared catalogs after VACUUM: {int(row[0] if row else 0) // 1024} kB"
    assert last < 3 * first, "opening becomes slower"


def at_once(world: World, limits: Limits) -> Iterator[str]:
    before = world.owner.execute(_LEFT).fetchone()
    started = time.monotonic()
    tasks = [
        open_task(world.owner, agent="bench", policy="bench", ttl=timedelta(minutes=60))
        for _ in range(limits.open)
    ]
    opened = time.monotonic() - started
    for number, task in enumerate(tasks):
        write(world, task, 1 + number % 1000)
    for task in tasks:
        assert end_task(world.owner, task.task.id, "done").ended
    assert world.owner.execute(_LEFT).fetchone() == before, "something is left"
    yield f"{limits.open} tasks open at once, all of them wrote: opened in {opened:.1f} s, nothing left"


def endure(world: World, limits: Limits) -> Iterator[str]:
    """Yield what was found. Raises AssertionError when something does not hold."""
    yield from one_after_another(world, limits)
    yield from at_once(world, limits)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.endurance", description="What many tasks leave."
    )
    parser.add_argument("--tasks", type=int, default=10_000, help="opened and ended one after another")
    parser.add_argument("--open", type=int, default=1_000, help="open at once")
    parser.add_argument("--minutes", type=float, default=20, help="the longest that the first part may take")
    parser.add_argument("--pg", type=int, help="version of PostgreSQL; default: what is found first")
    given = parser.parse_args()
    console = Console()
    with serve(given.pg) as server, twins(server, 1000, "soft") as world:
        for line in endure(world, Limits(given.tasks, given.open, given.minutes * 60)):
            console.print(line)


if __name__ == "__main__":
    main()
