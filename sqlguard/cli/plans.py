"""`plan list|show`, `approve`, `reject`: what waits for a person, and what the person says."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import psycopg
import typer
from rich.markup import escape

from sqlguard.cli.common import Dsn, Json, approver, operator
from sqlguard.cli.output import inset, out, print_json, print_pairs, print_rows
from sqlguard.errors import Refused
from sqlguard.plan_told import told
from sqlguard.postgres import plans

T = TypeVar("T")
group = typer.Typer(help="Plans: what waits for an approval, and what became of it.", no_args_is_help=True)
PlanId = Annotated[int, typer.Argument(help="The plan's number, as the agent or `plan list` says it.")]
_COLOURS = {"open": "yellow", "approved": "green", "rejected": "red", "committed": "cyan"}
#: A plan of 100,000 rows is read by its counts.
_SHOWN = 10
#: Characters of a value.
_LENGTH = 100


@group.command("list")
def list_(
    *,
    state: Annotated[str | None, typer.Option(help=f"Only those that are {', '.join(plans.STATES)}.")] = None,
    task: Annotated[str | None, typer.Option(help="Only those of one task.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = 50,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    List plans, oldest first.

    Example: sqlguard plan list --state open --json
    """
    if state is not None and state not in plans.STATES:
        raise typer.BadParameter(f"a state is one of {', '.join(plans.STATES)}")
    with operator(dsn) as conn:
        found = plans.list_plans(conn, state=state, task=task, limit=limit)
    if as_json:
        print_json({"plans": [plan.as_dict() for plan in found]})
        return
    print_rows(
        ("plan", "state", "agent", "rows", "tier", "expires", "statement"),
        [
            (
                plan.id,
                plan.state,
                plan.document["agent"],
                plan.document["affected_rows"],
                plan.document["tier"],
                str(plan.document["expires_at"])[:19],
                _one_line(plan.document["statements"]),
            )
            for plan in found
        ],
    )


@group.command("show")
def show(plan: PlanId, *, dsn: Dsn = None, as_json: Json = False) -> None:
    """
    Show what a plan would do: rows per table, shares, differences of some rows, and who has decided what.

    Example: sqlguard plan show 17 --json
    """
    with operator(dsn) as conn:
        found = plans.show(conn, plan)
    if as_json:
        print_json(found.as_dict())
    else:
        _show(found)


