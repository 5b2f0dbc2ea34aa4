"""The proxy in a thread of the test process: for hundreds of cases, where a process each would cost minutes."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sqlguard.ports import free_port
from sqlguard.proxy.operator import Operator
from sqlguard.proxy.server import Server
from sqlguard.settings import Settings


@contextmanager
def proxied(dsn: str, *, catalog_check_seconds: float = 0.2) -> Iterator[int]:
    """Serve the operator's *dsn* and yield the port; everything is closed behind the block."""
    port = free_port()
    settings = Settings(
        dsn=dsn,
        listen=f"127.0.0.1:{port}",
        backend_tls="disable",
        catalog_check_seconds=catalog_check_seconds,
    )
    operator = Operator(dsn, catalog_check_seconds=catalog_check_seconds)
    operator.start()
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    stop = asyncio.Event()

    async def run() -> None:
        server = Server(settings, operator)
        await server.start()
        ready.set()
        await stop.wait()
        await server.stop()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()), name="proxy")
    thread.start()
    try:
        assert ready.wait(20)
        yield port
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=20)
        loop.close()
        operator.stop()
