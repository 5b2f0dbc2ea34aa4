"""`step list|approve`, and the registry of compensations that an undo is given with `--tools`."""

import os
import sys
from importlib import import_module
from typing import Annotated

import typer

from sqlguard.cli.common import Dsn, Json, approver, operator
from sqlguard.cli.output import out, print_json, print_rows
from sqlguard.errors import NotConfigured
from sqlguard.postgres import compensate, steps
from sqlguard.steps import Tools

group = typer.Typer(help="Calls of an agent's tools that wait for a person.", no_args_is_help=True)


@group.command("list")
def list_(*, dsn: Dsn = None, as_json: Json = False) -> None:
    """
    List calls of irreversible tools that wait for an approval, or have one that was not used yet.

    Example: sqlguard step list
    """
    with operator(dsn) as conn:
        found = steps.waiting(conn)
    if as_json:
        print_json({"steps": found})
        return
    print_rows(
        ("action", "at", "agent", "tool", "arguments", "reason", "approved"),
        [
            (s.action, s.at, s.agent, s.tool, s.arguments, s.reason, "yes" if s.approved else "")
            for s in found
        ],
    )


@group.command("approve")
def approve(
    action: Annotated[int, typer.Argument(help="The refused call's action, as SG001 said it.")],
    *,
    note: Annotated[str | None, typer.Option(help="Why, for the journal.")] = None,
    dsn: Dsn = None,
) -> None:
    """
    Let a call be made once, within the hour. Wants a terminal: no agent says yes to itself.

    Example: sqlguard step approve 12 --note "asked for by Ada"
    """
    if not sys.stdin.isatty():
        raise NotConfigured("an approval is given by a person", hint="run it in a terminal")
    with approver(dsn) as conn:
        told = next((s for s in steps.waiting(conn) if s.action == action), None)
        if told is not None:
            out.print(f"{told.agent} wants to call {told.tool} with {told.arguments}", markup=False)
            out.print(f"because: {told.reason or 'it did not say why'}", markup=False)
            typer.confirm("It can't be taken back. Let it be called once?", abort=True)
        steps.approve(conn, action, note)
    out.print(f"approved: action {action}, for the next hour")


@group.command("resolve")
def resolve(
    action: Annotated[int, typer.Argument(help="The step's action, as `undo` showed it.")],
    *,
    note: Annotated[str, typer.Option(help="What was done about it, for the journal.")],
    dsn: Dsn = None,
) -> None:
    """
    Note that a person has answered a step that no registry can answer, so that the undo of its task goes on.

    Example: sqlguard step resolve 12 --note "refunded at the bank's counter"
    """
    with operator(dsn) as conn:
        compensate.resolve(conn, action, note)
    out.print(f"resolved: action {action}; run the undo again")


def load_tools(name: str | None) -> Tools | None:
    """Return the registry `module:name`, also of the working directory. Raises NotConfigured."""
    if name is None:
        return None
    module, colon, attribute = name.partition(":")
    hint = "write `module:registry`, where the registry is a sqlguard.steps.Tools"
    if not colon:
        raise NotConfigured(f"`{name}` does not name a registry", hint=hint)
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 (sys.path holds texts)
    try:
        found = getattr(import_module(module), attribute, None)
    except ImportError as fault:
        raise NotConfigured(f"`{module}` can't be imported: {fault}", hint=hint) from None
    finally:
        sys.path.pop(0)
    if not isinstance(found, Tools):
        raise NotConfigured(f"`{name}` is no registry of tools", hint=hint)
    return found


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="step")
