"""
How many clients all workers behind one address have, and from where: memory that they share.

A worker writes into its own part only and reads all of them, so there is no lock that one could die with; the part
of one that has died is its successor's, which begins by clearing it. Who comes is entered before anybody counts: a
bound is never exceeded, though of two that come at the same moment both may find it reached.
"""

import mmap
import secrets
from hashlib import blake2b

_WIDTH = 8
#: A part begins with its number of sessions.
_HEAD = 1


class Census:
    """For all workers; made before they are. `part` makes it one's own."""

    def __init__(self, workers: int, rows: int) -> None:
        """There are so many *rows* for each worker, one per connection."""
        self.workers = workers
        self.size = _HEAD + rows
        # Without a file and shared: what a fork leaves in common.
        self.memory = mmap.mmap(-1, workers * self.size * _WIDTH)
        self.cells = memoryview(self.memory).cast("Q")
        self._secret = secrets.token_bytes(16)

    def part(self, number: int) -> "Part":
        return Part(self, number)

    def sign(self, address: str) -> bytes:
        """Return what an address is called in the rows: as wide as one, and nobody's who can't guess 64 bits."""
        return blake2b(address.encode(), digest_size=_WIDTH, key=self._secret).digest()

    def sessions(self) -> int:
        return sum(self.cells[worker * self.size] for worker in range(self.workers))

    def clients(self, address: str) -> int:
        return self.memory[:].count(self.sign(address))


class Part:
    """One worker's."""

    def __init__(self, census: Census, number: int) -> None:
        self.everyone = census
        self._head = number * census.size
        end = self._head + census.size
        for cell in range(self._head, end):
            census.cells[cell] = 0
        self._free = list(range(end - 1, self._head + _HEAD - 1, -1))

    def enter(self, address: str) -> int | None:
        """Enter a client; return its row for `leave`, None if there is no room."""
        if not self._free:
            return None
        row = self._free.pop()
        at = row * _WIDTH
        self.everyone.memory[at : at + _WIDTH] = self.everyone.sign(address)
        return row

    def leave(self, row: int) -> None:
        self.everyone.cells[row] = 0
        self._free.append(row)

    def session(self, difference: int) -> None:
        """Enter a session (1), or take it back (-1)."""
        self.everyone.cells[self._head] += difference
