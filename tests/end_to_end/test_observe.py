"""`serve --observe`: everything passes as it came, and what the guard would have done is counted."""

import asyncio
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest
from end_to_end.certificates import issued, trusting
from end_to_end.inprocess import proxy
from end_to_end.wired import POLICY, Wired, wired_shop
from servers import OWNER, fresh_database
from typer.testing import CliRunner

from sqlguard.cli import app
from sqlguard.dsn import url
from sqlguard.embedded import EmbeddedServer
from sqlguard.errors import NotConfigured
from sqlguard.policy import parse_policy
from sqlguard.postgres.observations import Observation, forget_observations, read_observations
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.proxy.sightings import Sightings
from sqlguard.wire.messages import StartupMessage


@pytest.fixture(scope="module")
def world(server: EmbeddedServer) -> Iterator[Wired]:
    with fresh_database(server) as database, wired_shop(database) as made:
        yield made


class Watched:
    """An observing proxy, and what it has counted so far."""

    def __init__(self, world: Wired, port: int, sightings: Sightings) -> None:
        self.world = world
        self.sightings = sightings
        parts = psycopg.conninfo.conninfo_to_dict(world.database.owner_dsn)
        self.dsn = url(
            host="127.0.0.1",
            port=port,
            user=str(parts["user"]),
            password=str(parts["password"]),
            dbname=world.database.name,
        )
        self.keywords = {
            "host": "127.0.0.1",
            "port": port,
            "user": parts["user"],
            "password": parts["password"],
            "database": world.database.name,
        }

    def connect(self, **options: Any) -> psycopg.Connection[Any]:
        return psycopg.connect(self.dsn, **{"autocommit": True, **options})

    def seen(self) -> list[Observation]:
        """What has been counted, once it does not change any more: it is written behind the client's back."""
        found: list[Observation] = []
        for _ in range(20):
            time.sleep(0.3)
            now = read_observations(self.world.owner)
            if now == found and (now or not self.sightings.observes(OWNER)):
                break
            found = now
        return found

    def verdicts(self) -> dict[str, str]:
        return {o.sample: o.verdict for o in self.seen()}


@contextmanager
def watching(world: Wired, policy: str | None = "wired", **settings: Any) -> Iterator[Watched]:
    forget_observations(world.owner)
    dsn = world.database.owner_dsn
    sightings = Sightings(dsn, policy, settings.pop("roles", ()), every=0.1)
    sightings.start()
    try:
        with proxy(dsn, sightings=sightings, **settings) as running:
            yield Watched(world, running.port, sightings)
    finally:
        sightings.stop()


@pytest.fixture
def watched(world: Wired) -> Iterator[Watched]:
    with watching(world) as made:
        yield made


def test_what_would_be_refused_or_rewritten_is_done_and_counted(watched: Watched) -> None:
    with watched.connect() as conn:
        conn.execute("INSERT INTO plain (id, t) VALUES (900001, 'x'), (900002, 'y')")
        for key in (900001, 900002):
            assert conn.execute(f"DELETE FROM plain WHERE id = {key}").statusmessage == "DELETE 1"
        conn.execute("CREATE TABLE observed_table (id integer)")
        conn.execute("DROP TABLE observed_table /* because of Ms Miller */")
    # The row is really gone: nothing was rewritten.
    assert watched.world.value("SELECT count(*) FROM plain WHERE id IN (900001, 900002)") == 0
    seen = {o.sample: o for o in watched.seen()}
    delete = seen["DELETE FROM plain WHERE id = ?"]
    assert (delete.verdict, delete.count, delete.agent) == ("rewrite", 2, OWNER)
    assert delete.executed is not None
    assert delete.executed.startswith("UPDATE plain SET")
    assert delete.tables == ["public.plain"]
    assert seen["DROP TABLE observed_table"].verdict == "refuse"
    assert seen["DROP TABLE observed_table"].hint
    assert seen["INSERT INTO plain (id, t) VALUES (?, ?), (?, ?)"].verdict == "allow"


