"""
The two sockets of a session, as asyncio protocols.

Before the session exists a coroutine reads from them (`some`); afterwards every chunk goes straight to the
session: the transport calls what `take_over` was given, with nothing in between. A socket is read only while nobody
objects: the other side, because its send buffer is full, or the session, because too much waits in it already. So a
slow reader holds up nobody else and memory stays bounded.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any, cast

#: Above this many unsent bytes the other side is paused: a 239 MB result then took 24 MB of memory.
HIGH_WATER = 256 * 1024
#: Larger TLS records made an async libpq client hang (WIRE section 2).
TLS_PIECE = 8192
#: A login never needs more than this at once.
_LOGIN_LIMIT = 64 * 1024
#: A peer that does not take its last bytes within this many seconds is cut off.
_LINGER = 10.0


#: A peer that is silent for so many seconds is asked so often, so many times, whether it is still there.
_KEEP_ALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
_TLS_RECORD = 0x16
_SLOW = "the other side is slow"


class Closed(ConnectionError):
    """The peer went away."""


class Side(asyncio.BaseProtocol):
    """One socket. `data_received` is the session's when it has taken over; `lost` is called once when it is gone."""

    def __init__(self, open_sides: "set[Side]") -> None:
        """*open_sides* holds this one as long as its socket is there."""
        self._open_sides = open_sides
        self.transport: asyncio.Transport | None = None
        self.data_received: Callable[[bytes], None] = self._hold
        self.ended: Callable[[], None] | None = None
        self.lost: Callable[[], None] | None = None
        self.other: Side | None = None
        self.secure = False
        #: Where the client is, as far as is known; a load balancer may have said so (`arrivals`).
        self.address: str | None = None
        self._buffer = bytearray()
        self._arrived = asyncio.Event()
        self._gone = False
        #: We have said that we send no more.
        self._has_ended = False
        #: Sends bytes. Where nothing is in the way it is the transport's own: every message of a session goes there.
        self.write: Callable[[bytes], None] = self._write
        #: What `write` is while nothing is collected.
        self._way_out = self._write
        self._corked: list[bytes] = []
        self._objections: set[str] = set()
        self._linger: asyncio.TimerHandle | None = None

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._open_sides.add(self)
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=HIGH_WATER)
        keep_alive(self.transport.get_extra_info("socket"))

    def _hold(self, data: bytes) -> None:
        """Keep what comes while nobody has taken over."""
        self._buffer += data
        self._arrived.set()
        # asyncio ignores pause_reading() in connection_made (cpython 76002), so the bound is kept here.
        if len(self._buffer) > _LOGIN_LIMIT:
            self.pause("login")

    def eof_received(self) -> bool:
        """Keep our half open, which TLS can't: what the peer asked before is still answered."""
        if self.ended is None:
            return False
        self.ended()
        return not self.secure

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (the signature is asyncio's)
        self._gone = True
        self._look_before_writing()
        self._open_sides.discard(self)
        self._arrived.set()
        if self._linger is not None:
            self._linger.cancel()
        if self.lost is not None:
            self.lost()

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.pause(_SLOW)

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.resume(_SLOW)

    # --- reading and not reading

    def pause(self, why: str) -> None:
        """Read no more until *why* is taken back with `resume`."""
        if not self._objections and self._is_open:
            self._transport.pause_reading()
        self._objections.add(why)

    def resume(self, why: str) -> None:
        if why not in self._objections:
            return
        self._objections.discard(why)
        if not self._objections and self._is_open:
            self._transport.resume_reading()

    def hand_over(self, to: "Side") -> None:
        """Have *to* be the other side of the one that this is it of, which may be slow just now."""
        peer, self.other = self.other, None
        if peer is not None:
            peer.other, to.other = to, peer
            peer.resume(_SLOW)
        (to.pause if _SLOW in self._objections else to.resume)(_SLOW)
        self.resume(_SLOW)

    @property
    def _transport(self) -> asyncio.Transport:
        assert self.transport is not None  # noqa: S101 (callers look at `_is_open`, or have just sent something)
        return self.transport

    @property
    def _is_open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    # --- the login's side

    async def some(self) -> bytes:
        """Return the bytes that are there, at least one. Raises Closed."""
        while not self._buffer:
            if self._gone:
                raise Closed
            self._arrived.clear()
            self.resume("login")
            await self._arrived.wait()
        taken = bytes(self._buffer)
        self._buffer.clear()
        return taken

    def give_back(self, data: bytes) -> None:
        """Put bytes that `some` has returned, or their end, back for who asks next."""
        self._buffer[:0] = data

    @property
    def peer(self) -> object:
        """Return the address at the socket's other end, as the system puts it."""
        return None if self.transport is None else self.transport.get_extra_info("peername")

    async def start_tls(self, context: ssl.SSLContext, answer: bytes) -> None:
        """Answer a client's request for TLS and do the handshake. Raises Closed."""
        transport = self._transport
        transport.pause_reading()
        self.write(answer)
        loop = asyncio.get_running_loop()
        work = loop.create_task(loop.start_tls(transport, self, context, server_side=True))
        try:
            if self._buffer:
                # It has begun with TLS. Two turns of the loop later TLS listens, and nothing was read meanwhile.
                for _ in range(2):
                    await asyncio.sleep(0)
                _receive(transport.get_protocol(), bytes(self._buffer))
                self._buffer.clear()
            made = await work
        except (OSError, ssl.SSLError):
            raise Closed from None
        finally:
            work.cancel()
        self.secured(made)

    async def begins_with_tls(self) -> bool:
        """Wait for the client's first byte; say whether it begins with TLS, without asking for it. Raises Closed."""
        first = await self.some()
        self.give_back(first)
        return first[0] == _TLS_RECORD

    @property
    def alpn(self) -> str | None:
        """Return the protocol that TLS has agreed on for what is in it."""
        made = self._transport.get_extra_info("ssl_object")
        found: str | None = made.selected_alpn_protocol() if made is not None else None
        return found

    def secured(self, transport: asyncio.BaseTransport | None) -> None:
        """Go on through TLS. Raises Closed if the peer went away in the handshake."""
        if transport is None:
            raise Closed
        self.connection_made(transport)
        self.secure = True

    async def closed(self) -> None:
        """Wait until the peer has closed."""
        while not self._gone:
            self._arrived.clear()
            await self._arrived.wait()

    def take_over(
        self,
        deliver: Callable[[bytes], None],
        ended: Callable[[], None],
        lost: Callable[[], None],
        first: bytes,
    ) -> None:
        """From now on bytes go to *deliver*, beginning with *first* and what is buffered."""
        self.ended, self.lost = ended, lost
        if self._gone:
            lost()
            return
        self.deliver_to(deliver)
        if not self.secure and self._is_open:
            self.write = self._way_out = self._transport.write
        data = first + bytes(self._buffer)
        self._buffer.clear()
        self.resume("login")
        if data:
            deliver(data)

    def deliver_to(self, deliver: Callable[[bytes], None]) -> None:
        """From now on bytes go to *deliver*."""
        self.data_received = deliver
        # A transport looks its protocol's methods up only when it gets it.
        self._transport.set_protocol(self)

    # --- the session's side

    def _write(self, data: bytes) -> None:
        if self.transport is None or self._has_ended or self.transport.is_closing():
            return
        if not self.secure or len(data) <= TLS_PIECE:
            self.transport.write(data)
            return
        view = memoryview(data)
        for at in range(0, len(data), TLS_PIECE):
            self.transport.write(view[at : at + TLS_PIECE])

    def cork(self) -> None:
        """Collect what is written until `uncork`: one write for many small messages."""
        self._corked = []
        self.write = self._corked.append

    def uncork(self) -> None:
        collected, self.write = self._corked, self._way_out
        if collected:
            self.write(collected[0] if len(collected) == 1 else b"".join(collected))

    def _look_before_writing(self) -> None:
        """From now on bytes may have nowhere to go; those that are being collected are looked at in the end."""
        if self.write == self._way_out:
            self.write = self._write
        self._way_out = self._write

    def close(self) -> None:
        """Close when what is unsent has gone out; a peer that does not take it is cut off after a while."""
        self._look_before_writing()
        if self._is_open:
            self._transport.close()
            if not self._gone:
                self._linger = asyncio.get_running_loop().call_later(_LINGER, self._transport.abort)

    def end(self) -> None:
        """Send no more, and read what is still to come; TLS can only do both at once."""
        self._look_before_writing()
        if self._is_open:
            if self.secure or not self._transport.can_write_eof():
                self.close()
            else:
                self._has_ended = True
                self._transport.write_eof()

    def abort(self) -> None:
        """Close at once; what is unsent is lost."""
        self._look_before_writing()
        if self.transport is not None:
            self.transport.abort()


def keep_alive(made: socket.socket | None) -> None:
    """Have the kernel notice a peer that is gone without a word."""
    if made is None or made.family not in (socket.AF_INET, socket.AF_INET6):
        return
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE:
        if hasattr(socket, name):  # not everywhere
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _receive(protocol: Any, data: bytes) -> None:
    """Give *protocol*, asyncio's for TLS, what was read before it was there."""
    while data:
        room = protocol.get_buffer(len(data))
        taken = min(len(room), len(data))
        room[:taken] = data[:taken]
        protocol.buffer_updated(taken)
        data = data[taken:]
