"""`python -m benchmarks --help` says what it takes."""

import argparse
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from benchmarks import bulk, decision, idle, locks, preview, proxy, reads, tasks, undo
from benchmarks.measure import Result
from benchmarks.options import Options
from benchmarks.report import as_json, plot, show
from benchmarks.world import serve
from sqlguard.embedded import EmbeddedServer

Run = Callable[[EmbeddedServer, Options], Iterator[Result]]
BENCHMARKS: dict[str, Run] = {
    "decision": decision.run,
    "delete": bulk.deletes,
    "capture": bulk.captures,
    "read": reads.run,
    "task": tasks.run,
    "undo": undo.run,
    "preview": preview.run,
    "write": proxy.writes,
    "proxy": proxy.run,
    "idle": idle.run,
    "locks": locks.run,
}
#: Measured when asked for only: two million rows take their time.
ASKED = frozenset({"locks"})
#: What is quick enough to look at between two changes of the proxy: under three minutes.
QUICK = ("proxy",)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="What sqlguard costs, as ratios."
    )
    parser.add_argument(
        "--only", action="append", choices=[*BENCHMARKS], help="one benchmark; may be repeated"
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"{', '.join(QUICK)} only, with half of the rounds"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    parser.add_argument("--plot", type=Path, metavar="FILE", default=Path("build/benchmarks.png"))
    parser.add_argument("--effort", type=float, default=1.0, help="so many times the usual rounds")
    parser.add_argument("--rows", type=int, default=100_000, help="rows that the undo takes back")
    parser.add_argument(
        "--processor",
        action="store_true",
        help="delete and capture by processor time of the server (Linux); steadier where there is other work",
    )
    parser.add_argument("--pg", type=int, help="version of PostgreSQL; default: what is found first")
    given = parser.parse_args()
    if given.quick:
        given.only, given.effort = given.only or [*QUICK], given.effort / 2
    options = Options(given.effort, given.rows, given.processor)
    console = Console(width=None if os.isatty(1) else 150)
    began = time.monotonic()
    results: list[Result] = []
    failed: list[str] = []
    with serve(given.pg) as server:
        version = server.version
        for name in given.only or [n for n in BENCHMARKS if n not in ASKED]:
            started = time.monotonic()
            try:
                for result in BENCHMARKS[name](server, options):
                    results.append(result)  # noqa: PERF402 - what was measured before an error is kept
            except Exception:
                console.print_exception(max_frames=4)
                failed.append(name)
            console.print(f"[dim]{name}: {time.monotonic() - started:.0f} s[/]")
    show(results, console)
    facts = {"postgresql": version, "python": platform.python_version(), "cores": os.cpu_count()}
    if given.json is not None:
        given.json.write_text(as_json(results, facts), encoding="utf-8")
    given.plot.parent.mkdir(parents=True, exist_ok=True)
    drawn = plot(results, given.plot)
    console.print(f"[dim]{time.monotonic() - began:.0f} s, PostgreSQL {version}, {os.cpu_count()} cores[/]")
    console.print(
        f"[dim]picture: {given.plot}[/]" if drawn else "[dim]no picture: matplotlib is not installed[/]"
    )


if __name__ == "__main__":
    main()
