"""Sessions at the MCP door: each is a task, for as long as that lives, and nobody else comes in."""

import asyncio
import time
from collections.abc import Iterator
from datetime import timedelta

import httpx2
import pytest
from end_to_end.mcp_world import TOKEN, World, answer, client_of, door, http_client, refusal, serving
from servers import fresh_database

from sqlguard.embedded import EmbeddedServer
from sqlguard.mcp_server.sessions import Door
from sqlguard.postgres.tasks import end_task, open_task, renew_task
from sqlguard.postgres.undo import undo

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def world(server: EmbeddedServer) -> Iterator[World]:
    with fresh_database(server) as database:
        yield World(database)


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
    async with serving(door(world, ttl=timedelta(seconds=4))) as url:
        async with http_client(url) as renewed, http_client(url) as short:
            task = answer(await renewed.call_tool("status", {}))["task"]
            renew_task(world.owner, task, timedelta(minutes=5))
            answer(await short.call_tool("status", {}))
            await asyncio.sleep(5.5)
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
