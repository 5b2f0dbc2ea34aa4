"""SCRAM against an independent implementation (scramp), both ends, and what must not be accepted."""

import pytest
import scramp

from sqlguard.errors import ProtocolViolation
from sqlguard.scram import MECHANISM, MECHANISM_PLUS, ClientExchange, ServerExchange, Verifier, WrongPassword


def against_scramp_client(verifier: Verifier, password: str) -> ServerExchange:
    client = scramp.ScramClient([MECHANISM], "agent", password)
    server = ServerExchange(verifier, "s3rv3r")
    client.set_server_first(server.first(MECHANISM, client.get_client_first().encode()).decode())
    client.set_server_final(server.final(client.get_client_final().encode()).decode())
    return server


@pytest.mark.parametrize("password", ["secret", "correct horse battery staple", "\u2168"])
@pytest.mark.parametrize("salt", [b"0123456789abcdef", b"x" * 12, b"y" * 40])
def test_a_client_with_the_password_is_let_in_and_its_key_learned(password: str, salt: bytes) -> None:
    verifier = Verifier.make(password, salt, 4096)
    server = against_scramp_client(verifier, password)
    assert Verifier.parse(str(verifier)) == verifier
    again = ServerExchange(verifier, "other")
    client = ClientExchange(server.client_key, verifier.server_key, "cl13nt")
    final = again.final(client.final(again.first(MECHANISM, client.first())))
    client.check(final)


def test_a_wrong_password_is_not() -> None:
    with pytest.raises(WrongPassword):
        against_scramp_client(Verifier.make("secret", b"0123456789abcdef"), "guess")


def test_a_user_that_does_not_exist_answers_alike() -> None:
    verifier = Verifier.mock(b"k" * 32, "nobody")
    assert verifier == Verifier.mock(b"k" * 32, "nobody")
    assert verifier != Verifier.mock(b"k" * 32, "somebody")
    with pytest.raises(WrongPassword):
        against_scramp_client(verifier, "guess")


def test_a_server_that_does_not_know_the_verifier_is_found_out() -> None:
    verifier = Verifier.make("secret", b"0123456789abcdef")
    server = against_scramp_client(verifier, "secret")
    impostor = ServerExchange(Verifier(4096, verifier.salt, verifier.stored_key, bytes(32)), "x")
    client = ClientExchange(server.client_key, verifier.server_key, "n")
    with pytest.raises(ProtocolViolation):
        client.check(impostor.final(client.final(impostor.first(MECHANISM, client.first()))))


@pytest.mark.parametrize(
    ("mechanism", "message"),
    [
        (MECHANISM, b"y,,n=,r=abc"),
        (MECHANISM, b"p=tls-unique,,n=,r=abc"),
        (MECHANISM_PLUS, b"p=tls-unique,,n=,r=abc"),
        (MECHANISM_PLUS, b"n,,n=,r=abc"),
        (MECHANISM, b"n,a=admin,n=,r=abc"),
        (MECHANISM, b"n,,n=,r="),
        (MECHANISM, b"n,,m=x,n=,r=abc"),
        (MECHANISM, b""),
        (MECHANISM, b"n"),
    ],
)
def test_first_messages_that_are_not_accepted_over_tls(mechanism: str, message: bytes) -> None:
    exchange = ServerExchange(Verifier.make("s", b"salt"), "nonce", binding=b"h" * 32)
    with pytest.raises(ProtocolViolation):
        exchange.first(mechanism, message)


def test_without_tls_a_client_that_could_bind_is_welcome() -> None:
    ServerExchange(Verifier.make("s", b"salt"), "nonce").first(MECHANISM, b"y,,n=,r=abc")


def test_a_proof_for_another_channel_is_wrong() -> None:
    verifier = Verifier.make("secret", b"0123456789abcdef")
    good = against_scramp_client(verifier, "secret")
    exchange = ServerExchange(verifier, "nonce", binding=b"h" * 32)
    client = ClientExchange(good.client_key, verifier.server_key, "abc")
    first = exchange.first(MECHANISM_PLUS, b"p=tls-server-end-point,,n=,r=abc")
    with pytest.raises(WrongPassword):
        exchange.final(client.final(first))


@pytest.mark.parametrize(
    "text", ["", "md5abc", "SCRAM-SHA-256$x:y$z:w", "SCRAM-SHA-256$4096:c2FsdA==$c2hvcnQ=:c2hvcnQ="]
)
def test_what_is_no_verifier(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (b64decode's own messages vary)
        Verifier.parse(text)


@pytest.mark.parametrize(
    "final", [b"", b"c=biws", b"c=biws,r=abcnonce", b"c=biws,r=abcnonce,p=!!", b"c=biws,r=abcnonce,p=AAAA"]
)
def test_final_messages_that_are_not_accepted(final: bytes) -> None:
    exchange = ServerExchange(Verifier.make("s", b"salt"), "nonce")
    exchange.first(MECHANISM, b"n,,n=,r=abc")
    with pytest.raises((ProtocolViolation, WrongPassword)):
        exchange.final(final)
