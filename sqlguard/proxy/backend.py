"""
Logging in to PostgreSQL as the task's own role, with the keys learned from the agent's proof.
"""

import asyncio
import secrets
import ssl
from dataclasses import dataclass, field
from functools import cached_property

from psycopg.conninfo import conninfo_to_dict

from sqlguard.errors import DatabaseUnavailable, NotConfigured, ProtocolViolation, SqlguardError
from sqlguard.proxy.sockets import Closed, Side
from sqlguard.wire.buffer import BACKEND_LIMITS, Frame, FrameReader
from sqlguard.wire.messages import (
    AuthenticationOk,
    AuthenticationSASL,
    AuthenticationSASLContinue,
    AuthenticationSASLFinal,
    CancelRequest,
    ErrorResponse,
    SASLInitialResponse,
    SASLResponse,
    SSLRequest,
    StartupMessage,
    decode_authentication,
)
from sqlguard.wire.scram import MECHANISM, ClientExchange, Keys

_NONCE_BYTES = 18
#: How long a cancel request may take; PostgreSQL answers by closing.
_CANCEL_SECONDS = 10.0


class LoginFailed(SqlguardError):
    """PostgreSQL said no; `response` is its own ErrorResponse, passed on as it is."""

    sqlstate = "28000"

    def __init__(self, response: bytes, said: str) -> None:
        super().__init__(said)
        self.response = response


@dataclass(frozen=True)
class Address:
    """Where PostgreSQL is: a host and port or a socket directory, and how to speak TLS to it."""

    host: str
    port: int
    dbname: str
    tls: str = "prefer"
    ca: str | None = None
    #: The connections that there are.
    open_sides: set[Side] = field(default_factory=set, compare=False, repr=False)

    @classmethod
    def of(cls, dsn: str, tls: str, ca: str | None) -> "Address":
        """Read the operator's DSN: agents reach PostgreSQL by the same way. Raises NotConfigured."""
        parts = conninfo_to_dict(dsn)
        host = str(parts.get("hostaddr") or parts.get("host") or "/var/run/postgresql").split(",")[0]
        port = int(str(parts.get("port") or 5432).split(",")[0])
        name = str(parts.get("dbname") or parts.get("user") or "postgres")
        address = cls(host, port, name, "disable" if host.startswith("/") else tls, ca)
        if address.tls != "disable":
            address.context  # noqa: B018 (made now, so that a wrong CA is told at the start)
        return address

    @cached_property
    def context(self) -> ssl.SSLContext:
        """Return what speaks TLS; made once, reading the system's certificates takes 20 ms."""
        verify = self.tls == "verify-full"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = verify
        if not verify:
            context.verify_mode = ssl.CERT_NONE
            return context
        try:
            if self.ca is None:
                context.load_default_certs()
            else:
                context.load_verify_locations(self.ca)
        except (OSError, ssl.SSLError) as fault:
            raise NotConfigured(
                f"the certificates in `{self.ca}` can't be used: {fault}", hint="check --backend-tls-ca"
            ) from None
        return context

    async def connect(self) -> Side:
        """Open a connection, with TLS as asked. Raises DatabaseUnavailable, ProtocolViolation."""
        loop = asyncio.get_running_loop()

        def made() -> Side:
            return Side(self.open_sides)

        try:
            if self.host.startswith("/"):
                _, side = await loop.create_unix_connection(made, f"{self.host}/.s.PGSQL.{self.port}")
            else:
                _, side = await loop.create_connection(made, self.host, self.port)
        except OSError as fault:
            raise DatabaseUnavailable(f"PostgreSQL can't be reached: {fault}") from None
        if self.tls != "disable":
            try:
                await self._start_tls(side)
            except (Closed, OSError, ssl.SSLError) as fault:
                side.close()
                raise DatabaseUnavailable(
                    f"no TLS with PostgreSQL: {fault or 'it closed the connection'}",
                    hint="check its certificate and --backend-tls-ca, or choose another --backend-tls",
                ) from None
            except BaseException:
                side.close()
                raise
        return side

    async def _start_tls(self, side: Side) -> None:
        side.write(SSLRequest().encode())
        answer = await side.some()
        if answer == b"N":
            if self.tls == "prefer":
                return
            raise DatabaseUnavailable(
                "PostgreSQL does not offer TLS", hint="use --backend-tls prefer or disable"
            )
        if answer != b"S":
            raise ProtocolViolation("PostgreSQL did not answer the request for TLS as it must")
        assert side.transport is not None  # noqa: S101 (it has just answered)
        transport = await asyncio.get_running_loop().start_tls(
            side.transport, side, self.context, server_hostname=self.host
        )
        side.secured(transport)


