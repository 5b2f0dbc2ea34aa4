"""`demo`: the main job on an embedded PostgreSQL, told as a story that checks itself."""

import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from sqlguard.cli.output import err, out
from sqlguard.demo import stage as stages
from sqlguard.demo.story import NotSeen, tell
from sqlguard.embedded import EmbeddedServer, find_bindir


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
    del keep
