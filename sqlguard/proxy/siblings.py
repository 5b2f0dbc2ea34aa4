"""
What the workers behind one address tell each other: cancel requests, and (by `census`) how many clients they have.

The kernel gives a cancel request to any of them, and once a session has changed its server connection only its own
worker knows to which. The sockets are there before the workers are, so one that is started again has its own, too.
"""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

from sqlguard.errors import ProtocolViolation
from sqlguard.proxy.census import Census
from sqlguard.wire.frontend import CancelRequest, decode_startup

_LENGTH_BYTES = 4
#: A cancel key has up to 256 bytes.
_LONGEST = 1024


class Siblings:
    """One for all workers; `me` makes it one's own."""

    def __init__(self, count: int, census: Census) -> None:
        self.census = census
        self._pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(count)]
        for pair in self._pairs:
            for end in pair:
                end.settimeout(0)

    def listen(self, number: int, heard: Callable[[CancelRequest], None]) -> None:
        """Have *heard* told, in worker *number*, what the others have been asked."""
        ear = self._pairs[number][0]

        def read() -> None:
            with suppress(BlockingIOError, ProtocolViolation):
                request = decode_startup(ear.recv(_LONGEST)[_LENGTH_BYTES:])
                if isinstance(request, CancelRequest):
                    heard(request)

        asyncio.get_running_loop().add_reader(ear, read)

    def tell(self, number: int, request: CancelRequest) -> None:
        """Tell all but worker *number*; one that does not keep up misses it."""
        for other, (_, mouth) in enumerate(self._pairs):
            if other != number:
                with suppress(OSError):
                    mouth.send(request.encode())
