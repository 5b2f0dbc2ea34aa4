"""
The two sockets of a session, as asyncio protocols.

Before the session exists a coroutine reads from them (`exactly`); afterwards every chunk goes straight to the
session. Each side stops reading while the other's send buffer is full, so a slow reader holds up nobody else
and memory stays bounded.
"""

import asyncio
from collections.abc import Callable
from typing import cast

#: Above this many unsent bytes the other side is paused: a 239 MB result then took 24 MB of memory.
HIGH_WATER = 256 * 1024
#: Larger TLS records made an async libpq client hang (WIRE section 2).
TLS_PIECE = 8192
#: A handshake never needs more than this at once.
_HANDSHAKE_LIMIT = 64 * 1024


class Closed(ConnectionError):
    """The peer went away."""


class Side(asyncio.Protocol):
    """One socket. `deliver` is set when the session takes over; `lost` is called once when it is gone."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.deliver: Callable[[bytes], None] | None = None
        self.lost: Callable[[], None] | None = None
        self.other: Side | None = None
        self.secure = False
        self._buffer = bytearray()
        self._arrived = asyncio.Event()
        self._gone = False
        self._paused = False

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=HIGH_WATER)

    def data_received(self, data: bytes) -> None:
        if self.deliver is not None:
            self.deliver(data)
            return
        self._buffer += data
        self._arrived.set()
        # asyncio ignores pause_reading() in connection_made (cpython 76002), so the bound is kept here.
        if len(self._buffer) > _HANDSHAKE_LIMIT and self.transport is not None:
            self.transport.pause_reading()
            self._paused = True

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (the signature is asyncio's)
        self._gone = True
        self._arrived.set()
        if self.lost is not None:
            self.lost()

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    # --- the handshake's side

    @property
    def buffered(self) -> int:
        return len(self._buffer)

    async def exactly(self, count: int) -> bytes:
        """Return the next *count* bytes. Raises Closed."""
        while len(self._buffer) < count:
            if self._gone:
                raise Closed
            self._arrived.clear()
            if self._paused and self.transport is not None:
                self._paused = False
                self.transport.resume_reading()
            await self._arrived.wait()
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    async def closed(self) -> None:
        """Wait until the peer has closed."""
        while not self._gone:
            self._arrived.clear()
            await self._arrived.wait()

    def take_over(self, deliver: Callable[[bytes], None], lost: Callable[[], None]) -> None:
        """From now on bytes go to *deliver*, beginning with what is buffered."""
        self.deliver, self.lost = deliver, lost
        if self._paused and self.transport is not None:
            self._paused = False
            self.transport.resume_reading()
        if self._gone:
            lost()
            return
        if self._buffer:
            data = bytes(self._buffer)
            self._buffer.clear()
            deliver(data)

    # --- the session's side

    def write(self, data: bytes) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        if not self.secure or len(data) <= TLS_PIECE:
            self.transport.write(data)
            return
        view = memoryview(data)
        for at in range(0, len(data), TLS_PIECE):
            self.transport.write(view[at : at + TLS_PIECE])

    def close(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.close()
