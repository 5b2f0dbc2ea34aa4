"""
Messages cut at every byte and mutated at random, with fixed seeds: the proxy answers or ends that one connection,
and goes on serving the others.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from end_to_end.balancer import HEADERS, balancer
from end_to_end.certificates import issued
from end_to_end.fuzzing import OPEN, finish, first_proof, logins, mutated, startup, tls_login
from end_to_end.inprocess import proxy
from end_to_end.raw import Raw, bind, kinds, raw
from end_to_end.wired import Agent, Wired

from sqlguard.errors import ProtocolViolation
from sqlguard.wire.messages import (
    Close,
    Describe,
    Execute,
    Flush,
    Parse,
    Query,
    SSLRequest,
    Sync,
    Terminate,
)

#: Long: run on the newest server only (.ci/run).
pytestmark = pytest.mark.slow

SESSION = (
    Query(b"SELECT 1"),
    Parse(b"s", b"DELETE FROM customers WHERE id = $1 RETURNING id", (23,)),
    bind(b"p", b"s", formats=(1,), values=(b"\0\0\1\0",), result_formats=(1,)),
    Describe(is_portal=True, name=b"p"),
    Execute(b"p", 1),
    Close(is_portal=True, name=b"p"),
    Flush(),
    Sync(),
    Query(b"BEGIN; UPDATE orders SET note = 'z' WHERE id = 120; ROLLBACK"),
    Query(b"COPY (SELECT id FROM staff) TO STDOUT"),
)


@pytest.fixture
def _unharmed(wired_world: Wired, agent: Agent) -> Iterator[None]:
    """A session that is there all the time, and no session that is left over."""
    with agent.connect() as conn:
        before = wired_world.proxy.sessions
        yield
        assert conn.execute("SELECT count(*) FROM staff").fetchone() == (8,)
        for _ in range(200):
            if wired_world.proxy.sessions == before:
                break
            time.sleep(0.05)
        assert wired_world.proxy.sessions == before


@pytest.mark.usefixtures("_unharmed")
def test_the_login_cut_at_every_byte(agent: Agent) -> None:
    for packets in (
        (startup(agent),),
        (startup(agent), first_proof()),
        (SSLRequest().encode(), startup(agent)),
    ):
        whole = b"".join(packets)
        for cut in range(len(whole)):
            client = Raw(agent.host, agent.port)
            client.send(whole[:cut])
            finish(client)


@pytest.mark.usefixtures("_unharmed")
def test_the_login_mutated(agent: Agent) -> None:
    chance = random.Random(20_240_601)
    seeds = logins(agent)
    for _ in range(1500):
        client = Raw(agent.host, agent.port)
        client.send(mutated(chance.choice(seeds), chance))
        answer = finish(client)
        assert OPEN not in answer


@pytest.mark.usefixtures("_unharmed")
def test_logins_by_tls_and_behind_headers_mutated(wired_world: Wired, agent: Agent, tmp_path: Path) -> None:
    """Handshakes from the first byte on, and what a load balancer writes before them."""
    chance = random.Random(20_240_605)
    announced = {"proxy_protocol": "required", "proxy_protocol_from": ("127.0.0.1",)}
    dsn, papers = wired_world.database.owner_dsn, issued(tmp_path)
    with proxy(dsn, **papers) as plain, proxy(dsn, **papers, **announced) as behind:
        here, there = replace(agent, port=plain.port), replace(agent, port=behind.port)
        answers = []
        for _ in range(150):
            answers.append(tls_login(here, chance, 20))
            answers.append(tls_login(there, chance, 20, chance.choice(HEADERS)))
            client = Raw(there.host, there.port)
            client.send(mutated(chance.choice(HEADERS) + chance.choice(logins(agent)), chance))
            assert OPEN not in finish(client)
        assert not any(OPEN in answer for answer in answers)
        assert sum(answer[:1] in b"RE" for answer in answers if answer) > 5  # not all stop at the handshake
        with here.connect(sslmode="require") as conn:
            assert conn.execute("SELECT 1").fetchone() == (1,)
        with balancer(behind.port, HEADERS[0]) as port, replace(agent, port=port).connect() as conn:
            assert conn.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.usefixtures("_unharmed")
def test_a_session_cut_at_every_byte(agent: Agent) -> None:
    whole = b"".join(m.encode() for m in SESSION)
    for cut in range(len(whole)):
        with raw(agent) as client:
            client.send(whole[:cut])
            finish(client)


@pytest.mark.usefixtures("_unharmed")
def test_a_session_in_two_pieces_at_every_byte(agent: Agent) -> None:
    whole = b"".join(m.encode() for m in SESSION[:8])
    expected: list[str] | None = None
    with raw(agent) as client:
        for cut in range(len(whole) + 1):
            client.send(whole[:cut])
            if cut % 7 == 0:
                time.sleep(0.001)
            client.send(whole[cut:])
            found = [kinds(client.until_ready()), kinds(client.until_ready())]
            # The second time the statement is there already, and the row is gone.
            if cut == 1:
                expected = found
            assert expected is None or found == expected


@pytest.mark.usefixtures("_unharmed")
def test_a_session_mutated(agent: Agent) -> None:
    chance = random.Random(20_240_602)
    whole = [m.encode() for m in SESSION]
    for _ in range(400):
        with raw(agent) as client:
            sent = list(whole)
            chance.shuffle(sent)
            index = chance.randrange(len(sent))
            sent[index] = mutated(sent[index], chance)
            client.send(b"".join(sent[: chance.randint(1, len(sent))]))
            finish(client)


@pytest.mark.usefixtures("_unharmed")
def test_messages_in_any_order_end_with_one_ready_per_sync(agent: Agent) -> None:
    """Whole messages, shuffled: legal or not, the client is never out of step."""
    chance = random.Random(20_240_603)
    for _ in range(150):
        with raw(agent) as client:
            messages = [chance.choice(SESSION) for _ in range(chance.randint(1, 12))]
            client.send(*messages, Sync(), Query(b"ROLLBACK"), Query(b"SELECT 'the end'"), Terminate())
            found = client.rest()
            text = kinds(found)
            assert text.endswith("TDCZ")
            assert text.count("Z") <= sum(isinstance(m, Query | Sync) for m in messages) + 3


def test_the_mutations_reach_the_decoders() -> None:
    """The fuzz is worth something only if it gets past the framing often enough."""
    from sqlguard.wire.buffer import Frame, FrameReader, frontend_limits  # noqa: PLC0415
    from sqlguard.wire.messages import decode_frontend  # noqa: PLC0415

    chance = random.Random(1)
    decoded = broken = 0
    for _ in range(2000):
        reader = FrameReader(frontend_limits())
        try:
            for frame in reader.receive(mutated(chance.choice(SESSION).encode(), chance)):
                assert isinstance(frame, Frame)
                decode_frontend(frame.kind, frame.body)
                decoded += 1
        except ProtocolViolation:
            broken += 1
    assert decoded > 40
    assert broken > 300
