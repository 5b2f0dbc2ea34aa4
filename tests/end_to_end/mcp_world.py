"""A guarded shop behind the MCP door, and the SDK's own client of it over stdio and streamable HTTP."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any

import httpx2
import uvicorn
from end_to_end.shop import POLICY, SHOP, TABLES
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from servers import Database

from sqlguard.mcp_server.server import ERROR_META, Guard
from sqlguard.mcp_server.sessions import Door
from sqlguard.mcp_server.transports import http_app
from sqlguard.policy import parse_policy
from sqlguard.ports import free_port
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.migrate import migrate
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.postgres.tasks import list_tasks

TOKEN = "a token of the tests, long enough"


class World:
    """A guarded shop with the policy `support`."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.dsn = database.owner_dsn
        migrate(self.dsn)
        self.owner = database.connect(self.dsn)
        self.owner.execute(SHOP)
        guard_tables(self.owner, TABLES, mode="soft")
        apply_policy(self.owner, parse_policy(POLICY, "policy"))

    def value(self, sql: str, *params: Any) -> Any:
        row = self.owner.execute(sql.encode(), params or None).fetchone()
        return row and row[0]

    def living(self) -> set[str]:
        return {t.id for t in list_tasks(self.owner)}


@contextmanager
def over_stdio(world: World, **_: Any) -> Iterator[Any]:
    words = ["-m", "sqlguard", "mcp", "--policy", "support", "--agent", "tester", "--purpose", "a test"]
    environment = {**os.environ, "SQLGUARD_DSN": world.dsn}
    yield StdioServerParameters(command=sys.executable, args=words, env=environment)


@asynccontextmanager
async def serving(door: Door, *, token: str | None = TOKEN) -> AsyncIterator[str]:
    """The HTTP application in this process; gives its URL."""
    port = free_port()
    guard = Guard(door, shared=False)
    app = http_app(guard, host="127.0.0.1", token=TOKEN)
    if token is None:
        app = app._app  # type: ignore[attr-defined]  # for a client that can't show one
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def http_client(url: str, token: str = TOKEN, **options: Any) -> AsyncIterator[Client]:
    async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {token}"}) as http:
        async with Client(streamable_http_client(url, http_client=http), **options) as client:
            yield client


def door(world: World, **options: Any) -> Door:
    return Door(world.dsn, **{"policy": "support", "agent": "tester", "ttl": timedelta(minutes=5), **options})


@asynccontextmanager
async def client_of(kind: str, world: World) -> AsyncIterator[Client]:
    if kind == "http":
        async with serving(door(world)) as url, http_client(url) as client:
            yield client
    else:
        with over_stdio(world) as parameters:
            async with Client(parameters, mode="legacy" if kind == "stdio-handshake" else "auto") as client:
                yield client


def answer(result: Any) -> dict[str, Any]:
    assert not result.is_error, result.content
    found: dict[str, Any] = result.structured_content
    assert json.loads(result.content[0].text) == found
    return found


def refusal(result: Any) -> dict[str, Any]:
    """What a tool error says to programs; the same is in its text."""
    assert result.is_error
    found: dict[str, Any] = result.meta[ERROR_META]
    for part in (found["error"], found["hint"], found["sqlstate"]):
        assert part is None or part in result.content[0].text
    return found
