"""
The wire core against a real PostgreSQL: a login with nothing but the ClientKey, SASLprep, and real pipelines.

One plain blocking socket; nothing of the proxy.
"""

import os
import socket
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from psycopg import sql
from servers import Database

from sqlguard.errors import ProtocolViolation
from sqlguard.wire import messages as m
from sqlguard.wire.buffer import BACKEND_LIMITS, Frame, FrameReader
from sqlguard.wire.reports import error_response, fields_of
from sqlguard.wire.scram import MECHANISM, ClientExchange, Keys, ServerExchange, Verifier
from sqlguard.wire.session import ASKS, Expect, Part, Reply, Session, refusal, refused_reply

ROLE, PASSWORD = "sqlguard_wire", "correct horse"
OURS = error_response("ERROR", "SG002", "no")


class Peer:
    """A raw connection to the server."""

    def __init__(self, database: Database) -> None:
        self.socket = socket.create_connection(("127.0.0.1", database.server.port), timeout=10)
        self._frames = FrameReader(BACKEND_LIMITS)
        self._queue: list[Frame] = []

    def next(self) -> m.BackendMessage:
        while not self._queue:
            data = self.socket.recv(65536)
            assert data, "the server hung up"
            self._queue += [frame for frame in self._frames.receive(data) if isinstance(frame, Frame)]
        frame = self._queue.pop(0)
        return m.decode_backend(frame.kind, frame.body)

    def log_in(self, database: Database, secret: Keys | str) -> m.BackendKeyData:
        pairs = ((b"user", ROLE.encode()), (b"database", database.name.encode()))
        self.socket.sendall(m.StartupMessage(m.PROTOCOL_3_0, pairs).encode())
        offer = self.next()
        assert isinstance(offer, m.AuthenticationSASL)
        assert MECHANISM.encode() in offer.mechanisms
        client = ClientExchange(secret, b64encode(os.urandom(18)).decode())
        self.socket.sendall(m.SASLInitialResponse(MECHANISM.encode(), client.first()).encode())
        go_on = self.next()
        assert isinstance(go_on, m.AuthenticationSASLContinue)
        self.socket.sendall(m.SASLResponse(client.final(go_on.data)).encode())
        final = self.next()
        if isinstance(final, m.ErrorResponse):
            raise PermissionError(str(final.get(b"C")))
        assert isinstance(final, m.AuthenticationSASLFinal)
        client.check(final.data)
        assert self.next() == m.AuthenticationOk()
        key = None
        while (message := self.next()) != m.ReadyForQuery(b"I"):
            if isinstance(message, m.BackendKeyData):
                key = message
        assert key is not None
        return key


@contextmanager
def peer(database: Database) -> Iterator[Peer]:
    made = Peer(database)
    try:
        yield made
    finally:
        made.socket.close()


@pytest.fixture
def verifier(database: Database) -> Verifier:
    """The verifier of a role that was made with it: the password has never been at the server."""
    made = Verifier.make(PASSWORD, os.urandom(27))
    create = sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(sql.Identifier(ROLE), str(made))
    with database.connect() as conn:
        conn.execute(create)
        conn.execute(sql.SQL("GRANT CREATE ON SCHEMA public TO {}").format(sql.Identifier(ROLE)))
    return made


def learned(verifier: Verifier) -> Keys:
    """Return what a proxy learns from a client that proves that it knows the password."""
    client, server = ClientExchange(PASSWORD, "ours"), ServerExchange(verifier, "theirs")
    client.check(server.final(client.final(server.first(MECHANISM, client.first()))))
    return server.keys


def test_log_in_with_only_the_client_key(database: Database, verifier: Verifier) -> None:
    keys = learned(verifier)
    with peer(database) as connection:
        key = connection.log_in(database, keys)
        assert key.pid > 0
        connection.socket.sendall(m.Query(b"SELECT current_user").encode())
        assert isinstance(connection.next(), m.RowDescription)
        assert connection.next() == m.DataRow((ROLE.encode(),))


def test_libpq_and_we_make_the_same_keys(database: Database, verifier: Verifier) -> None:
    with psycopg.connect(database.dsn_for(ROLE, PASSWORD)) as conn:
        assert conn.execute("SELECT 1").fetchone() == (1,)
    with peer(database) as connection:
        connection.log_in(database, PASSWORD)


def test_other_keys_do_not_log_in(database: Database, verifier: Verifier) -> None:
    with peer(database) as connection, pytest.raises(PermissionError, match="28P01"):
        connection.log_in(database, Keys(bytes(32), verifier.server_key))


