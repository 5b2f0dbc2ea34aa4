"""The MCP door with the SDK's own client: every tool over stdio and streamable HTTP, against a real server."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any

import httpx2
import jsonschema
import pytest
import uvicorn
from end_to_end.shop import POLICY, SHOP, TABLES
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from servers import Database, fresh_database

from sqlguard.embedded import EmbeddedServer
from sqlguard.mcp_server.server import ERROR_META, Guard
from sqlguard.mcp_server.sessions import Door
from sqlguard.mcp_server.transports import http_app
from sqlguard.policy import parse_policy
from sqlguard.ports import free_port
from sqlguard.postgres import plans
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.migrate import migrate
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.postgres.tasks import end_task, list_tasks, open_task, renew_task
from sqlguard.postgres.undo import undo

pytestmark = pytest.mark.anyio
TOKEN = "a token of the tests, long enough"
EVERY_TYPE = """
SELECT 1::smallint, 9007199254740993::bigint, 1.10::numeric, 'NaN'::numeric, 'NaN'::float8, '-Infinity'::float4,
       1.5::float8, true, 'x'::text, '\\x00ff'::bytea, '2026-01-02 03:04:05+00'::timestamptz AT TIME ZONE 'UTC',
       'infinity'::timestamptz, '0044-03-15 BC'::date, '12:30'::time, '1 mon 2 days'::interval,
       'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'::uuid, '{"a": [1, 1e999]}'::jsonb - 'b', ARRAY[1.5, NULL]::numeric[],
       '192.168.0.1/24'::inet, '[1,3)'::int4range, '{[1,2),[5,6)}'::int4multirange, B'101', '(1,2)'::point,
       'a b'::tsvector, ROW(1, 'x'), NULL, '12.50'::money::text, '08:00:2b:01:02:03'::macaddr
