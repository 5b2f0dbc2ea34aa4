"""
Edits at byte offsets, applied at once; and the way back from the new text's positions to the old one's.
"""

from dataclasses import dataclass

from sqlguard.errors import NotUnderstood


@dataclass(frozen=True, slots=True)
class Copied:
    """A run of characters that stands in both texts; positions are 0-based characters."""

    new: int
    old: int
    length: int


@dataclass(frozen=True, slots=True)
class Spliced:
    text: str
    copied: tuple[Copied, ...]


class Edits:
    """What is to be changed in a text; insertions at one place keep the order they were asked for in."""

    def __init__(self) -> None:
        self._edits: list[tuple[int, int, int, str]] = []

    def __bool__(self) -> bool:
        return bool(self._edits)

    def insert(self, offset: int, text: str) -> None:
        self.replace(offset, offset, text)

    def replace(self, start: int, end: int, text: str) -> None:
        self._edits.append((start, end, len(self._edits), text))

    def apply(self, source: bytes) -> Spliced:
        """Return *source* with every edit made; two edits of the same bytes are a fault of ours."""
        parts: list[str] = []
        copied: list[Copied] = []
        new = old = offset = 0
        for start, end, _, text in [*sorted(self._edits), (len(source), len(source), 0, "")]:
            if start < offset:
                raise NotUnderstood("two rewrites meet in one place", rules=("rewrite-not-placed",))
            kept = source[offset:start].decode()
            if kept:
                copied.append(Copied(new, old, len(kept)))
            parts += (kept, text)
            new += len(kept) + len(text)
            old += len(kept) + len(source[start:end].decode())
            offset = end
        return Spliced("".join(parts), tuple(copied))
