"""`demo`: the main job on an embedded PostgreSQL, told as a story that checks itself."""

import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from sqlguard.cli.output import err, out
from sqlguard.demo.story import NotSeen, Stage, tell


def demo(
    *,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave everything running until Ctrl-C, to connect yourself.")
    ] = False,
) -> None:
    """
    Start a real PostgreSQL, load a small shop, guard it, let an agent loose on it, and show what happened.

    Needs nothing but Python; exit status 0 only if every step was seen in the database.

    Example: sqlguard demo --keep
    """
    # Alembic costs a second to import, which no other command should pay.
    from sqlguard.demo.stage import set_up  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="sqlguard-demo-", ignore_cleanup_errors=True) as folder:
        try:
            with set_up(Path(folder), out) as stage:
                tell(stage)
                out.print("\n[bold green]Every step was seen in the database.[/] Try next:")
                _try_next(stage, keep=keep)
        except NotSeen as fault:
            err.print(f"[bold red]not seen in the database:[/] {fault}")
            raise typer.Exit(1) from None


def _try_next(stage: Stage, *, keep: bool) -> None:
    if not keep:
        out.print(
            f"  {Path(sys.argv[0])} demo --keep      leaves the shop running and prints this line for it:"
        )
        out.print(f"  psql '{stage.opened['dsn']}'", soft_wrap=True)
        return
    fresh = stage.task("1h")
    out.print("  be the agent for an hour, through the proxy:")
    out.print(f"  psql '{fresh['dsn']}'", soft_wrap=True, markup=False)
    out.print("  and take back whatever you did (as the owner):")
    out.print(
        f"  {Path(sys.argv[0])} undo --task {fresh['task']} --dsn '{stage.owner_dsn}'",
        soft_wrap=True,
        markup=False,
    )
    out.print("Ctrl-C ends the demo.")
    try:
        signal.pause()
    except KeyboardInterrupt:
        out.print("ended")


def register(app: typer.Typer) -> None:
    app.command()(demo)