"""


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


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def world(server: EmbeddedServer) -> Iterator[World]:
    with fresh_database(server) as database:
        yield World(database)


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


@pytest.fixture(scope="module")
async def shared_client(world: World) -> AsyncIterator[Client]:
    async with client_of("http", world) as client:
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


@pytest.mark.parametrize("kind", ["http", "stdio"])
async def test_every_tool_and_resource(world: World, kind: str) -> None:
    before = world.living()
    async with client_of(kind, world) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}

        async def call(name: str, **arguments: Any) -> dict[str, Any]:
            jsonschema.validate(arguments, tools[name].input_schema)
            found = answer(await client.call_tool(name, arguments))
            jsonschema.validate(found, tools[name].output_schema or {})
            used.add(name)
            return found

        used: set[str] = set()
        assert {t["table"] for t in (await call("list_tables"))["tables"]} == {f"public.{t}" for t in TABLES}
        orders = await call("describe_table", table="orders")
        assert orders["primary_key"] == ["id"]
        assert orders["foreign_keys"][0]["references"] == "public.customers"
        assert "public.items" in orders["referenced_by"]
        assert "deleted_at" not in {c["name"] for c in orders["columns"]}
        assert {c["name"] for c in orders["columns"] if c["may_update"]} == {"status", "note", "total"}
        found = await call("query", sql="SELECT id, name FROM customers WHERE id = $1", params=[42])
        assert found["rows"] == [[42, "Customer 42"]]
        sql = "DELETE FROM customers WHERE id = $1 RETURNING name"
        seen = await call("preview", sql=sql, params=[42])
        assert (seen["affected_rows"], seen["rowcount"]) == (15, 1)
        said = {"reason": "ticket 731", "confidence": 0.9, "idempotency_key": f"731-{kind}"}
        done = await call("write", sql=sql, params=[42], **said)
        assert (done["affected"], done["rows"]) == (seen["affected"], [["Customer 42"]])
        again = await call("write", sql=sql, params=[42], **said)
        assert (again["rows"], again["affected"], again["repeats"]) == ([["Customer 42"]], [], done["action"])
        assert again["note"].startswith(f"a repeat: action {done['action']} did this already")
        assert world.value("SELECT reason FROM sqlguard.action WHERE id = %s", done["action"]) == "ticket 731"
        assert (await call("undo", action=done["action"], preview=True))["rows"] == 15
        assert (await call("undo"))["rows"] == 15
        task = await call("status")
        assert 0 < task["seconds_left"] <= 3600
        assert world.living() - before == {task["task"]}
        assert used == set(tools) - {"ticket", "commit_plan"}
        resources = {r.uri for r in (await client.list_resources()).resources}
        assert resources == {"sqlguard://policy", "sqlguard://schema"}
        policy = (await client.read_resource("sqlguard://policy")).contents[0].text  # type: ignore[union-attr]
        assert "public.orders: read, insert, update (status, total, note), delete" in policy
        schema = (await client.read_resource("sqlguard://schema")).contents[0].text  # type: ignore[union-attr]
        assert "- (customer_id) references public.customers (id), on delete cascade" in schema
        one = (await client.read_resource("sqlguard://table/orders")).contents[0].text  # type: ignore[union-attr]
        assert json.loads(one) == orders
    assert world.living() == before  # the task went with the session
    assert world.value("SELECT count(*) FROM customers WHERE id = 42 AND deleted_at IS NULL") == 1


async def test_an_older_client_over_stdio(world: World) -> None:
    async with client_of("stdio-handshake", world) as client:
        assert answer(await client.call_tool("status", {}))["agent"] == "tester"


async def test_annotations_tell_reads_from_writes(world: World) -> None:
    async with client_of("http", world) as client:
        tools = (await client.list_tools()).tools
    hints = {t.name: t.annotations for t in tools}
    assert {n for n, a in hints.items() if a and a.read_only_hint} == set(hints) - {
        "write",
        "undo",
        "commit_plan",
    }
    assert all(a and a.open_world_hint is False for a in hints.values())
    assert hints["write"] is not None
    assert hints["write"].destructive_hint
    assert not {n for n in hints if "approve" in n}


@pytest.mark.parametrize(
    ("tool", "sql", "sqlstate", "says"),
    [
        ("query", "DELETE FROM orders WHERE id = 1", "SG002", "`write`"),
        ("query", "SELECT * FROM orders WHERE id = 1 FOR UPDATE", "SG002", "`write`"),
        ("query", "BEGIN", "SG002", "transaction of its own"),
        ("query", "SET statement_timeout = 0", "SG002", ""),
        ("query", "SELECT 1; SELECT 2", "SG002", "one statement"),
        ("query", "", "SG002", "only read"),
        ("query", "SELECT pg_sleep(1)", "SG002", ""),
        ("query", "SELECT nmae FROM orders", "42703", ""),
        ("query", "selec 1", "42601", ""),
        ("write", "SELECT 1", "SG002", "`query`"),
        ("write", "DROP TABLE orders", "SG002", ""),
        ("write", "DELETE FROM orders", "SG002", ""),
        ("write", "COMMIT", "SG002", ""),
        ("write", "UPDATE orders SET status = 'x' WHERE id > 5", "SG006", ""),
        ("preview", "TRUNCATE orders", "SG002", ""),
        ("write", "INSERT INTO staff (id, name) VALUES (1, 'x')", "23505", ""),
    ],
)
async def test_refusals_are_tool_errors_that_say_what_to_do(
    *, shared_client: Client, world: World, tool: str, sql: str, sqlstate: str, says: str
) -> None:
    before = world.value("SELECT sum(hashtext(o::text)) FROM orders o")
    arguments = {"sql": sql} | ({"reason": "a test"} if tool == "write" else {})
    found = refusal(await shared_client.call_tool(tool, arguments))
    assert found["sqlstate"] == sqlstate
    if sqlstate.startswith("SG"):
        assert found["hint"]
    assert says in f"{found['error']} {found['hint']}"
    assert world.value("SELECT sum(hashtext(o::text)) FROM orders o") == before


async def test_arguments_are_checked(shared_client: Client) -> None:
    for tool, arguments in (
        ("write", {"sql": "DELETE FROM orders WHERE id = 1"}),
        ("write", {"sql": "DELETE FROM orders WHERE id = 1", "reason": "x", "confidence": 3}),
        ("query", {"sql": "SELECT 1", "max_rows": 0}),
        ("describe_table", {"table": "pg_authid"}),
        ("describe_table", {"table": "sqlguard.action"}),
        ("approve", {"plan": "1"}),
    ):
        try:
            assert (await shared_client.call_tool(tool, arguments)).is_error, tool
        except MCPError:
            assert tool == "approve"


async def test_every_type_is_json(shared_client: Client) -> None:
    found = answer(await shared_client.call_tool("query", {"sql": EVERY_TYPE.replace("1e999", "1e3")}))
    (row,) = found["rows"]
    assert json.dumps(row, allow_nan=False)
    assert row[:13] == [
        1,
        "9007199254740993",
        "1.10",
        "NaN",
        "NaN",
        "-Infinity",
        1.5,
        True,
        "x",
        "\\x00ff",
        "2026-01-02T03:04:05",
        "infinity",
        "0044-03-15 BC",
    ]
    assert row[13:16] == ["12:30:00", "1 mon 2 days", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"]
    assert row[16:22] == [{"a": [1, 1000]}, ["1.5", None], "192.168.0.1/24", "[1,3)", "{[1,2),[5,6)}", "101"]


async def test_parameters(shared_client: Client) -> None:
    sql = "SELECT $1::int + 1, $2::text, $3::jsonb, $4::int[], $5::bool, 'a%sb' LIKE 'a%'"
    values = [1, "it's", {"a": [1]}, [1, 2], None]
    found = answer(await shared_client.call_tool("query", {"sql": sql, "params": values}))
    assert found["rows"] == [[2, "it's", {"a": [1]}, [1, 2], None, True]]


async def test_long_results_are_cut_and_counted(shared_client: Client) -> None:
    sql = "SELECT n FROM generate_series(1, 5000) n"
    found = answer(await shared_client.call_tool("query", {"sql": sql, "max_rows": 7}))
    assert (len(found["rows"]), found["total_rows"], found["truncated"]) == (7, 5000, True)
    assert found["note"].startswith("CUT: these are the first 7 of 5,000 rows")
    wide = answer(await shared_client.call_tool("query", {"sql": "SELECT repeat('x', 50000)"}))
    assert (wide["total_rows"], wide["truncated"]) == (1, True)
    assert wide["rows"][0][0].endswith("… (CUT: 50,000 characters in all)")
    many = "SELECT repeat('x', 9000) FROM generate_series(1, 100)"
    found = answer(await shared_client.call_tool("query", {"sql": many}))
    assert 0 < len(found["rows"]) < 100
    assert found["total_rows"] == 100
    whole = answer(await shared_client.call_tool("query", {"sql": "SELECT 1"}))
    assert (whole["truncated"], whole["note"]) == (False, None)


async def test_sessions_are_tasks_of_their_own_at_once(world: World) -> None:
    before = world.living()
    async with serving(door(world)) as url:

        async def one(n: int) -> str:
            async with http_client(url) as client:
                found = answer(await client.call_tool("status", {}))
                for k in range(3):
                    sql = "UPDATE orders SET note = $1 WHERE id = $2"
                    said = {
                        "sql": sql,
                        "params": [f"{n}", 200 + n],
                        "reason": "at once",
                        "idempotency_key": f"{n}:{k}",
                    }
                    assert answer(await client.call_tool("write", said))["rowcount"] == 1
                # Calls at once in one session wait for each other.
                counts = await asyncio.gather(
                    *(client.call_tool("query", {"sql": f"SELECT {k}"}) for k in range(4))
                )
                assert [answer(c)["rows"] for c in counts] == [[[k]] for k in range(4)]
                other = world.value(
                    "SELECT id FROM sqlguard.action WHERE task_id <> %s LIMIT 1", found["task"]
                )
                if other is not None:
                    taken = refusal(await client.call_tool("undo", {"action": other}))
                    assert "not of this task" in taken["error"]
                assert answer(await client.call_tool("undo", {}))["rows"] == 3
                return str(found["task"])

        found = await asyncio.gather(*(one(n) for n in range(4)))
        assert len(set(found)) == 4
    assert world.living() == before


async def test_cancelling_a_call_cancels_the_statement(world: World) -> None:
    slow = "SELECT count(*) FROM generate_series(1, 20000) a, generate_series(1, 20000) b"
    async with client_of("http", world) as client:
        answer(await client.call_tool("query", {"sql": "SELECT 1"}))
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.call_tool("query", {"sql": slow}), 0.5)
        found = answer(await client.call_tool("query", {"sql": "SELECT 2"}))
        assert found["rows"] == [[2]]
        assert time.monotonic() - began < 4
    running = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE %s AND state = 'active' AND pid <> pg_backend_pid()"
    assert world.value(running, "%20000) b%") == 0


async def test_a_task_that_is_ended_ends_its_session(world: World) -> None:
    async with client_of("http", world) as client:
        task = answer(await client.call_tool("status", {}))["task"]
        end_task(world.owner, task, "the operator said so")
        for _ in range(2):
            found = refusal(await client.call_tool("query", {"sql": "SELECT 1"}))
            assert found["sqlstate"] == "SG004"
            assert found["hint"]


async def test_a_session_ends_with_its_time_and_lives_on_when_renewed(world: World) -> None:
    async with serving(door(world, ttl=timedelta(seconds=2))) as url:
        async with http_client(url) as short, http_client(url) as renewed:
            task = answer(await renewed.call_tool("status", {}))["task"]
            answer(await short.call_tool("status", {}))
            renew_task(world.owner, task, timedelta(minutes=5))
            await asyncio.sleep(3.5)
            assert refusal(await short.call_tool("query", {"sql": "SELECT 1"}))["sqlstate"] == "SG004"
            assert answer(await renewed.call_tool("query", {"sql": "SELECT 1"}))["rows"] == [[1]]
            assert task in world.living()


async def test_a_lost_session_is_opened_again(world: World) -> None:
    async with client_of("http", world) as client:
        task = answer(await client.call_tool("status", {}))["task"]
        mine = "SELECT role FROM sqlguard.lease WHERE task_id = %s"
        world.database.execute(
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename IN ({mine})", [task]
        )
        assert refusal(await client.call_tool("query", {"sql": "SELECT 1"}))["sqlstate"] == "08001"
        assert answer(await client.call_tool("status", {}))["task"] == task


async def test_with_a_tasks_own_dsn_all_clients_are_that_task(world: World) -> None:
    opened = open_task(world.owner, agent="tester", policy="support", ttl=timedelta(minutes=5))
    own = Door(world.database.dsn_for(opened.role, opened.password), own_task=True)
    try:
        async with serving(own) as url, http_client(url) as one, http_client(url, mode="legacy") as other:
            for client in (one, other):
                found = answer(await client.call_tool("status", {}))
                assert (found["task"], found["can_undo"]) == (opened.task.id, False)
            refused = refusal(await one.call_tool("undo", {}))
            assert refused["sqlstate"] == "58000"
            assert "sqlguard undo" in refused["hint"]
            end_task(world.owner, opened.task.id, "over")
            assert refusal(await one.call_tool("query", {"sql": "SELECT 1"}))["sqlstate"] == "SG004"
    finally:
        undo(world.owner, task=opened.task.id)


async def test_http_lets_nobody_in_without_the_token_or_from_elsewhere(world: World) -> None:
    hello = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    accept = {"Accept": "application/json, text/event-stream"}
    async with serving(door(world)) as url, httpx2.AsyncClient() as http:
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": f"Bearer {TOKEN}", "Host": "evil.example"}, 421),
            ({"Authorization": f"Bearer {TOKEN}", "Origin": "http://evil.example"}, 403),
        ):
            got = await http.post(url, json=hello, headers=accept | headers)
            assert got.status_code == status, (headers, got.text)
        assert not world.value("SELECT count(*) FROM sqlguard.task WHERE agent = 'nobody'")


CAREFUL = """
name = "careful"

