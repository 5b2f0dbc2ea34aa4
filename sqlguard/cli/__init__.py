"""
The command line. One module per group of commands; this one joins them and turns errors into exit statuses:
0 ok, 1 refused or conflict, 2 usage, 3 approval required.
"""

import sys
from importlib import metadata
from typing import Annotated

import psycopg
import typer

from sqlguard.cli import (
    absent,
    database,
    demo,
    doctor,
    feed,
    history,
    init,
    mcp,
    observe,
    plans,
    policies,
    retention,
    serve,
    statements,
    steps,
    tasks,
)
from sqlguard.cli.common import state
from sqlguard.cli.output import err, out, print_error, print_exception
from sqlguard.errors import SqlguardError


def _say_version(value: bool) -> None:  # noqa: FBT001 (typer calls it so)
    if value:
        out.print(f"sqlguard {metadata.version('sqlguard-pg')}")
        raise typer.Exit


app = typer.Typer(
    name="sqlguard",
    help="Database-layer safety for AI agents that write SQL.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)
for group in (
    demo,
    database,
    init,
    doctor,
    plans,
    policies,
    tasks,
    statements,
    history,
    feed,
    steps,
    retention,
    serve,
    observe,
    mcp,
    absent,
):
    group.register(app)


@app.callback()
def _root(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", help="Say which version this is.", is_eager=True, callback=_say_version),
    ] = False,
) -> None:
    """Database-layer safety for AI agents that write SQL."""


def main() -> None:
    """Run the command line and exit with its status."""
    state.json = False  # a command without `--json` must not answer as the one before it in this process did
    try:
        app(standalone_mode=True)
    except SqlguardError as fault:
        print_error(fault, as_json=state.json)
        sys.exit(fault.exit_status)
    except psycopg.Error as fault:
        print_exception(fault, as_json=state.json)
        sys.exit(1)
    except KeyboardInterrupt:
        err.print("interrupted")
        sys.exit(130)


__all__ = ["app", "main"]
