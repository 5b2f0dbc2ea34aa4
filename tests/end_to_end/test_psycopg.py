"""psycopg 3 through the proxy: what it does by itself, and what it can be told to do."""

import threading
import time
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from end_to_end.wired import Agent, Wired
from psycopg import pq
from psycopg.rows import dict_row


def test_values_of_every_kind_go_there_and_back(wired_world: Wired, agent: Agent) -> None:
    with agent.connect() as conn:
        for binary in (False, True):
            row = (1000 + binary, "naïve 'quoted' \\ text", b"\x00\xff\x01", Decimal("12.50"), [1, 2])
            conn.execute("INSERT INTO plain VALUES (%s, %s, %s, %s, %s)", row, binary=binary)
            found = conn.execute("SELECT id, t, b, n, a FROM plain WHERE id = %s", [row[0]], binary=binary)
            assert found.fetchone() == row
            assert conn.execute("SELECT %s::text", [None], binary=binary).fetchone() == (None,)


def test_transactions_roll_back_and_commit(wired_world: Wired, agent: Agent) -> None:
    with agent.connect(autocommit=False) as conn:
        conn.execute("UPDATE orders SET note = 'one' WHERE id = 1")
        conn.rollback()
        with conn.transaction():
            conn.execute("UPDATE orders SET note = 'two' WHERE id = 1")
            with pytest.raises(ZeroDivisionError), conn.transaction():
                conn.execute("UPDATE orders SET note = 'three' WHERE id = 1")
                _ = 1 / 0
        conn.commit()
    assert wired_world.value("SELECT note FROM orders WHERE id = 1") == "two"
    assert wired_world.outcomes(agent) == ["rolled_back", "committed", "rolled_back"]


def test_a_refusal_inside_a_transaction_puts_it_into_the_failed_state(agent: Agent) -> None:
    with agent.connect(autocommit=False) as conn:
        conn.execute("SELECT 1")
        with pytest.raises(psycopg.Error) as caught:
            conn.execute("DROP TABLE orders")
        assert caught.value.sqlstate == "SG002"
        assert conn.info.transaction_status == pq.TransactionStatus.INERROR
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            conn.execute("SELECT 1")
        conn.rollback()
        assert conn.execute("SELECT 1").fetchone() == (1,)


def test_a_savepoint_survives_a_refusal(agent: Agent) -> None:
    with agent.connect() as conn, conn.transaction():
        with pytest.raises(psycopg.Error), conn.transaction():
            conn.execute("TRUNCATE orders")
        conn.execute("UPDATE orders SET note = 'kept' WHERE id = 2")
        assert conn.execute("SELECT note FROM orders WHERE id = 2").fetchone() == ("kept",)


@pytest.mark.parametrize("mode", ["simple", "extended", "prepared", "pipeline", "binary"])
def test_a_soft_delete_is_a_delete_to_the_client(wired_world: Wired, agent: Agent, mode: str) -> None:
    number = {"simple": 20, "extended": 21, "prepared": 22, "pipeline": 23, "binary": 24}[mode]
    with agent.connect() as conn:
        cursor = conn.cursor()
        if mode == "simple":
            cursor.execute(f"DELETE FROM customers WHERE id = {number} RETURNING id, name")
        elif mode == "pipeline":
            with conn.pipeline():
                cursor.execute("DELETE FROM customers WHERE id = %s RETURNING id, name", [number])
        else:
            cursor.execute(
                "DELETE FROM customers WHERE id = %s RETURNING id, name",
                [number],
                prepare=mode == "prepared",
                binary=mode == "binary",
            )
        assert cursor.statusmessage == "DELETE 1"
        assert cursor.fetchall() == [(number, f"Customer {number}")]
        assert conn.execute("SELECT count(*) FROM customers WHERE id = %s", [number]).fetchone() == (0,)
    assert wired_world.value(f"SELECT deleted_by_agent FROM customers WHERE id = {number}") == "tester"


def test_prepared_statements_are_used_again(wired_world: Wired, agent: Agent) -> None:
    with agent.connect() as conn:
        conn.prepare_threshold = 0
        for number in (30, 31, 32):
            assert conn.execute("DELETE FROM customers WHERE id = %s", [number]).statusmessage == "DELETE 1"
            assert conn.execute("SELECT name FROM customers WHERE id = %s", [number + 10]).fetchone()
        assert conn.execute("SELECT count(*) FROM pg_prepared_statements").fetchone() == (3,)
        conn.execute("DEALLOCATE ALL")
    assert wired_world.value("SELECT count(*) FROM customers WHERE deleted_at IS NOT NULL") == 3


