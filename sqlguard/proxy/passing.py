"""
Messages that were found to pass as they are, for all sessions of a gate: what was decided for the very same bytes is
decided.
"""

from typing import Generic, TypeVar

from sqlguard.gate import Gate
from sqlguard.proxy.likeness import likeness
from sqlguard.proxy.portals import Prepared

V = TypeVar("V")
#: Bounds of what is remembered.
_ENTRIES, _BYTES = 4096, 8192


class Recent(dict[bytes, V], Generic[V]):
    """
    What was used last. When half of the room is full the half before it goes, but for what was used meanwhile.

    As a dictionary it is the newer half: a plain look-up, at the speed of one, comes first and `again` behind it.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._half = most // 2
        self._older: dict[bytes, V] = {}

    def keep(self, key: bytes, value: V) -> None:
        if len(self) >= self._half:
            self._older = dict(self)
            self.clear()
        self[key] = value

    def again(self, key: bytes) -> bool:
        """Say whether *key* is in the older half; from then on it is in the newer one."""
        if key not in self._older:
            return False
        self.keep(key, self._older.pop(key))
        return True


class Passing:
    """
    What *gate* lets pass.

    `texts` are Query and Parse messages, a Parse with what it prepares; `alike` are likenesses of Query messages.
    """

    def __init__(self, gate: Gate | None = None) -> None:
        self.gate = gate
        self.catalog = None if gate is None else gate.context.catalog
        self.hits = 0
        self.texts: Recent[Prepared | None] = Recent(_ENTRIES)
        self.alike: Recent[None] = Recent(_ENTRIES)

    def remember(self, message: bytes, prepared: Prepared | None = None, like: bytes | None = None) -> None:
        """Remember a message, and with *like* that a number in it may stand for any other."""
        if like is not None:
            self.alike.keep(like, None)
        if len(message) <= _BYTES:
            self.texts.keep(message, prepared)

    def passes(self, message: bytes) -> bool:
        """Say whether a Query passes."""
        if message in self.texts or self.texts.again(message):
            return True
        like = likeness(message)
        if like is None or not (like in self.alike or self.alike.again(like)):
            return False
        self.texts.keep(message, None)
        return True

    def prepared(self, message: bytes) -> Prepared | None:
        """Return what a Parse prepares, if it passes."""
        found = self.texts.get(message)
        return self.texts[message] if found is None and self.texts.again(message) else found
