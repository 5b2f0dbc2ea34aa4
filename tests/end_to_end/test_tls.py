"""TLS to clients and to PostgreSQL."""

import asyncio
import socket
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest
import trustme
from end_to_end.certificates import HERE, issued, trusting
from end_to_end.fuzzing import startup
from end_to_end.inprocess import proxy
from end_to_end.raw import Raw
from end_to_end.wired import Agent, Wired, wired_shop
from servers import SETTINGS, Database, create, make_owner

from sqlguard.embedded import EmbeddedServer
from sqlguard.embedded.binaries import find_bindir
from sqlguard.wire.channel_binding import end_point_hash
from sqlguard.wire.messages import CancelRequest, SSLRequest


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A certificate authority, a certificate for this machine, and one for another."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    trustme.CA().cert_pem.write_to_path(folder / "other-ca.pem")
    for name, hosts in (("here", HERE), ("elsewhere", ("db.example",))):
        issued(folder, name, hosts, authority)
    return {p.name: p for p in folder.iterdir()}


@pytest.fixture(scope="module")
def secure(wired_world: Wired, papers: dict[str, Path]) -> Iterator[int]:
    """The port of a second proxy for the same database that insists on TLS."""
    with proxy(
        wired_world.database.owner_dsn,
        tls_cert=papers["here.pem"],
        tls_key=papers["here.key"],
        tls_required=True,
    ) as running:
        yield running.port


@pytest.fixture
def guest(agent: Agent, secure: int) -> Agent:
    return replace(agent, port=secure)


def test_a_verified_connection_bound_to_the_certificate(guest: Agent, papers: dict[str, Path]) -> None:
    with guest.connect(
        sslmode="verify-full", sslrootcert=str(papers["ca.pem"]), channel_binding="require"
    ) as conn:
        assert conn.pgconn.ssl_in_use
        assert conn.execute("DELETE FROM customers WHERE id = 160").statusmessage == "DELETE 1"


def _is_direct(conn: "psycopg.Connection[Any]") -> bool:
    assert conn.pgconn.ssl_in_use
    return conn.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.skipif(psycopg.pq.version() < 170000, reason="libpq has sslnegotiation since 17")
def test_tls_from_the_first_byte(guest: Agent, papers: dict[str, Path]) -> None:
    with guest.connect(
        sslmode="verify-full",
        sslrootcert=str(papers["ca.pem"]),
        channel_binding="require",
        sslnegotiation="direct",
    ) as conn:
        assert _is_direct(conn)
        assert conn.execute("SELECT length(repeat('x', 100000))").fetchone() == (100_000,)


def test_who_begins_with_tls_has_to_say_what_it_speaks(guest: Agent) -> None:
    for protocols, wanted in ((["postgresql"], True), (["http/1.1"], False), ([], False)):
        with socket.create_connection((guest.host, guest.port), timeout=10) as plain:
            try:
                with trusting(*protocols).wrap_socket(plain) as client:
                    client.sendall(CancelRequest(1, b"1234").encode() if not wanted else startup(guest))
                    assert client.recv(1)[:1] == (b"R" if wanted else b"")
            except (ssl.SSLError, ConnectionResetError):
                assert not wanted


def test_without_channel_binding(guest: Agent) -> None:
    with guest.connect(sslmode="require", channel_binding="disable") as conn:
        assert conn.execute("SELECT 1").fetchone() == (1,)


def test_plain_connections_are_refused_before_the_password(guest: Agent) -> None:
    with pytest.raises(psycopg.OperationalError, match="TLS only"):
        guest.connect(sslmode="disable")


def test_another_authority_is_not_trusted(guest: Agent, papers: dict[str, Path]) -> None:
    with pytest.raises(psycopg.OperationalError, match="certificate verify failed"):
        guest.connect(sslmode="verify-full", sslrootcert=str(papers["other-ca.pem"]))
    with guest.connect(sslmode="require") as conn:
        assert conn.execute("SELECT 1").fetchone() == (1,)


def test_text_behind_the_request_for_tls_ends_the_connection(guest: Agent) -> None:
    client = Raw(guest.host, guest.port)
    client.send(SSLRequest().encode() + b"\0\0\0\x08\x04\xd2\x16\x2f")
    assert client.socket.recv(1) in (b"E", b"")
    client.close()


def test_rubbish_in_the_handshake(guest: Agent) -> None:
    client = Raw(guest.host, guest.port)
    client.send(SSLRequest())
    assert client.socket.recv(1) == b"S"
    client.send(b"this is no ClientHello" * 20)
    while client.socket.recv(4096):
        pass
    client.close()


async def _lengths(guest: Agent) -> list[int]:
    """Records of about TLS's own limit once made libpq's non-blocking clients hang."""
    async with await psycopg.AsyncConnection.connect(guest.dsn, sslmode="require", autocommit=True) as conn:
        found = []
        for length in (8191, 8192, 8193, 16360, 16384, 40000, 1_000_000):
            if length < 20_000:
                cursor = await conn.execute(f"SELECT repeat('x', {length})".encode())
            else:
                cursor = await conn.execute("SELECT %s::text", ["x" * length])
            row = await cursor.fetchone()
            found.append(len(row[0]) if row else 0)
        return found


