"""
The HTTP side for operators: `/metrics`, `/healthz` (the process answers), `/readyz` (clients would be served).

In threads of its own and only for GET: neither a slow scraper nor a busy event loop holds up the other. It has no
login, so it listens where only operators come: on loopback, unless told otherwise.
"""

import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from sqlguard.errors import NotConfigured
from sqlguard.settings import host_and_port

#: Seconds that a request may take to come.
_TIMEOUT = 5.0
Answer = Callable[[], tuple[HTTPStatus, bytes]]


class Health:
    """Serves from `start` to `stop`."""

    def __init__(self, listen: str, pages: dict[str, Answer]) -> None:
        """Raises NotConfigured when the address can't be used."""
        try:
            self._server = ThreadingHTTPServer(host_and_port(listen), _handler(pages))
        except OSError as fault:
            raise NotConfigured(
                f"can't listen on {listen}: {fault.strerror or fault}",
                hint="choose another address with --metrics-listen",
            ) from None
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="sqlguard-health", daemon=True
        )

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Safe to repeat."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


def _handler(pages: dict[str, Answer]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _TIMEOUT
        server_version = "sqlguard"
        sys_version = ""

        def do_GET(self) -> None:
            page = pages.get(self.path.partition("?")[0])
            try:
                status, body = page() if page else (HTTPStatus.NOT_FOUND, b"not found\n")
            except Exception as fault:
                status, body = HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(fault).__name__}\n".encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: what scrapers ask every few seconds is no news."""

    return Handler