def test_a_tasks_login_is_judged_by_its_own_policy(watched: Watched) -> None:
    agent = watched.world.agent()
    agent.port = int(watched.keywords["port"])
    with agent.connect() as conn:
        conn.execute("SELECT 1 AS mine")
    seen = {o.sample: o for o in watched.seen()}
    assert (seen["SELECT ? AS mine"].agent, seen["SELECT ? AS mine"].role) == ("tester", agent.task.role)


def test_a_prepared_statement_counts_as_often_as_it_is_executed(watched: Watched) -> None:
    async def run() -> None:
        conn = await asyncpg.connect(**watched.keywords)
        prepared = await conn.prepare("SELECT $1::int + 41 AS sum")
        assert [await prepared.fetchval(n) for n in range(5)] == [41, 42, 43, 44, 45]
        await conn.close()

    asyncio.run(run())
    found = next(o for o in watched.seen() if o.sample.endswith("AS sum"))
    assert (found.verdict, found.count) == ("allow", 5)


def test_the_session_is_followed(watched: Watched) -> None:
    """What a statement means depends on what the session has done before, and on what was rolled back."""
    with watched.connect(autocommit=False) as conn:
        conn.execute("CREATE TEMP TABLE scratch (id integer)")
        conn.execute("INSERT INTO scratch VALUES (1)")
        conn.execute("DELETE FROM scratch WHERE id = 1")
        conn.commit()
    assert watched.verdicts()["DELETE FROM scratch WHERE id = ?"] == "allow"


def test_errors_and_copy_pass_and_are_followed(watched: Watched) -> None:
    with watched.connect() as conn:
        with pytest.raises(psycopg.errors.UndefinedTable):
            conn.execute("SELECT * FROM no_such_table")
        with pytest.raises(psycopg.errors.SyntaxError):
            conn.execute("SELEC 'secret'")
        with conn.cursor().copy("COPY plain (id, t) FROM STDIN") as copy:
            copy.write_row((910001, "copied"))
        with conn.cursor().copy("COPY plain (id) TO STDOUT") as copy:
            assert b"910001\n" in b"".join(copy)
        conn.execute("SELECT 'behind' AS all")
    assert watched.world.value("SELECT t FROM plain WHERE id = 910001") == "copied"
    watched.world.owner.execute("DELETE FROM plain WHERE id = 910001")
    verdicts = watched.verdicts()
    assert "SELECT ? AS all" in verdicts
    assert "unknown" not in verdicts.values()
    assert not any("secret" in sample for sample in verdicts)


def test_wrong_passwords_and_cancels_are_postgresqls_own(watched: Watched) -> None:
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(watched.dsn, password="wrong")
    with watched.connect() as conn:
        conn.execute("SET statement_timeout = '20s'")
        cancelled: list[str] = []

        def cancel() -> None:
            time.sleep(0.3)
            conn.cancel_safe()

        thread = threading.Thread(target=cancel)
        thread.start()
        try:
            conn.execute("SELECT pg_sleep(15)")
        except psycopg.errors.QueryCanceled as fault:
            cancelled.append(str(fault.sqlstate))
        thread.join()
        assert cancelled == ["57014"]


def test_other_databases_pass_unjudged(watched: Watched) -> None:
    with psycopg.connect(
        watched.dsn.replace(watched.world.database.name, "postgres"), autocommit=True
    ) as conn:
        assert conn.execute("SELECT current_database()").fetchone() == ("postgres",)
    assert not any("current_database" in o.sample for o in watched.seen())


def test_a_client_that_leaves_before_it_says_who_it_is_is_told_nothing(watched: Watched) -> None:
    """As by PostgreSQL: node-postgres sends its Terminate at once when it is ended at once."""
    with socket.create_connection(("127.0.0.1", int(watched.keywords["port"])), timeout=10) as client:
        client.sendall(b"X\0\0\0\4")
        assert client.recv(100) == b""


