"""
COPY … FROM STDIN by a task: into a table that is guarded as `journal` it goes straight, into one with row-level security
by way of a table of its own. Both have to look like PostgreSQL.
"""

import asyncio
import io
import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import asyncpg
import psycopg
import psycopg.sql
import pytest
from end_to_end.copy_world import TABLES, copy_world, count, until
from end_to_end.node import run_node
from end_to_end.raw import raw
from end_to_end.wired import Agent, Wired
from psycopg import pq

from sqlguard.embedded import EmbeddedServer
from sqlguard.postgres import event_trigger
from sqlguard.postgres.freeze import freeze, thaw
from sqlguard.postgres.tasks import open_task
from sqlguard.wire.messages import (
    CopyData,
    CopyDone,
    Query,
)


@pytest.fixture(scope="module")
def world(server: EmbeddedServer) -> Iterator[Wired]:
    with copy_world(server) as made:
        yield made


@pytest.fixture
def agent(world: Wired) -> Iterator[Agent]:
    with world.visiting() as visitor:
        yield visitor


def copy(conn: "psycopg.Connection[object]", text: str, data: str | bytes) -> str | None:
    cursor = conn.cursor()
    with cursor.copy(text.encode()) as stream:
        stream.write(data)
    return cursor.statusmessage


# --- what comes in


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("form", ["text", "csv", "binary"])
def test_the_rows_are_there_and_the_journal_knows(world: Wired, agent: Agent, table: str, form: str) -> None:
    rows = [(n, f"row {n}", bytes([n]), Decimal(n) / 2, [n, None]) for n in range(1, 100)]
    with agent.connect() as conn:
        cursor = conn.cursor()
        if form == "csv":
            assert (
                copy(conn, f"COPY {table} FROM STDIN (FORMAT csv, HEADER)", "id,t,b,n,a\n1,x,,,\n")
                == "COPY 1"
            )
        else:
            with cursor.copy(f"COPY {table} (id, t, b, n, a) FROM STDIN (FORMAT {form})".encode()) as stream:
                stream.set_types(["int4", "text", "bytea", "numeric", "int4[]"])
                for row in rows:
                    stream.write_row(row)
            assert cursor.statusmessage == "COPY 99"
    assert count(world, table) == (1 if form == "csv" else 99)
    (action,) = world.actions(agent)
    assert (action["kind"], action["outcome"]) == ("copy_in", "committed")
    assert world.value(
        f"SELECT sum(rows) FROM sqlguard.change_set WHERE action_id = {action['id']} AND op = 'insert'"
    ) == (1 if form == "csv" else 99)


def test_beside_the_event_trigger_that_refuses_ddl(world: Wired, agent: Agent) -> None:
    """The table that a COPY's rows go to first is made, granted and dropped by the guard, in the task's session."""
    superuser = world.database.connect()
    event_trigger.put_up(superuser)
    try:
        with agent.connect() as conn:
            for table in ("ledger (id)", "plain (id)", "odd (k)"):
                assert copy(conn, f"COPY {table} FROM STDIN", "801\n802\n") == "COPY 2"
    finally:
        event_trigger.take_down(superuser)


@pytest.mark.parametrize("table", TABLES)
def test_in_a_block_of_the_clients(world: Wired, agent: Agent, table: str) -> None:
    with agent.connect(autocommit=False) as conn:
        assert copy(conn, f"COPY {table} (id, t) FROM STDIN", "1\ta\n2\tb\n") == "COPY 2"
        assert copy(conn, f"COPY {table} (t, id) FROM STDIN", "c\t3\n") == "COPY 1"
        conn.execute(f"UPDATE {table} SET t = 'z' WHERE id = 1".encode())
        assert conn.execute(f"SELECT count(*) FROM {table}".encode()).fetchone() == (3,)
        assert count(world, table) == 0
        conn.commit()
        assert count(world, table) == 3
        copy(conn, f"COPY {table} (id) FROM STDIN", "4\n")
        conn.rollback()
    assert count(world, table) == 3
    assert world.outcomes(agent) == ["committed", "committed", "committed", "rolled_back"]


