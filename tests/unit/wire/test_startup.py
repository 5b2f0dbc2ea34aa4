"""The start of a connection, byte by byte, and everything that must not be let in."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlguard.errors import ProtocolViolation, Refused
from sqlguard.wire import messages as m
from sqlguard.wire.parameters import Setting, read_options, read_request, split_options
from sqlguard.wire.scram import MECHANISM, MECHANISM_PLUS, ClientExchange, Verifier
from sqlguard.wire.startup import (
    NEXT,
    Answer,
    CancelAsked,
    Event,
    ProofAccepted,
    ProofRefused,
    Startup,
    StartupAsked,
    State,
    Step,
    TlsBegins,
)

VERIFIER = Verifier.make("secret", b"0123456789abcdef")
BINDING = b"\x01" * 32
SSL, GSS = m.SSLRequest().encode(), m.GSSENCRequest().encode()


def hello(*more: tuple[bytes, bytes], protocol: int = m.PROTOCOL_3_0) -> bytes:
    return m.StartupMessage(protocol, ((b"user", b"agent"), *more)).encode()


def log_in(
    startup: Startup, client: ClientExchange, binding: bytes | None = None, step: int = 0
) -> list[Event]:
    """Take *startup*, which is STARTED, to the end of its login, in pieces of *step* bytes."""
    offer = m.decode_authentication(startup.challenge(VERIFIER, "theirs", binding)[5:])
    assert isinstance(offer, m.AuthenticationSASL)
    assert client.mechanism.encode() in offer.mechanisms
    first = m.SASLInitialResponse(client.mechanism.encode(), client.first()).encode()
    (answer,) = feed(startup, first, step)
    assert isinstance(answer, Answer)
    go_on = m.decode_authentication(answer.data[5:])
    assert isinstance(go_on, m.AuthenticationSASLContinue)
    return feed(startup, m.SASLResponse(client.final(go_on.data)).encode(), step)


def feed(startup: Startup, data: bytes, step: int = 0) -> list[Event]:
    step = step or len(data)
    return [event for at in range(0, len(data), step) for event in startup.receive(data[at : at + step])]


@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_login_in_the_clear(step: int) -> None:
    startup = Startup(can_tls=False)
    assert feed(startup, GSS, step) == [Answer(b"N")]
    assert feed(startup, SSL, step) == [Answer(b"N")]
    (asked,) = feed(startup, hello((b"database", b"shop"), (b"application_name", b"psql")), step)
    assert isinstance(asked, StartupAsked)
    assert (asked.request.user, asked.request.database) == (b"agent", b"shop")
    client = ClientExchange("secret", "ours")
    (accepted,) = log_in(startup, client, step=step)
    assert isinstance(accepted, ProofAccepted)
    assert "client_key" not in repr(accepted)
    final = m.decode_authentication(accepted.data[5:])
    assert isinstance(final, m.AuthenticationSASLFinal)
    client.check(final.data)
    assert startup.state is State.PROVED
    again = Startup(can_tls=False)
    again.receive(hello())
    assert isinstance(log_in(again, ClientExchange(accepted.keys, "x"))[0], ProofAccepted)


def test_a_login_by_tls_with_channel_binding() -> None:
    startup = Startup(can_tls=True)
    assert startup.receive(SSL) == [TlsBegins()]
    startup.tls_started()
    startup.receive(hello())
    (accepted,) = log_in(startup, ClientExchange("secret", "ours", BINDING), BINDING)
    assert isinstance(accepted, ProofAccepted)


def test_plus_is_offered_by_tls_only() -> None:
    startup = Startup(can_tls=True)
    startup.receive(hello())
    assert MECHANISM_PLUS.encode() not in startup.challenge(VERIFIER, "theirs", BINDING)


def test_a_wrong_proof_ends_it() -> None:
    startup = Startup(can_tls=False)
    startup.receive(hello())
    assert log_in(startup, ClientExchange("wrong", "ours")) == [ProofRefused(b"agent")]
    assert startup.state is State.CLOSED
    with pytest.raises(ProtocolViolation):
        startup.receive(b"p")


def test_what_comes_behind_the_proof_belongs_to_the_session() -> None:
    startup = Startup(can_tls=False)
    startup.receive(hello())
    startup.challenge(VERIFIER, "theirs")
    client = ClientExchange("secret", "ours")
    first = m.SASLInitialResponse(MECHANISM.encode(), client.first()).encode()
    (answer,) = startup.receive(first)
    assert isinstance(answer, Answer)
    query = m.Query(b"SELECT 1").encode()
    startup.receive(m.SASLResponse(client.final(answer.data[9:])).encode() + query[:3])
    startup.receive(query[3:])
    assert startup.rest == query


@pytest.mark.parametrize("can_tls", [True, False])
@pytest.mark.parametrize("request_", [SSL, GSS])
@pytest.mark.parametrize("injected", [b"\0", hello()])
def test_plaintext_behind_an_encryption_request_ends_it(
    *, can_tls: bool, request_: bytes, injected: bytes
) -> None:
    with pytest.raises(ProtocolViolation, match="unencrypted data"):
        Startup(can_tls=can_tls).receive(request_ + injected)


def test_plaintext_during_the_handshake_ends_it() -> None:
    startup = Startup(can_tls=True)
    startup.receive(SSL)
    with pytest.raises(ProtocolViolation, match="nobody asked for"):
        startup.receive(hello())


@pytest.mark.parametrize("packets", [[SSL, SSL], [GSS, GSS], [SSL, GSS, SSL], [GSS, SSL, GSS]])
def test_encryption_is_asked_for_once(packets: list[bytes]) -> None:
    startup = Startup(can_tls=False)
    for packet in packets[:-1]:
        startup.receive(packet)
    with pytest.raises(ProtocolViolation, match="not legal"):
        startup.receive(packets[-1])


@pytest.mark.parametrize("packet", [SSL, GSS])
def test_nothing_is_negotiated_inside_tls(packet: bytes) -> None:
    startup = Startup(can_tls=True)
    startup.receive(SSL)
    startup.tls_started()
    with pytest.raises(ProtocolViolation):
        startup.receive(packet)


@pytest.mark.parametrize("size", [4, 32, 256])
def test_cancel_with_keys_of_any_length(size: int) -> None:
    startup = Startup(can_tls=False)
    assert startup.receive(m.CancelRequest(7, b"k" * size).encode()) == [CancelAsked(7, b"k" * size)]
    assert startup.state is State.CLOSED


@pytest.mark.parametrize("size", [0, 3, 257])
def test_cancel_keys_of_impossible_length(size: int) -> None:
    with pytest.raises(ProtocolViolation):
        Startup(can_tls=False).receive(m.CancelRequest(7, b"k" * size).encode())


@pytest.mark.parametrize("length", [0, 4, 7, 10_005, 0x7FFFFFFF, 0xFFFFFFFF, 0x16030100])
def test_a_length_is_judged_at_once(length: int) -> None:
    with pytest.raises(ProtocolViolation, match="invalid length"):
        Startup(can_tls=True).receive(length.to_bytes(4, "big"))


def test_the_longest_packet() -> None:
    base = len(hello((b"x", b"")))
    whole = hello((b"x", b"v" * (10_004 - base)))
    assert len(whole) == 10_004
    assert len(Startup(can_tls=False).receive(whole)) == 1
    with pytest.raises(ProtocolViolation):
        Startup(can_tls=False).receive(hello((b"x", b"v" * (10_005 - base))))


@pytest.mark.parametrize(
    ("asked", "newest", "options", "spoken", "negotiated"),
    [
        (0, 2, [], 0, None),
        (1, 2, [], 1, None),
        (2, 2, [], 2, None),
        (2, 0, [], 0, (0, [])),
        (3, 2, [], 2, (2, [])),
        (9999, 2, [b"_pq_.test_protocol_negotiation"], 2, (2, [b"_pq_.test_protocol_negotiation"])),
        (0, 2, [b"_pq_.a", b"_pq_.b", b"_pq_.a"], 0, (0, [b"_pq_.a", b"_pq_.b"])),
    ],
)
def test_the_version_is_negotiated_in_one_message(
    asked: int, newest: int, options: list[bytes], spoken: int, negotiated: tuple[int, list[bytes]] | None
) -> None:
    startup = Startup(can_tls=False, newest=3 << 16 | newest)
    packet = hello(*((name, b"") for name in options), protocol=3 << 16 | asked)
    *answers, started = startup.receive(packet)
    assert isinstance(started, StartupAsked)
    assert started.protocol == 3 << 16 | spoken
    assert not [name for name, _ in started.request.parameters if name.startswith(b"_pq_")]
    if negotiated is None:
        assert answers == []
    else:
        (answer,) = answers
        assert isinstance(answer, Answer)
        minor, names = negotiated
        assert m.decode_backend(answer.data[0], answer.data[5:]) == m.NegotiateProtocolVersion(
            3 << 16 | minor, tuple(names)
        )


@pytest.mark.parametrize("code", [2 << 16, 4 << 16, 0, 1234 << 16 | 1])
def test_other_protocols(code: int) -> None:
    with pytest.raises(ProtocolViolation, match="not spoken"):
        Startup(can_tls=False).receive(m.StartupMessage(code, ((b"user", b"a"),)).encode())


@pytest.mark.parametrize("value", [b"database", b"true", b"on", b"1", b"yes", b"maybe", b""])
def test_replication_is_refused(value: bytes) -> None:
    with pytest.raises(Refused, match="replication"):
        Startup(can_tls=False).receive(hello((b"replication", value)))


@pytest.mark.parametrize("value", [b"false", b"OFF", b"no", b"0", b"f"])
def test_no_replication_is_no_replication(value: bytes) -> None:
    (asked,) = Startup(can_tls=False).receive(hello((b"replication", value)))
    assert isinstance(asked, StartupAsked)
    assert asked.request.parameters == ()


@pytest.mark.parametrize("pairs", [(), ((b"user", b""),), ((b"user", b"a"), (b"user", b""))])
def test_a_user_is_required(pairs: Any) -> None:
    with pytest.raises(ProtocolViolation, match="no PostgreSQL user"):
        Startup(can_tls=False).receive(m.StartupMessage(m.PROTOCOL_3_0, pairs).encode())


def doubtful(*pairs: tuple[bytes, bytes]) -> list[bytes]:
    startup = m.StartupMessage(m.PROTOCOL_3_0, ((b"user", b"a"), *pairs))
    return [setting.name for setting in read_request(startup).doubtful]


@pytest.mark.parametrize(
    "name", [b"role", b"ROLE", b"session_authorization", b"Search_Path", b"row_security", b"sqlguard.task"]
)
def test_settings_that_decide_rights_are_reported(name: bytes) -> None:
    assert doubtful((name, b"x")) == [name.lower()]
    for options in (b"-c %b=x", b"-c%b=x", b"--%b=x", b"-c  %b=x", b"-c geqo=on --%b=x"):
        assert doubtful((b"options", options % name)) == [name.lower()]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (b"-c search-path=x", [b"search_path"]),
        (b"--session-authorization=x", [b"session_authorization"]),
        (b"-\\c role=x", [b"role"]),
        (b"-c ro\\le=x", [b"role"]),
        (b"-c\trole=x\n", [b"role"]),
        (b"-erole", [b"-erole"]),
        (b"-ec role=x", [b"-ec", b"role=x"]),
        (b"-O", [b"-O"]),
        (b"-c", [b""]),
        (b"-c role", [b"role"]),
        (b"--", [b""]),
        (b"word", [b"word"]),
        (b"-c timezone=UTC -c DateStyle=ISO", []),
        (b"-c timezone=a\\ -c\\ role=x", []),
        (b"", []),
        (b"   ", []),
    ],
)
def test_settings_hidden_in_options_are_reported(options: bytes, names: list[bytes]) -> None:
    assert doubtful((b"options", options)) == names


def test_the_last_of_two_options_counts_as_in_postgresql() -> None:
    assert doubtful((b"options", b"-c role=x"), (b"options", b"")) == []
    assert doubtful((b"options", b""), (b"options", b"-c role=x")) == [b"role"]


def test_settings_keep_their_values() -> None:
    assert read_options(b"-c a=b=c --d-e=\\\\x\\ y") == [
        Setting(b"a", b"b=c", is_option=True),
        Setting(b"d_e", b"\\x y", is_option=True),
    ]
    assert split_options(b" a  b\\ c \\") == [b"a", b"b c", b""]


def test_the_table_is_whole() -> None:
    assert set(NEXT) == set(State)
    reached = {state for row in NEXT.values() for state in row.values()} | {State.FRESH}
    assert reached == set(State)
    assert {step for row in NEXT.values() for step in row} == set(Step)


@given(st.data())
def test_nothing_raises_but_violations(data: st.DataObject) -> None:
    packets = [SSL, GSS, hello(), m.SASLInitialResponse(MECHANISM.encode(), b"n,,n=,r=x").encode(), b"p\0"]
    startup = Startup(can_tls=data.draw(st.booleans()))
    with suppress(ProtocolViolation, Refused):
        for _ in range(6):
            raw = bytearray(data.draw(st.sampled_from(packets)))
            for _ in range(data.draw(st.integers(0, 2))):
                raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
            for event in startup.receive(bytes(raw)):
                if isinstance(event, TlsBegins):
                    startup.tls_started()
                if isinstance(event, StartupAsked):
                    startup.challenge(VERIFIER, "theirs")
                assert not isinstance(event, ProofAccepted)
