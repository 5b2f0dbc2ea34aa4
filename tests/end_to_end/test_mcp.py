"""The MCP door's tools with the SDK's own client: every one over stdio and streamable HTTP, against a real server."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import jsonschema
import pytest
from end_to_end.mcp_world import World, answer, client_of, refusal
from end_to_end.shop import TABLES
from mcp import Client
from mcp.shared.exceptions import MCPError
from servers import fresh_database

from sqlguard.embedded import EmbeddedServer

pytestmark = pytest.mark.anyio
EVERY_TYPE = """
SELECT 1::smallint, 9007199254740993::bigint, 1.10::numeric, 'NaN'::numeric, 'NaN'::float8, '-Infinity'::float4,
       1.5::float8, true, 'x'::text, '\\x00ff'::bytea, '2026-01-02 03:04:05+00'::timestamptz AT TIME ZONE 'UTC',
       'infinity'::timestamptz, '0044-03-15 BC'::date, '12:30'::time, '1 mon 2 days'::interval,
       'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'::uuid, '{"a": [1, 1e999]}'::jsonb - 'b', ARRAY[1.5, NULL]::numeric[],
       '192.168.0.1/24'::inet, '[1,3)'::int4range, '{[1,2),[5,6)}'::int4multirange, B'101', '(1,2)'::point,
       'a b'::tsvector, ROW(1, 'x'), NULL, '12.50'::money::text, '08:00:2b:01:02:03'::macaddr
"""


@pytest.fixture(scope="module")
def world(server: EmbeddedServer) -> Iterator[World]:
    with fresh_database(server) as database:
        yield World(database)


@pytest.fixture(scope="module")
async def shared_client(world: World) -> AsyncIterator[Client]:
    async with client_of("http", world) as client:
        yield client


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