def test_a_client_may_say_goodbye_twice(watched: Watched) -> None:
    """node-postgres does, where a pool and a client are ended at once."""
    with watched.connect() as conn:
        conn.execute("SELECT 3 AS last")
        with socket.socket(fileno=os.dup(conn.pgconn.socket)) as same:
            same.sendall(b"X\0\0\0\4" * 2)
            with suppress(OSError):  # PostgreSQL may be gone by now
                same.sendall(b"X\0\0\0\4")
    assert watched.verdicts() == {"SELECT ? AS last": "allow"}


def test_only_listed_roles_are_observed(world: Wired) -> None:
    with watching(world, roles=("somebody_else",)) as watched:
        with watched.connect() as conn:
            assert conn.execute("SELECT 1 AS unseen").fetchone() == (1,)
        assert watched.seen() == []


def test_a_protocol_that_is_not_known_ends_the_observing_only(world: Wired) -> None:
    """Here: a message longer than the bound of what is looked at."""
    with watching(world, max_message_bytes=10_000) as small:
        with small.connect() as conn:
            text = "x" * 20_000
            assert conn.execute(f"SELECT '{text}'").fetchone() == (text,)
            assert conn.execute("SELECT 2").fetchone() == (2,)
        assert [o.verdict for o in small.seen() if o.verdict != "allow"] == ["unknown"]


def test_a_policy_must_be_there(world: Wired) -> None:
    with pytest.raises(NotConfigured):
        Sightings(world.database.owner_dsn, "no_such_policy").start()


def test_a_new_version_of_the_policy_judges_at_once(world: Wired) -> None:
    with watching(world) as watched:
        first = watched.sightings.stranger("x")
        apply_policy(
            world.owner, parse_policy(POLICY.replace("max_rows = 5000", "max_rows = 4999"), "wired.toml")
        )
        time.sleep(0.4)
        second = watched.sightings.stranger("x")
        assert first is not None
        assert second is not None
        assert second.task.policy_version == first.task.policy_version + 1


def test_the_report_says_what_would_have_happened(watched: Watched) -> None:
    with watched.connect() as conn:
        conn.execute("DELETE FROM plain WHERE id = 77")
    watched.seen()
    run = CliRunner().invoke(app, ["observe", "report", "--dsn", watched.world.database.owner_dsn])
    assert "DELETE FROM plain WHERE id = ?" in run.output
    run = CliRunner().invoke(app, ["observe", "report", "--json", "--dsn", watched.world.database.owner_dsn])
    assert '"rewrite": 1' in run.output
    run = CliRunner().invoke(app, ["observe", "forget", "--dsn", watched.world.database.owner_dsn])
    assert "forgotten" in run.output
    run = CliRunner().invoke(app, ["observe", "report", "--dsn", watched.world.database.owner_dsn])
    assert "nothing was observed" in run.output


def test_tls_from_the_first_byte(world: Wired, tmp_path: Path) -> None:
    if psycopg.pq.version() < 170000:
        pytest.skip("libpq has sslnegotiation since 17")
    with watching(world, **issued(tmp_path)) as watched:
        options = {"sslmode": "require", "channel_binding": "disable"}
        for negotiation in ("direct", "postgres"):
            with watched.connect(sslnegotiation=negotiation, **options) as conn:
                assert conn.pgconn.ssl_in_use
                assert conn.execute("SELECT length(repeat('x', 100000)) AS direct").fetchone() == (100_000,)
                conn.cancel_safe()
                assert conn.execute("SELECT 1").fetchone() == (1,)
        (seen,) = [o for o in watched.seen() if "direct" in o.sample]
        assert (seen.verdict, seen.count) == ("allow", 2)
        # As by the guarded way: who does not say what it speaks may be another protocol's client.
        for protocols in ((), ("http/1.1",)):
            with socket.create_connection(("127.0.0.1", watched.keywords["port"]), timeout=10) as plain:
                assert not is_heard(plain, protocols)


def is_heard(plain: socket.socket, protocols: tuple[str, ...]) -> bool:
    try:
        with trusting(*protocols).wrap_socket(plain) as client:
            client.sendall(StartupMessage(3 << 16, ((b"user", OWNER.encode()),)).encode())
            return client.recv(1) != b""
    except (ssl.SSLError, ConnectionResetError):
        return False
