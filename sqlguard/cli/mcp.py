"""`mcp`: tools for an agent over the Model Context Protocol."""

import os
import secrets
from datetime import timedelta
from typing import Annotated

import typer

from sqlguard import settings
from sqlguard.cli.common import Dsn, operator_dsn
from sqlguard.cli.output import err
from sqlguard.cli.serve import configure_logs
from sqlguard.cli.tasks import parameters, ttl_of
from sqlguard.errors import NotConfigured

TOKEN_VARIABLE = "SQLGUARD_MCP_TOKEN"  # noqa: S105 (its name, not a token)


# long: one flag after the other, then one call
def mcp(
    *,
    policy: Annotated[
        str | None, typer.Option(help="What the task of a session may do; needs the operator's DSN.")
    ] = None,
    agent: Annotated[str, typer.Option(help="Who works, as the journal shall name it.")] = "mcp",
    ttl: Annotated[str, typer.Option(help="How long a session's task lives, e.g. `1h`.")] = "1h",
    purpose: Annotated[str | None, typer.Option(help="What it is for.")] = None,
    param: Annotated[list[str] | None, typer.Option(help="name=value for the policy's row scopes.")] = None,
    http: Annotated[
        str | None,
        typer.Option(help="Serve streamable HTTP here (loopback only), not stdio: 127.0.0.1:6544."),
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A Host header of a reverse proxy in front; may be repeated.")
    ] = None,
    dsn: Dsn = None,
) -> None:
    """
    Serve MCP tools to an agent: read, preview, write, undo, all of it guarded. No tool approves.

    With the operator's DSN every session of a client is a task of its own, which ends with it. With a task's own
    `direct_dsn` all clients work as that task. Over HTTP a client shows the token that SQLGUARD_MCP_TOKEN holds;
    without that, one is made up and printed.

    Example: SQLGUARD_DSN=postgresql://owner@localhost/shop sqlguard mcp --policy support --agent claude
    """
    try:
        from sqlguard.mcp_server.server import Guard  # noqa: PLC0415 (an optional extra)
        from sqlguard.mcp_server.sessions import Door, checked  # noqa: PLC0415
        from sqlguard.mcp_server.transports import run_http, run_stdio  # noqa: PLC0415
    except ModuleNotFoundError as fault:
        if fault.name is None or fault.name.startswith("sqlguard"):
            raise
        raise NotConfigured(
            "the MCP server needs more packages", hint="pip install 'sqlguard-pg[mcp]'"
        ) from None
    length: timedelta = ttl_of(ttl)
    configure_logs("warning", as_json=False)
    door = checked(Door(operator_dsn(dsn), policy, agent, length, purpose, parameters(param or [])))
    # What is told to the process is no business of the tools.
    given = os.environ.pop(TOKEN_VARIABLE, None)
    token = given or secrets.token_urlsafe(24)
    if http is None:
        run_stdio(Guard(door, shared=True))
        return
    host, port = settings.host_and_port(http)
    guard = Guard(door, shared=False)
    err.print(f"sqlguard mcp: http://{http}/mcp", markup=False)
    # One that was given is known already, and standard error may go to a log.
    shown = f"(the value of {TOKEN_VARIABLE})" if given else token
    err.print(f"Authorization: Bearer {shown}", markup=False)
    run_http(guard, host=host, port=port, token=token, allowed_hosts=tuple(allow_host or ()))


def register(app: typer.Typer) -> None:
    app.command()(mcp)