@pytest.mark.parametrize("table", TABLES)
def test_among_several_statements(world: Wired, agent: Agent, table: str) -> None:
    text = f"SELECT 1; COPY {table} (id) FROM STDIN; INSERT INTO {table} (id) VALUES (7); COPY {table} (id) FROM STDIN"
    with raw(agent) as client:
        client.send(Query(text.encode()))
        assert until(client, "G") == "TDCG"
        client.send(CopyData(b"1\n2\n"), CopyDone())
        assert until(client, "G") == "CCG"
        client.send(CopyData(b"3\n"), CopyDone())
        assert until(client, "Z") == "CZ"
        # All of it or nothing.
        client.send(Query(text.replace("7", "8").encode()))
        assert until(client, "G") == "TDCG"
        client.send(CopyData(b"9\n"), CopyDone())
        assert until(client, "G") == "CCG"
        client.send(CopyData(b"rubbish\n"), CopyDone())
        assert until(client, "Z") == "EZ"
    assert sorted(r[0] for r in world.owner.execute(f"SELECT id FROM {table}").fetchall()) == [1, 2, 3, 7]


def test_columns_of_every_kind(world: Wired, agent: Agent) -> None:
    """Identities, generated columns, defaults, reserved and foreign names; what no INSERT may give, no COPY may."""
    with agent.connect() as conn:
        assert copy(conn, 'COPY odd ("of", k, "Ünïcode") FROM STDIN', "y\t21\tä\n") == "COPY 1"
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            copy(conn, "COPY odd FROM STDIN", "5\ty\t21\tä\n")
        assert copy(conn, 'COPY public.odd ("Ünïcode", k) FROM STDIN', "ö\t1\n") == "COPY 1"
        with pytest.raises(psycopg.Error) as caught:
            copy(conn, "COPY odd (nmae) FROM STDIN", "")
        assert caught.value.sqlstate == "42703"
    found = world.owner.execute('SELECT "of", twice, k, "Ünïcode", deleted_at FROM odd ORDER BY k').fetchall()
    assert found == [("x", 2, 1, "ö", None), ("y", 42, 21, "ä", None)]


@pytest.mark.parametrize("table", TABLES)
def test_errors_are_postgresqls(world: Wired, agent: Agent, table: str) -> None:
    with agent.connect() as conn:
        with pytest.raises(psycopg.errors.InvalidTextRepresentation) as caught:
            copy(conn, f"COPY {table} (id, t) FROM STDIN", "1\ta\nx\tb\n")
        assert caught.value.diag.context == f'COPY {table}, line 2, column id: "x"'
        copy(conn, f"COPY {table} (id) FROM STDIN", "1\n")
        with pytest.raises(psycopg.errors.UniqueViolation):
            copy(conn, f"COPY {table} (id) FROM STDIN", "2\n1\n")
        with pytest.raises(RuntimeError, match="out of data"):
            with conn.cursor().copy(f"COPY {table} (id) FROM STDIN".encode()) as stream:
                stream.write("3\n")
                raise RuntimeError("out of data")
        assert conn.execute("SELECT 1").fetchone() == (1,)
    assert count(world, table) == 1
    assert world.outcomes(agent) == ["failed", "committed", "failed", "failed"]


# --- what the policy says


def test_what_is_refused(world: Wired) -> None:
    with world.visiting() as agent, agent.connect() as conn:
        for text, hint in (
            ("COPY plain FROM '/etc/passwd'", "STDIN"),
            ("COPY plain FROM PROGRAM 'id'", "STDIN"),
            ("COPY plain (id, deleted_at) FROM STDIN", ""),
            ("COPY plain (id) FROM STDIN WHERE id > 3", "leave the rows out"),
            ("COPY plain (id) FROM STDIN (FREEZE)", "leave it out"),
            ("COPY sqlguard.task FROM STDIN", ""),
            ("COPY pg_catalog.pg_authid FROM STDIN", ""),
            ("COPY plain (id) FROM STDIN /*idempotency_key='k'*/", "narrow it down"),
        ):
            with pytest.raises(psycopg.Error) as caught:
                copy(conn, text, "1\n")
            assert caught.value.sqlstate in ("SG002", "SG007"), text
            assert hint in (caught.value.diag.message_hint or ""), text
        assert conn.execute("SELECT 1").fetchone() == (1,)
    assert count(world, "plain") == 0


def test_gates_columns_and_plans(world: Wired) -> None:
    def task(policy: str) -> Agent:
        made = open_task(world.owner, agent="tester", policy=policy)
        return Agent(made, "127.0.0.1", world.proxy.port, world.database.name, "")

    with task("gated").connect() as conn:
        for text, data in (
            ("COPY orders (id, customer_id, placed_on) FROM STDIN", "9999\t1\t2024-01-01\n"),
            ("COPY ledger (id) FROM STDIN", "".join(f"{n}\n" for n in range(11))),
            ("COPY staff FROM STDIN", "99\tx\n"),
        ):
            with pytest.raises(psycopg.Error) as caught:
                copy(conn, text, data)
            assert caught.value.sqlstate == "SG002", text
        assert copy(conn, "COPY ledger (id) FROM STDIN", "1\n2\n") == "COPY 2"
    with task("planonly").connect() as conn, pytest.raises(psycopg.Error) as caught:
        copy(conn, "COPY ledger (id) FROM STDIN", "3\n")
    assert "INSERT the rows" in str(caught.value)
    assert count(world, "ledger") == 2
    assert count(world, "sqlguard.plan") == 0
    world.owner.execute("DELETE FROM ledger")


