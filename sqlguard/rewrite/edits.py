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
        text = ""
        copied: list[Copied] = []
        old = offset = 0
        for start, end, _, ours in [*sorted(self._edits), (len(source), len(source), 0, "")]:
            if start < offset:
                raise NotUnderstood("two rewrites meet in one place", rules=("rewrite-not-placed",))
            kept = source[offset:start].decode()
            if kept:
                text += _blank(text, kept)
                copied.append(Copied(len(text), old, len(kept)))
                text += kept
            text += _blank(text, ours) + ours
            old += len(kept) + len(source[start:end].decode())
            offset = end
        return Spliced(text, tuple(copied))


def _blank(before: str, after: str) -> str:
    """Return what keeps two words apart that stood next to a quote, as in `RETURNING"a"`."""
    return " " if _ends_word(before[-1:]) and _ends_word(after[:1]) else ""


def _ends_word(character: str) -> bool:
    return bool(character) and (character.isalnum() or character in "_$" or not character.isascii())