def test_a_server_that_cannot_prove_itself_is_not_used(database: Database, verifier: Verifier) -> None:
    keys = learned(verifier)
    with peer(database) as connection, pytest.raises(ProtocolViolation, match="could not prove"):
        connection.log_in(database, Keys(keys.client_key, bytes(32)))


@pytest.mark.parametrize(
    "password",
    [
        "plain",
        "a\N{SOFT HYPHEN}b",
        "a\N{NO-BREAK SPACE}b",
        "a\N{ZERO WIDTH SPACE}b",
        "\N{FEMININE ORDINAL INDICATOR}\N{ROMAN NUMERAL NINE}",
        "A\N{COMBINING DIAERESIS}",
        "ä\N{BELL}",
        "\N{SOFT HYPHEN}",
        "\N{ARABIC LETTER ALEF}1",
        "\N{ARABIC LETTER ALEF}1\N{ARABIC LETTER ALEF}",
        "\N{ARABIC LETTER ALEF}a\N{ARABIC LETTER ALEF}",
        "\N{HEBREW LETTER ALEF}",
        "\U000e0001",
        "\ue000",
        "\u0221",
        "\N{LATIN SMALL LIGATURE FI}\N{SOFT HYPHEN}",
        "\N{PILE OF POO}",
        "\N{COMBINING GRAPHEME JOINER}x",
        "\N{IDEOGRAPHIC SPACE}x",
        "\N{REPLACEMENT CHARACTER}",
        "\N{ANGSTROM SIGN}",
    ],
    ids=ascii,
)
def test_saslprep_is_postgresqls(database: Database, password: str) -> None:
    with database.connect() as conn:
        role = sql.Identifier(ROLE)
        conn.execute(sql.SQL("CREATE ROLE {} PASSWORD {}").format(role, password))
        row = conn.execute("SELECT rolpassword FROM pg_authid WHERE rolname = %s", [ROLE]).fetchone()
    assert row is not None
    theirs = Verifier.parse(row[0])
    assert Verifier.make(password, theirs.salt, theirs.iterations) == theirs
    assert str(theirs) == row[0]


class Guarded:
    """A logged-in connection with its books, as a proxy has it."""

    def __init__(self, connection: Peer) -> None:
        self._socket = connection.socket
        self.session = Session()

    def send(self, *messages: m.FrontendMessage | bytes, error: bytes = OURS) -> bytes:
        """Send in one piece, bytes are refused messages; return what a client would get."""
        raw = b""
        for one in messages:
            kind = one[0] if isinstance(one, bytes) else one.kind
            assert self.session.takes(kind)
            if isinstance(one, bytes):
                self.session.expect(Expect(refused_reply(kind), error=error))
                raw += refusal(kind)
            else:
                if kind in ASKS:
                    self.session.expect(Expect(ASKS[kind]))
                raw += one.encode()
        self._socket.sendall(raw)
        return self.receive()

    def ask(self, item: Expect, raw: bytes) -> bytes:
        self.session.expect(item)
        self._socket.sendall(raw)
        return self.receive()

    def receive(self) -> bytes:
        out = b""
        while not self.session.is_quiet and not self.session.is_copying_in:
            data = self._socket.recv(65536)
            assert data, "the server hung up"
            out += self.session.feed(data)
        return out


@pytest.fixture
def guarded(database: Database, verifier: Verifier) -> Iterator[Guarded]:
    with peer(database) as connection:
        connection.log_in(database, PASSWORD)
        made = Guarded(connection)
        made.send(m.Query(b"CREATE TABLE t (a int PRIMARY KEY)"))
        yield made


def kinds(raw: bytes) -> str:
    return "".join(chr(frame.kind) for frame in FrameReader(BACKEND_LIMITS).receive(raw))


def run(text: bytes) -> list[m.FrontendMessage]:
    return [m.Parse(b"", text), m.Bind(b"", b""), m.Execute(b"")]


def test_a_refusal_in_a_pipeline_takes_back_what_ran_before_it(guarded: Guarded) -> None:
    insert = run(b"INSERT INTO t VALUES (1)")
    out = guarded.send(*insert, m.Parse(b"", b"DROP TABLE t").encode(), *insert, m.Sync())
    assert kinds(out) == "12CEZ"
    assert OURS in out
    assert kinds(guarded.send(*run(b"SELECT * FROM t"), m.Sync())) == "12CZ"


