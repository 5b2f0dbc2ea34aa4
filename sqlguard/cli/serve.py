"""`serve`: the proxy and the janitor in one process."""

import logging
import sys
from pathlib import Path
from typing import Annotated

import structlog
import typer

from sqlguard import app as composition
from sqlguard import settings
from sqlguard.cli.common import Json, operator_dsn
from sqlguard.cli.output import out, print_json
from sqlguard.postgres.proxies import announced


# long: one parameter per flag
def serve(
    *,
    listen: Annotated[str | None, typer.Option(help="host:port; default 127.0.0.1:6543.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate for TLS to agents (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key (PEM).")] = None,
    tls_required: Annotated[bool, typer.Option("--tls-required", help="Refuse agents without TLS.")] = False,
    backend_tls: Annotated[
        str | None, typer.Option(help="TLS to PostgreSQL: disable, prefer, require or verify-full.")
    ] = None,
    backend_tls_ca: Annotated[Path | None, typer.Option(help="CA for verify-full.")] = None,
    unix_socket: Annotated[
        Path | None, typer.Option(help="Folder of a Unix socket to listen on too.")
    ] = None,
    replica: Annotated[
        str | None,
        typer.Option(help="Connection to a streaming standby, for reads where the policy allows it."),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that share the address; default 1.")] = None,
    metrics_listen: Annotated[
        str | None, typer.Option(help="host:port for /metrics, /healthz and /readyz; default: none.")
    ] = None,
    shutdown_grace: Annotated[
        float | None, typer.Option(help="Seconds that open transactions get at the end; default 10.")
    ] = None,
    observe: Annotated[
        bool,
        typer.Option(
            "--observe", help="Pass everything on unchanged; count what would have been refused or rewritten."
        ),
    ] = False,
    observe_policy: Annotated[
        str | None, typer.Option(help="Policy for observed logins that are no task's.")
    ] = None,
    observe_role: Annotated[
        list[str] | None, typer.Option(help="Observe only this login; may be repeated.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check configuration and database, then exit.")
    ] = False,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    dsn: Annotated[
        str | None, typer.Option("--dsn", help="Connection of the operator. [env: SQLGUARD_DSN]")
    ] = None,
    as_json: Json = False,
) -> None:
    """
    Run the proxy that agents connect to, and the janitor that ends tasks.

    Example: sqlguard serve --dsn postgresql://owner@localhost/shop --listen 127.0.0.1:6543
    """
    configuration = settings.load(
        dsn=operator_dsn(dsn),
        listen=listen,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_required=tls_required or None,
        backend_tls=backend_tls,
        backend_tls_ca=backend_tls_ca,
        unix_socket=unix_socket,
        replica=replica,
        workers=workers,
        metrics_listen=metrics_listen,
        shutdown_grace=shutdown_grace,
        observe=observe or None,
        observe_policy=observe_policy,
        observe_roles=tuple(observe_role) if observe_role else None,
        log_level=log_level,
    )
    settings.host_and_port(configuration.listen)  # raises before anything is started
    configure_logs(configuration.log_level, as_json=as_json)
    if check:
        found = composition.check(configuration)
        if as_json:
            print_json(found)
        else:
            out.print(f"ok: PostgreSQL {found['postgresql']}, {found['guarded_tables']} guarded tables")
        return
    assert configuration.dsn is not None  # noqa: S101 (operator_dsn has looked)
    with announced(configuration.dsn, configuration.public_host or configuration.listen):
        composition.serve(configuration)


def configure_logs(level: str, *, as_json: bool) -> None:
    # Tracebacks without local variables: those hold statements and row values.
    console = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    renderer = structlog.processors.JSONRenderer() if as_json else console
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([structlog.processors.format_exc_info] if as_json else []),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper(), logging.INFO)),
        # Looked up for each line: whoever runs a command in his own process may close what was stderr then.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )


def register(app: typer.Typer) -> None:
    app.command()(serve)