def test_server_side_cursors(agent: Agent) -> None:
    with agent.connect(autocommit=False) as conn, conn.cursor("walk") as cursor:
        cursor.itersize = 100
        cursor.execute("SELECT id FROM orders ORDER BY id")
        assert [row[0] for row in cursor] == list(range(1, 2401))
    with agent.connect(autocommit=False) as conn, conn.cursor("jump", scrollable=True) as cursor:
        cursor.execute("SELECT id FROM orders ORDER BY id")
        cursor.scroll(99)
        assert cursor.fetchone() == (100,)


def test_a_pipeline_of_reads_and_writes(wired_world: Wired, agent: Agent) -> None:
    with agent.connect() as conn, conn.pipeline() as pipeline:
        first = conn.execute("SELECT count(*) FROM items WHERE order_id = 1")
        for number in range(1, 6):
            conn.execute("UPDATE orders SET note = %s WHERE id = %s", [f"n{number}", number])
        pipeline.sync()
        last = conn.execute("SELECT note FROM orders WHERE id BETWEEN 1 AND 5 ORDER BY id")
        assert [row[0] for row in last.fetchall()] == ["n1", "n2", "n3", "n4", "n5"]
        assert first.fetchone()
    assert {a["outcome"] for a in wired_world.actions(agent)} == {"committed"}


def test_a_refusal_in_the_middle_of_a_pipeline(wired_world: Wired, agent: Agent) -> None:
    with agent.connect() as conn:
        with pytest.raises(psycopg.Error) as caught, conn.pipeline() as pipeline:
            conn.execute("SELECT 1")
            conn.execute("UPDATE orders SET note = 'gone' WHERE id = 1")
            conn.execute("DROP TABLE orders")
            aborted = conn.execute("UPDATE orders SET note = 'never' WHERE id = 2")
            pipeline.sync()
            aborted.fetchall()
        assert caught.value.sqlstate == "SG002"
        assert conn.execute("SELECT note FROM orders WHERE id = 1").fetchone() == (None,)
        assert conn.execute("SELECT 1").fetchone() == (1,)
    outcomes = [(a["kind"], a["outcome"]) for a in wired_world.actions(agent)]
    assert ("update", "failed") in outcomes
    assert ("update", "committed") not in outcomes


def test_executemany_with_returning(wired_world: Wired, agent: Agent) -> None:
    with agent.connect() as conn:
        cursor = conn.cursor()
        cursor.executemany(
            "INSERT INTO plain (id, t) VALUES (%s, %s) RETURNING id",
            [(n, f"t{n}") for n in range(40)],
            returning=True,
        )
        found = []
        while True:
            found.append(cursor.fetchone())
            if not cursor.nextset():
                break
        assert found == [(n,) for n in range(40)]
    assert wired_world.value("SELECT count(*) FROM plain WHERE deleted_at IS NULL") == 40


@pytest.mark.parametrize("form", ["text", "binary"])
def test_copy_out(agent: Agent, form: str) -> None:
    suffix = " (FORMAT binary)" if form == "binary" else ""
    with agent.connect() as conn:
        plain = conn.execute("SELECT id, status FROM orders ORDER BY id").fetchall()
        with conn.cursor().copy(
            f"COPY (SELECT id, status FROM orders ORDER BY id) TO STDOUT{suffix}"
        ) as copy:
            copy.set_types(["int4", "text"])
            assert list(copy.rows()) == plain


def test_a_copy_that_is_refused_and_the_session_goes_on(wired_world: Wired, agent: Agent) -> None:
    with agent.connect() as conn:
        with (
            pytest.raises(psycopg.Error) as caught,
            conn.cursor().copy("COPY plain (id, deleted_at) FROM STDIN") as copy,
        ):
            copy.write("1\t\n")
        assert caught.value.sqlstate == "SG002"
        assert conn.execute("SELECT count(*) FROM plain").fetchone() == (0,)
    assert wired_world.outcomes(agent) == ["refused"]


