"""`init`: a starting policy for a database."""

from pathlib import Path
from typing import Annotated

import typer

from sqlguard import settings
from sqlguard.cli.common import Dsn, Json, operator
from sqlguard.cli.output import out, print_json
from sqlguard.errors import NotConfigured, PolicyError
from sqlguard.policy import parse_policy
from sqlguard.postgres.starting_policy import propose, render


def init(
    name: Annotated[str, typer.Argument(help="What the policy shall be called.")] = "agent",
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file; default: NAME.toml among the policies.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    Write a starting policy: every table named, reading granted, writes and guard modes proposed in comments.

    Example: sqlguard init support --dsn postgresql://owner@localhost/shop
    """
    path = output or settings.load().policies / f"{name}.toml"
    with operator(dsn) as conn:
        proposals = propose(conn)
        text = render(name, conn.info.dbname, proposals)
    if not proposals:
        raise NotConfigured(
            "the database has no tables yet", hint="create them, then run `sqlguard init` again"
        )
    parse_policy(text, str(path))  # also says what is wrong with the name
    _write(path, text, force=force)
    steps = [f"sqlguard policy apply {path}", f"sqlguard task open --agent NAME --policy {name} --json"]
    if as_json:
        tables = [proposal.as_dict() for proposal in proposals]
        print_json({"policy": name, "path": str(path), "tables": tables, "next": steps})
        return
    modes = [proposal.mode or "none" for proposal in proposals]
    counts = ", ".join(f"{modes.count(mode)} {mode}" for mode in ("soft", "journal", "none") if mode in modes)
    out.print(
        f"wrote {path}: {len(proposals)} tables (proposed modes: {counts}), reading only so far", markup=False
    )
    for step in ["edit it", *steps]:
        out.print(f"  next: {step}", markup=False)


def _write(path: Path, text: str, *, force: bool) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise PolicyError(
            f"`{path}` is there already", hint="give another name or -o FILE, or --force to write over it"
        ) from None
    except OSError as fault:
        raise PolicyError(
            f"`{path}` can't be written: {fault.strerror}", hint="give another place with -o"
        ) from None


def register(app: typer.Typer) -> None:
    app.command()(init)
