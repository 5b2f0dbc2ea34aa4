"""
Streams of bytes, cut into protocol messages.

Theory of operation. A message is a type byte, a length that counts itself, and a body. `FrameReader` takes the
client's stream: it lists which types may come and how long each may be, and judges a length as soon as its five
header bytes are there. `Scanner` takes the server's stream: it walks over headers only and hands on what lies
between two interesting messages as one slice, so that a row costs one step of a loop and no object.

Neither holds more than one message. Types that are *run* through (CopyData, DataRow) are not held at all: a
piece of a message is passed on as it comes, however long the whole is.
"""

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from struct import Struct
from typing import NamedTuple

from sqlguard.errors import ProtocolViolation

HEADER = Struct(">BI")
_HEADER_BYTES = 5
#: A length counts its own four bytes.
_LENGTH_BYTES = 4
#: PostgreSQL's bound for messages that hold no user data (PQ_SMALL_MESSAGE_LIMIT).
SMALL_LIMIT = 10_000
#: PostgreSQL's bound for the others (PQ_LARGE_MESSAGE_LIMIT): one byte less than its largest allocation.
LARGE_LIMIT = 0x3FFFFFFE
#: What a proxy holds in memory for one message of one client, unless it is told otherwise.
DEFAULT_LIMIT = 64 * 1024 * 1024

_COPY_DATA = ord("d")
_BULK = (ord("D"), _COPY_DATA)
#: Bytes of a chunk that is worth the look whether it holds nothing but rows.
_MANY = 4096


def message(kind: bytes, body: bytes) -> bytes:
    """Return a whole message of one type."""
    return HEADER.pack(kind[0], len(body) + _LENGTH_BYTES) + body


class Frame(NamedTuple):
    """One whole message: its type byte, and all of it, header included."""

    kind: int
    raw: bytes

    @classmethod
    def of(cls, kind: int, body: bytes) -> "Frame":
        return cls(kind, HEADER.pack(kind, len(body) + _LENGTH_BYTES) + body)

    @property
    def body(self) -> bytes:
        return self.raw[_HEADER_BYTES:]

    def encode(self) -> bytes:
        return self.raw


class Run(NamedTuple):
    """A stretch of messages of one kind, headers included, which may begin and end inside a message."""

    kind: int
    data: bytes


def frontend_limits(large: int = DEFAULT_LIMIT) -> Mapping[int, int]:
    """Return the types a client may send in a session, each with the longest body it may have."""
    limits = dict.fromkeys(b"CDEHSXcf", SMALL_LIMIT)
    limits |= dict.fromkeys(b"QPBF", large)
    limits[_COPY_DATA] = LARGE_LIMIT
    return limits


#: What a server may send; for those who read a login or a conversation of their own.
BACKEND_LIMITS: Mapping[int, int] = dict.fromkeys(b"123ACDEGHIKNRSTVWZcdnstv", DEFAULT_LIMIT)
COPY_RUNS = frozenset({_COPY_DATA})


class FrameReader:
    """
    Cuts one direction of a stream into frames.

    *limits* lists the types that may come; any other is a violation. Types in *runs* come as `Run`s, as they
    arrive, everything else as whole frames.
    """

    def __init__(self, limits: Mapping[int, int], runs: frozenset[int] = frozenset()) -> None:
        self._lengths = {kind: limit + _LENGTH_BYTES for kind, limit in limits.items()}
        self._runs = runs
        self._held = bytearray()
        #: Bytes that must be held before anything more can be said.
        self._need = _HEADER_BYTES
        #: Bytes still to come of a message that is being run through.
        self._rest = 0
        self._run_kind = 0

    @property
    def held(self) -> bytes:
        """Return the bytes of the message that is not whole yet."""
        return bytes(self._held)

    @property
    def is_between_messages(self) -> bool:
        return not self._held and not self._rest

    @property
    def is_in_run(self) -> bool:
        """Say whether a message has been passed on in part."""
        return self._rest > 0

    def receive(self, data: bytes) -> Iterator[Frame | Run]:
        """Yield what *data* makes whole; must be read to its end. Raises ProtocolViolation."""
        # Not a generator itself: the bytes count as received even if nobody looks at the frames.
        return iter(self._frames(data))

    def _frames(self, data: bytes) -> list[Frame | Run]:
        found: list[Frame | Run] = []
        if self._rest and data:
            taken = min(self._rest, len(data))
            self._rest -= taken
            found.append(Run(self._run_kind, data[:taken]))
            data = data[taken:]
        if self._held:
            self._held += data
            if len(self._held) < self._need:
                return found
            data = bytes(self._held)
            self._held = bytearray()
        at, size, limits = 0, len(data), self._lengths
        while size - at >= _HEADER_BYTES:
            kind, length = HEADER.unpack_from(data, at)
            if not _LENGTH_BYTES <= length <= limits.get(kind, -1):
                raise self._refused(kind, length)
            if kind in self._runs:
                at = self._run(data, at, kind, found)
                continue
            end = at + 1 + length
            if end > size:
                self._need = end - at
                self._held += data[at:]
                return found
            found.append(Frame(kind, data[at:end]))
            at = end
        self._need = _HEADER_BYTES
        self._held += data[at:]
        # A type byte alone is enough to refuse an unknown type.
        if at < size and data[at] not in limits:
            raise self._refused(data[at], 0)
        return found

    def _refused(self, kind: int, length: int) -> ProtocolViolation:
        if kind not in self._lengths:
            return ProtocolViolation(f"`{_name(kind)}` is no message type that may come here")
        return ProtocolViolation(f"a message of type `{_name(kind)}` has the impossible length {length}")

    def _run(self, data: bytes, at: int, kind: int, found: list[Frame | Run]) -> int:
        start, size = at, len(data)
        while size - at >= _HEADER_BYTES and data[at] == kind:
            _, length = HEADER.unpack_from(data, at)
            if not _LENGTH_BYTES <= length <= self._lengths[kind]:
                raise self._refused(kind, length)
            at += 1 + length
        if at > size:
            self._rest, self._run_kind = at - size, kind
            at = size
        found.append(Run(kind, data[start:at]))
        return at


