"""The proxy in a thread of the test process: for hundreds of cases, where a process each would cost minutes."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
import uvloop

from sqlguard.ports import free_port
from sqlguard.proxy.operator import Operator
from sqlguard.proxy.server import Server
from sqlguard.proxy.sightings import Sightings
from sqlguard.proxy.tracing import Tracing
from sqlguard.settings import Settings

T = TypeVar("T")
# Tracebacks with all local variables take seconds to print.
structlog.configure(
    processors=[
        structlog.processors.add_log_level,
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)


@dataclass
class Proxy:
    """A running proxy; look into it only through `call`, on its own loop."""

    port: int
    server: Server
    operator: Operator
    loop: asyncio.AbstractEventLoop

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run_coroutine_threadsafe(work(), self.loop).result(20)

    @property
    def sessions(self) -> int:
        async def count() -> int:
            return self.server.sessions

        return self.call(count)


@contextmanager
def proxy(
    dsn: str, sightings: Sightings | None = None, tracing: Tracing | None = None, **settings: Any
) -> Iterator[Proxy]:
    """Serve the operator's *dsn*; everything is closed behind the block."""
    port = free_port()
    given: dict[str, Any] = {
        "dsn": dsn,
        "listen": f"127.0.0.1:{port}",
        "backend_tls": "disable",
        "catalog_check_seconds": 0.2,
        **settings,
    }
    configured = Settings(**given)
    operator = Operator(dsn, catalog_check_seconds=configured.catalog_check_seconds, tracing=tracing)
    operator.start()
    loop = uvloop.new_event_loop()
    ready = threading.Event()
    stop = asyncio.Event()
    made: list[Server] = []
    faults: list[BaseException] = []

    async def run() -> None:
        server = Server(configured, operator, sightings)
        try:
            await server.start()
            made.append(server)
            ready.set()
            await stop.wait()
        except BaseException as fault:
            faults.append(fault)
            ready.set()
        finally:
            # A loop with a server that still listens can't be closed: it would wait for ever.
            await server.stop()
            # As `asyncio.run` does it: what waits for something that does not come any more.
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()), name="proxy")
    thread.start()
    try:
        assert ready.wait(20)
        if faults:
            raise faults[0]
        yield Proxy(port, made[0], operator, loop)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=20)
        operator.stop()
        loop.close()


@contextmanager
def proxied(dsn: str, **settings: Any) -> Iterator[int]:
    """Serve the operator's *dsn* and yield the port."""
    with proxy(dsn, **settings) as running:
        yield running.port
