"""
The observing way of a client (WIRE section 5): every byte is passed on as it comes, in both directions.

PostgreSQL itself checks the login, whoever it is; nothing is held back, changed or refused here. Only the start is
looked at, to see who it is, and the rest is read along by an `Observer` behind the client's back.

TLS ends at the proxy on either side. SCRAM with channel binding is between the client and PostgreSQL's own
certificate and so can't go through two TLS connections: where the client has TLS, PostgreSQL is reached without,
unless TLS is required there.
"""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import replace

import structlog

from sqlguard.errors import DatabaseUnavailable, ProtocolViolation
from sqlguard.proxy.backend import Address
from sqlguard.proxy.observer import Observer
from sqlguard.proxy.operator import Operator
from sqlguard.proxy.sightings import Sightings
from sqlguard.proxy.sockets import Closed, Side
from sqlguard.proxy.startup import Cancel, direct_tls
from sqlguard.wire.frontend import decode_startup
from sqlguard.wire.messages import CancelRequest, GSSENCRequest, SSLRequest, StartupMessage
from sqlguard.wire.parameters import Request, read_request
from sqlguard.wire.startup import STARTUP_LIMIT

log = structlog.get_logger()
_LENGTH_BYTES = 4


class Relay:
    """Joins clients with PostgreSQL and observes what they send."""

    def __init__(  # noqa: PLR0913 (what a session is made of)
        self,
        address: Address,
        operator: Operator,
        sightings: Sightings,
        tls: ssl.SSLContext | None,
        *,
        limit: int,
        timeout: float,
    ) -> None:
        self._address = address
        self._operator = operator
        self._sightings = sightings
        self.tls = tls
        self._limit = limit
        self._timeout = timeout

    async def serve(self, side: Side) -> None:
        """Lead a client to PostgreSQL. Raises Cancel, SqlguardError, Closed."""
        try:
            async with asyncio.timeout(self._timeout):
                packet, rest = await self._startup(side)
                address = self._address
                if side.secure and address.tls == "prefer":
                    address = replace(address, tls="disable", open_sides=address.open_sides)
                backend = await address.connect()
                backend.write(packet)
                # While PostgreSQL begins with the login: being watched must not take longer.
                observer = await self._observer(packet)
        except TimeoutError:
            raise Closed from None
        _join(side, backend, observer, rest)

    async def _startup(self, side: Side) -> tuple[bytes, bytes]:
        """Return the StartupMessage, whole, and what is behind it. Raises as `serve`."""
        held = b""
        await direct_tls(side, self.tls)
        while True:
            while (length := _whole(held)) is None:
                held += await side.some()
            packet, held = held[:length], held[length:]
            match decode_startup(packet[_LENGTH_BYTES:]):
                case SSLRequest() | GSSENCRequest() as asked:
                    if held:
                        raise ProtocolViolation("received unencrypted data after a request for encryption")
                    if isinstance(asked, SSLRequest) and self.tls is not None and not side.secure:
                        await side.start_tls(self.tls, b"S")
                    else:
                        side.write(b"N")
                case CancelRequest() as request:
                    raise Cancel(request)
                case StartupMessage():
                    return packet, held

    async def _observer(self, packet: bytes) -> Observer | None:
        """Return who reads along, None where nothing can be said: another database, a role that is not listed."""
        request = read_request(_started(packet))
        role = request.user.decode("utf-8", "replace")
        if not self._wanted(request, role):
            return None
        try:
            login = await self._operator.login(role) or self._sightings.stranger(role)
        except DatabaseUnavailable:
            login = None
        if login is None:
            log.info("not observed: no policy judges it", role=role)
            return None
        return Observer(login, self._operator, self._sightings, self._limit)

    def _wanted(self, request: Request, role: str) -> bool:
        is_here = request.database.decode("utf-8", "replace") == self._operator.database
        return is_here and not request.is_replication and self._sightings.observes(role)


def _started(packet: bytes) -> StartupMessage:
    startup = decode_startup(packet[_LENGTH_BYTES:])
    assert isinstance(startup, StartupMessage)  # noqa: S101 (`_startup` has looked)
    return startup


def _whole(held: bytes) -> int | None:
    """Return the length of the first packet, None if it is not whole yet. Raises Closed, as PostgreSQL says nothing."""
    if len(held) < _LENGTH_BYTES:
        return None
    length = int.from_bytes(held[:_LENGTH_BYTES], "big")
    if not 2 * _LENGTH_BYTES <= length <= STARTUP_LIMIT + _LENGTH_BYTES:
        raise Closed
    return length if len(held) >= length else None


def _join(side: Side, backend: Side, observer: Observer | None, rest: bytes) -> None:
    side.other, backend.other = backend, side

    def closed(other: Side) -> Callable[[], None]:
        return other.close

    def to_server(data: bytes) -> None:
        backend.write(data)
        if observer is not None:
            observer.from_client(data)

    def to_client(data: bytes) -> None:
        side.write(data)
        if observer is not None:
            observer.from_server(data)

    backend.take_over(to_client, closed(side), closed(side), b"")
    side.take_over(to_server, backend.end, closed(backend), rest)
