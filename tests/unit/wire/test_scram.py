"""SCRAM against scramp as the peer, against itself, and against everything that is not of its form."""

from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress

import pytest
import scramp
from hypothesis import given, settings
from hypothesis import strategies as st

from sqlguard.errors import ProtocolViolation
from sqlguard.wire.saslprep import prepared
from sqlguard.wire.scram import (
    MECHANISM,
    MECHANISM_PLUS,
    ClientExchange,
    Keys,
    ServerExchange,
    Verifier,
    WrongPassword,
)

SALT, BINDING = b"0123456789abcdef", b"\x01" * 32
VERIFIER = Verifier.make("secret", SALT)
#: RFC 7677, section 3.
RFC_SALT, RFC_NONCE = "W22ZaJ0SNY7soEsUEjb6gQ==", "rOprNGfwEbeRWgbNEkqO"
NONCES = st.text("abcXYZ019+/", min_size=1, max_size=30)


def log_in(client: ClientExchange, server: ServerExchange) -> None:
    client.check(server.final(client.final(server.first(client.mechanism, client.first()))))


def test_the_example_of_the_rfc() -> None:
    client = ClientExchange("pencil", RFC_NONCE)
    client._bare = b"n=user,r=" + RFC_NONCE.encode()
    server_first = f"r={RFC_NONCE}%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s={RFC_SALT},i=4096".encode()
    assert client.final(server_first).endswith(b",p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=")
    client.check(b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=")


@settings(max_examples=10)
@given(st.text(max_size=12), st.binary(min_size=1, max_size=40), NONCES, NONCES, st.none() | st.just(BINDING))
def test_what_the_proof_gives_away_logs_in(
    password: str, salt: bytes, ours: str, theirs: str, binding: bytes | None
) -> None:
    verifier = Verifier.make(password, salt, 100)
    assert Verifier.parse(str(verifier)) == verifier
    first = ServerExchange(verifier, theirs, binding)
    log_in(ClientExchange(password, ours, binding), first)
    log_in(ClientExchange(first.keys, ours), ServerExchange(verifier, theirs))


@pytest.mark.parametrize("binding", [None, BINDING], ids=["plain", "plus"])
def test_scramp_as_client(binding: bytes | None) -> None:
    server = ServerExchange(VERIFIER, "theirs", binding)
    channel = None if binding is None else ("tls-server-end-point", binding)
    client = scramp.ScramClient(server.mechanisms, "somebody", "secret", channel_binding=channel)
    client.set_server_first(server.first(client.mechanism_name, client.get_client_first().encode()).decode())
    client.set_server_final(server.final(client.get_client_final().encode()).decode())
    assert client.mechanism_name == (MECHANISM if binding is None else MECHANISM_PLUS)
    assert server.keys.client_key == Keys.derive("secret", SALT, 4096).client_key


@pytest.mark.parametrize("binding", [None, BINDING], ids=["plain", "plus"])
@pytest.mark.parametrize("by_keys", [False, True])
def test_scramp_as_server(binding: bytes | None, by_keys: bool) -> None:  # noqa: FBT001
    secret = Keys.derive("secret", SALT, 4096) if by_keys else "secret"
    client = ClientExchange(secret, "ours", binding)
    mechanism = scramp.ScramMechanism(client.mechanism)
    known = mechanism.make_auth_info("secret", salt=SALT)
    channel = None if binding is None else ("tls-server-end-point", binding)
    server = mechanism.make_server(lambda _user: known, channel_binding=channel)
    # scramp wants a user name, PostgreSQL's clients send none.
    client._bare = b"n=somebody,r=ours"
    server.set_client_first(client.first().decode())
    server.set_client_final(client.final(server.get_server_first().encode()).decode())
    client.check(server.get_server_final().encode())


def test_a_wrong_password_and_an_unknown_user_look_alike() -> None:
    mock = Verifier.mock(b"a secret of the proxy", "nobody")
    answers = []
    for verifier in (VERIFIER, mock):
        server = ServerExchange(verifier, "theirs")
        client = ClientExchange("wrong", "ours")
        answers.append(server.first(MECHANISM, client.first()))
        with pytest.raises(WrongPassword):
            server.final(client.final(answers[-1]))
        with pytest.raises(ValueError, match="proved"):
            _ = server.keys
    assert len(answers[0]) == len(answers[1])


def test_a_made_up_verifier_is_the_same_each_time_and_nobody_elses() -> None:
    assert Verifier.mock(b"s", "a") == Verifier.mock(b"s", b"a")
    assert len({str(Verifier.mock(s, u)) for s in (b"s", b"t") for u in ("a", "b")}) == 4


def test_no_proof_fits_a_made_up_verifier() -> None:
    """Not even that of somebody who knows keys that would."""
    mock = Verifier(4096, SALT, VERIFIER.stored_key, VERIFIER.server_key, is_real=False)
    server, client = ServerExchange(mock, "theirs"), ClientExchange("secret", "ours")
    with pytest.raises(WrongPassword):
        server.final(client.final(server.first(MECHANISM, client.first())))


def test_nothing_secret_is_shown() -> None:
    keys = Keys.derive("secret", SALT, 100)
    assert str(keys.client_key) not in repr(keys)
    assert str(VERIFIER.stored_key) not in repr(VERIFIER)


@pytest.mark.parametrize(
    ("mechanism", "first", "binding"),
    [
        (MECHANISM, b"y,,n=,r=x", BINDING),
        (MECHANISM, b"p=tls-server-end-point,,n=,r=x", BINDING),
        (MECHANISM_PLUS, b"n,,n=,r=x", BINDING),
        (MECHANISM_PLUS, b"y,,n=,r=x", BINDING),
        (MECHANISM_PLUS, b"p=tls-unique,,n=,r=x", BINDING),
        (MECHANISM_PLUS, b"p=tls-server-end-point,,n=,r=x", None),
        ("SCRAM-SHA-1", b"n,,n=,r=x", None),
        (MECHANISM, b"n,a=other,n=,r=x", None),
        (MECHANISM, b"n,,m=1,n=,r=x", None),
        (MECHANISM, b"n,,n=,r=x,m=1", None),
        (MECHANISM, b"n,,n=,r=", None),
        (MECHANISM, b"n,,n=,r=\x7f", None),
        (MECHANISM, b"n,,r=x,n=", None),
        (MECHANISM, b"n,", None),
        (MECHANISM, b"", None),
        (MECHANISM, b"x,,n=,r=x", None),
    ],
)
def test_first_messages_that_are_refused(mechanism: str, first: bytes, binding: bytes | None) -> None:
    with pytest.raises(ProtocolViolation):
        ServerExchange(VERIFIER, "theirs", binding).first(mechanism, first)


def test_y_is_fine_where_nothing_was_offered() -> None:
    log_in(ClientExchange("secret", "ours", is_binding_possible=True), ServerExchange(VERIFIER, "theirs"))


def test_somebody_in_between_is_noticed() -> None:
    server, client = ServerExchange(VERIFIER, "n", BINDING), ClientExchange("secret", "m", b"\x02" * 32)
    with pytest.raises(ProtocolViolation, match="another channel"):
        server.final(client.final(server.first(MECHANISM_PLUS, client.first())))


def test_a_changed_gs2_header_is_noticed() -> None:
    server, client = ServerExchange(VERIFIER, "n"), ClientExchange("secret", "m", is_binding_possible=True)
    with pytest.raises(ProtocolViolation, match="another channel"):
        server.final(client.final(server.first(MECHANISM, b"n" + client.first()[1:])))


def test_a_server_that_does_not_know_the_verifier_is_noticed() -> None:
    client = ClientExchange("secret", "ours")
    server = ServerExchange(VERIFIER, "theirs")
    final = server.final(client.final(server.first(MECHANISM, client.first())))
    for answer in (b"v=" + b64encode(bytes(32)), b"e=other-error", b"", b"v=!", final[:-4]):
        with pytest.raises(ProtocolViolation):
            client.check(answer)
    client.check(final)


def test_a_client_checks_nothing_before_its_proof() -> None:
    with pytest.raises(ProtocolViolation):
        ClientExchange("secret", "ours").check(b"v=")


@pytest.mark.parametrize(
    "first",
    [
        b"r=ours,s=AAAA,i=4096",
        b"r=other,s=AAAA,i=4096",
        b"r=oursX,s=!,i=4096",
        b"r=oursX,s=AAAA,i=0",
        b"r=oursX,s=AAAA,i=-1",
        b"r=oursX,s=AAAA,i=2147483647",
        b"r=oursX,s=AAAA,i=9999999999999999",
        b"r=oursX,s=AAAA",
        b"m=x,r=oursX,s=AAAA,i=4096",
        b"",
    ],
)
def test_server_first_messages_that_are_refused(first: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        ClientExchange("secret", "ours").final(first)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "md5d41d8cd98f00b204e9800998ecf8427e",
        "SCRAM-SHA-256$4096:AAAA$AAAA:AAAA",
        str(VERIFIER).replace("4096", "0"),
        str(VERIFIER).replace("4096", "²"),
        str(VERIFIER).replace("4096", "99999999999"),
        str(VERIFIER).replace("SHA-256", "SHA-512"),
        str(VERIFIER)[:-1],
        str(VERIFIER) + "$",
        str(VERIFIER).replace("$", "€"),
    ],
)
def test_verifiers_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Verifier.parse(text)


