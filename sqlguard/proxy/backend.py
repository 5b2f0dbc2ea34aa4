"""
Logging in to PostgreSQL as the task's own role, with the ClientKey learned from the agent's proof.
"""

import asyncio
import secrets
import ssl
from dataclasses import dataclass, field

from psycopg.conninfo import conninfo_to_dict

from sqlguard.errors import DatabaseUnavailable, ProtocolViolation, SqlguardError
from sqlguard.proxy import packets
from sqlguard.proxy.sockets import Closed, Side
from sqlguard.scram import MECHANISM, ClientExchange

SSL_REQUEST = 80877103
CANCEL_REQUEST = 80877102
_OK, _SASL, _SASL_CONTINUE, _SASL_FINAL = 0, 10, 11, 12
_LIMIT = 1024 * 1024


class LoginFailed(SqlguardError):
    """PostgreSQL said no; `response` is its own ErrorResponse, passed on as it is."""

    sqlstate = "28000"

    def __init__(self, response: bytes) -> None:
        super().__init__(packets.error_fields(response).get("M", "PostgreSQL refused the login"))
        self.response = response


@dataclass(frozen=True, slots=True)
class Address:
    """Where PostgreSQL is: a host and port or a socket directory, and how to speak TLS to it."""

    host: str
    port: int
    dbname: str
    tls: str = "prefer"
    ca: str | None = None

    @classmethod
    def of(cls, dsn: str, tls: str, ca: str | None) -> "Address":
        """Read the operator's DSN. Agents reach PostgreSQL by the same way."""
        parts = conninfo_to_dict(dsn)
        host = str(parts.get("hostaddr") or parts.get("host") or "/var/run/postgresql").split(",")[0]
        port = int(str(parts.get("port") or 5432).split(",")[0])
        name = str(parts.get("dbname") or parts.get("user") or "postgres")
        return cls(host, port, name, "disable" if host.startswith("/") else tls, ca)

    async def connect(self) -> Side:
        """Open a connection, with TLS as asked. Raises DatabaseUnavailable."""
        loop = asyncio.get_running_loop()
        try:
            if self.host.startswith("/"):
                _, side = await loop.create_unix_connection(Side, f"{self.host}/.s.PGSQL.{self.port}")
            else:
                _, side = await loop.create_connection(Side, self.host, self.port)
            if self.tls != "disable":
                await self._start_tls(side)
        except (OSError, ssl.SSLError) as fault:
            raise DatabaseUnavailable(f"PostgreSQL can't be reached: {fault}") from None
        return side

    async def _start_tls(self, side: Side) -> None:
        side.write((8).to_bytes(4, "big") + SSL_REQUEST.to_bytes(4, "big"))
        answer = await side.exactly(1)
        if answer != b"S":
            if self.tls == "prefer":
                return
            raise DatabaseUnavailable(
                "PostgreSQL does not offer TLS", hint="use --backend-tls prefer or disable"
            )
        if side.buffered:
            raise ProtocolViolation("PostgreSQL sent data before TLS was there")
        context = ssl.create_default_context(cafile=self.ca)
        if self.tls != "verify-full":
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        assert side.transport is not None  # noqa: S101 (connected above)
        transport = await asyncio.get_running_loop().start_tls(
            side.transport, side, context, server_hostname=self.host
        )
        assert transport is not None  # noqa: S101 (start_tls raises otherwise)
        side.connection_made(transport)
        side.secure = True


@dataclass
class Backend:
    """A connection that is logged in: its replies so far, for the client."""

    side: Side
    pid: int = 0
    key_data: bytes = b""
    #: ParameterStatus messages, whole.
    statuses: list[bytes] = field(default_factory=list)
    #: NOTICEs of the login and the like, whole.
    notices: list[bytes] = field(default_factory=list)
    ready: bool = False


async def log_in(
    address: Address, parameters: dict[str, str], minor: int, client_key: bytes, server_key: bytes
) -> Backend:
    """
    Connect and log in.

    Raises LoginFailed with PostgreSQL's own answer, DatabaseUnavailable, ProtocolViolation.
    """
    side = await address.connect()
    try:
        side.write(startup(parameters, minor))
        exchange = ClientExchange(client_key, server_key, secrets.token_urlsafe(18))
        backend = Backend(side)
        while not backend.ready:
            _greeted(backend, *await _message(side), exchange)
    except Closed:
        raise DatabaseUnavailable("PostgreSQL closed the connection during the login") from None
    except BaseException:
        side.close()
        raise
    return backend


def _greeted(backend: "Backend", kind: bytes, body: bytes, exchange: ClientExchange) -> None:
    """Take one message of the login."""
    match kind:
        case b"R":
            _authenticate(backend.side, body, exchange)
        case b"E":
            raise LoginFailed(packets.message(b"E", body))
        case b"S":
            backend.statuses.append(packets.message(b"S", body))
        case b"K":
            backend.pid, backend.key_data = int.from_bytes(body[:4], "big"), packets.message(b"K", body)
        case b"N":
            backend.notices.append(packets.message(b"N", body))
        case b"Z":
            backend.ready = True
        case b"v":
            pass  # an older server settles for 3.0, and so did we with the client
        case _:
            raise ProtocolViolation(f"PostgreSQL sent {kind!r} during the login")


def startup(parameters: dict[str, str], minor: int) -> bytes:
    """Return a StartupMessage of protocol 3.*minor*."""
    body = (196608 + minor).to_bytes(4, "big")
    for name, value in parameters.items():
        body += name.encode() + b"\0" + value.encode() + b"\0"
    body += b"\0"
    return (len(body) + 4).to_bytes(4, "big") + body


async def _message(side: Side) -> tuple[bytes, bytes]:
    header = await side.exactly(5)
    length = int.from_bytes(header[1:], "big")
    if not 4 <= length <= _LIMIT:  # noqa: PLR2004 (the length counts itself)
        raise ProtocolViolation("PostgreSQL sent a message of impossible length")
    return header[:1], await side.exactly(length - 4)


def _authenticate(side: Side, body: bytes, exchange: ClientExchange) -> None:
    code = int.from_bytes(body[:4], "big")
    if code == _SASL:
        if MECHANISM.encode() not in body[4:].split(b"\0"):
            raise ProtocolViolation("PostgreSQL does not offer SCRAM-SHA-256")
        first = exchange.first()
        side.write(packets.message(b"p", MECHANISM.encode() + b"\0" + len(first).to_bytes(4, "big") + first))
    elif code == _SASL_CONTINUE:
        side.write(packets.message(b"p", exchange.final(body[4:])))
    elif code == _SASL_FINAL:
        exchange.check(body[4:])
    elif code != _OK:
        raise DatabaseUnavailable(
            "PostgreSQL asks for another way to log in than SCRAM-SHA-256",
            hint="give the task roles `scram-sha-256` in pg_hba.conf",
        )


async def cancel(address: Address, request: bytes) -> None:
    """Pass a CancelRequest on; returns when PostgreSQL has closed, so that a late one hits no later query."""
    side = await address.connect()
    side.write(request)
    try:
        await asyncio.wait_for(side.closed(), timeout=10)
    except TimeoutError:
        pass
    finally:
        side.close()