@pytest.mark.parametrize("table", TABLES)
def test_caps_and_freezes_hold(world: Wired, agent: Agent, table: str) -> None:
    with agent.connect() as conn:
        with pytest.raises(psycopg.Error) as caught:
            copy(conn, f"COPY {table} (id) FROM STDIN", "".join(f"{n}\n" for n in range(5001)))
        assert caught.value.sqlstate == "SG006"
        freeze(world.owner, [f"public.{table}"], None, "stocktaking")
        try:
            with pytest.raises(psycopg.Error) as caught:
                copy(conn, f"COPY {table} (id) FROM STDIN", "1\n")
            assert caught.value.sqlstate == "SG005"
        finally:
            thaw(world.owner)
    assert count(world, table) == 0


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("block", [False, True])
def test_dry_runs_roll_back_and_report(world: Wired, agent: Agent, table: str, *, block: bool) -> None:
    notices: list[str] = []
    with agent.connect() as conn:
        conn.add_notice_handler(lambda n: notices.append(n.message_primary or ""))
        conn.execute("SET sqlguard.dry_run = on")
        if block:
            conn.execute("BEGIN")
        assert copy(conn, f"COPY {table} (id) FROM STDIN", "1\n2\n") == "COPY 2"
        assert conn.pgconn.transaction_status == (
            pq.TransactionStatus.INTRANS if block else pq.TransactionStatus.IDLE
        )
        if block:
            conn.execute("COMMIT")
        conn.execute("SET sqlguard.dry_run = off")
    assert any(f"2 insert in public.{table}" in n for n in notices)
    assert count(world, table) == 0


# --- asyncpg, and much data


@pytest.mark.parametrize("table", TABLES)
def test_asyncpg(world: Wired, agent: Agent, table: str) -> None:
    async def work() -> None:
        conn = await asyncpg.connect(**agent.keywords)
        try:
            rows = [(n, f"row {n}") for n in range(3000)]
            assert await conn.copy_records_to_table(table, records=rows, columns=["id", "t"]) == "COPY 3000"
            data = io.BytesIO(b"4000,x\n4001,y\n")
            assert await conn.copy_to_table(table, source=data, columns=["id", "t"], format="csv") == "COPY 2"
            with pytest.raises(asyncpg.PostgresError):
                await conn.copy_records_to_table(table, records=[(1, "again")], columns=["id", "t"])
            assert await conn.fetchval("SELECT 1") == 1
        finally:
            await conn.close()

    asyncio.run(work())
    assert count(world, table) == 3002


NODE = """
const { Client } = require('pg');
const { from } = require('pg-copy-streams');
const { pipeline } = require('stream/promises');
const { Readable } = require('stream');
async function main() {
  const client = new Client(JSON.parse(process.argv[2]));
  await client.connect();
  for (const table of ['ledger', 'plain']) {
    await pipeline(Readable.from(['1\\ta\\n', '2\\tb\\n']), client.query(from(`COPY ${table} (id, t) FROM STDIN`)));
    try {
      await pipeline(Readable.from(['x\\n']), client.query(from(`COPY ${table} (id) FROM STDIN`)));
    } catch (e) { console.log(e.code); }
    console.log((await client.query(`SELECT count(*)::int AS n FROM ${table}`)).rows[0].n);
  }
  await client.end();
}
main().catch((e) => { console.error(e); process.exit(1); });
"""


def test_node(agent: Agent, node_folder: Path) -> None:
    done = run_node(node_folder, NODE, json.dumps(agent.keywords))
    assert (done.stdout.split(), done.stderr) == (["22P02", "2", "22P02", "2"], "")


def test_much_data_in_bounded_memory(world: Wired, agent: Agent) -> None:
    """A line of 60 MB in pieces, and a server that is slower than the client: nothing piles up in the proxy."""
    piece = b"x" * (1 << 20)
    with agent.connect() as conn, conn.cursor().copy("COPY ledger (id, t) FROM STDIN") as stream:
        stream.write("1\t")
        for _ in range(60):
            stream.write(piece)
        stream.write("\n")
    assert world.value("SELECT length(t) FROM ledger WHERE id = 1") == 60 << 20
