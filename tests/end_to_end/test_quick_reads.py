"""Prepared reads that are forwarded as they come: where that is so, and what must still be looked at."""

import psycopg
import pytest
from end_to_end.raw import Raw, bind, kinds, raw
from end_to_end.wired import Agent, Wired

from sqlguard.wire.messages import Describe, Execute, Parse, Query, Sync

READ = b"SELECT status FROM orders WHERE id = $1"
WRITE = b"UPDATE orders SET note = $1 WHERE id = 60"
RUN = (Describe(is_portal=True, name=b""), Execute(b""), Sync())


def prepare(client: Raw) -> None:
    client.send(Parse(b"r", READ), Parse(b"w", WRITE), Sync())
    assert kinds(client.until_ready()) == "11Z"


def read(client: Raw, key: bytes = b"60") -> str:
    client.send(bind(statement=b"r", values=(key,)), *RUN)
    return kinds(client.until_ready())


def ask(client: Raw, text: bytes) -> str:
    client.send(Query(text))
    return kinds(client.until_ready())


def hits(wired_world: Wired) -> int:
    return wired_world.proxy.operator.lookups()["hit"]


@pytest.mark.parametrize("block", [b"BEGIN", b"BEGIN READ ONLY", b"SET sqlguard.dry_run = on; BEGIN"])
def test_reads_in_a_block_are_not_looked_at(wired_world: Wired, agent: Agent, block: bytes) -> None:
    with raw(agent) as client:
        prepare(client)
        for text in block.split(b"; "):
            ask(client, text)
        before = hits(wired_world)
        for _ in range(5):
            assert read(client) == "2TDCZ"
        assert hits(wired_world) == before + 5
        assert ask(client, b"COMMIT")[-2:] == "CZ"


def test_reads_between_writes_of_a_block_are_not_looked_at(wired_world: Wired, agent: Agent) -> None:
    with raw(agent) as client:
        prepare(client)
        ask(client, b"BEGIN")
        for number in range(3):
            client.send(bind(statement=b"w", values=(b"%d" % number,)), Execute(b""), Sync())
            assert kinds(client.until_ready()) == "2CZ"
            assert read(client) == "2TDCZ"  # takes the unnamed portal over
            before = hits(wired_world)
            assert read(client) == read(client) == "2TDCZ"
            assert hits(wired_world) == before + 2
        ask(client, b"COMMIT")
        assert read(client) == "2TDCZ"
    assert wired_world.outcomes(agent) == ["committed"] * 3


def test_a_read_that_fails_to_bind_leaves_the_portal_of_a_write(wired_world: Wired, agent: Agent) -> None:
    """The roll-back to a savepoint brings it back: who runs it then is still journaled."""
    with raw(agent) as client:
        prepare(client)
        client.send(Parse(b"b", b"BEGIN"), Parse(b"s", b"SAVEPOINT s"), Parse(b"t", b"ROLLBACK TO s"), Sync())
        client.until_ready()
        for name in (b"b", b"s"):
            client.send(bind(name, name), Execute(name), Sync())
            client.until_ready()
        for key in (b"60", b"no number"):
            client.send(bind(statement=b"w", values=(b"late",)), Sync())
            client.until_ready()
            client.send(bind(b"s", b"s"), Execute(b"s"), Sync())
            client.until_ready()
            client.send(bind(statement=b"r", values=(key,)), Sync())
            client.until_ready()
            client.send(bind(b"t", b"t"), Execute(b"t"), Sync())
            client.until_ready()
            client.send(Execute(b""), Sync())
            client.until_ready()
        ask(client, b"COMMIT")
    changed = wired_world.value("SELECT note FROM orders WHERE id = 60") == "late"
    assert changed == ("committed" in wired_world.outcomes(agent))


def test_an_implicit_transaction_that_sets_something_ends_with_its_sync(agent: Agent) -> None:
    with raw(agent) as client:
        prepare(client)
        client.send(
            *(Parse(b"", b"SET application_name = 'a'"), bind(), Execute(b""), Sync()),
            *(bind(statement=b"r", values=(b"60",)), *RUN),
        )
        assert kinds(client.until_ready()) == "12CSZ"
        assert kinds(client.until_ready()) == "2TDCZ"
        ask(client, b"BEGIN")
        ask(client, b"SET application_name = 'b'")
        assert read(client) == "2TDCZ"
        ask(client, b"ROLLBACK")
        assert read(client) == "2TDCZ"


def test_a_block_that_failed_says_so_to_every_read(agent: Agent) -> None:
    with raw(agent) as client:
        prepare(client)
        ask(client, b"BEGIN")
        assert read(client, b"no number") == "EZ"
        for _ in range(3):
            assert read(client) == "EZ"
        assert ask(client, b"ROLLBACK") == "CZ"
        assert read(client) == "2TDCZ"


def test_a_prepared_read_that_locks_rows_runs_again_and_again(agent: Agent) -> None:
    with agent.connect(prepare_threshold=0) as conn:
        for number in (60, 61, 60):
            found = conn.execute("SELECT id FROM orders WHERE id = %s FOR UPDATE", [number])
            assert found.fetchall() == [(number,)]
        with conn.transaction():
            conn.execute("SELECT id FROM orders WHERE id = %s FOR UPDATE", [60])
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
