"""Composition root: the only module that knows every part and joins them for `sqlguard serve`."""

import asyncio
import gc
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus

import structlog
import uvloop

from sqlguard.errors import NotConfigured, SqlguardError
from sqlguard.janitor import Janitor
from sqlguard.postgres.catalog_reader import read_catalog
from sqlguard.postgres.connect import connect
from sqlguard.postgres.control import not_migrated
from sqlguard.postgres.reconcile import Reconciler
from sqlguard.postgres.replica import check_replica
from sqlguard.proxy import workers
from sqlguard.proxy.arrivals import rows, trusted_networks
from sqlguard.proxy.census import Census
from sqlguard.proxy.harbour import places
from sqlguard.proxy.health import Answer, Health
from sqlguard.proxy.listeners import remove, unix_socket
from sqlguard.proxy.operator import Operator
from sqlguard.proxy.server import Server
from sqlguard.proxy.siblings import Siblings
from sqlguard.proxy.sightings import Sightings
from sqlguard.proxy.supervisor import notify
from sqlguard.proxy.tracing import tracing
from sqlguard.settings import Settings, host_and_port

log = structlog.get_logger()
#: Sessions make little that needs collecting; Python's default would look every 700 objects.
_COLLECT_EVERY = 20_000


def check(settings: Settings) -> dict[str, object]:
    """Return what `serve` would start with; raises the error that it would stop with."""
    assert settings.dsn is not None  # noqa: S101 (the command line has looked)
    _fits(settings)
    with connect(settings.dsn) as conn:
        if conn.execute("SELECT to_regclass('sqlguard.task')").fetchone() == (None,):
            raise not_migrated()
        if settings.replica is not None:
            check_replica(conn, settings.replica)
        catalog = read_catalog(conn)
        return {
            "postgresql": conn.info.parameter_status("server_version"),
            "tables": len(catalog.tables),
            "guarded_tables": len(list(catalog.guarded())),
            "listen": settings.listen,
        }


def _fits(settings: Settings) -> None:
    """Raises NotConfigured for what can be told without the database."""
    Server.tls_contexts(settings)
    trusted_networks(settings)
    places(settings)


def serve(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM; open transactions get their time, then sessions are told and closed."""
    assert settings.dsn is not None  # noqa: S101 (the command line has looked)
    _fits(settings)  # before there are workers, which would be started again and again
    with connect(settings.dsn) as conn:
        if conn.execute("SELECT to_regclass('sqlguard.task')").fetchone() == (None,):
            raise not_migrated()
        # What a crash left without an end is settled before anything new begins.
        reconciler = Reconciler()
        settled = reconciler.run(conn)
    if settled:
        log.info("reconciled", actions=len(settled))
    with _unix_socket(settings) as listener:
        if settings.workers > 1:
            # Before anything has a thread or a connection: a fork takes neither along.
            siblings = Siblings(settings.workers, Census(settings.workers, rows(settings)))
            workers.run(
                settings.workers,
                lambda number: _work(settings, number, listener, siblings),
                Janitor(settings.dsn, reconciler=reconciler),
            )
        else:
            with Janitor(settings.dsn, reconciler=reconciler):
                _work(settings, 0, listener)


@contextmanager
def _unix_socket(settings: Settings) -> Iterator[socket.socket | None]:
    if settings.unix_socket is None:
        yield None
        return
    port = host_and_port(settings.listen)[1]
    listener = unix_socket(settings.unix_socket, port)
    try:
        yield listener
    finally:
        remove(listener, settings.unix_socket, port)


def _work(
    settings: Settings, number: int, listener: socket.socket | None, siblings: Siblings | None = None
) -> None:
    """Be one worker: everything but the janitor."""
    assert settings.dsn is not None  # noqa: S101 (`serve` has looked)
    operator = Operator(settings.dsn, catalog_check_seconds=settings.catalog_check_seconds, tracing=tracing())
    operator.start()
    sightings = _sightings(settings)
    # What is there now stays: the collector need not walk over the catalog and the lists again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_EVERY)
    try:
        with suppress(KeyboardInterrupt):
            server = Server(settings, operator, sightings, None if siblings is None else (siblings, number))
            uvloop.run(_serve(settings, operator, server, number, listener))
    finally:
        if sightings is not None:
            sightings.stop()
        operator.stop()


def _sightings(settings: Settings) -> Sightings | None:
    """Return what counts for `--observe`, started. Raises NotConfigured."""
    if not settings.observe:
        return None
    assert settings.dsn is not None  # noqa: S101 (`serve` has looked)
    sightings = Sightings(settings.dsn, settings.observe_policy, settings.observe_roles)
    sightings.start()
    return sightings


async def _serve(
    settings: Settings,
    operator: Operator,
    server: Server,
    number: int,
    listener: socket.socket | None,
) -> None:
    health = _health(settings, operator, server, number)
    await server.start(listener)
    if health is not None:
        health.start()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop.set)

    def reload() -> None:
        server.reload()
        operator.look_again()

    loop.add_signal_handler(signal.SIGHUP, reload)
    notify("READY=1")
    await stop.wait()
    notify("STOPPING=1")
    log.info("stopping", sessions=server.sessions)
    stop.clear()  # a second signal cuts the waiting short
    stopping = loop.create_task(server.stop(settings.shutdown_grace))
    impatient = loop.create_task(stop.wait())
    await asyncio.wait({stopping, impatient}, return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        stopping.cancel()
        await server.stop()
    impatient.cancel()
    if health is not None:
        await loop.run_in_executor(None, health.stop)


def _health(settings: Settings, operator: Operator, server: Server, number: int) -> Health | None:
    """Return the HTTP side of a worker: the first listens where it is told, the others on the ports behind."""
    if settings.metrics_listen is None:
        return None
    host, port = host_and_port(settings.metrics_listen)
    metrics, writer = operator.metrics, operator.writer
    metrics.gauges["journal_waiting"] = (
        "intents and events that wait to be written",
        None,
        lambda: {"": writer.waiting},
    )
    metrics.gauges["journal_lag_seconds"] = (
        "age of the group that is being written",
        None,
        lambda: {"": writer.lag},
    )
    metrics.gauges["leases"] = ("leases by state", "state", operator.leases)
    metrics.counters["decision_lookups"] = (
        "decisions that were remembered (hit) and made (miss)",
        "result",
        operator.lookups,
    )

    def ready() -> tuple[HTTPStatus, bytes]:
        if server.is_stopping:
            return HTTPStatus.SERVICE_UNAVAILABLE, b"stopping\n"
        try:
            operator.leases()
        except (SqlguardError, TimeoutError):
            return HTTPStatus.SERVICE_UNAVAILABLE, b"PostgreSQL does not answer\n"
        return HTTPStatus.OK, b"ready\n"

    pages: dict[str, Answer] = {
        "/metrics": lambda: (HTTPStatus.OK, metrics.text()),
        "/healthz": lambda: (HTTPStatus.OK, b"ok\n"),
        "/readyz": ready,
    }
    if port + number > 65535:  # noqa: PLR2004 (the largest TCP port)
        raise NotConfigured("there are not enough ports behind --metrics-listen", hint="choose a lower one")
    return Health(f"{host}:{port + number}" if ":" not in host else f"[{host}]:{port + number}", pages)
