"""
The start of a client connection: TLS, protocol version, parameters, SCRAM. Afterwards it is known who the
client is (a login role of a living task) and its ClientKey, with which the proxy logs in to PostgreSQL.
"""

import asyncio
import secrets
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlguard.errors import ProtocolViolation, Refused, SqlguardError, TaskEnded
from sqlguard.postgres.control import Login
from sqlguard.proxy import packets
from sqlguard.proxy.backend import CANCEL_REQUEST, SSL_REQUEST
from sqlguard.proxy.operator import Operator
from sqlguard.proxy.sockets import Side
from sqlguard.scram import MECHANISM, MECHANISM_PLUS, ServerExchange, Verifier, WrongPassword

GSS_REQUEST = 80877104
#: PostgreSQL's own limit for a start-up packet (MAX_STARTUP_PACKET_LENGTH).
_STARTUP_LIMIT = 10_000
_SASL_LIMIT = 4096
#: Settings that a client may bring along; everything else is the policy's business.
ALLOWED_PARAMETERS = frozenset(
    {
        "application_name",
        "client_encoding",
        "datestyle",
        "timezone",
        "intervalstyle",
        "extra_float_digits",
        "bytea_output",
        "geqo",
        "jit",
        "options",
        "sqlguard.dry_run",
        "sqlguard.reason",
        "sqlguard.confidence",
        "sqlguard.step",
        "sqlguard.idempotency_key",
    }
)


class Cancel(Exception):
    """The connection was a CancelRequest; `request` is to be passed on as it is."""

    def __init__(self, request: bytes) -> None:
        super().__init__()
        self.request = request


class InvalidPassword(SqlguardError):
    sqlstate = "28P01"
    default_hint = "use the dsn that `sqlguard task open` printed"


@dataclass(frozen=True, slots=True)
class Welcome:
    """Who the client is and how it wants to be served."""

    login: Login
    parameters: dict[str, str]
    minor: int
    client_key: bytes
    server_key: bytes


@dataclass(frozen=True)
class Door:
    """What every client is welcomed with. `mock` makes the verifiers of users that don't exist."""

    operator: Operator
    database: str
    tls: ssl.SSLContext | None = None
    tls_required: bool = False
    #: tls-server-end-point hash of the proxy's certificate.
    binding: bytes | None = None
    mock: bytes = b""

    async def welcome(self, side: Side) -> Welcome:
        """Lead a client to the point where PostgreSQL can be asked. Raises Cancel, SqlguardError, Closed."""
        version, body = await self._first_packet(side)
        if self.tls_required and not side.secure:
            raise Refused("this proxy accepts TLS only", hint="connect with sslmode=require")
        parameters = _parameters(body)
        minor = self._negotiate(side, version & 0xFFFF, parameters)
        user = _check(parameters, self.database)
        login, client_key, server_key = await self._authenticate(side, user)
        return Welcome(login, parameters, minor, client_key, server_key)

    async def _first_packet(self, side: Side) -> tuple[int, bytes]:
        """Answer SSLRequest and GSSENCRequest, return the StartupMessage. Raises Cancel."""
        asked: set[int] = set()
        while True:
            length = int.from_bytes(await side.exactly(4), "big")
            if not 8 <= length <= _STARTUP_LIMIT:  # noqa: PLR2004 (length and code)
                raise ProtocolViolation("this is no PostgreSQL start-up packet")
            packet = await side.exactly(length - 4)
            code, body = int.from_bytes(packet[:4], "big"), packet[4:]
            if code == CANCEL_REQUEST:
                raise Cancel(length.to_bytes(4, "big") + packet)
            if code not in (SSL_REQUEST, GSS_REQUEST):
                if code >> 16 != 3:  # noqa: PLR2004 (the protocol's major version)
                    raise ProtocolViolation(f"protocol {code >> 16}.{code & 0xFFFF} is not spoken here")
                return code, body
            if code in asked or side.buffered:
                # Asked twice, or bytes slipped in before TLS was there: plain text injection.
                raise ProtocolViolation("data before the answer to an encryption request")
            asked.add(code)
            if code == SSL_REQUEST and self.tls is not None and not side.secure:
                await self._start_tls(side, self.tls)
            else:
                side.write(b"N")

    @staticmethod
    async def _start_tls(side: Side, context: ssl.SSLContext) -> None:
        assert side.transport is not None  # noqa: S101 (it has just sent something)
        side.transport.pause_reading()
        side.write(b"S")
        transport = await asyncio.get_running_loop().start_tls(
            side.transport, side, context, server_side=True
        )
        assert transport is not None  # noqa: S101 (start_tls raises otherwise)
        side.connection_made(transport)
        side.secure = True

    def _negotiate(self, side: Side, minor: int, parameters: dict[str, str]) -> int:
        """Settle the protocol's minor version; exactly one NegotiateProtocolVersion if it is not as asked."""
        newest = 2 if self.operator.catalog.server_version >= 180000 else 0  # noqa: PLR2004 (3.2 came with 18)
        unknown = [name for name in parameters if name.startswith("_pq_.")]
        for name in unknown:
            del parameters[name]
        settled = min(minor, newest)
        if unknown or settled != minor:
            names = b"".join(name.encode() + b"\0" for name in unknown)
            version = (196608 + settled).to_bytes(4, "big")
            side.write(packets.message(b"v", version + len(unknown).to_bytes(4, "big") + names))
        return settled

    async def _authenticate(self, side: Side, user: str) -> tuple[Login, bytes, bytes]:
        login = await self.operator.login(user)
        known = login is not None and login.verifier is not None
        verifier = (
            Verifier.parse(login.verifier) if login and login.verifier else Verifier.mock(self.mock, user)
        )
        plus = side.secure and self.binding is not None
        exchange = ServerExchange(verifier, secrets.token_urlsafe(18), self.binding if plus else None)
        mechanisms = [MECHANISM_PLUS, MECHANISM] if plus else [MECHANISM]
        side.write(_authentication(10, b"".join(m.encode() + b"\0" for m in mechanisms) + b"\0"))
        try:
            mechanism, first = _initial_response(await _sasl(side))
            if mechanism not in mechanisms:
                raise ProtocolViolation(f"SASL mechanism `{mechanism}` is not offered")
            side.write(_authentication(11, exchange.first(mechanism, first)))
            last = await _sasl(side)
            if login is not None and not _alive(login):
                # Before the proof is answered: an ended credential tells nothing (CVE-2025-2291 of a peer).
                raise TaskEnded("the task of this login has ended")
            answer = exchange.final(last)
        except WrongPassword:
            raise InvalidPassword(f'password authentication failed for user "{user}"') from None
        if login is None or not known:
            raise InvalidPassword(f'password authentication failed for user "{user}"')
        side.write(_authentication(12, answer))
        return login, exchange.client_key, verifier.server_key