[tables."public.*"]
select = true
update = true
delete = "soft"

[[gates]]
when = { rows = ">3" }
then = "approve"
"""


def approve(world: World, plan: int) -> None:
    """A person's decision, with a login of their own."""
    name = f"sg_dana_{plan}"
    world.database.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'secret' IN ROLE sqlguard_approver")
    with world.database.connect(world.database.dsn_for(name, "secret")) as dana:
        plans.approve(dana, plan, plans.show(dana, plan).document["digest"])


@pytest.mark.parametrize("how", ["commit_plan", "write"])
async def test_a_plan_that_a_person_approves(world: World, how: str) -> None:
    apply_policy(world.owner, parse_policy(CAREFUL, "careful"))
    customer = 70 if how == "write" else 71
    said = {"sql": "DELETE FROM customers WHERE id = $1", "params": [customer]}
    living = f"SELECT count(*) FROM orders WHERE customer_id = {customer} AND deleted_at IS NULL"
    async with serving(door(world, policy="careful")) as url, http_client(url) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        stopped = refusal(await client.call_tool("write", said | {"reason": "asked for"}))
        assert stopped["sqlstate"] == "SG001"
        assert "sqlguard approve" in stopped["hint"]
        plan = int(stopped["hint"].split("sqlguard approve ")[1].split("`")[0])
        ticket = answer(await client.call_tool("ticket", {"plan": plan}))
        jsonschema.validate(ticket, tools["ticket"].output_schema or {})
        assert (ticket["state"], ticket["affected_rows"], ticket["approved_by"]) == ("open", 15, [])
        early = refusal(await client.call_tool("commit_plan", {"plan": plan}))
        assert early["sqlstate"] == "SG001"
        assert refusal(await client.call_tool("write", said | {"reason": "now!"}))["sqlstate"] == "SG001"
        assert world.value(living) == 4
        approve(world, plan)
        assert answer(await client.call_tool("ticket", {"plan": plan}))["state"] == "approved"
        if how == "write":
            done = answer(await client.call_tool("write", said | {"reason": "asked for"}))
        else:
            done = answer(await client.call_tool("commit_plan", {"plan": plan}))
            jsonschema.validate(done, tools["commit_plan"].output_schema or {})
        assert done["committed"]
        assert world.value(living) == 0
        again = answer(await client.call_tool("ticket", {"plan": plan}))
        assert again["state"] == "committed"
        assert refusal(await client.call_tool("commit_plan", {"plan": plan}))["sqlstate"] == "SG002"
        assert refusal(await client.call_tool("ticket", {"plan": 987654}))["sqlstate"] == "SG002"
        assert answer(await client.call_tool("undo", {}))["rows"] == 15


async def test_an_approved_plan_whose_rows_have_changed(world: World) -> None:
    apply_policy(world.owner, parse_policy(CAREFUL, "careful"))
    async with serving(door(world, policy="careful")) as url, http_client(url) as client:
        seen = answer(await client.call_tool("preview", {"sql": "DELETE FROM customers WHERE id = 72"}))
        assert seen["plan"]
        assert seen["report"]
        approve(world, seen["plan"])
        world.owner.execute("UPDATE orders SET note = 'changed since' WHERE customer_id = 72")
        drifted = refusal(await client.call_tool("commit_plan", {"plan": seen["plan"]}))
        assert drifted["sqlstate"] == "SG003"
        assert world.value("SELECT count(*) FROM customers WHERE id = 72 AND deleted_at IS NULL") == 1


# The official inspector ---------------------------------------------------------------------------------------

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
