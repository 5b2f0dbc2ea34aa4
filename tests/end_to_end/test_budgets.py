"""Budgets that the doors keep, through the proxy by every protocol and through the Python door."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import asyncpg
import psycopg
import pytest
from end_to_end.inprocess import proxied
from end_to_end.wired import POLICY, Agent, Wired, wired_shop
from servers import Database

from sqlguard.connection import connect
from sqlguard.errors import CapExceeded, DatabaseUnavailable
from sqlguard.policy import parse_policy
from sqlguard.postgres.policy_apply import apply_policy

BUDGETS = """
[budgets]
statements_per_minute = 5
"""
ROWS = POLICY.replace("[defaults]", "[defaults]\nreads = { max_result_rows = 10 }")
BYTES = POLICY.replace(
    "[defaults]", "[defaults]\nreads = { max_result_rows = 1000000, max_result_bytes = 2000000 }"
)
SERIES = "SELECT g FROM generate_series(1, {}) g"


@pytest.fixture
def wired(database: Database) -> Iterator[Wired]:
    with wired_shop(database) as made:
        yield made


def agent(wired: Wired, policy: str) -> Agent:
    apply_policy(wired.owner, parse_policy(policy, "wired.toml"))
    return wired.agent()


def code(conn: psycopg.Connection[Any], text: str, params: Any = None) -> str | None:
    try:
        conn.execute(text.encode(), params)
    except psycopg.Error as fault:
        return fault.sqlstate
    return None


@pytest.mark.parametrize("prepare", [None, 0], ids=["simple", "extended"])
def test_statements_a_minute(wired: Wired, prepare: int | None) -> None:
    made = agent(wired, POLICY + BUDGETS)
    with made.connect() as conn, made.connect() as other:
        conn.prepare_threshold = prepare
        params = None if prepare is None else [1]
        text = "SELECT 1" if prepare is None else "SELECT %s"
        assert [code(conn, text, params) for _ in range(4)] == [None] * 4
        assert code(other, "UPDATE orders SET note = 'x' WHERE id = 1") is None
        with pytest.raises(psycopg.Error, match="5 statements a minute") as caught:
            conn.execute(text, params)
        assert caught.value.sqlstate == "SG006"
        assert (caught.value.diag.message_hint or "").startswith("send it again after 2")
        assert code(other, "SELECT 1") == "SG006"
    with agent(wired, POLICY + BUDGETS).connect() as conn:
        assert code(conn, "; ".join(["SELECT 1"] * 5)) is None
        assert code(conn, "SELECT 1") == "SG006"


def test_statements_a_minute_in_a_block_and_in_python(wired: Wired) -> None:
    with agent(wired, POLICY + BUDGETS).connect() as conn:
        conn.execute("BEGIN")
        for _ in range(4):
            conn.execute("SELECT 1")
        assert code(conn, "SELECT 1") == "SG006"
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.INERROR
    with connect(agent(wired, POLICY + BUDGETS).direct) as guarded:
        for _ in range(5):
            guarded.execute("SELECT 1")
        with pytest.raises(CapExceeded, match="5 statements a minute"):
            guarded.execute("SELECT 1")


def test_statements_a_minute_over_two_proxies_and_python(wired: Wired) -> None:
    made = agent(wired, POLICY + BUDGETS)
    with (
        proxied(wired.database.owner_dsn) as port,
        made.connect() as first,
        made.connect(port=port) as second,
        connect(made.direct) as third,
        connect(wired.database.owner_dsn, task=made.task.task.id) as fourth,
    ):
        assert [code(c, "SELECT 1") for c in (first, second, second)] == [None] * 3
        third.execute("SELECT 1")
        fourth.execute("SELECT 1")
        for _ in range(2):
            assert [code(c, "SELECT 1") for c in (first, second)] == ["SG006"] * 2
            for door in (third, fourth):
                with pytest.raises(CapExceeded, match="5 statements a minute") as caught:
                    door.execute("SELECT 1")
                assert "send it again after 2" in (caught.value.hint or "")
        assert code(second, "COMMIT") is None


def test_a_large_rate_is_never_exceeded_and_asks_seldom(wired: Wired) -> None:
    made = agent(wired, POLICY + BUDGETS.replace("5", "400"))
    with (
        proxied(wired.database.owner_dsn) as port,
        made.connect() as first,
        made.connect(port=port) as second,
    ):
        before = int(wired.value("SELECT txid_current()"))
        passed = sum(code(first, "SELECT 1") is None for _ in range(200))
        assert passed == 200
        # Questions are the only transactions that take a number.
        assert int(wired.value("SELECT txid_current()")) - before < 60
        passed += sum(code(second, "SELECT 1") is None for _ in range(400))
        assert 300 <= passed <= 400
        assert code(second, "SELECT 1") == "SG006"


@pytest.mark.parametrize("prepare", [None, 0], ids=["simple", "extended"])
def test_what_can_t_be_counted_is_refused(wired: Wired, prepare: int | None) -> None:
    made = agent(wired, POLICY + BUDGETS)
    with made.connect() as conn, connect(made.direct) as guarded:
        conn.prepare_threshold = prepare
        with wired.owner.transaction():
            wired.owner.execute("LOCK TABLE sqlguard.statement_rate")
            assert [code(conn, "SELECT 1") for _ in range(3)] == ["08001"] * 3
            with pytest.raises(DatabaseUnavailable):
                guarded.execute("SELECT 1")
        guarded.execute("SELECT 1")
        time.sleep(1.1)
        assert [code(conn, "SELECT 1") for _ in range(5)] == [None] * 4 + ["SG006"]
        assert "refused" in wired.outcomes(made)


@pytest.mark.parametrize("rows", [11, 100_000, 600_000])
@pytest.mark.parametrize("protocol", ["simple", "extended"])
def test_a_result_that_is_too_large(wired: Wired, rows: int, protocol: str) -> None:
    binary = protocol == "extended"
    with agent(wired, ROWS).connect() as conn:
        for _ in range(3):
            with pytest.raises(psycopg.Error, match="10 rows") as caught:
                conn.execute(SERIES.format(rows), binary=binary)
            assert caught.value.sqlstate == "SG006"
            assert len(conn.execute(SERIES.format(10), binary=binary).fetchall()) == 10
        with (
            pytest.raises(psycopg.Error, match="10 rows"),
            conn.cursor().copy(f"COPY ({SERIES.format(rows)}) TO STDOUT") as copy,
        ):
            assert len(list(copy)) == 10
        assert conn.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.parametrize("rows", [11, 500_000])
def test_a_block_fails_with_it(wired: Wired, rows: int) -> None:
    with agent(wired, ROWS).connect() as conn:
        conn.execute("BEGIN")
        conn.execute("UPDATE orders SET note = 'gone' WHERE id = 1")
        assert code(conn, SERIES.format(rows)) == "SG006"
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.INERROR
        assert code(conn, "SELECT 1") == "25P02"
        assert conn.execute("COMMIT").statusmessage == "ROLLBACK"
        assert conn.execute("SELECT count(*) FROM orders WHERE note = 'gone'").fetchone() == (0,)


def test_bytes(wired: Wired) -> None:
    with agent(wired, BYTES).connect() as conn:
        assert code(conn, "SELECT repeat('x', 1000000)") is None
        assert code(conn, "SELECT repeat('x', 3000000)") == "SG006"
        assert code(conn, "SELECT repeat('x', 1000) FROM generate_series(1, 1900)") is None
        assert code(conn, "SELECT repeat('x', 1000) FROM generate_series(1, 5000)") == "SG006"


def test_asyncpg_and_pipelines(wired: Wired) -> None:
    made = agent(wired, ROWS)

    async def work() -> None:
        conn = await asyncpg.connect(**made.keywords)
        for rows in (11, 300_000):
            with pytest.raises(asyncpg.PostgresError, match="10 rows"):
                await conn.fetch(SERIES.format(rows))
            assert len(await conn.fetch(SERIES.format(10))) == 10
        await conn.close()

    asyncio.run(work())
    with made.connect() as conn:
        with pytest.raises(psycopg.Error, match="10 rows"), conn.pipeline() as pipeline:
            first = conn.execute(SERIES.format(5))
            conn.execute(SERIES.format(50))
            conn.execute(SERIES.format(5))
            pipeline.sync()
        assert len(first.fetchall()) == 5
        assert len(conn.execute(SERIES.format(10)).fetchall()) == 10


def test_the_python_door(wired: Wired) -> None:
    with connect(agent(wired, ROWS).direct) as guarded:
        assert len(guarded.execute(SERIES.format(10)).rows) == 10
        with pytest.raises(CapExceeded, match="10 rows"):
            guarded.execute(SERIES.format(11))
        with pytest.raises(CapExceeded):
            guarded.execute("UPDATE orders SET note = 'gone' WHERE id <= 30 RETURNING id")
        assert guarded.execute("SELECT count(*) FROM orders WHERE note = 'gone'").rows == ((0,),)
        guarded.execute("BEGIN")
        with pytest.raises(CapExceeded):
            guarded.execute(SERIES.format(11))
        assert guarded.execute("COMMIT").tag == "ROLLBACK"


def test_sessions_that_came_through_are_known(wired: Wired) -> None:
    with agent(wired, POLICY).connect() as conn:
        conn.execute("SELECT 1")
        pid = conn.info.backend_pid
        for _ in range(100):
            if wired.value(f"SELECT count(*) FROM sqlguard.door_session WHERE pid = {pid}"):
                break
            time.sleep(0.05)
        assert wired.value(f"SELECT count(*) FROM sqlguard.door_session WHERE pid = {pid}") == 1
