"""asyncpg through the proxy: binary formats, its own statement cache, cursors, pools."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import pytest
from end_to_end.wired import Agent, Wired

Work = Callable[[Any], Awaitable[None]]


def run(agent: Agent, work: Work) -> None:
    async def inside() -> None:
        conn = await asyncpg.connect(**agent.keywords, timeout=20)
        try:
            await work(conn)
        finally:
            await conn.close(timeout=10)

    asyncio.run(inside())


def test_fetching_with_and_without_parameters(agent: Agent) -> None:
    async def work(conn: Any) -> None:
        assert await conn.fetchval("SELECT count(*) FROM customers") == 600
        row = await conn.fetchrow("SELECT id, name, joined_on FROM customers WHERE id = $1", 5)
        assert (row["id"], row["name"]) == (5, "Customer 5")
        assert await conn.fetchval("SELECT $1::int[]", [1, None, 3]) == [1, None, 3]
        assert await conn.fetchval("SELECT $1::numeric", None) is None
        assert (await conn.execute("SELECT 1")) == "SELECT 1"

    run(agent, work)


def test_a_delete_with_returning(wired_world: Wired, agent: Agent) -> None:
    async def work(conn: Any) -> None:
        deleted = await conn.fetch("DELETE FROM customers WHERE id = $1 RETURNING id, name", 70)
        assert [tuple(r) for r in deleted] == [(70, "Customer 70")]
        assert await conn.execute("DELETE FROM customers WHERE id = $1", 71) == "DELETE 1"
        assert await conn.execute("DELETE FROM customers WHERE id = 72") == "DELETE 1"
        assert await conn.fetchval("SELECT count(*) FROM customers WHERE id BETWEEN 70 AND 72") == 0

    run(agent, work)
    assert wired_world.outcomes(agent) == ["committed"] * 3


def test_prepared_statements_and_their_description(agent: Agent) -> None:
    async def work(conn: Any) -> None:
        statement = await conn.prepare("DELETE FROM customers WHERE id = $1 RETURNING id, name")
        assert [p.name for p in statement.get_parameters()] == ["int4"]
        assert [(a.name, a.type.name) for a in statement.get_attributes()] == [
            ("id", "int4"),
            ("name", "text"),
        ]
        assert [tuple(r) for r in await statement.fetch(80)] == [(80, "Customer 80")]
        assert statement.get_statusmsg() == "DELETE 1"
        assert await statement.fetchval(81) == 81
        assert await statement.fetch(81) == []
        assert statement.get_statusmsg() == "DELETE 0"

    run(agent, work)


def test_transactions_and_savepoints(wired_world: Wired, agent: Agent) -> None:
    async def work(conn: Any) -> None:
        async with conn.transaction():
            await conn.execute("UPDATE orders SET note = $1 WHERE id = 40", "kept")
            with pytest.raises(asyncpg.PostgresError) as caught:
                async with conn.transaction():
                    await conn.execute("UPDATE orders SET note = $1 WHERE id = 41", "lost")
                    await conn.execute("TRUNCATE orders")
            assert caught.value.sqlstate == "SG002"
        with pytest.raises(ZeroDivisionError):
            async with conn.transaction():
                await conn.execute("UPDATE orders SET note = $1 WHERE id = 42", "lost")
                _ = 1 / 0
        async with conn.transaction(isolation="serializable", readonly=True):
            assert await conn.fetchval("SELECT 1") == 1
            with pytest.raises(asyncpg.PostgresError):
                await conn.execute("UPDATE orders SET note = $1 WHERE id = 43", "lost")

    run(agent, work)
    found = wired_world.owner.execute(
        "SELECT id, note FROM orders WHERE id BETWEEN 40 AND 43 ORDER BY id"
    ).fetchall()
    assert found == [(40, "kept"), (41, None), (42, None), (43, None)]
    assert wired_world.outcomes(agent) == [
        "committed",
        "rolled_back",
        "refused",
        "rolled_back",
        "rolled_back",
    ]


def test_cursors(agent: Agent) -> None:
    async def work(conn: Any) -> None:
        async with conn.transaction():
            seen = [r["id"] async for r in conn.cursor("SELECT id FROM orders ORDER BY id", prefetch=100)]
            assert seen == list(range(1, 2401))
            cursor = await conn.cursor("SELECT id FROM orders WHERE id > $1 ORDER BY id", 10)
            await cursor.forward(5)
            assert [r["id"] for r in await cursor.fetch(3)] == [16, 17, 18]

    run(agent, work)


def test_copy_from_the_server(agent: Agent) -> None:
    async def work(conn: Any) -> None:
        chunks: list[bytes] = []

        async def take(data: bytes) -> None:
            chunks.append(data)

        tag = await conn.copy_from_query(
            "SELECT id, status FROM orders ORDER BY id", output=take, format="csv"
        )
        assert tag == "COPY 2400"
        assert b"".join(chunks).count(b"\n") == 2400
        with pytest.raises(asyncpg.PostgresError) as caught:
            await conn.copy_records_to_table("plain", records=[(1, "x")], columns=["id", "deleted_at"])
        assert caught.value.sqlstate == "SG002"
        assert await conn.fetchval("SELECT 1") == 1

    run(agent, work)


def test_executemany(wired_world: Wired, agent: Agent) -> None:
    async def work(conn: Any) -> None:
        await conn.executemany("INSERT INTO plain (id, t) VALUES ($1, $2)", [(n, f"t{n}") for n in range(30)])
        with pytest.raises(asyncpg.UniqueViolationError):
            await conn.executemany("INSERT INTO plain (id, t) VALUES ($1, $2)", [(100, "x"), (1, "again")])

    run(agent, work)
    assert wired_world.value("SELECT count(*) FROM plain WHERE deleted_at IS NULL") == 30
    assert wired_world.outcomes(agent) == ["committed"] * 30 + ["failed"] * 2


def test_a_pool_resets_its_connections(agent: Agent) -> None:
    async def inside() -> None:
        async with asyncpg.create_pool(**agent.keywords, min_size=1, max_size=2) as pool:
            for _ in range(3):
                async with pool.acquire() as conn:
                    await conn.execute("SET application_name = 'borrowed'")
                    assert await conn.fetchval("SELECT count(*) FROM orders WHERE id = $1", 1) == 1
            async with pool.acquire() as conn:
                assert await conn.fetchval("SHOW application_name") != "borrowed"
                assert await conn.execute("UPDATE orders SET note = 'p' WHERE id = 44") == "UPDATE 1"

    asyncio.run(inside())


def test_types_that_have_to_be_looked_up(agent: Agent) -> None:
    async def work(conn: Any) -> None:
        assert await conn.fetchval("SELECT int4range(1, 5)") is not None
        assert await conn.fetchval("SELECT ROW(1, 'x')") == (1, "x")
        await conn.reload_schema_state()

    run(agent, work)


def test_cancelling_by_timeout(agent: Agent) -> None:
    async def work(conn: Any) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await conn.fetchval(
                "SELECT count(*) FROM generate_series(1, 3000) a, generate_series(1, 3000) b, generate_series(1, 3000) c",
                timeout=0.5,
            )
        assert await conn.fetchval("SELECT 1") == 1

    run(agent, work)
