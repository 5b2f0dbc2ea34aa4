"""The MCP door as the official inspector sees it: every tool, by the schema that it declares."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from end_to_end.mcp_world import World, door, serving
from end_to_end.shop import TABLES
from servers import fresh_database

from sqlguard.embedded import EmbeddedServer
from sqlguard.mcp_server.server import ERROR_META

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def world(server: EmbeddedServer) -> Iterator[World]:
    with fresh_database(server) as database:
        yield World(database)


#: The newest one that runs on Node 20; it can't send headers, so its server here asks for no token.
INSPECTOR = "@modelcontextprotocol/inspector-cli@0.15.0"


@pytest.fixture(scope="session")
def inspector(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("inspector")
    (folder / "package.json").write_text('{"private": true}')
    words = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", INSPECTOR]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=180, check=False)
    if done.returncode != 0:
        pytest.skip(f"the inspector could not be installed: {done.stderr.strip()[-200:]}")
    return [node, str(folder / "node_modules/@modelcontextprotocol/inspector-cli/build/index.js")]


async def inspect(inspector: list[str], *words: str) -> Any:
    process = await asyncio.create_subprocess_exec(
        *inspector, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    return json.loads(out)


@pytest.mark.slow
async def test_the_inspector_drives_every_tool(world: World, inspector: list[str]) -> None:
    async with serving(door(world), token=None) as url:
        tools = {t["name"]: t for t in (await inspect(inspector, url, "--method", "tools/list"))["tools"]}

        async def call(name: str, **arguments: str) -> Any:
            words = [word for k, v in arguments.items() for word in ("--tool-arg", f"{k}={v}")]
            found = await inspect(inspector, url, "--method", "tools/call", "--tool-name", name, *words)
            if not found.get("isError"):
                jsonschema.validate(found["structuredContent"], tools[name]["outputSchema"])
            used.add(name)
            return found

        used: set[str] = set()
        assert (await call("list_tables"))["structuredContent"]["total"] == len(TABLES)
        assert (await call("describe_table", table="items"))["structuredContent"]["primary_key"] == ["id"]
        read = await call(
            "query", sql="SELECT name FROM customers WHERE id = $1", params="[80]", max_rows="1"
        )
        assert read["structuredContent"]["rows"] == [["Customer 80"]]
        sql = "UPDATE orders SET note = 'seen' WHERE id = 80"
        seen = await call("preview", sql=sql)
        assert seen["structuredContent"]["affected_rows"] == 1
        done = await call("write", sql=sql, reason="inspected", confidence="0.9", idempotency_key="i-1")
        assert done["structuredContent"]["committed"]
        assert (await call("undo", preview="true"))["structuredContent"][
            "rows"
        ] == 0  # a new session, a new task
        assert (await call("status"))["structuredContent"]["policy"] == "support"
        plan = str(seen["structuredContent"]["plan"])
        assert (await call("ticket", plan=plan))["structuredContent"]["state"] == "open"
        assert (await call("commit_plan", plan=plan))["isError"]
        assert used == set(tools)
        refused = await call("write", sql="DROP TABLE orders", reason="inspected")
        assert refused["_meta"][ERROR_META]["sqlstate"] == "SG002"
        page = await inspect(inspector, url, "--method", "resources/read", "--uri", "sqlguard://policy")
        assert "Policy `support`" in page["contents"][0]["text"]
