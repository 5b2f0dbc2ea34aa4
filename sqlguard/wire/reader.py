"""
Reading a message's body field by field; whatever does not fit is a ProtocolViolation.

Text stays bytes: it is in the client's encoding, which only the session knows.
"""

from struct import Struct, unpack_from
from typing import ClassVar, Self

from sqlguard.errors import ProtocolViolation
from sqlguard.wire.buffer import HEADER

_INT16 = Struct(">h")
_UINT16 = Struct(">H")
_INT32 = Struct(">i")
_UINT32 = Struct(">I")


class Reader:
    """Reads *body* from its start; *what* names the message in errors. `end` must be the last call."""

    __slots__ = ("_at", "_body", "_what")

    def __init__(self, body: bytes, what: str) -> None:
        self._body = body
        self._what = what
        self._at = 0

    def broken(self, why: str) -> ProtocolViolation:
        return ProtocolViolation(f"malformed {self._what}: {why}")

    def _number(self, form: Struct) -> int:
        at = self._at
        self._at = at + form.size
        if self._at > len(self._body):
            raise self.broken("it ends too early")
        number: int = form.unpack_from(self._body, at)[0]
        return number

    def int16(self) -> int:
        return self._number(_INT16)

    def uint16(self) -> int:
        at = self._at
        self._at = end = at + 2
        if end > len(self._body):
            raise self.broken("it ends too early")
        return self._body[at] << 8 | self._body[at + 1]

    def int32(self) -> int:
        return self._number(_INT32)

    def uint32(self) -> int:
        return self._number(_UINT32)

    def byte(self) -> int:
        return self.take(1)[0]

    def take(self, count: int) -> bytes:
        at = self._at
        if not 0 <= count <= len(self._body) - at:
            raise self.broken("it ends too early")
        self._at = at + count
        return self._body[at : self._at]

    def text(self) -> bytes:
        """Read bytes up to a NUL, which is read too."""
        at = self._at
        stop = self._body.find(b"\0", at)
        if stop < 0:
            raise self.broken("a text without its end")
        self._at = stop + 1
        return self._body[at:stop]

    def texts(self) -> tuple[bytes, ...]:
        """Read texts up to an empty one, which is read too."""
        found = []
        while text := self.text():
            found.append(text)
        return tuple(found)

    def value(self) -> bytes | None:
        """Read a length and that many bytes; -1 is NULL."""
        length = self.int32()
        if length == -1:
            return None
        return self.take(length)

    def values(self) -> tuple[bytes | None, ...]:
        # In one frame, without `value`: every Bind comes through here.
        count, at, body = self.uint16(), self._at, self._body
        size = len(body)
        found: list[bytes | None] = []
        for _ in range(count):
            start = at + 4
            length = int.from_bytes(body[at:start], "big", signed=True)
            at = start + max(0, length)
            if at > size or length < -1:
                raise self.broken("it ends too early")
            found.append(body[start:at] if length >= 0 else None)
        self._at = at
        return tuple(found)

    def int16s(self) -> tuple[int, ...]:
        return self._many("H", 2)

    def uint32s(self) -> tuple[int, ...]:
        return self._many("I", 4)

    def _many(self, form: str, size: int) -> tuple[int, ...]:
        count = self.uint16()
        if not count:
            return ()
        at = self._at
        # Checked before anything is made: the count is the peer's word.
        self.take(count * size)
        return unpack_from(f">{count}{form}", self._body, at)

    def formats(self) -> tuple[int, ...]:
        """Read format codes: 0 is text, 1 is binary."""
        codes = self.int16s()
        if codes and max(codes) > 1:
            raise self.broken(f"unknown format code {max(codes)}")
        return codes

    def rest(self) -> bytes:
        at, self._at = self._at, len(self._body)
        return self._body[at:]

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self._body)

    def end(self) -> None:
        if self._at != len(self._body):
            raise self.broken(f"{len(self._body) - self._at} bytes too many")


def text_at(body: bytes, at: int) -> tuple[bytes, int]:
    """Return the text at *at* and the place behind its NUL: for looking at a message without decoding it all."""
    stop = body.find(b"\0", at)
    if stop < 0:
        raise ProtocolViolation("malformed message: a text without its end")
    return body[at:stop], stop + 1


def pack_texts(*texts: bytes) -> bytes:
    """Return each text with its NUL; a NUL inside one would be another message and must not happen."""
    for text in texts:
        if b"\0" in text:
            raise ValueError("a text on the wire can't hold a NUL")
    return b"\0".join((*texts, b""))


def pack_values(values: tuple[bytes | None, ...]) -> bytes:
    return b"".join((_UINT16.pack(len(values)), *map(pack_value, values)))


def pack_value(value: bytes | None) -> bytes:
    return b"\xff\xff\xff\xff" if value is None else _INT32.pack(len(value)) + value


def pack_int16s(numbers: tuple[int, ...]) -> bytes:
    return Struct(f">H{len(numbers)}H").pack(len(numbers), *numbers)


def pack_uint32s(numbers: tuple[int, ...]) -> bytes:
    return Struct(f">H{len(numbers)}I").pack(len(numbers), *numbers)


class Bare:
    """A message that is its type and nothing else."""

    __slots__ = ()
    kind: ClassVar[int]

    def encode(self) -> bytes:
        return HEADER.pack(self.kind, 4)

    @classmethod
    def decode(cls, body: bytes) -> Self:
        if body:
            raise ProtocolViolation(f"malformed {cls.__name__}: {len(body)} bytes too many")
        return cls()
