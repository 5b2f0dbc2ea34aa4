"""
What a client's names stand for on the server: prepared statements, portals.

A name counts from the message that makes it, because others may follow before the server has said yes; and it
is given back if the server says no. What is not known here was never decided, and does not run.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

from sqlguard.wire.replies import Expect

T = TypeVar("T")
#: NAMEDATALEN - 1: PostgreSQL looks at no more bytes of a statement's or a portal's name.
LONGEST_NAME = 63
#: Of our own statements and portals.
OWN = b"sqlguard own"


def misleading(name: bytes, encoding: str) -> str | None:
    """
    Return why a client may not use *name*, None if it may.

    Two names that PostgreSQL would cut to the same are one to it; letters are other bytes in another
    client_encoding; and what an error has left prepared under our own name is not the client's to run.
    """
    if len(name.decode(encoding, "replace").encode()) > LONGEST_NAME:
        return "the name has more than 63 bytes"
    if not name.isascii() and encoding != "utf-8":
        return "a name with other letters than ASCII needs client_encoding UTF8"
    return "the name is taken" if name == OWN else None


class Names(Generic[T]):
    def __init__(self) -> None:
        self.known: dict[bytes, T] = {}
        #: Made (or, with None, closed) by messages that are not answered yet.
        self.pending: dict[bytes, T | None] = {}

    def find(self, name: bytes) -> T | None:
        """Return what *name* will mean when a message sent now reaches the server."""
        if name in self.pending:
            return self.pending[name]
        return self.known.get(name)

    def settled(self, name: bytes) -> T | None:
        """Return what *name* means if no message about it is under way."""
        return None if name in self.pending else self.known.get(name)

    def only(self, name: bytes) -> T | None:
        """Return what *name* means if there is no other, and no message about any is under way."""
        return None if self.pending or len(self.known) > 1 else self.known.get(name)

    def make(self, name: bytes, value: T) -> Callable[[Expect], None]:
        """Note that *name* is being made; what is returned must be told how it went."""
        self.pending[name] = value

        def done(expect: Expect) -> None:
            if self.pending.get(name) is value:
                del self.pending[name]
            if expect.failed is None:
                self.known[name] = value

        return done

    def close(self, name: bytes) -> Callable[[Expect], None]:
        """Note that *name* is being closed; what is returned must be told how it went."""
        self.pending[name] = None

        def done(expect: Expect) -> None:
            if name in self.pending and self.pending[name] is None:
                del self.pending[name]
            if expect.failed is None:
                self.known.pop(name, None)

        return done

    def keep(self, name: bytes, value: T) -> None:
        self.known[name] = value

    def forget(self, name: bytes) -> None:
        self.known.pop(name, None)

    @property
    def is_used(self) -> bool:
        return bool(self.known or self.pending)

    def items(self) -> list[tuple[bytes, T]]:
        """Return what the server has made."""
        return list(self.known.items())

    def clear(self) -> None:
        """Forget what the server has made; what is under way comes after whatever cleared it."""
        self.known.clear()
