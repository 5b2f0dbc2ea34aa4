"""Reads that the policy lets go to a replica: which do, and what they see there."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from end_to_end.raw import bind, kinds, raw
from end_to_end.replica_world import MAY_READ_THERE, World, replica_world
from end_to_end.wired import POLICY, Agent

from sqlguard.embedded import EmbeddedServer
from sqlguard.policy import parse_policy
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.wire.messages import BackendMessage, Close, Describe, Execute, Flush, Parse, Query, Sync


@pytest.fixture(scope="module")
def world(server: EmbeddedServer) -> Iterator[World]:
    with replica_world(server, replica_max_lag=60.0) as made:
        yield made


@pytest.fixture
def agent(world: World) -> Iterator[Agent]:
    with world.wired.visiting() as visitor:
        yield visitor


@pytest.fixture
def conn(world: World, agent: Agent) -> Iterator[psycopg.Connection[Any]]:
    with agent.connect() as made:
        world.settle(made)
        yield made


def test_a_plain_read_goes_there(world: World, conn: psycopg.Connection[Any]) -> None:
    with world.went("replica", 4):
        assert conn.execute("SELECT count(*) > 0 FROM customers").fetchone() == (True,)
        assert conn.execute("SELECT name FROM customers WHERE id = %s", [1]).fetchone() is not None
        assert conn.execute("VALUES (1, 'a')").fetchone() == (1, "a")
        with conn.cursor().copy("COPY (SELECT id FROM customers ORDER BY id) TO STDOUT") as copy:
            assert b"".join(bytes(piece) for piece in copy).startswith(b"1\n2\n")


@pytest.mark.parametrize(
    "text",
    [
        "SELECT id FROM customers WHERE id = 1 FOR UPDATE",
        "SELECT pg_backend_pid()",
        "SELECT random()",
        "SELECT clock_timestamp()",
        "SELECT current_setting('transaction_read_only')",
        "SELECT pg_typeof(1)",
        "SELECT txid_current_if_assigned()",
        "SHOW transaction_read_only",
        "EXPLAIN SELECT 1",
        "SELECT count(*) FROM pg_catalog.pg_class",
        "UPDATE customers SET city = city WHERE id = 1",
    ],
)
def test_what_a_standby_answers_otherwise_does_not(
    world: World, conn: psycopg.Connection[Any], text: str
) -> None:
    before = world.reads["replica"]
    conn.execute(text.encode())
    assert world.reads["replica"] == before


def test_inside_a_block_nothing_does(world: World, conn: psycopg.Connection[Any]) -> None:
    before = world.reads["replica"]
    with conn.transaction():
        conn.execute("SELECT 1")
        conn.execute("SELECT count(*) FROM customers")
    assert world.reads["replica"] == before


def test_settings_go_along(world: World, agent: Agent) -> None:
    with agent.connect(options="-c TimeZone=Asia/Tokyo") as conn:
        world.settle(conn)
        text = "SELECT timestamptz '2026-01-01 00:00:00+00'::text"
        with world.went("replica"):
            assert conn.execute(text).fetchone() == ("2026-01-01 09:00:00+09",)
        conn.execute("SET TimeZone = 'UTC'")
        conn.execute("SET datestyle = 'German'")
        world.settle(conn)
        with world.went("replica"):
            assert conn.execute(text).fetchone() == ("01.01.2026 00:00:00 UTC",)
        conn.execute("RESET datestyle")
        world.settle(conn)
        with world.went("replica"):
            assert conn.execute(text).fetchone() == ("2026-01-01 00:00:00+00",)


def test_session_state_keeps_it_at_the_primary(world: World, conn: psycopg.Connection[Any]) -> None:
    conn.execute("SET sqlguard.dry_run = on")
    with world.went("session"):
        assert conn.execute("SELECT 1").fetchone() == (1,)
    conn.execute("SET sqlguard.dry_run = off")
    world.settle(conn)
    conn.execute("SELECT set_config('application_name', 'me', false)")
    with world.went("session"):
        assert conn.execute("SELECT 1").fetchone() == (1,)


def test_own_writes_are_seen_at_once(world: World, conn: psycopg.Connection[Any], agent: Agent) -> None:
    with agent.connect() as other:
        for number in range(200):
            conn.execute("INSERT INTO plain (id, t) VALUES (%s, %s)", [800_000 + number, "x"])
            # In another session of the same task too.
            reader = other if number % 2 else conn
            found = reader.execute("SELECT count(*) FROM plain WHERE id >= 800000").fetchone()
            assert found == (number + 1,)
    world.settle(conn)
    with world.went("replica"):
        assert conn.execute("SELECT count(*) FROM plain WHERE id >= 800000").fetchone() == (200,)


def test_a_block_that_wrote_is_seen_at_once(world: World, conn: psycopg.Connection[Any]) -> None:
    for number in range(20):
        with conn.transaction():
            conn.execute("INSERT INTO plain (id, t) VALUES (%s, 'y')", [810_000 + number])
        found = conn.execute("SELECT count(*) FROM plain WHERE id >= 810000 AND t = 'y'").fetchone()
        assert found == (number + 1,)


def test_prepared_statements(world: World, conn: psycopg.Connection[Any]) -> None:
    for city in range(3):
        conn.execute("SELECT count(*) FROM customers WHERE id > %s", [city], prepare=True)
    with world.went("replica", 10):
        for number in range(10):
            found = conn.execute(
                "SELECT %s::integer + id FROM customers WHERE id = 1", [number], prepare=True
            )
            assert found.fetchone() == (number + 1,)
            found = conn.execute("SELECT count(*) FROM customers WHERE id > %s", [number], prepare=True)
            assert found.fetchone() is not None


def test_prepared_before_the_catalog_changed(world: World, conn: psycopg.Connection[Any]) -> None:
    text = "SELECT count(*) FROM customers WHERE id > %s"
    conn.execute(text, [1], prepare=True)
    world.wired.owner.execute("CREATE TABLE another (id integer)")
    try:
        operator, before = world.wired.proxy.operator, world.wired.proxy.operator.catalog
        world.until(lambda: operator.catalog is not before, "the catalog is not read")
        world.settle(conn)
        with world.went("replica", 2):
            conn.execute(text, [2], prepare=True)
            conn.execute(text, [3], prepare=True)
    finally:
        world.wired.owner.execute("DROP TABLE another")


def test_names_mean_what_they_meant_last(world: World, agent: Agent) -> None:
    with raw(agent) as client:
        world.settle_raw(client)
        for text, row in ((b"SELECT 1", b"1"), (b"SELECT 2", b"2")) * 3:
            client.send(Close(is_portal=False, name=b"s"), Parse(b"s", text), Sync())
            client.until_ready()
            with world.went("replica", 2):
                for _ in range(2):
                    client.send(bind(statement=b"s"), Execute(b""), Sync())
                    assert _values(client.until_ready()) == [row]


def test_the_unnamed_statement_is_the_clients_on_both_sides(world: World, agent: Agent) -> None:
    def read(number: int) -> Parse:
        return Parse(b"", b"SELECT id FROM customers WHERE id = %d" % number)

    once = (bind(), Describe(is_portal=True, name=b""), Execute(b""), Sync())
    with raw(agent) as client:
        world.settle_raw(client)
        # Made at the replica and used there; a Query at the primary takes it away.
        assert world.goes(client, read(1), *once)
        assert world.goes(client, *once)
        client.send(Query(b"SHOW TimeZone"))
        client.until_ready()
        client.send(*once)
        assert kinds(client.until_ready()) == "EZ"
        # Made at the primary without being run, and used at the replica.
        world.settle_raw(client)
        client.send(read(2), Describe(is_portal=False, name=b""), Sync())
        assert kinds(client.until_ready()) == "1tTZ"
        assert world.goes(client, *once)
        # A Query at the replica takes it away at both.
        assert world.goes(client, Query(b"SELECT 1"), answer="TDCZ")
        client.send(*once)
        assert kinds(client.until_ready()) == "EZ"
        # Made at the replica, and used at the primary.
        world.settle_raw(client)
        assert world.goes(client, read(3), *once)
        world.standby.pause()
        try:
            with agent.connect() as writer:
                writer.execute("INSERT INTO plain (id) VALUES (820000)")
            before = world.reads["replica"]
            client.send(*once)
            assert _values(client.until_ready()) == [b"3"]
            assert world.reads["replica"] == before
        finally:
            world.standby.go_on()


def _values(messages: list[BackendMessage]) -> list[bytes]:
    return [v for m in messages for v in getattr(m, "values", ()) if v is not None]


def test_pipelines_keep_their_order(world: World, agent: Agent) -> None:
    with raw(agent) as client:
        world.settle_raw(client)
        before = world.reads["replica"]
        messages: list[Any] = []
        for number in range(20):
            text = b"SELECT %d" % number
            messages += [Query(text)] if number % 3 else [Parse(b"", text), bind(), Execute(b""), Sync()]
            if number == 10:
                messages.append(Query(b"UPDATE plain SET t = 'z' WHERE id = -1"))
        client.send(*messages)
        values: list[bytes] = []
        for _ in range(21):
            values += _values(client.until_ready())
        assert values == [b"%d" % number for number in range(20)]
        assert world.reads["replica"] - before >= 10


def test_several_statements_in_one_batch(world: World, conn: psycopg.Connection[Any]) -> None:
    with world.went("replica"):
        cursor = conn.execute("SELECT 1; SELECT 2")
        assert cursor.fetchone() == (1,)
        assert cursor.nextset()
        assert cursor.fetchone() == (2,)


def test_a_pipeline_with_one_sync(world: World, agent: Agent) -> None:
    with raw(agent) as client:
        world.settle_raw(client)
        messages: list[Any] = []
        for number in range(5):
            messages += [Parse(b"", b"SELECT %d" % number), bind(), Execute(b"")]
        with world.went("replica"):
            client.send(*messages, Sync())
            assert kinds(client.until_ready()) == "12DC" * 5 + "Z"


def test_errors_are_those_of_the_primary(world: World, conn: psycopg.Connection[Any]) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero):
        conn.execute("SELECT 1 / (id - 1) FROM customers WHERE id = 1")
    assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    with world.went("failed lately"), pytest.raises(psycopg.errors.DivisionByZero):
        conn.execute("SELECT 1 / (id - 1) FROM customers WHERE id = 1")
    assert world.settle(conn) == (1,)


def test_only_where_the_policy_says_so(world: World) -> None:
    owner = world.wired.owner
    apply_policy(owner, parse_policy(POLICY, "wired.toml"))
    try:
        with world.wired.visiting() as agent, agent.connect() as conn:
            before = world.reads
            for _ in range(10):
                conn.execute("SELECT count(*) FROM customers")
            assert world.reads == before
            assert world.backends(agent) == 0
    finally:
        apply_policy(owner, parse_policy(MAY_READ_THERE, "wired.toml"))


def test_reads_alone_are_no_writes(world: World, agent: Agent) -> None:
    """What prepares, closes, or comes in pieces does not keep the reads behind it at the primary."""
    with raw(agent) as client:
        world.settle_raw(client)
        read = Parse(b"p", b"SELECT id FROM customers WHERE id = 3")
        look = Describe(is_portal=False, name=b"p")
        for messages, answer in (
            ((read, look, Sync()), "1tTZ"),
            ((bind(statement=b"p"), Execute(b""), Sync()), "2DCZ"),
            ((Close(is_portal=False, name=b"p"), Sync()), "3Z"),
            ((read, bind(statement=b"p"), Execute(b""), Sync()), "12DCZ"),
            ((Close(is_portal=False, name=b"p"), Sync()), "3Z"),
        ):
            world.goes(client, *messages, answer=answer)
        client.send(read, look, Flush())
        assert kinds([m for m in (client.message() for _ in range(3)) if m is not None]) == "1tT"
        world.goes(client, bind(statement=b"p"), Execute(b""), Sync(), answer="2DCZ")
        assert world.goes(client, Query(b"SELECT 1"), answer="TDCZ"), world.reads
