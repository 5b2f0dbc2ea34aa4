"""`step list|approve|reject|resolve`, and the registry of compensations that an undo is given with `--tools`."""

import os
import sys
from importlib import import_module
from typing import Annotated, Any

import psycopg
import typer

from sqlguard.cli.common import Dsn, Json, approver, operator
from sqlguard.cli.output import out, print_json, print_pairs, print_rows
from sqlguard.cli.plans import confirmed, decided, wants_person
from sqlguard.errors import NotConfigured, Refused
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
    if not revoke:
        wants_person()
    with approver(dsn) as conn:
        if revoke:
            state = decided(conn, lambda: steps.revoke(conn, action, reason))
        else:
            _show(decided(conn, lambda: _waiting(conn, action)))
            confirmed(f"It can't be taken back. Let it be called once, as {conn.info.user}?")
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


def _waiting(conn: psycopg.Connection[Any], action: int) -> steps.Waiting:
    """Return what is known of a call. Raises Refused for one that nobody can decide over: it was not shown."""
    for step in steps.waiting(conn):
        if step.action == action:
            return step
    raise Refused(f"no call {action} waits for an approval", hint="see `sqlguard step list`")


def _show(step: steps.Waiting) -> None:
    """Print what somebody is about to let happen; an agent's words stay within their lines."""
    told = {
        "agent": step.agent,
        "tool": step.tool,
        "arguments": step.arguments,
        "because": step.reason or "it did not say why",
    }
    print_pairs(told)


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
    as_json: Json = False,
) -> None:
    """
    Note that a person has answered a step that no registry can answer, so that the undo of its task goes on.

    Example: sqlguard step resolve 12 --note "refunded at the bank's counter"
    """
    with operator(dsn) as conn:
        compensate.resolve(conn, action, note)
    if as_json:
        print_json({"action": action, "resolved": True})
        return
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
