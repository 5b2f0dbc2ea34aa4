"""
A client's connection from its first byte to its SCRAM proof.

Theory of operation
-------------------
`Startup` takes bytes and returns events; each event says what to write, or what to find out and tell it:

    TlsBegins         write `data`, do the handshake, call `tls_started`, go on with what comes out of it
    Answer            write `data`
    CancelAsked       hand the request on; nothing more comes
    StartupAsked      look the user up, then call `challenge` with its verifier (a mock for an unknown
                      one) and write what it returns
    ProofAccepted     check that the login is still good, log in to PostgreSQL with `keys`, write `data`, then
                      what the server says from its AuthenticationOk on
    ProofRefused      write an error and close

What is legal is the table `NEXT`. Bytes behind an SSLRequest or GSSENCRequest were sent before the answer, so
they were sent in the clear by somebody who wants them taken for the encrypted stream: that ends the connection.
After ProofAccepted, bytes that came early stay in `rest` for the session.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from sqlguard.errors import ProtocolViolation, Refused
from sqlguard.wire.buffer import HEADER
from sqlguard.wire.messages import (
    PROTOCOL_3_2,
    AuthenticationSASL,
    AuthenticationSASLContinue,
    AuthenticationSASLFinal,
    CancelRequest,
    GSSENCRequest,
    NegotiateProtocolVersion,
    SASLInitialResponse,
    SSLRequest,
    StartupMessage,
    decode_startup,
)
from sqlguard.wire.parameters import Request, read_request
from sqlguard.wire.scram import Keys, ServerExchange, Verifier, WrongPassword

#: PostgreSQL's bound for a packet before the login (MAX_STARTUP_PACKET_LENGTH), its length not counted.
STARTUP_LIMIT = 10_000
#: PostgreSQL's bound for a message of SCRAM (PG_MAX_SASL_MESSAGE_LENGTH).
SASL_LIMIT = 1024
_LENGTH_BYTES = 4
_CODE_BYTES = 4


class State(StrEnum):
    FRESH = "fresh"
    #: Encryption of one kind was asked for and refused; the other may still be asked for.
    TLS_REFUSED = "TLS refused"
    GSS_REFUSED = "GSSAPI refused"
    BOTH_REFUSED = "TLS and GSSAPI refused"
    HANDSHAKE = "TLS handshake"
    ENCRYPTED = "encrypted"
    #: The user is being looked up.
    STARTED = "started"
    CHALLENGED = "challenged"
    ANSWERED = "SCRAM answered"
    PROVED = "proved"
    CLOSED = "closed"


class Step(StrEnum):
    TLS_GRANTED = "SSLRequest, granted"
    TLS_REFUSED = "SSLRequest, refused"
    GSS_REFUSED = "GSSENCRequest"
    TLS_STARTED = "end of the TLS handshake"
    STARTUP = "StartupMessage"
    CANCEL = "CancelRequest"
    CHALLENGE = "SCRAM challenge"
    FIRST = "SASLInitialResponse"
    PROOF = "SASLResponse"
    WRONG_PROOF = "SASLResponse with a wrong proof"


_BEGIN = {Step.STARTUP: State.STARTED, Step.CANCEL: State.CLOSED}
NEXT: Mapping[State, Mapping[Step, State]] = {
    State.FRESH: _BEGIN
    | {
        Step.TLS_GRANTED: State.HANDSHAKE,
        Step.TLS_REFUSED: State.TLS_REFUSED,
        Step.GSS_REFUSED: State.GSS_REFUSED,
    },
    State.TLS_REFUSED: _BEGIN | {Step.GSS_REFUSED: State.BOTH_REFUSED},
    State.GSS_REFUSED: _BEGIN | {Step.TLS_GRANTED: State.HANDSHAKE, Step.TLS_REFUSED: State.BOTH_REFUSED},
    State.BOTH_REFUSED: _BEGIN,
    State.HANDSHAKE: {Step.TLS_STARTED: State.ENCRYPTED},
    State.ENCRYPTED: _BEGIN,
    State.STARTED: {Step.CHALLENGE: State.CHALLENGED},
    State.CHALLENGED: {Step.FIRST: State.ANSWERED},
    State.ANSWERED: {Step.PROOF: State.PROVED, Step.WRONG_PROOF: State.CLOSED},
    State.PROVED: {},
    State.CLOSED: {},
}
_PACKETS = frozenset({State.FRESH, State.TLS_REFUSED, State.GSS_REFUSED, State.BOTH_REFUSED, State.ENCRYPTED})
_FRAMES = frozenset({State.CHALLENGED, State.ANSWERED})


@dataclass(frozen=True, slots=True)
class Answer:
    data: bytes


@dataclass(frozen=True, slots=True)
class TlsBegins:
    data: bytes = b"S"


@dataclass(frozen=True, slots=True)
class CancelAsked:
    pid: int
    key: bytes


@dataclass(frozen=True, slots=True)
class StartupAsked:
    """*protocol* is the one that is spoken from here on."""

    request: Request
    protocol: int


@dataclass(frozen=True, slots=True, repr=False)
class ProofAccepted:
    keys: Keys
    data: bytes


@dataclass(frozen=True, slots=True)
class ProofRefused:
    user: bytes


Event = Answer | TlsBegins | CancelAsked | StartupAsked | ProofAccepted | ProofRefused


class Startup:
    """One per connection; *newest* is the highest protocol version that is spoken here."""

    def __init__(self, *, can_tls: bool, newest: int = PROTOCOL_3_2, is_encrypted: bool = False) -> None:
        """*is_encrypted*: the client has begun with TLS."""
        self.state = State.ENCRYPTED if is_encrypted else State.FRESH
        self.is_encrypted = is_encrypted
        self._can_tls = can_tls
        self._newest = newest
        self._held = bytearray()
        self._user = b""
        self._exchange: ServerExchange | None = None

    @property
    def rest(self) -> bytes:
        """Return the bytes that came behind the proof: the session's first."""
        return bytes(self._held)

    def receive(self, data: bytes) -> list[Event]:
        """Take bytes of the client. Raises ProtocolViolation, or Refused for replication."""
        self._held += data
        events: list[Event] = []
        while self._held:
            if self.state in _PACKETS:
                packet = self._packet()
                if packet is None:
                    break
                events += self._start(packet)
            elif self.state in _FRAMES:
                body = self._frame()
                if body is None:
                    break
                events.append(self._log_in(body))
            elif self.state is State.PROVED:
                break
            else:
                raise ProtocolViolation(f"data that nobody asked for ({self.state})")
        return events

    def tls_started(self) -> None:
        """Go on with the bytes that come out of the TLS stream."""
        self._advance(Step.TLS_STARTED)
        self.is_encrypted = True

    def challenge(self, verifier: Verifier, nonce: str, binding: bytes | None = None) -> bytes:
        """
        Return the offer of SCRAM. *binding* is the hash of our certificate, for SCRAM-SHA-256-PLUS.

        *nonce* must be fresh and random, at least 18 bytes of it, in printable ASCII without a comma.
        """
        self._advance(Step.CHALLENGE)
        self._exchange = ServerExchange(verifier, nonce, binding if self.is_encrypted else None)
        return AuthenticationSASL(tuple([name.encode() for name in self._exchange.mechanisms])).encode()

    def _advance(self, step: Step) -> None:
        try:
            self.state = NEXT[self.state][step]
        except KeyError:
            raise ProtocolViolation(f"{step} is not legal here ({self.state})") from None

    def _packet(self) -> bytes | None:
        """Return the next packet without its length, None if it is not whole yet."""
        if len(self._held) < _LENGTH_BYTES:
            return None
        length = int.from_bytes(self._held[:_LENGTH_BYTES], "big") - _LENGTH_BYTES
        if not _CODE_BYTES <= length <= STARTUP_LIMIT:
            raise ProtocolViolation("invalid length of startup packet")
        end = _LENGTH_BYTES + length
        if len(self._held) < end:
            return None
        packet = bytes(self._held[_LENGTH_BYTES:end])
        del self._held[:end]
        return packet

    def _start(self, packet: bytes) -> list[Event]:
        match decode_startup(packet):
            case SSLRequest():
                self._advance(Step.TLS_GRANTED if self._can_tls else Step.TLS_REFUSED)
                self._refuse_injected("SSLRequest")
                return [TlsBegins() if self._can_tls else Answer(b"N")]
            case GSSENCRequest():
                self._advance(Step.GSS_REFUSED)
                self._refuse_injected("GSSENCRequest")
                return [Answer(b"N")]
            case CancelRequest(pid, key):
                self._advance(Step.CANCEL)
                self._held.clear()
                return [CancelAsked(pid, key)]
            case StartupMessage() as startup:
                self._advance(Step.STARTUP)
                return self._begin(startup)

    def _refuse_injected(self, what: str) -> None:
        if self._held:
            raise ProtocolViolation(f"received unencrypted data after {what}")

    def _begin(self, startup: StartupMessage) -> list[Event]:
        request = read_request(startup)
        if request.is_replication:
            raise Refused("replication is not offered here", hint="connect without `replication`")
        self._user = request.user
        protocol = min(startup.protocol, self._newest)
        asked = StartupAsked(request, protocol)
        if protocol == startup.protocol and not request.protocol_options:
            return [asked]
        return [Answer(NegotiateProtocolVersion(protocol, request.protocol_options).encode()), asked]

    def _frame(self) -> bytes | None:
        """Return the body of the next message, None if it is not whole yet."""
        # By hand: what is behind the last message of a login is not a login's any more.
        if len(self._held) < HEADER.size:
            return None
        kind, length = HEADER.unpack_from(self._held)
        if kind != ord("p") or not _LENGTH_BYTES <= length <= SASL_LIMIT + _LENGTH_BYTES:
            raise ProtocolViolation("expected a SASL response")
        if len(self._held) < 1 + length:
            return None
        body = bytes(self._held[HEADER.size : 1 + length])
        del self._held[: 1 + length]
        return body

    def _log_in(self, body: bytes) -> Event:
        exchange = self._exchange
        if exchange is None:
            raise ProtocolViolation("a SASL message before the challenge")
        if self.state is State.CHALLENGED:
            self._advance(Step.FIRST)
            initial = SASLInitialResponse.decode(body)
            name = initial.mechanism.decode("ascii", "replace")
            return Answer(AuthenticationSASLContinue(exchange.first(name, initial.data or b"")).encode())
        try:
            final = exchange.final(body)
        except WrongPassword:
            self._advance(Step.WRONG_PROOF)
            self._held.clear()
            return ProofRefused(self._user)
        self._advance(Step.PROOF)
        return ProofAccepted(exchange.keys, AuthenticationSASLFinal(final).encode())
