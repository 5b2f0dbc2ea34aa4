"""`observe report|forget`: what the guard would have done, as `serve --observe` has counted it."""

from typing import Annotated

import typer

from sqlguard.cli.common import Dsn, Json, operator
from sqlguard.cli.output import out, print_json, print_rows
from sqlguard.postgres import observations

group = typer.Typer(
    help="What the guard would have done, as counted by `sqlguard serve --observe`.", no_args_is_help=True
)
_INTERVENES = ("refuse", "approve", "unknown", "rewrite")


@group.command("report")
def report(
    *,
    agent: Annotated[str | None, typer.Option(help="Only this agent, or login that is no task's.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Also what would have passed as it came.")] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    List statement shapes that the guard would have refused, asked about or rewritten, per agent.

    Values are not kept, so none is shown.

    Example: sqlguard observe report --agent billing
    """
    with operator(dsn) as conn:
        seen = observations.read_observations(conn, agent=agent)
    totals: dict[str, int] = {}
    for one in seen:
        totals[one.verdict] = totals.get(one.verdict, 0) + one.count
    shown = [one for one in seen if all_ or one.verdict in _INTERVENES]
    if as_json:
        print_json({"totals": totals, "observations": [one.as_dict() for one in shown]})
        return
    if not seen:
        out.print("nothing was observed yet: point a client at `sqlguard serve --observe`")
        return
    out.print(", ".join(f"{verdict} {count}" for verdict, count in totals.items()))
    print_rows(
        ("verdict", "times", "agent", "policy", "statement", "why", "what would pass"),
        [(o.verdict, o.count, o.agent, o.policy, o.sample, o.message or o.executed, o.hint) for o in shown],
    )


@group.command("forget")
def forget(*, dsn: Dsn = None, as_json: Json = False) -> None:
    """
    Delete what was observed, to begin anew after a change of policy.

    Example: sqlguard observe forget
    """
    with operator(dsn) as conn:
        count = observations.forget_observations(conn)
    if as_json:
        print_json({"forgotten": count})
    else:
        out.print(f"{count} statement shapes forgotten")


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="observe")
