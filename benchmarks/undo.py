"""
How long does an undo take, compared with the change itself? `python benchmarks/undo.py --rows 1000000`

Prints, for each kind of change, the bare statement as the owner, the agent's captured one, the undo, the
ratio of undo to captured change, and the memory of this process (what the undo holds is on the server, in
work_mem and temporary files). The server runs with fsync off: compare ratios only.
"""

import argparse
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from journaled import world
from servers import Servers, fresh_database

from sqlguard.postgres import undo

TABLE = """
    CREATE SCHEMA app;
    CREATE TABLE app.t (id int PRIMARY KEY, c int, note text, price numeric(12, 2), at timestamptz DEFAULT now());
    CREATE INDEX ON app.t (c);
    INSERT INTO app.t SELECT g, g % 1000, 'note ' || g, g * 1.5 FROM generate_series(1, {rows}) g;
"""
CHANGES = (
    "UPDATE app.t SET note = note || 'x', price = price * 1.1",
    "DELETE FROM app.t",
    "INSERT INTO app.t SELECT g + 100000000, 1, 'new', 2 FROM generate_series(1, {rows}) g",
    "UPDATE app.t SET id = id + 100000000",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--pg", type=int, default=18)
    options = parser.parse_args()
    servers = Servers()
    try:
        with fresh_database(servers.get(options.pg)) as database, world(database) as made:
            made.op.execute(TABLE.format(rows=options.rows))
            made.grant()
            made.guard("app.t")
            agent = made.task("bench")
            for change in CHANGES:
                text = change.format(rows=options.rows)
                made.op.execute("VACUUM ANALYZE app.t")
                with made.op.transaction(force_rollback=True):
                    bare = timed(lambda text=text: made.op.execute(text))
                made.op.execute("VACUUM app.t")
                captured = timed(lambda text=text: made.act(agent, text))
                made.op.execute("VACUUM app.t")
                undone = timed(lambda: undo.undo(made.op, task="bench"))
                memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
                print(
                    f"{text[:30]:30} bare {bare:6.2f} s  captured {captured:6.2f} s  undo {undone:6.2f} s"
                    f"  undo/captured {undone / captured:.2f}  memory {memory} MB"
                )
    finally:
        servers.stop()


def timed(work: object) -> float:
    started = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