def test_rows_of_about_a_record(guest: Agent) -> None:
    assert asyncio.run(_lengths(guest)) == [8191, 8192, 8193, 16360, 16384, 40000, 1_000_000]


async def _with_asyncpg(guest: Agent, papers: dict[str, Path]) -> int:
    context = ssl.create_default_context(cafile=str(papers["ca.pem"]))
    conn = await asyncpg.connect(**guest.keywords, ssl=context)
    try:
        found: int = await conn.fetchval("SELECT count(*) FROM orders")
        return found
    finally:
        await conn.close()


def test_asyncpg(guest: Agent, papers: dict[str, Path]) -> None:
    assert asyncio.run(_with_asyncpg(guest, papers)) == 2400


def test_cancel_over_tls(guest: Agent) -> None:
    with guest.connect(sslmode="require") as conn:
        conn.execute("SELECT 1")
        conn.cancel_safe()
        assert conn.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.parametrize("kind", ["rsa:2048 -sha256", "rsa:2048 -sha384", "rsa:2048 -sha512", "ec -sha384"])
def test_the_hash_of_a_certificate_is_openssls(tmp_path: Path, kind: str) -> None:
    algorithm, digest = kind.split()
    more = ["-pkeyopt", "ec_paramgen_curve:secp384r1"] if algorithm == "ec" else []
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", algorithm, *more, digest, "-nodes", "-days", "1", "-subj", "/CN=x",
         "-keyout", str(tmp_path / "k.pem"), "-out", str(tmp_path / "c.pem")],
        capture_output=True, check=False,
    )  # fmt: skip
    if made.returncode != 0:
        pytest.skip("there is no openssl to make the certificate")
    told = subprocess.run(
        ["openssl", "x509", "-in", str(tmp_path / "c.pem"), "-noout", "-fingerprint", digest],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (
        end_point_hash((tmp_path / "c.pem").read_text()).hex()
        == told.stdout.split("=")[1].strip().replace(":", "").lower()
    )


# --- to PostgreSQL


@pytest.fixture(scope="module")
def tls_server(papers: dict[str, Path]) -> Iterator[EmbeddedServer]:
    """PostgreSQL 15 with TLS: the newer ones that come as wheels are built without."""
    bindir = find_bindir(15)
    if bindir is None:
        pytest.skip("PostgreSQL 15 is not installed")
    with EmbeddedServer.start(
        bindir, ssl=(papers["here.pem"], papers["here.key"]), settings=SETTINGS
    ) as made:
        make_owner(made)
        yield made


@pytest.fixture(scope="module")
def tls_shop(tls_server: EmbeddedServer) -> Iterator[Wired]:
    create(tls_server, "shop")
    database = Database(tls_server, "shop")
    with wired_shop(database, backend_tls="require") as made:
        yield made
    database.close()


USES_TLS = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"


def uses_tls(world: Wired, agent: Agent) -> Any:
    with agent.connect() as conn:
        pid = conn.info.backend_pid
        conn.execute("SELECT 1")
        return world.database.execute(f"SELECT ssl FROM pg_stat_ssl WHERE pid = {pid}")[0][0]


@pytest.mark.parametrize("mode", ["disable", "prefer", "require", "verify-full"])
def test_tls_to_postgresql(tls_shop: Wired, papers: dict[str, Path], mode: str) -> None:
    ca = {"backend_tls_ca": papers["ca.pem"]} if mode == "verify-full" else {}
    with tls_shop.visiting() as agent, proxy(tls_shop.database.owner_dsn, backend_tls=mode, **ca) as running:
        agent = replace(agent, port=running.port)
        assert uses_tls(tls_shop, agent) is (mode != "disable")
        with agent.connect() as conn:
            text = "x" * 100_000
            assert conn.execute("SELECT %s::text", [text]).fetchone() == (text,)
            assert conn.execute("DELETE FROM customers WHERE id = 170").statusmessage == "DELETE 1"
            conn.cancel_safe()


def test_a_server_that_can_not_prove_who_it_is(tls_shop: Wired, papers: dict[str, Path]) -> None:
    ca = papers["other-ca.pem"]
    with (
        tls_shop.visiting() as agent,
        proxy(tls_shop.database.owner_dsn, backend_tls="verify-full", backend_tls_ca=ca) as running,
    ):
        with pytest.raises(psycopg.OperationalError, match="no TLS with PostgreSQL"):
            replace(agent, port=running.port).connect()


def test_a_server_without_tls_is_refused_where_it_is_required(wired_world: Wired, agent: Agent) -> None:
    if wired_world.database.server.version == 15:
        pytest.skip("this server is built with TLS, and offers it if it has a certificate")
    with proxy(wired_world.database.owner_dsn, backend_tls="require") as running:
        with pytest.raises(psycopg.OperationalError, match="does not offer TLS"):
            replace(agent, port=running.port).connect()
    with proxy(wired_world.database.owner_dsn, backend_tls="prefer") as running:
        with replace(agent, port=running.port).connect() as conn:
            assert conn.execute("SELECT 1").fetchone() == (1,)