@dataclass
class Backend:
    """A connection that is logged in, with what PostgreSQL said meanwhile."""

    side: Side
    pid: int = 0
    key_data: bytes = b""
    #: ParameterStatus messages, whole.
    statuses: list[bytes] = field(default_factory=list)
    #: Notices of the login, whole.
    notices: list[bytes] = field(default_factory=list)
    #: What came behind the first ReadyForQuery.
    rest: bytes = b""
    is_ready: bool = False


async def log_in(
    address: Address, parameters: tuple[tuple[bytes, bytes], ...], protocol: int, keys: Keys
) -> Backend:
    """
    Connect and log in.

    Raises LoginFailed with PostgreSQL's own answer, DatabaseUnavailable, ProtocolViolation.
    """
    side = await address.connect()
    try:
        side.write(StartupMessage(protocol, parameters).encode())
        exchange = ClientExchange(keys, secrets.token_urlsafe(_NONCE_BYTES))
        reader = FrameReader(BACKEND_LIMITS)
        backend = Backend(side)
        while not backend.is_ready:
            for frame in reader.receive(await side.some()):
                assert isinstance(frame, Frame)  # noqa: S101 (this reader makes no runs)
                _take(backend, frame, exchange)
        backend.rest += reader.held
    except Closed:
        raise DatabaseUnavailable("PostgreSQL closed the connection during the login") from None
    except BaseException:
        side.close()
        raise
    return backend


def _take(backend: Backend, frame: Frame, exchange: ClientExchange) -> None:
    """Take one message of the login."""
    if backend.is_ready:
        backend.rest += frame.encode()
        return
    match chr(frame.kind):
        case "R":
            _authenticate(backend.side, frame.body, exchange)
        case "E":
            said = ErrorResponse.decode(frame.body).fields
            text = dict(said).get(b"M", b"PostgreSQL refused the login").decode("utf-8", "replace")
            raise LoginFailed(frame.encode(), text)
        case "S":
            backend.statuses.append(frame.encode())
        case "K":
            backend.pid, backend.key_data = int.from_bytes(frame.body[:4], "big"), frame.encode()
        case "N":
            backend.notices.append(frame.encode())
        case "Z":
            backend.is_ready = True
        case "v":
            raise ProtocolViolation("PostgreSQL does not speak the protocol's version that was agreed on")
        case other:
            raise ProtocolViolation(f"PostgreSQL sent a `{other}` during the login")


def _authenticate(side: Side, body: bytes, exchange: ClientExchange) -> None:
    match decode_authentication(body):
        case AuthenticationSASL(mechanisms):
            if MECHANISM.encode() not in mechanisms:
                raise ProtocolViolation("PostgreSQL does not offer SCRAM-SHA-256")
            side.write(SASLInitialResponse(MECHANISM.encode(), exchange.first()).encode())
        case AuthenticationSASLContinue(data):
            side.write(SASLResponse(exchange.final(data)).encode())
        case AuthenticationSASLFinal(data):
            exchange.check(data)
        case AuthenticationOk():
            pass
        case _:
            raise DatabaseUnavailable(
                "PostgreSQL asks for another way to log in than SCRAM-SHA-256",
                hint="give the task roles `scram-sha-256` in pg_hba.conf",
            )


async def cancel(address: Address, request: CancelRequest) -> None:
    """
    Pass a CancelRequest on; return when PostgreSQL has closed, so that a late one hits no later query.

    Raises DatabaseUnavailable, ProtocolViolation.
    """
    side = await address.connect()
    side.write(request.encode())
    try:
        async with asyncio.timeout(_CANCEL_SECONDS):
            await side.closed()
    except TimeoutError:
        pass
    finally:
        side.close()
