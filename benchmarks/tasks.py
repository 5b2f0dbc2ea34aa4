"""Opening a task, compared with the bare statement that makes a login role."""

from collections.abc import Iterator

from benchmarks.measure import Goal, Label, Result, compare, timed
from benchmarks.options import Options
from benchmarks.world import twins
from sqlguard.embedded import EmbeddedServer
from sqlguard.postgres.tasks import open_task

EACH = 5


def run(server: EmbeddedServer, options: Options) -> Iterator[Result]:
    with twins(server, 1000, "soft") as world:
        row = world.owner.execute("SELECT group_role FROM sqlguard.policy").fetchone()
        assert row is not None
        made = 0

        def ours() -> float:
            return (
                timed(lambda: [open_task(world.owner, agent="bench", policy="bench") for _ in range(EACH)])
                / EACH
            )

        def roles() -> None:
            nonlocal made
            for _ in range(EACH):
                made += 1
                # A verifier, so that the server does not have to work one out.
                world.owner.execute(
                    f"CREATE ROLE bench_login_{made} LOGIN PASSWORD '{VERIFIER}' IN ROLE {row[0]}"
                )

        def base() -> float:
            return timed(roles) / EACH

        yield compare(
            Label("task open", "opening a task", "CREATE ROLE … IN ROLE", Goal(3)),
            ours,
            base,
            options.rounds(21),
        )
        for number in range(1, made + 1):
            world.owner.execute(f"DROP ROLE bench_login_{number}")
        for (task,) in world.owner.execute(
            "SELECT role FROM sqlguard.lease WHERE state <> 'ended'"
        ).fetchall():
            world.owner.execute(f'DROP ROLE IF EXISTS "{task}"')


#: A made-up one: nobody logs in with it.
VERIFIER = (
    "SCRAM-SHA-256$4096:c29tZSBzYWx0IGhlcmUhIQ==$"
    "cV8Dz6xkFQ1QX1pNd5vH3lVYl2nC8aS0Yh5m1wq4tE0=:Yw0yQk3m2u4s6W8y0A2C4E6G8I0K2M4O6Q8S0U2W4Y0="
)
