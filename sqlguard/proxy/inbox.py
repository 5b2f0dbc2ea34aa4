"""
What a client has sent and nobody has taken yet; the client is no longer read when that is too much.
"""

from collections import deque

from sqlguard.proxy.pipe import Pipe
from sqlguard.wire.buffer import Frame, Run

#: Messages (or pieces of COPY data) that may wait before the client is no longer read, and their bytes.
WAITING = 1024
_WAITING_BYTES = 4 * 1024 * 1024
_WHY = "too many messages are waiting"


class Inbox:
    def __init__(self, client: Pipe) -> None:
        self._client = client
        self._items: deque[Frame | Run] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._items)

    @property
    def first(self) -> Frame | Run:
        return self._items[0]

    def add(self, item: Frame | Run) -> None:
        self._items.append(item)
        self._bytes += len(item[1])
        if len(self._items) > WAITING or self._bytes > _WAITING_BYTES:
            self._client.pause(_WHY)

    def take(self) -> Frame | Run:
        """Return the first message; it waits no longer."""
        item = self._items.popleft()
        self._bytes -= len(item[1])
        if len(self._items) <= WAITING // 2 and self._bytes <= _WAITING_BYTES // 2:
            self._client.resume(_WHY)
        return item