def _alive(login: Login) -> bool:
    now = datetime.now(UTC)
    return login.task.alive(now) and login.lease_state == "live" and now < login.lease_expires_at


def _authentication(code: int, body: bytes) -> bytes:
    return packets.message(b"R", code.to_bytes(4, "big") + body)


async def _sasl(side: Side) -> bytes:
    header = await side.exactly(5)
    length = int.from_bytes(header[1:], "big")
    if header[:1] != b"p" or not 4 <= length <= _SASL_LIMIT:  # noqa: PLR2004 (the length counts itself)
        raise ProtocolViolation("a SASL response was expected")
    return await side.exactly(length - 4)


def _initial_response(body: bytes) -> tuple[str, bytes]:
    name, at = packets.cstring(body, 0)
    size = int.from_bytes(body[at : at + 4], "big", signed=True)
    if size != len(body) - at - 4:
        raise ProtocolViolation("the SASL response is not of its form")
    return name.decode("ascii", "replace"), body[at + 4 :]


def _parameters(body: bytes) -> dict[str, str]:
    """Read the name and value pairs of a StartupMessage. Raises ProtocolViolation."""
    if body[-1:] != b"\0":
        raise ProtocolViolation("the start-up packet has no end")
    items = body[:-1].split(b"\0")
    if items and items[-1] == b"":
        items.pop()
    if len(items) % 2:
        raise ProtocolViolation("the start-up packet names a parameter without a value")
    try:
        texts = [item.decode() for item in items]
    except UnicodeDecodeError:
        raise ProtocolViolation("the start-up packet is not UTF-8") from None
    return dict(zip(texts[::2], texts[1::2], strict=True))


def _check(parameters: dict[str, str], database: str) -> str:
    """Return the user; refuse what a task may not bring along. Raises Refused or ProtocolViolation."""
    user = parameters.get("user", "")
    if not user:
        raise ProtocolViolation("no PostgreSQL user name was given")
    if parameters.get("replication", "off").lower() not in ("off", "false", "no", "0"):
        raise Refused("replication is not for agents")
    parameters.pop("replication", None)
    if parameters.setdefault("database", user) != database:
        raise Refused(
            f"this proxy serves the database `{database}`",
            hint="use the dsn that `sqlguard task open` printed",
        )
    for name in parameters:
        if name.lower() not in ALLOWED_PARAMETERS and name not in ("user", "database"):
            raise Refused(f"the start-up parameter `{name}` is not accepted", hint="leave it out")
    for name in _option_names(parameters.get("options", "")):
        if name not in ALLOWED_PARAMETERS:
            raise Refused(f"the option `{name}` is not accepted", hint="leave it out")
    return user


def _option_names(options: str) -> list[str]:
    """Return the settings that an `options` parameter makes; anything but `-c name=value` is refused."""
    names: list[str] = []
    words = _words(options)
    while words:
        word = words.pop(0)
        if word == "-c" and words:
            word = words.pop(0)
        elif word.startswith(("-c", "--")):
            word = word[2:]
        else:
            raise Refused("the start-up options are not accepted", hint="leave `options` out")
        names.append(word.partition("=")[0].replace("-", "_").lower())
    return names


def _words(options: str) -> list[str]:
    """Split at blanks as PostgreSQL's pg_split_opts does: a backslash keeps the next character."""
    words: list[str] = []
    current, inside, escaped = "", False, False
    for character in options:
        if escaped:
            current, escaped = current + character, False
        elif character == "\\":
            inside = escaped = True
        elif character.isspace():
            if inside:
                words.append(current)
            current, inside = "", False
        else:
            current, inside = current + character, True
    if inside:
        words.append(current)
    return words