def only_violations(call: Callable[[], object]) -> None:
    with suppress(ProtocolViolation, WrongPassword):
        call()


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    raw = bytearray(whole)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(raw)))
        raw[at : at + draw(st.integers(0, 5))] = draw(st.binary(max_size=3) | st.sampled_from([b",", b"="]))
    return bytes(raw)


@given(st.data())
def test_damaged_messages(data: st.DataObject) -> None:
    server, client = ServerExchange(VERIFIER, "theirs"), ClientExchange(Keys(bytes(32), bytes(32)), "ours")
    first = client.first()
    only_violations(lambda: ServerExchange(VERIFIER, "n").first(MECHANISM, data.draw(damaged(first))))
    server_first = server.first(MECHANISM, first)
    only_violations(lambda: ClientExchange(client._secret, "ours").final(data.draw(damaged(server_first))))
    final = client.final(server_first)
    only_violations(lambda: server.final(data.draw(damaged(final))))
    only_violations(lambda: client.check(data.draw(damaged(b"v=" + b64encode(bytes(32))))))


@pytest.mark.parametrize(
    ("password", "expected"),
    [
        ("plain", b"plain"),
        ("a\N{SOFT HYPHEN}b", b"ab"),
        ("a\N{NO-BREAK SPACE}b", b"a b"),
        ("a\N{ZERO WIDTH SPACE}b", b"a b"),
        ("\N{FEMININE ORDINAL INDICATOR}", b"a"),
        ("\N{ROMAN NUMERAL NINE}", b"IX"),
        ("ä\N{BELL}", "ä\N{BELL}".encode()),
        ("\N{SOFT HYPHEN}", "\N{SOFT HYPHEN}".encode()),
        ("\N{ARABIC LETTER ALEF}1", "\N{ARABIC LETTER ALEF}1".encode()),
        (b"\xff\xfe", b"\xff\xfe"),
    ],
)
def test_saslprep(password: str | bytes, expected: bytes) -> None:
    assert prepared(password) == expected
