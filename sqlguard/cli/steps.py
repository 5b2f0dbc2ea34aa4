"""`step list|approve|reject|resolve`, and the registry of compensations that an undo is given with `--tools`."""

import os
import sys
from importlib import import_module
from typing import Annotated

import typer

from sqlguard.cli.common import Dsn, Json, approver, operator
from sqlguard.cli.output import out, print_json, print_rows
from sqlguard.cli.plans import decided
from sqlguard.errors import NotConfigured
from sqlguard.postgres import compensate, steps
from sqlguard.steps import Tools

Call = Annotated[int, typer.Argument(help="The refused call's action, as SG001 said it.")]
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
        [(s.action, s.at, s.agent, s.tool, s.arguments, s.reason, _approved(s)) for s in found],
    )


@group.command("approve")
def approve(
    action: Call,
    *,
    revoke: Annotated[bool, typer.Option("--revoke", help="Take the approvals back.")] = False,
    reason: Annotated[str | None, typer.Option("--reason", "--note", help="Why, for the journal.")] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    Let a call be made once, within the hour. Wants a terminal: no agent says yes to itself.

    Example: sqlguard step approve 12 --reason "asked for by Ada"
    """
    if not revoke and not sys.stdin.isatty():
        raise NotConfigured("an approval is given by a person", hint="run it in a terminal")
    with approver(dsn) as conn:
        if revoke:
            state = decided(conn, lambda: steps.revoke(conn, action, reason))
        else:
            told = next((s for s in steps.waiting(conn) if s.action == action), None)
            if told is not None:
                typer.echo(f"{told.agent} wants to call {told.tool} with {told.arguments}", err=True)
                typer.echo(f"because: {told.reason or 'it did not say why'}", err=True)
                typer.confirm("It can't be taken back. Let it be called once?", abort=True, err=True)
            state = decided(conn, lambda: steps.approve(conn, action, reason))
    _say(action, state, as_json=as_json)


@group.command("reject")
def reject(
    action: Call,
    *,
    reason: Annotated[str, typer.Option(help="Why; the agent reads it.")],
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    Reject a call for good: the same call of the same task is refused with the reason.

    Example: sqlguard step reject 12 --reason "ask the customer first"
    """
    with approver(dsn) as conn:
        state = decided(conn, lambda: steps.reject(conn, action, reason))
    _say(action, state, as_json=as_json)


def _approved(step: steps.Waiting) -> str:
    if step.state == "approved":
        return "yes"
    return f"{len(step.approved_by)} of {step.approvals_needed}" if step.approved_by else ""


def _say(action: int, state: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"action": action, "state": state})
    elif state == "approved":
        out.print(f"approved: action {action}, for the next hour")
    elif state == "open":
        out.print(f"action {action} waits for an approval")
    else:
        out.print(f"action {action} is {state}")


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