def test_a_refusal_inside_a_transaction_leaves_it_failed(guarded: Guarded) -> None:
    assert guarded.send(m.Query(b"BEGIN"))[-1:] == b"T"
    assert guarded.send(m.Query(b"DROP TABLE t").encode()) == OURS + m.ReadyForQuery(b"E").encode()
    assert guarded.session.status == b"E"
    assert kinds(guarded.send(m.FunctionCall(1598).encode())) == "EZ"
    assert kinds(guarded.send(m.Query(b"ROLLBACK"))) == "CZ"


@pytest.mark.parametrize("kind", [b"B", b"D", b"E", b"C"])
def test_a_refusal_keeps_the_clients_unnamed_statement(guarded: Guarded, kind: bytes) -> None:
    out = guarded.send(m.Parse(b"", b"SELECT 1"), m.Flush(), kind + b"\0\0\0\x04", m.Sync())
    assert kinds(out) == "1EZ"
    assert kinds(guarded.send(m.Bind(b"", b""), m.Execute(b""), m.Sync())) == "2DCZ"


def test_messages_of_ours_between_the_clients(guarded: Guarded) -> None:
    guarded.session.takes(ord("P"))
    for message in (first := run(b"SELECT 1")):
        guarded.session.expect(Expect(ASKS[message.kind]))
    ours = run(b"SELECT generate_series(1, 1000)")
    ours[0] = m.Parse(b"ours", b"SELECT generate_series(1, 1000)")
    ours[1] = m.Bind(b"ours", b"ours")
    ours[2] = m.Execute(b"ours")
    for message in ours:
        parts = (Part.CAPTURE,) if isinstance(message, m.Execute) else ()
        guarded.session.expect(item := Expect(ASKS[message.kind], swallow=True, parts=parts))
    raw = b"".join(message.encode() for message in (*first, *ours))
    out = guarded.ask(Expect(Reply.SYNC), raw + m.Sync().encode())
    assert kinds(out) == "12DCZ"
    assert len(item.captured) == 1000


def test_a_query_of_ours_is_not_seen(guarded: Guarded) -> None:
    item = Expect(Reply.QUERY, swallow=True)
    assert guarded.ask(item, m.Query(b"SELECT 1 / 0").encode()) == b""
    assert item.failed is not None
    assert fields_of(item.failed)[b"C"] == b"22012"


@pytest.mark.parametrize("data", [b"1\n2\n", b"1\n1\n", b"x\n"], ids=["fine", "duplicate", "no number"])
def test_copy_in_by_the_extended_protocol(guarded: Guarded, data: bytes) -> None:
    """As libpq does it: with a Sync behind the Execute, which the server reads as part of the COPY."""
    out = guarded.send(*run(b"COPY t FROM STDIN"), m.Sync())
    assert kinds(out) == "12G"
    out = guarded.send(m.CopyData(data), m.Sync(), m.CopyDone(), m.Sync())
    assert guarded.session.is_quiet
    out += guarded.send(m.Query(b"SELECT 1"))
    # Bad text is found before the Sync behind it is read: so that one counts, and has its own ReadyForQuery,
    # early or late. A duplicate is found at the end of the data.
    expected = {b"1\n2\n": "CZTDCZ", b"1\n1\n": "EZTDCZ", b"x\n": "EZZTDCZ"}
    assert kinds(out) == expected[data]


@pytest.mark.parametrize("simple", [True, False])
def test_copy_in_in_one_piece(guarded: Guarded, simple: bool) -> None:  # noqa: FBT001
    """The data stand behind the statement before the server has said that it wants them."""
    begin = [m.Query(b"COPY t FROM STDIN")] if simple else run(b"COPY t FROM STDIN")
    end: list[m.FrontendMessage] = [] if simple else [m.Sync()]
    out = guarded.send(*begin, m.CopyData(b"7\n"), m.Sync(), m.CopyDone(), *end)
    assert kinds(out).lstrip("12") == "GCZ"
    assert kinds(guarded.send(*run(b"SELECT * FROM t"), m.Sync())) == "12DCZ"


def test_an_error_at_sync_skips_nothing(guarded: Guarded) -> None:
    guarded.send(m.Query(b"CREATE TABLE d (a int UNIQUE DEFERRABLE INITIALLY DEFERRED)"))
    out = guarded.send(*run(b"INSERT INTO d VALUES (1), (1)"), m.Sync(), *run(b"SELECT 1"), m.Sync())
    assert kinds(out) == "12CEZ12DCZ"
