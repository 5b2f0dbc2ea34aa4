"""
stdio for a client that starts this process, streamable HTTP for several clients on this machine.

Over HTTP any process of any user of the machine could knock, and so could a web page in a browser. So the server
listens on loopback only, wants a bearer token, and holds Host and Origin against a list (DNS rebinding).
"""

import hmac

import anyio
import uvicorn
from mcp.server.transport_security import TransportSecuritySettings
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from sqlguard.errors import NotConfigured
from sqlguard.mcp_server.server import Guard

PATH = "/mcp"
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
#: Shorter ones can be guessed.
SHORTEST_TOKEN = 16


class BearerToken:
    """Lets a request in that shows the token, and says nothing to others but how to show one."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        if len(token) < SHORTEST_TOKEN:
            raise NotConfigured(
                f"a token has at least {SHORTEST_TOKEN} characters",
                hint="set SQLGUARD_MCP_TOKEN to a random one, or leave it out to get one",
            )
        self._app = app
        self._expected = b"Bearer " + token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = Headers(scope=scope).get("authorization", "").encode("utf-8", "replace")
            if not hmac.compare_digest(given, self._expected):
                refused = JSONResponse(
                    {"error": "a bearer token is needed"}, 401, headers={"WWW-Authenticate": "Bearer"}
                )
                await refused(scope, receive, send)
                return
        await self._app(scope, receive, send)


def http_app(guard: Guard, *, host: str, token: str, allowed_hosts: tuple[str, ...] = ()) -> ASGIApp:
    """Return the ASGI application; raises NotConfigured for an address that others could reach."""
    if host not in LOOPBACK:
        raise NotConfigured(
            f"`{host}` can be reached from outside of this machine",
            hint="listen on 127.0.0.1; for others put a reverse proxy with TLS in front, and name it with --allow-host",
        )
    names = ["127.0.0.1:*", "localhost:*", "[::1]:*", *allowed_hosts]
    origins = ["http://127.0.0.1:*", "http://localhost:*", "http://[::1]:*"]
    security = TransportSecuritySettings(
        enable_dns_rebinding_protection=True,
        allowed_hosts=names,
        allowed_origins=[*origins, *(f"https://{name}" for name in allowed_hosts)],
    )
    app = guard.server.streamable_http_app(
        streamable_http_path=PATH,
        transport_security=security,
        host=host,
        max_sessions=guard.most_sessions,
    )
    return BearerToken(app, token)


def run_http(guard: Guard, *, host: str, port: int, token: str, allowed_hosts: tuple[str, ...] = ()) -> None:
    """Serve until the process is told to stop; the tasks of open sessions end then."""
    app = http_app(guard, host=host, token=token, allowed_hosts=allowed_hosts)
    config = uvicorn.Config(
        app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=2, access_log=False
    )
    anyio.run(uvicorn.Server(config).serve)


def run_stdio(guard: Guard) -> None:
    """Serve the client that started this process, until it closes our input."""
    anyio.run(guard.server.run_stdio_async)