def approve(
    plan: PlanId,
    *,
    revoke: Annotated[bool, typer.Option("--revoke", help="Take the approvals back.")] = False,
    reason: Annotated[str | None, typer.Option(help="Why, for the journal.")] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    Look at a plan and approve it. Asks on the terminal, with your own login: a member of sqlguard_approver that has not
    opened the task.

    Example: sqlguard approve 17 --dsn postgresql://dana@db/shop
    """
    if not revoke:
        wants_person()
    with approver(dsn) as conn:
        found = plans.show(conn, plan)
        if revoke:
            state = decided(conn, lambda: plans.revoke(conn, plan, reason))
        else:
            _show(found)
            confirmed(f"Approve plan {plan} as {conn.info.user}?")
            digest = str(found.document["digest"])
            state = decided(conn, lambda: plans.approve(conn, plan, digest, reason))
    _say(plan, state, as_json=as_json)


def reject(
    plan: PlanId,
    *,
    reason: Annotated[str, typer.Option(help="Why; the agent reads it.")],
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    Reject a plan for good.

    Example: sqlguard reject 17 --reason "ask the customer first"
    """
    with approver(dsn) as conn:
        state = decided(conn, lambda: plans.reject(conn, plan, reason))
    _say(plan, state, as_json=as_json)


def wants_person() -> None:
    """Raise Refused unless there is a terminal: no agent's script says yes to itself."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise Refused(
            "an approval is given at a terminal, by a person",
            hint="run it where you can read what it shows and answer",
        )


def confirmed(question: str) -> None:
    """Ask the person; end the command with status 1 unless the answer is yes."""
    if not typer.confirm(question, default=False):
        out.print("nothing was approved")
        raise typer.Exit(1)


def decided(conn: psycopg.Connection[Any], decide: Callable[[], T]) -> T:
    """Return what a decision leads to, or a look at what is to be decided. Raises Refused for who may not decide."""
    try:
        return decide()
    except psycopg.errors.InsufficientPrivilege as fault:
        raise Refused(
            f"`{conn.info.user}` may not decide: {fault.diag.message_primary}",
            hint=fault.diag.message_hint
            or "use your own login; an administrator makes it an approver with"
            " `GRANT sqlguard_approver TO …`",
        ) from None


def _say(plan: int, state: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"plan": plan, "state": state})
    elif state == "open":
        out.print(f"plan {plan} waits for one more approval")
    else:
        out.print(f"plan {plan} is {state}")


def _show(plan: plans.Plan) -> None:
    document = plan.as_dict()
    colour = _COLOURS.get(plan.state, "dim")
    out.print(f"[bold]plan {plan.id}[/bold]  [{colour}]{plan.state}[/]")
    print_pairs(
        {
            "agent": f"{document['agent']} (task {document['task']}, policy {document['policy']}"
            f" v{document['policy_version']})",
            "purpose": document["purpose"] or "",
            "because": "; ".join(document["reasons"]),
            "approvals": f"{len(document['approved_by'])} of {document['approvals_needed']}"
            + (f": {', '.join(document['approved_by'])}" if document["approved_by"] else ""),
            "expires": str(document["expires_at"])[:19],
            "tier": document["tier"]
            + (f" ({', '.join(document['classes'])})" if document["classes"] else ""),
        }
    )
    if document["rejected_because"]:
        out.print(f"rejected: {_line(document['rejected_because'])}", markup=False)
    if document["reported_by"] == "task":
        out.print(
            "[yellow]Statement, tier and reasons are what the task's own session says; the rows are measured.[/]"
        )
    for statement in document["statements"][:_SHOWN]:
        out.print(inset(statement["statement"].strip()), markup=False)
        if statement["params"]:
            out.print(f"  with {', '.join(map(_line, statement['params']))}", markup=False)
    _cut(len(document["statements"]), "statements")
    out.print(f"\n[bold]{document['affected_rows']} rows[/bold]: {escape(told(document))}")
    _tables(document)
    for sample in document["samples"][:_SHOWN]:
        _sample(sample)
    _cut(document["affected_rows"], "rows", shown=min(len(document["samples"]), _SHOWN))
    for line in _moved(document):
        out.print(line, markup=False)


def _moved(document: Mapping[str, Any]) -> Iterator[str]:
    """Say which sequences a roll-back leaves moved, and which statement of several it was."""
    places = {step["action"]: n for n, step in enumerate(document["statements"], 1)}
    for moved in document["sequences_by_action"]:
        place = places.get(moved["action"])
        where = f" of statement {place}" if place and len(places) > 1 else ""
        yield f"not taken back: {', '.join(moved['sequences'])} (sequences{where})"


def _tables(document: Mapping[str, Any]) -> None:
    shares = {share["table"]: share for share in document["shares"]}
    rows = []
    for change in document["affected"]:
        share = shares.get(change["table"])
        about = "about " if share and share.get("estimated") else ""
        of = f"{about}{share['share']:.1%} of {share['of']}" if share else ""
        how = "by a cascade or trigger" if change["nested"] else ""
        rows.append((change["table"], change["op"], change["rows"], of, how))
    print_rows(("table", "operation", "rows", "share", ""), rows)


def _sample(sample: Mapping[str, Any]) -> None:
    key = ", ".join(map(_line, sample["key"] or ()))
    out.print(f"[bold]{escape(sample['table'])}[/bold] {sample['op']} {escape(key)}")
    for column, values in sample["changed"].items():
        before, after = shortened(*("NULL" if v is None else _line(v) for v in values))
        out.print(f"    {escape(column)}: [red]{escape(before)}[/red] → [green]{escape(after)}[/green]")


def shortened(before: str, after: str) -> tuple[str, str]:
    """Return so much of two values that a line stays readable, from shortly before the first difference on."""
    if max(len(before), len(after)) <= _LENGTH:
        return before, after
    same = next((n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), 0)
    start = 0 if same < _LENGTH // 2 else same - _LENGTH // 4

    def part(text: str) -> str:
        end = start + _LENGTH
        return ("…" if start else "") + text[start:end] + ("…" if len(text) > end else "")

    return part(before), part(after)


def _line(value: object) -> str:
    """Return *value* on one line: its own could look like lines of ours."""
    return str(value).replace("\\", "\\\\").replace("\n", "\\n") if "\n" in str(value) else str(value)


def _cut(total: int, what: str, *, shown: int = _SHOWN) -> None:
    if total > shown:
        out.print(f"  … {total - shown} more {what}")


def _one_line(statements: Sequence[Mapping[str, Any]]) -> str:
    first = " ".join(str(statements[0]["statement"]).split())
    more = f" (+{len(statements) - 1})" if len(statements) > 1 else ""
    return (first if len(first) <= 60 else first[:57] + "…") + more  # noqa: PLR2004 (a row stays one line)


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="plan")
    app.command()(approve)
    app.command()(reject)
