"""`task open`, `task list`, `task renew`, `task end`."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import psycopg
import typer
from psycopg.conninfo import conninfo_to_dict
from rich.markup import escape

from sqlguard import settings
from sqlguard.cli.common import Dsn, Json, operator, operator_dsn
from sqlguard.cli.output import err, out, print_json, print_pairs, print_rows
from sqlguard.dsn import url
from sqlguard.policy.model import duration
from sqlguard.postgres import proxies, tasks
from sqlguard.task import Task as Task_

group = typer.Typer(help="Tasks: an agent's short-lived right to the database.", no_args_is_help=True)
Task = Annotated[str, typer.Argument(help="The task's id, as `task open` printed it.")]


def ttl_of(text: str) -> timedelta:
    try:
        value = duration(text)
    except ValueError as fault:
        raise typer.BadParameter(str(fault)) from None
    if not isinstance(value, timedelta) or value <= timedelta():
        raise typer.BadParameter("a TTL is longer than nothing, e.g. `300s`")
    return value


def parameters(pairs: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise typer.BadParameter(f"`{pair}` is not of the form name=value")
        found[name] = value
    return found


@group.command("open")
def open_(
    *,
    agent: Annotated[str, typer.Option(help="Who works, as the journal shall name it.")],
    policy: Annotated[str, typer.Option(help="The policy that says what it may do; see `policy apply`.")],
    ttl: Annotated[str, typer.Option(help="How long the credential lives, e.g. `300s` or `15min`.")] = "300s",
    purpose: Annotated[str | None, typer.Option(help="What it is for.")] = None,
    param: Annotated[list[str] | None, typer.Option(help="name=value for the policy's row scopes.")] = None,
    agent_version: Annotated[str | None, typer.Option(help="Version or model of the agent.")] = None,
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Nothing commits but plans that a person has approved.")
    ] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    Open a task: a login role of its own that ends by itself. The secret is shown once.

    Example: sqlguard task open --agent claude --policy support --ttl 15min --param customer_id=42 --json
    """
    length, params = ttl_of(ttl), parameters(param or [])
    with operator(dsn) as conn:
        opened = tasks.open_task(
            conn,
            agent=agent,
            policy=policy,
            ttl=length,
            purpose=purpose,
            params=params,
            agent_version=agent_version,
            plan_only=plan_only,
        )
        document = _document(opened, conn, operator_dsn(dsn), length)
    if as_json:
        print_json(document)
        return
    warnings = document.pop("warnings")
    print_pairs(document)
    _warn(warnings)


def _document(
    opened: tasks.OpenedTask, conn: psycopg.Connection[Any], dsn: str, length: timedelta
) -> dict[str, Any]:
    """Return what is shown of a new task, the secret inside its two DSNs."""
    warnings = _cut(opened.task, length) + _unused(opened)
    address = _proxy_address(conn, warnings)
    proxy_host, proxy_port = settings.host_and_port(address)
    credential = {"user": opened.role, "password": opened.password, "dbname": conn.info.dbname}
    return {
        "task": opened.task.id,
        "role": opened.role,
        "dsn": url(host=proxy_host, port=proxy_port, **credential),
        "direct_dsn": url(host=conn.info.host, port=conn.info.port, **credential, **_tls(dsn)),
        "expires_at": opened.task.expires_at,
        "agent": opened.task.agent,
        "policy": opened.task.policy,
        "policy_version": opened.task.policy_version,
        "warnings": warnings,
    }


def _warn(warnings: list[str]) -> None:
    for text in warnings:
        err.print(f"[yellow]warning[/yellow] {escape(text)}")


def _cut(task: Task_, length: timedelta, since: datetime | None = None) -> list[str]:
    """Say so when the policy's longest time was less than what was asked for."""
    begins = since or task.opened_at
    if begins is None or task.expires_at - begins >= length - timedelta(seconds=1):
        return []
    latest = f"{task.expires_at:%Y-%m-%d %H:%M:%S %Z}"
    return [
        f"not {_span(length)} as asked for: policy `{task.policy}` lets the task live until {latest} (max_ttl)"
    ]


def _unused(opened: tasks.OpenedTask) -> list[str]:
    """Say which parameters scope nothing: with a mistyped name a task sees more than somebody meant."""
    named = ", ".join(f"`{name}`" for name in opened.unused)
    return [f"no row scope of policy `{opened.task.policy}` asks for {named}"] if named else []


def _span(length: timedelta) -> str:
    """Write *length* as it may be given: `8h`, `90min`, `300s`."""
    seconds = round(length.total_seconds())
    unit, size = next(
        (u, s) for u, s in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)) if seconds % s == 0
    )
    return f"{seconds // size}{unit}"


def _proxy_address(conn: psycopg.Connection[Any], warnings: list[str]) -> str:
    """Return where agents reach the proxy: as configured, or where one that runs has said that it listens."""
    configuration = settings.load()
    if configuration.public_host:
        return configuration.public_host
    known = proxies.addresses(conn)
    # The configured one first: several proxies may run, and that one was chosen.
    for address in sorted(known, key=lambda a: a != configuration.listen):
        if proxies.answers(*settings.host_and_port(address)):
            return address
    if not proxies.answers(*settings.host_and_port(configuration.listen)):
        warnings.append(f"no proxy answers at {configuration.listen}: run `sqlguard serve`")
    return configuration.listen


def _tls(dsn: str) -> dict[str, str]:
    """Keep the operator's own TLS settings in the direct DSN."""
    return {k: str(v) for k, v in conninfo_to_dict(dsn).items() if k in ("sslmode", "sslrootcert")}


@group.command("list")
def list_(
    *,
    all_tasks: Annotated[bool, typer.Option("--all", help="Ended ones too.")] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    List the open tasks.

    Example: sqlguard task list --all --json
    """
    with operator(dsn) as conn:
        found = tasks.list_tasks(conn, all=all_tasks)
    if as_json:
        print_json({"tasks": found})
        return
    print_rows(
        ("task", "agent", "policy", "state", "expires", "purpose"),
        [(t.id, t.agent, f"{t.policy} v{t.policy_version}", t.state, t.expires_at, t.purpose) for t in found],
    )


@group.command("renew")
def renew(
    task: Task,
    *,
    ttl: Annotated[str, typer.Option(help="From now, up to the policy's max_ttl.")] = "300s",
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    Let a task live for so long from now: longer than it had, or shorter.

    Example: sqlguard task renew TASK --ttl 300s
    """
    with operator(dsn) as conn:
        length, began = ttl_of(ttl), datetime.now(UTC)
        renewed = tasks.renew_task(conn, task, length)
    warnings = _cut(renewed, length, began)
    if as_json:
        print_json({"task": task, "expires_at": renewed.expires_at, "warnings": warnings})
    else:
        out.print(f"`{task}` now expires at {renewed.expires_at:%Y-%m-%d %H:%M:%S %Z}")
        _warn(warnings)


@group.command("end")
def end(
    task: Task,
    *,
    reason: Annotated[str, typer.Option(help="Why it ends.")] = "ended by the operator",
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """
    End a task: its rights, its sessions and its login, in that order. Safe to repeat.

    Example: sqlguard task end TASK
    """
    with operator(dsn) as conn:
        report = tasks.end_task(conn, task, reason)
    if as_json:
        print_json(report)
        return
    out.print(f"ended `{task}`")
    for problem in report.problems:
        out.print(f"[yellow]left behind:[/yellow] {problem}")


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="task")