def test_errors_point_into_the_text_that_was_sent(agent: Agent) -> None:
    text = "DELETE FROM customers WHERE id = 1 AND nmae = 'x' RETURNING id"
    with agent.connect() as conn:
        for sql in (
            text,
            "SELECT id FROM customers WHERE nmae = 'x'",
            "UPDATE orders SET total = 1/0 WHERE id = 1",
        ):
            with pytest.raises(psycopg.Error) as caught:
                conn.execute(sql)
            position = caught.value.diag.statement_position
            if position is not None:
                assert sql[int(position) - 1 :].startswith(("nmae", "status")), (sql, position, caught.value)
        with pytest.raises(psycopg.errors.SyntaxError) as caught:
            conn.execute("SELEC 1")
        assert caught.value.diag.statement_position == "1"
        with pytest.raises(psycopg.errors.DivisionByZero):
            conn.execute("UPDATE orders SET total = 1/0 WHERE id = 1")


def test_constraint_errors_are_postgresqls_own(agent: Agent) -> None:
    with agent.connect() as conn:
        with pytest.raises(psycopg.errors.UniqueViolation) as caught:
            conn.execute("INSERT INTO staff (id, name) VALUES (1, 'again')")
        assert caught.value.diag.constraint_name == "staff_pkey"
        with pytest.raises(psycopg.errors.ForeignKeyViolation):
            conn.execute("INSERT INTO items (order_id, product_id, quantity, price) VALUES (99999, 1, 1, 1)")


def test_cancel_with_the_keys_of_postgresql(agent: Agent) -> None:
    with agent.connect() as conn:
        pid = conn.info.backend_pid
        assert conn.execute("SELECT pg_backend_pid()").fetchone() == (pid,)
        timer = threading.Timer(0.5, conn.cancel_safe)
        timer.start()
        started = time.monotonic()
        with pytest.raises(psycopg.errors.QueryCanceled):
            conn.execute(
                "SELECT count(*) FROM generate_series(1, 3000) a, generate_series(1, 3000) b, generate_series(1, 3000) c"
            )
        assert time.monotonic() - started < 15
        timer.join()
        assert conn.execute("SELECT 1").fetchone() == (1,)


def test_notices_and_row_factories(agent: Agent) -> None:
    notices: list[str] = []
    with agent.connect(row_factory=dict_row) as conn:
        conn.add_notice_handler(lambda n: notices.append(n.message_primary or ""))
        conn.execute("BEGIN")
        conn.execute("BEGIN")
        conn.execute("ROLLBACK")
        assert conn.execute("SELECT id, name FROM staff WHERE id = 1").fetchone() == {
            "id": 1,
            "name": "Clerk 1",
        }
    assert notices == ["there is already a transaction in progress"]


def test_several_statements_in_one_message(wired_world: Wired, agent: Agent) -> None:
    with agent.connect() as conn:
        cursor = conn.execute(
            "SELECT 1; UPDATE orders SET note = 'm' WHERE id = 7; DELETE FROM customers WHERE id = 50 RETURNING id;"
            " SELECT count(*) FROM customers WHERE id = 50"
        )
        seen: list[Any] = []
        while True:
            seen.append((cursor.statusmessage, cursor.fetchall() if cursor.description else None))
            if not cursor.nextset():
                break
        assert seen == [
            ("SELECT 1", [(1,)]),
            ("UPDATE 1", None),
            ("DELETE 1", [(50,)]),
            ("SELECT 1", [(0,)]),
        ]
        with pytest.raises(psycopg.errors.DivisionByZero):
            conn.execute("UPDATE orders SET note = 'lost' WHERE id = 8; SELECT 1/0")
        conn.execute("BEGIN; UPDATE orders SET note = 'kept' WHERE id = 9; COMMIT; SELECT 1")
        conn.execute(
            "UPDATE orders SET note = 'in' WHERE id = 10; BEGIN; UPDATE orders SET note = 'in' WHERE id = 11"
        )
        assert conn.info.transaction_status == pq.TransactionStatus.INTRANS
        conn.execute("ROLLBACK")
    notes = {n: wired_world.value(f"SELECT note FROM orders WHERE id = {n}") for n in range(7, 12)}
    assert notes == {7: "m", 8: None, 9: "kept", 10: None, 11: None}


