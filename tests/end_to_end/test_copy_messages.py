"""COPY … FROM STDIN by a task, message by message: what drivers send, what none sends, and who leaves in the middle."""

import struct
from collections.abc import Iterator
from datetime import timedelta

import pytest
from end_to_end.copy_world import TABLES, copy_world, count, until
from end_to_end.raw import bind, kinds, raw
from end_to_end.wired import Agent, Wired

from sqlguard.embedded import EmbeddedServer
from sqlguard.janitor import Janitor
from sqlguard.postgres.reconcile import Reconciler
from sqlguard.wire.messages import (
    CopyData,
    CopyDone,
    CopyFail,
    Describe,
    Execute,
    Flush,
    Parse,
    Query,
    Sync,
    Terminate,
)


@pytest.fixture(scope="module")
def world(server: EmbeddedServer) -> Iterator[Wired]:
    with copy_world(server) as made:
        yield made


@pytest.fixture
def agent(world: Wired) -> Iterator[Agent]:
    with world.visiting() as visitor:
        yield visitor


@pytest.mark.parametrize("table", TABLES)
def test_the_extended_protocol_as_libpq_sends_it(world: Wired, agent: Agent, table: str) -> None:
    """A Sync stands behind the Execute, which the server reads in the COPY and ignores."""
    with raw(agent) as client:
        for data, answer in ((b"1\n", "CZ"), (b"x\n", "EZ"), (b"2\n", "CZ")):
            client.send(
                Parse(b"", f"COPY {table} (id) FROM STDIN".encode()),
                bind(),
                Describe(is_portal=True, name=b""),
                Execute(b""),
                Sync(),
            )
            assert until(client, "G") == "12nG"
            client.send(CopyData(data), CopyDone(), Sync())
            assert until(client, "Z") == answer
        client.send(Query(b"SELECT 'in step'"))
        assert until(client, "Z") == "TDCZ"
    assert count(world, table) == 2
    assert world.outcomes(agent) == ["committed", "failed", "committed"]


@pytest.mark.parametrize("table", TABLES)
def test_everything_at_once(world: Wired, agent: Agent, table: str) -> None:
    """A client need not wait for the CopyInResponse; prepared, twice, and a failure skips to the Sync."""
    run = [bind(b"", b"c"), Execute(b""), CopyData(b"%d\n"), CopyDone()]
    with raw(agent) as client:
        client.send(Parse(b"c", f"COPY {table} (id) FROM STDIN".encode()))
        for n in (1, 2):
            client.send(*run[:2], CopyData(b"%d\n" % n), CopyDone())
        client.send(Sync())
        assert until(client, "Z") == "12GC2GCZ"
        client.send(
            *run[:2], CopyData(b"x\n"), CopyDone(), Parse(b"", b"SELECT 1"), Sync(), Query(b"SELECT 1")
        )
        assert until(client, "Z") == "2GEZ"
        assert until(client, "Z") == "TDCZ"
        client.send(*run[:2], CopyFail(b"changed my mind"), Sync())
        assert until(client, "Z") == "2GEZ"
        client.send(
            Query(f"COPY {table} (id) FROM STDIN".encode()), Flush(), CopyData(b"5\n"), Sync(), CopyDone()
        )
        assert until(client, "Z") == "GCZ"
    assert count(world, table) == 3


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("end", ["close", "half", "terminate", "query"])
def test_a_client_that_leaves_in_the_middle(world: Wired, agent: Agent, table: str, end: str) -> None:
    with raw(agent) as client:
        client.send(Query(f"COPY {table} (id) FROM STDIN".encode()))
        assert until(client, "G") == "G"
        client.send(CopyData(b"1\n2\n"))
        match end:
            case "close":
                client.close()
            case "half":
                client.socket.shutdown(1)
                assert not [m for m in client.rest() if chr(m.kind) == "C"]
            case "terminate":
                client.send(CopyData(b"3\n").encode()[:4], b"")
                client.socket.shutdown(1)
                client.rest()
            case _:
                client.send(Query(b"SELECT 1"))
                assert kinds(client.rest()).endswith("E")
    with raw(agent) as client:
        client.send(Terminate())
    # Nobody saw how it ended: the proxy's janitor does, by what is there.
    with Janitor(world.database.owner_dsn, interval=0.1, reconciler=Reconciler(timedelta())):
        assert world.outcomes(agent) in (["failed"], ["no changes"])
    assert count(world, table) == 0


@pytest.mark.parametrize("table", TABLES)
def test_a_dry_run_by_the_extended_protocol(world: Wired, agent: Agent, table: str) -> None:
    with raw(agent) as client:
        client.send(Query(b"SET sqlguard.dry_run = on"))
        until(client, "Z")
        client.send(Parse(b"", f"COPY {table} (id) FROM STDIN".encode()), bind(), Execute(b""), Sync())
        assert until(client, "G") == "12G"
        client.send(CopyData(b"1\n"), CopyDone(), Sync())
        assert until(client, "Z") == "NCZ"
    assert count(world, table) == 0


def test_one_message_of_many_megabytes(world: Wired, agent: Agent) -> None:
    body = b"2\t" + b"y" * (40 << 20) + b"\n"
    with raw(agent) as client:
        client.send(
            Query(b"COPY ledger (id, t) FROM STDIN"),
            b"d" + struct.pack(">I", len(body) + 4),
            body,
            CopyDone(),
        )
        assert until(client, "Z") == "GCZ"
    assert world.value("SELECT length(t) FROM ledger WHERE id = 2") == 40 << 20
