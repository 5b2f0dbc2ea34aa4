"""
Peers that are gone without a word while something that was sent to them is not acknowledged.

Keep-alive asks only where nothing is under way; else the kernel sends again for a quarter of an hour. TCP_USER_TIMEOUT
would shorten that, but ends a peer that is there and does not read for as long, too: a client at its pager, a server
at a long statement. So the kernel's books are looked at: who is there acknowledges what is sent to it again.
"""

import asyncio
import socket
import struct
import sys
from collections.abc import Set as AbstractSet

import structlog

from sqlguard.proxy.sockets import Side

log = structlog.get_logger()
#: Seconds without any acknowledgement, as long as keep-alive takes, and between looks.
SECONDS, EVERY = 120.0, 15.0
#: So often it was sent again meanwhile.
_AGAIN = 3
#: Of Linux's tcp_info: how often it was sent again, segments not acknowledged, milliseconds since an acknowledgement.
_BOOKS = struct.Struct("=2xB21xI28xI")


async def watch(*groups: AbstractSet[Side]) -> None:
    """Cut off those of *groups* that are gone, until cancelled."""
    while sys.platform == "linux":
        await asyncio.sleep(EVERY)
        for side in [side for group in groups for side in group]:
            if _is_gone(side):
                log.info("peer gone without a word", client_addr=side.address)
                side.abort()


def _is_gone(side: Side) -> bool:
    made = None if side.transport is None else side.transport.get_extra_info("socket")
    if made is None or made.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        books = made.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BOOKS.size)
    except OSError:
        return False  # it is being closed
    again, unacknowledged, silent = _BOOKS.unpack(books)
    return bool(unacknowledged > 0 and again >= _AGAIN and silent >= SECONDS * 1000)