class Rows(NamedTuple):
    """What a piece of a run of rows holds: how many begin there, what ends the one before, what is yet to come."""

    number: int
    before: int
    behind: int


class Bulk(Enum):
    """What becomes of rows and COPY data."""

    PASS = "pass"  # noqa: S105 (a disposition, no secret)
    DROP = "drop"
    #: Each message is given to the judge, whole.
    JUDGE = "judge"


class Scanner:
    """
    Walks over the server's stream and returns what goes on to the client.

    *judge* gets every message but rows and COPY data, whole and with its header, and returns what goes out in its
    place, None for the message as it is. *bulk* is asked what becomes of a run of rows; the answer must hold until
    the judge is called again. *passes* is asked first, about the type alone: it may spare the judge a message that goes
    out as it is.
    """

    def __init__(
        self,
        judge: Callable[[int, bytes], bytes | None],
        bulk: Callable[[], Bulk],
        limit: int = DEFAULT_LIMIT,
        *,
        passes: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._passes = passes
        self._judge = judge
        self._bulk = bulk
        self._limit = limit
        self._held = bytearray()
        self._need = _HEADER_BYTES
        self._rest = 0
        self._rest_passes = True
        #: Of the chunk that was fed last, if it was seen to be nothing but rows.
        self.rows: Rows | None = None

    @property
    def is_between_messages(self) -> bool:
        return not self._held and not self._rest

    def feed(self, chunk: bytes) -> bytes:
        """Take what the server sent and return what the client gets. Raises ProtocolViolation."""
        self.rows = self._run(chunk) if len(chunk) >= _MANY else None
        if self.rows is not None:
            return chunk
        out: list[bytes] = []
        start = at = 0
        if self._rest:
            at = min(self._rest, len(chunk))
            self._rest -= at
            if not self._rest_passes:
                start = at
            elif at == len(chunk):
                return chunk
        elif self._held:
            self._held += chunk
            if len(self._held) < self._need:
                return b""
            chunk = bytes(self._held)
            self._held = bytearray()
        self._scan(chunk, out, start, at)
        return out[0] if len(out) == 1 else b"".join(out)

    def _run(self, chunk: bytes) -> Rows | None:
        """Take *chunk* if it is nothing but a run of rows or COPY data that goes on as it is; else do nothing."""
        at = begun = self._rest
        count, size, kind = 0, len(chunk), chunk[at] if at < len(chunk) else 0
        if self._held or (begun and not self._rest_passes) or (kind and kind not in _BULK):
            return None
        unpack_from = HEADER.unpack_from
        while size - at >= _HEADER_BYTES:
            found, length = unpack_from(chunk, at)
            if found != kind or length < _LENGTH_BYTES:
                return None
            at += 1 + length
            count += 1
        if at < size or (count and self._bulk() is not Bulk.PASS):
            return None
        self._rest, self._rest_passes = at - size, True
        return Rows(count, begun, at - size)

    def _scan(self, chunk: bytes, out: list[bytes], start: int, at: int) -> None:
        """Go on from *at*; chunk[start:at] goes out as it is."""
        size = len(chunk)
        self._need = _HEADER_BYTES
        while size - at >= _HEADER_BYTES:
            kind, length = HEADER.unpack_from(chunk, at)
            end: int = at + 1 + length
            if kind in _BULK:
                bulk = self._bulk()
                if bulk is not Bulk.JUDGE:
                    end = self._walk(chunk, at, kind)
                    if bulk is Bulk.DROP:
                        out.append(chunk[start:at])
                        start = end
                    at = end
                    continue
            if end > size or length < _LENGTH_BYTES:
                self._bound(kind, length)
                self._need = end - at
                break
            if self._passes(kind):
                at = end
                continue
            replaced = self._judge(kind, chunk[at:end])
            if replaced is not None:
                out.append(chunk[start:at])
                out.append(replaced)
                start = end
            at = end
        if start < at:
            out.append(chunk if at - start == size else chunk[start:at])
        if at < size:
            self._held += chunk[at:]

    def _walk(self, chunk: bytes, at: int, kind: int) -> int:
        """Step over messages of *kind* from *at*; remember what the last one still lacks."""
        size = len(chunk)
        unpack_from = HEADER.unpack_from
        while size - at >= _HEADER_BYTES:
            found, length = unpack_from(chunk, at)
            if found != kind:
                return at
            if length < _LENGTH_BYTES:
                self._bound(kind, length)
            at += 1 + length
        if at > size:
            self._rest = at - size
            self._rest_passes = self._bulk() is Bulk.PASS
            return size
        return at

    def _bound(self, kind: int, length: int) -> None:
        if not _LENGTH_BYTES <= length <= self._limit:
            raise ProtocolViolation(
                f"the server sent a message of type `{_name(kind)}` with the impossible length {length}"
            )


def _name(kind: int) -> str:
    return chr(kind) if chr(kind).isascii() and chr(kind).isprintable() else f"0x{kind:02x}"
