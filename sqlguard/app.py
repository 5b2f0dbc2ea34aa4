"""Composition root: the only module that knows every part and joins them for `sqlguard serve`."""

import asyncio
import gc
import signal
from contextlib import suppress

import structlog
import uvloop

from sqlguard.janitor import Janitor
from sqlguard.postgres.catalog_reader import read_catalog
from sqlguard.postgres.connect import connect
from sqlguard.postgres.control import not_migrated
from sqlguard.postgres.reconcile import reconcile
from sqlguard.proxy.operator import Operator
from sqlguard.proxy.server import Server
from sqlguard.proxy.sightings import Sightings
from sqlguard.settings import Settings

log = structlog.get_logger()
#: Sessions make little that needs collecting; Python's default would look every 700 objects.
_COLLECT_EVERY = 20_000


def check(settings: Settings) -> dict[str, object]:
    """Return what `serve` would start with; raises the error that it would stop with."""
    assert settings.dsn is not None  # noqa: S101 (the command line has looked)
    Server.tls_contexts(settings)
    with connect(settings.dsn) as conn:
        if conn.execute("SELECT to_regclass('sqlguard.task')").fetchone() == (None,):
            raise not_migrated()
        catalog = read_catalog(conn)
        return {
            "postgresql": conn.info.parameter_status("server_version"),
            "tables": len(catalog.tables),
            "guarded_tables": len(list(catalog.guarded())),
            "listen": settings.listen,
        }


def serve(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM; open sessions are told and closed then."""
    assert settings.dsn is not None  # noqa: S101 (the command line has looked)
    operator = Operator(settings.dsn, catalog_check_seconds=settings.catalog_check_seconds)
    operator.start()
    with connect(settings.dsn) as conn:
        # What a crash left without an end is settled before anything new begins.
        settled = reconcile(conn)
    if settled:
        log.info("reconciled", actions=len(settled))
    sightings = _sightings(settings)
    janitor = Janitor(settings.dsn)
    janitor.start()
    # What is there now stays: the collector need not walk over the catalog and the lists again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_EVERY)
    try:
        with suppress(KeyboardInterrupt):
            uvloop.run(_serve(settings, operator, sightings))
    finally:
        janitor.stop()
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


async def _serve(settings: Settings, operator: Operator, sightings: Sightings | None) -> None:
    server = Server(settings, operator, sightings)
    await server.start()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
    log.info("stopping", sessions=server.sessions)
    await server.stop()
