"""
A preview through the Python connection, against BEGIN, the statement, ROLLBACK as the same task on the same table.

Capture is on both sides. What a preview adds that does not grow with the rows is mostly the journal: its intent, its
plan and how it ended are committed, each on its own.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psycopg

from benchmarks.measure import Goal, Label, Result, Slice, compare, timed
from benchmarks.options import Options
from benchmarks.world import World, twins
from sqlguard.connection import connect
from sqlguard.embedded import EmbeddedServer

ROWS = 200_000
#: Rows, how often in one slice, usual number of rounds.
CASES = ((1, 20, 40), (1_000, 3, 25), (100_000, 1, 7))
GOAL = Goal(1.3)


def run(server: EmbeddedServer, options: Options) -> Iterator[Result]:
    with twins(server, ROWS, "soft") as world:
        agent = world.agent()
        with connect(world.dsn, task=world.task_id) as guarded:
            for rows, times, rounds in CASES:
                text = f"UPDATE t SET note = 'changed', price = price + 1 WHERE id <= {rows}"
                yield compare(
                    Label(
                        "preview", f"UPDATE, {rows:,} row{'s'[: rows > 1]}", "BEGIN; UPDATE; ROLLBACK", GOAL
                    ),
                    _slice(world, partial(guarded.preview, text), times),
                    _slice(world, partial(_tried, agent, text), times),
                    options.rounds(rounds),
                )


def _tried(conn: psycopg.Connection[Any], text: str) -> None:
    conn.execute("BEGIN")
    conn.execute(text)
    conn.execute("ROLLBACK")


def _slice(world: World, work: Callable[[], object], times: int) -> Slice:
    """Return a slice on a table that has no dead rows; what it costs is one time."""

    def several() -> None:
        for _ in range(times):
            work()

    def measured() -> float:
        world.owner.execute("VACUUM guarded.t, sqlguard.row_change")
        return timed(several) / times

    return measured
