"""Undo, compared with the change that it takes back; `--rows 1000000` for the size of the goal."""

from collections.abc import Iterator

from benchmarks.measure import Goal, Label, Result, result, timed
from benchmarks.options import Options
from benchmarks.world import World, twins
from sqlguard.embedded import EmbeddedServer
from sqlguard.postgres.undo import undo

GOAL = Goal(3)
CASES = (
    ("UPDATE", "UPDATE guarded.t SET note = note || 'x', price = price * 1.1"),
    ("DELETE", "DELETE FROM guarded.t"),
    ("INSERT", "INSERT INTO guarded.t SELECT id + 100000000, 1, 'new', '', 'n' || id, 2 FROM guarded.t"),
    ("UPDATE of keys", "UPDATE guarded.t SET id = id + 100000000"),
)


def run(server: EmbeddedServer, options: Options) -> Iterator[Result]:
    for case, text in CASES:
        with twins(server, options.rows, "journal") as world:
            times: list[tuple[float, float]] = []

            def change(world: World = world, text: str = text) -> float:
                return _changed(world, text)

            def back(world: World = world) -> float:
                world.owner.execute("VACUUM guarded.t")
                return timed(lambda: undo(world.owner, task=world.task_id))

            times.append((change(), back()))
            for _ in range(options.rounds(3)):
                times.append((change(), back()))
            yield _result(case, options.rows, times[1:])


def _changed(world: World, text: str) -> float:
    """Return how long the agent's change took, its commit included."""
    world.owner.execute("VACUUM ANALYZE guarded.t")
    agent = world.agent()
    action = world.action(text)

    def work() -> None:
        with agent.transaction():
            agent.execute("SELECT set_config('sqlguard.action', %s, true)", [str(action)])
            agent.execute(text)

    seconds = timed(work)
    agent.close()
    return seconds


def _result(case: str, rows: int, times: list[tuple[float, float]]) -> Result:
    # A change and its undo can only be in this order; each pair is one measurement.
    found = [{"ours": back, "base": change} for change, back in times]
    return result(Label("undo", f"{case} of {rows:,} rows", "the change", GOAL), found, "ours", "base")
