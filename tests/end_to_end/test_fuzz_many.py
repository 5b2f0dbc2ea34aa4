"""
Very many mutated messages, in framing that mostly holds, against a proxy in a process of its own.

`SQLGUARD_FUZZ_MESSAGES` says how many (a million takes about an hour on two cores), `SQLGUARD_FUZZ_SEED` with which seed,
`SQLGUARD_FUZZ_SECONDS` how long at most. A batch of messages ends with what brings any session back to its beginning
(CopyFail, Sync, ROLLBACK) and a SELECT: its answer has to come last, with no ReadyForQuery too many, or the session has
been ended. Each failure shows the batch that made it.
"""

import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from end_to_end.balancer import HEADERS, balancer
from end_to_end.certificates import issued
from end_to_end.fuzzing import OPEN, finish, logins, mutated, tls_login
from end_to_end.raw import Raw, bind
from end_to_end.shop import World, shop_world
from end_to_end.wired import Agent
from servers import fresh_database

from sqlguard.embedded import EmbeddedServer
from sqlguard.postgres.tasks import open_task
from sqlguard.wire.buffer import BACKEND_LIMITS, Frame, FrameReader, message
from sqlguard.wire.messages import (
    Close,
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

pytestmark = pytest.mark.slow

MESSAGES = int(os.environ.get("SQLGUARD_FUZZ_MESSAGES", "6000"))
SECONDS = float(os.environ.get("SQLGUARD_FUZZ_SECONDS", "3000"))
SEED = int(os.environ.get("SQLGUARD_FUZZ_SEED", "20240604"))
#: A proxy that has just started takes about 90 MB.
MEMORY = 400 * 1024 * 1024
BATCH, CLIENTS = 120, 3
TEXTS = (
    b"SELECT 1",
    b"SELECT id, name FROM customers ORDER BY id LIMIT 3",
    b"SELECT 1; SELECT 'two'; SELECT 3",
    b"BEGIN",
    b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",
    b"COMMIT",
    b"ROLLBACK",
    b"SAVEPOINT s; ROLLBACK TO s; RELEASE s",
    b"UPDATE orders SET note = 'f' WHERE id = 7",
    b"DELETE FROM customers WHERE id = 31 RETURNING id",
    b"INSERT INTO staff (id, name) VALUES (9001, 'Ada') /*idempotency_key='f-1',reason='fuzz'*/",
    b"COPY (SELECT id FROM staff) TO STDOUT",
    b"PREPARE p (int) AS SELECT $1; EXECUTE p(1); DEALLOCATE p",
    b"DECLARE c CURSOR FOR SELECT id FROM staff",
    b"FETCH 2 FROM c",
    b"SET search_path = public, pg_catalog",
    b"SET sqlguard.dry_run = on",
    b"RESET ALL",
    b"DISCARD ALL",
    b"EXPLAIN SELECT 1",
    b"SET client_encoding = 'LATIN1'",
    b"",
)
EXTENDED = (
    Parse(b"", b"SELECT $1::int + 1", (23,)),
    Parse(b"w", b"UPDATE orders SET note = $1 WHERE id = $2", (25, 23)),
    Parse(b"", b"BEGIN"),
    bind(values=(b"\0\0\0\1",), formats=(1,), result_formats=(1,)),
    bind(b"p", b"w", values=(b"x", b"7")),
    bind(),
    Describe(is_portal=True, name=b""),
    Describe(is_portal=False, name=b"w"),
    Execute(b"", 0),
    Execute(b"p", 1),
    Close(is_portal=False, name=b"w"),
    Close(is_portal=True, name=b"p"),
    Flush(),
    Sync(),
    CopyData(b"9002\tBob\n"),
    CopyDone(),
    CopyFail(b"no"),
    Terminate(),
)
CALL = message(b"F", b"\0\0\4\xd2\0\0\0\0\0\0")
#: Data that comes before the server has asked for it is kept for it: so a COPY is a message of three.
DATA = CopyData(b"9002\tBob\n9003\tEve\n").encode() + CopyDone().encode()
COPIES = (
    Query(b"COPY staff (id, name) FROM STDIN").encode() + DATA,
    Query(b"COPY staff FROM STDIN (FORMAT csv); SELECT 1").encode()
    + CopyData(b"1,x\n").encode()
    + CopyDone().encode(),
    Query(b"COPY staff (id, name) FROM STDIN").encode() + CopyFail(b"no").encode(),
    Parse(b"", b"COPY staff (id, name) FROM STDIN").encode()
    + bind().encode()
    + Execute(b"", 0).encode()
    + DATA,
)
SEEDS = (*(Query(text).encode() for text in TEXTS), *(m.encode() for m in EXTENDED), CALL)
BACK = (
    CopyFail(b"over").encode()
    + Sync().encode()
    + b"".join(Query(t).encode() for t in (b"ROLLBACK", b"RESET ALL"))
)


class Failed(Exception):
    """What went wrong, and the batch that did it."""


def fuzzed(chance: random.Random) -> bytes:
    """One message in a frame that fits: as it is, with another text, or with a body that is mutated anyhow."""
    if chance.random() < 0.05:
        return chance.choice(COPIES)
    seed = chance.choice(SEEDS)
    if seed == Terminate().encode() and chance.random() < 0.95:
        seed = Sync().encode()
    dice = chance.random()
    if dice < 0.45:
        return seed
    body = mutated(seed[5:], chance) if len(seed) > 5 else chance.randbytes(2)
    if dice < 0.97 and seed[:1] == b"Q":
        return message(b"Q", body.replace(b"\0", b"") + b"\0")
    if dice < 0.97 and seed[:1] == b"P":
        name, text, rest = seed[5:].split(b"\0", 2)
        text = mutated(text, chance).replace(b"\0", b"")
        return message(b"P", b"\0".join([name, text, rest]))
    return seed if dice < 0.97 else message(seed[:1], body)


class Client:
    """Sends batches by one connection as long as it lasts."""

    def __init__(self, agent: Agent, behind: int, seed: int) -> None:
        """*behind* is the port of the proxy that takes headers."""
        self.agent, self.behind = agent, replace(agent, port=behind)
        self.chance = random.Random(seed)
        self.messages = self.batches = self.sessions = self.ended = 0
        self._raw: Raw | None = None

    def batch(self) -> None:
        sent = [fuzzed(self.chance) for _ in range(self.chance.randint(1, BATCH))]
        self.messages += len(sent)
        self.batches += 1
        # A frame that does not fit ends a session, or lets it wait for the rest of a message: it comes last.
        broken = mutated(self.chance.choice(SEEDS), self.chance) if self.chance.random() < 0.05 else None
        end = b"end of %d" % self.batches
        try:
            if self._raw is None:
                self._raw = Raw(self.agent.host, self.agent.port, timeout=60)
                self._raw.log_in(self.agent)
                self.sessions += 1
            if broken is not None:
                self._raw.send(*sent, broken)
                finish(self._raw, 60)
                self._over()
                return
            self._raw.send(*sent, BACK, Query(b"SELECT '%s'" % end))
            if not self._answered(self._raw, end, sent):
                self._over()
        except (BrokenPipeError, ConnectionResetError):
            self._over()
        except TimeoutError:
            raise Failed(f"no answer in time to {sent!r} {broken!r}") from None

    def _answered(self, client: Raw, end: bytes, sent: list[bytes]) -> bool:
        """Read up to the answer of the last SELECT; False if the session was ended."""
        reader, ready, told = FrameReader(BACKEND_LIMITS), 0, False
        asked = sum(m[:1] in b"QSF" for m in sent) + 4
        while data := client.socket.recv(1 << 16):
            for frame in reader.receive(data):
                assert isinstance(frame, Frame)
                ready += frame.kind == ord("Z")
                told = told or (frame.kind == ord("D") and frame.raw.endswith(end))
                if ready > asked:
                    raise Failed(f"{ready} times ready for {asked} questions: {sent!r}")
            if told and data[-6:-1] == b"Z\0\0\0\5":
                return True
        return False

    def _over(self) -> None:
        self.ended += 1
        self.close()

    def close(self) -> None:
        if self._raw is not None:
            self._raw.close()
            self._raw = None

    def login(self) -> None:
        """A login that is spoilt somewhere: as it is, behind a load balancer's header, with TLS, with both."""
        chance, seed = self.chance, self.chance.getrandbits(64)
        header = chance.choice(HEADERS) if chance.random() < 0.5 else b""
        again = random.Random(seed)
        try:
            answer = self._spoilt(again, header)
        except TimeoutError:
            raise Failed(f"no answer in time to the login of seed {seed} behind {header!r}") from None
        self.messages += 1
        if OPEN in answer:
            raise Failed(f"got in by the login of seed {seed} behind {header!r}")

    def _spoilt(self, chance: random.Random, header: bytes) -> bytes:
        agent = self.behind if header else self.agent
        if chance.random() < 0.4:
            return tls_login(agent, chance, 60, header)
        client = Raw(agent.host, agent.port, timeout=60)
        client.send(mutated(header + chance.choice(logins(agent)), chance))
        return finish(client, 60)


@pytest.fixture(scope="module")
def shop(server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The shop, with TLS."""
    folder = tmp_path_factory.mktemp("shop")
    with fresh_database(server) as database, shop_world(database, folder, *papers(folder)) as world:
        yield world


@pytest.fixture(scope="module")
def behind(shop: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The same by way of a load balancer: a proxy of its own that wants to be told who comes."""
    folder = tmp_path_factory.mktemp("behind")
    settings = 'proxy_protocol = "required"\nproxy_protocol_from = ["127.0.0.1"]\n'
    (folder / "sqlguard.toml").write_text(settings, encoding="utf-8")
    with World(shop.database, shop.dsn, folder).serve(*papers(folder)) as world:
        yield world


def papers(folder: Path) -> list[str]:
    found = issued(folder)
    return ["--tls-cert", str(found["tls_cert"]), "--tls-key", str(found["tls_key"])]


@pytest.fixture
def bystander(shop: World) -> Iterator[list[float]]:
    """A session that works all the time, and how long each of its statements took."""
    agent, took, done = made(shop), [], threading.Event()

    def work() -> None:
        with agent.connect() as conn:
            while not done.wait(0.2):
                began = time.monotonic()
                assert conn.execute("SELECT count(*) FROM products").fetchone() == (120,)
                took.append(time.monotonic() - began)

    thread = threading.Thread(target=work)
    thread.start()
    yield took
    is_alive = thread.is_alive()
    done.set()
    thread.join()
    assert is_alive, "the session of a bystander was harmed"


def made(shop: World) -> Agent:
    task = open_task(shop.owner, agent="tester", policy="support", ttl=timedelta(minutes=59))
    return Agent(task, "127.0.0.1", shop.port, shop.database.name, "")


def resident(pid: int) -> int:
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def test_many_messages(
    shop: World, behind: World, bystander: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("memory is read from /proc")
    until = time.monotonic() + SECONDS
    clients = [Client(made(shop), behind.port, SEED + n) for n in range(CLIENTS)]
    failed: list[Exception] = []
    most = 0

    def work(client: Client) -> None:
        try:
            while client.messages < MESSAGES // CLIENTS and time.monotonic() < until and not failed:
                client.batch()
                if client.chance.random() < 0.3:
                    client.login()
        except Exception as fault:  # told below, in the test's own thread
            failed.append(fault)

    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.2)
        most = max(most, *(resident(world.process.pid) for world in (shop, behind)))
        with capfd.disabled():
            told(clients, most)
    for client in clients:
        client.close()
    if failed:
        raise failed[0]
    assert most < MEMORY
    assert max(bystander) < 10
    agent = made(shop)
    with balancer(behind.port, HEADERS[0]) as there:
        assert {is_served(replace(agent, port=port)) for port in (shop.port, there)} == {True}


def is_served(agent: Agent) -> bool:
    with agent.connect() as conn:
        return conn.execute("SELECT 1").fetchone() == (1,)


def told(clients: list[Client], most: int) -> None:
    """Write down how far a long run has come."""
    path = os.environ.get("SQLGUARD_FUZZ_PROGRESS")
    if path:
        parts = [
            sum(getattr(c, name) for c in clients) for name in ("messages", "batches", "sessions", "ended")
        ]
        Path(path).write_text(
            f"{parts} messages, batches, sessions, ended; {most >> 20} MB\n", encoding="utf-8"
        )