def test_sql_level_prepare_execute_and_cursors(wired_world: Wired, agent: Agent) -> None:
    with agent.connect() as conn:
        conn.execute("PREPARE gone(int) AS DELETE FROM customers WHERE id = $1 RETURNING id")
        cursor = conn.execute("EXECUTE gone(60)")
        assert (cursor.statusmessage, cursor.fetchall()) == ("DELETE 1", [(60,)])
        conn.execute("DEALLOCATE gone")
        with pytest.raises(psycopg.errors.InvalidSqlStatementName):
            conn.execute("EXECUTE gone(61)")
        conn.execute("BEGIN")
        conn.execute("DECLARE c CURSOR FOR SELECT id FROM orders ORDER BY id")
        assert conn.execute("FETCH 2 FROM c").fetchall() == [(1,), (2,)]
        conn.execute("ROLLBACK")
        with pytest.raises(psycopg.Error):
            conn.execute("FETCH 2 FROM c")
    assert wired_world.value("SELECT count(*) FROM customers WHERE deleted_at IS NOT NULL") == 1


def test_temporary_tables(agent: Agent) -> None:
    with agent.connect() as conn:
        try:
            conn.execute("CREATE TEMP TABLE mine (id int)")
        except psycopg.Error as fault:
            assert (fault.sqlstate or "")[:2] == "SG"
            assert fault.diag.message_hint
            return
        conn.execute("INSERT INTO mine VALUES (1), (2)")
        assert conn.execute("SELECT count(*) FROM mine").fetchone() == (2,)
        conn.execute("DROP TABLE mine")


def test_reset_and_discard_keep_the_guard(wired_world: Wired, agent: Agent) -> None:
    with agent.connect() as conn:
        for text in ("RESET ALL", "DISCARD ALL"):
            conn.execute(text)
            assert conn.execute("SHOW default_transaction_read_only").fetchone() == ("on",)
            assert conn.execute("UPDATE orders SET note = 'x' WHERE id = 3").statusmessage == "UPDATE 1"
            with pytest.raises(psycopg.Error):
                conn.execute("SET default_transaction_read_only = off")


def test_read_only_transactions_stay_read_only(agent: Agent) -> None:
    with agent.connect(autocommit=False) as conn:
        conn.read_only = True
        conn.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            conn.execute("UPDATE orders SET note = 'x' WHERE id = 3")
        conn.rollback()
        assert conn.execute("SHOW transaction_isolation").fetchone() == ("serializable",)


def test_a_client_in_latin1(wired_world: Wired, agent: Agent) -> None:
    with agent.connect(client_encoding="latin1") as conn:
        assert conn.execute("SELECT 'é', length('é')").fetchone() == ("é", 1)
        conn.execute("UPDATE orders SET note = 'crème' WHERE id = 4")
        conn.execute("UPDATE orders SET note = %s WHERE id = 5", ["brûlée"])
        with pytest.raises(psycopg.Error) as caught:
            conn.execute("SELECT 'é' FROM nowhere_é")
        assert caught.value.sqlstate
    assert wired_world.value("SELECT note FROM orders WHERE id = 4") == "crème"
    assert wired_world.value("SELECT note FROM orders WHERE id = 5") == "brûlée"
    journaled = [a["statement"] for a in wired_world.actions(agent)]
    assert "UPDATE orders SET note = 'crème' WHERE id = 4" in journaled


def test_a_large_result_arrives_whole(agent: Agent) -> None:
    with agent.connect() as conn:
        text, count = conn.execute("SELECT %s::text, 1", ["x" * 20_000_000]).fetchone() or ("", 0)
        assert (len(text), count) == (20_000_000, 1)
        found = conn.execute("SELECT repeat('y', 1000) FROM generate_series(1, 20000)")
        assert sum(len(row[0]) for row in found) == 20_000_000


async def _asynchronous(agent: Agent) -> int:
    async with await psycopg.AsyncConnection.connect(agent.dsn, autocommit=True) as conn:
        row = await (await conn.execute("SELECT repeat('x', 16360)")).fetchone()
        return len(row[0]) if row else 0


def test_the_asynchronous_connection(agent: Agent) -> None:
    import asyncio  # noqa: PLC0415

    assert asyncio.run(_asynchronous(agent)) == 16_360
