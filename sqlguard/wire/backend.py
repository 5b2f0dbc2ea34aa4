"""What servers send. Each message is a frozen value with `encode`; `decode` reads its body, strictly."""

from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct
from typing import ClassVar, Self

from sqlguard.errors import ProtocolViolation
from sqlguard.wire.authentication import Authentication, decode_authentication
from sqlguard.wire.buffer import message
from sqlguard.wire.frontend import CANCEL_KEY_MAX, CANCEL_KEY_MIN, CopyData, CopyDone
from sqlguard.wire.reader import Bare, Reader, pack_int16s, pack_texts, pack_uint32s, pack_value, pack_values

_UINT16 = Struct(">H")
_UINT32 = Struct(">I")
_COLUMN = Struct(">IhIhih")


# --- start and state of a session


@dataclass(frozen=True, slots=True)
class BackendKeyData:
    kind: ClassVar[int] = ord("K")
    pid: int
    key: bytes

    def encode(self) -> bytes:
        return message(b"K", _UINT32.pack(self.pid) + self.key)

    @classmethod
    def decode(cls, body: bytes) -> Self:
        reader = Reader(body, "BackendKeyData")
        decoded = cls(reader.uint32(), reader.rest())
        if not CANCEL_KEY_MIN <= len(decoded.key) <= CANCEL_KEY_MAX:
            raise reader.broken(f"a cancel key of {len(decoded.key)} bytes")
        return decoded


@dataclass(frozen=True, slots=True)
class ParameterStatus:
    kind: ClassVar[int] = ord("S")
    name: bytes
    value: bytes

    def encode(self) -> bytes:
        return message(b"S", pack_texts(self.name, self.value))

    @classmethod
    def decode(cls, body: bytes) -> Self:
        reader = Reader(body, "ParameterStatus")
        decoded = cls(reader.text(), reader.text())
        reader.end()
        return decoded


@dataclass(frozen=True, slots=True)
class NegotiateProtocolVersion:
    """*protocol* is the one that will be spoken; *options* are the `_pq_.` names that are not known here."""

    kind: ClassVar[int] = ord("v")
    protocol: int
    options: tuple[bytes, ...]

    def encode(self) -> bytes:
        counted = _UINT32.pack(len(self.options)) + pack_texts(*self.options)
        return message(b"v", _UINT32.pack(self.protocol) + counted)

    @classmethod
    def decode(cls, body: bytes) -> Self:
        reader = Reader(body, "NegotiateProtocolVersion")
        protocol, count = reader.uint32(), reader.uint32()
        if count > len(body):
            raise reader.broken("it ends too early")
        decoded = cls(protocol, tuple([reader.text() for _ in range(count)]))
        reader.end()
        return decoded


@dataclass(frozen=True, slots=True)
class ReadyForQuery:
    kind: ClassVar[int] = ord("Z")
    #: `I` idle, `T` in a transaction, `E` in a failed one.
    status: bytes

    def encode(self) -> bytes:
        return message(b"Z", self.status)

    @classmethod
    def decode(cls, body: bytes) -> Self:
        if body not in (b"I", b"T", b"E"):
            raise ProtocolViolation("malformed ReadyForQuery: unknown transaction status")
        return cls(body)


@dataclass(frozen=True, slots=True)
class _Report:
    """Fields in the order they came: a code of one byte and its text."""

    kind: ClassVar[int]
    fields: tuple[tuple[bytes, bytes], ...]

    def encode(self) -> bytes:
        parts = [code + pack_texts(text) for code, text in self.fields]
        return message(bytes([self.kind]), b"".join(parts) + b"\0")

    @classmethod
    def decode(cls, body: bytes) -> Self:
        reader = Reader(body, cls.__name__)
        fields = tuple([(text[:1], text[1:]) for text in reader.texts()])
        reader.end()
        return cls(fields)

    def get(self, code: bytes) -> bytes | None:
        return dict(self.fields).get(code)


@dataclass(frozen=True, slots=True)
class ErrorResponse(_Report):
    kind: ClassVar[int] = ord("E")

    @property
    def is_fatal(self) -> bool:
        """Say whether the server ends the session with it."""
        return (self.get(b"V") or self.get(b"S")) in (b"FATAL", b"PANIC")


@dataclass(frozen=True, slots=True)
class NoticeResponse(_Report):
    kind: ClassVar[int] = ord("N")


@dataclass(frozen=True, slots=True)
class NotificationResponse:
    kind: ClassVar[int] = ord("A")
    pid: int
    channel: bytes
    payload: bytes

    def encode(self) -> bytes:
        return message(b"A", _UINT32.pack(self.pid) + pack_texts(self.channel, self.payload))

    @classmethod
    def decode(cls, body: bytes) -> Self:
        reader = Reader(body, "NotificationResponse")
        decoded = cls(reader.uint32(), reader.text(), reader.text())
        reader.end()
        return decoded


# --- results


@dataclass(frozen=True, slots=True)
class CommandComplete:
    kind: ClassVar[int] = ord("C")
    tag: bytes

    def encode(self) -> bytes:
        return message(b"C", pack_texts(self.tag))

    @classmethod
    def decode(cls, body: bytes) -> Self:
        reader = Reader(body, "CommandComplete")
        decoded = cls(reader.text())
        reader.end()
        return decoded


@dataclass(frozen=True, slots=True)
class Column:
    name: bytes
    table: int = 0
    attribute: int = 0
    type: int = 0
    size: int = -1
    modifier: int = -1
    format: int = 0


@dataclass(frozen=True, slots=True)
class RowDescription:
    kind: ClassVar[int] = ord("T")
    columns: tuple[Column, ...]

    def encode(self) -> bytes:
        parts = [_UINT16.pack(len(self.columns))]
        for c in self.columns:
            parts.append(pack_texts(c.name))
            parts.append(_COLUMN.pack(c.table, c.attribute, c.type, c.size, c.modifier, c.format))
        return message(b"T", b"".join(parts))

    @classmethod
    def decode(cls, body: bytes) -> Self:
        reader = Reader(body, "RowDescription")
        columns = []
        for _ in range(reader.uint16()):
            name = reader.text()
            columns.append(Column(name, *_COLUMN.unpack(reader.take(_COLUMN.size))))
        reader.end()
        return cls(tuple(columns))


@dataclass(frozen=True, slots=True)
class DataRow:
    kind: ClassVar[int] = ord("D")
    values: tuple[bytes | None, ...]

    def encode(self) -> bytes:
        return message(b"D", pack_values(self.values))

    @classmethod
    def decode(cls, body: bytes) -> Self:
        reader = Reader(body, "DataRow")
        decoded = cls(reader.values())
        reader.end()
        return decoded


@dataclass(frozen=True, slots=True)
class ParameterDescription:
    kind: ClassVar[int] = ord("t")
    types: tuple[int, ...]

    def encode(self) -> bytes:
        return message(b"t", pack_uint32s(self.types))

    @classmethod
    def decode(cls, body: bytes) -> Self:
        reader = Reader(body, "ParameterDescription")
        decoded = cls(reader.uint32s())
        reader.end()
        return decoded


@dataclass(frozen=True, slots=True)
class FunctionCallResponse:
    kind: ClassVar[int] = ord("V")
    value: bytes | None

    def encode(self) -> bytes:
        return message(b"V", pack_value(self.value))

    @classmethod
    def decode(cls, body: bytes) -> Self:
        reader = Reader(body, "FunctionCallResponse")
        decoded = cls(reader.value())
        reader.end()
        return decoded


@dataclass(frozen=True, slots=True)
class _CopyResponse:
    kind: ClassVar[int]
    #: Of the whole: 0 is text, 1 is binary.
    format: int
    column_formats: tuple[int, ...]

    def encode(self) -> bytes:
        return message(bytes([self.kind]), bytes([self.format]) + pack_int16s(self.column_formats))

    @classmethod
    def decode(cls, body: bytes) -> Self:
        reader = Reader(body, cls.__name__)
        decoded = cls(reader.byte(), reader.formats())
        reader.end()
        if decoded.format > 1:
            raise reader.broken(f"unknown format code {decoded.format}")
        return decoded


@dataclass(frozen=True, slots=True)
class CopyInResponse(_CopyResponse):
    kind: ClassVar[int] = ord("G")


@dataclass(frozen=True, slots=True)
class CopyOutResponse(_CopyResponse):
    kind: ClassVar[int] = ord("H")


@dataclass(frozen=True, slots=True)
class CopyBothResponse(_CopyResponse):
    kind: ClassVar[int] = ord("W")


@dataclass(frozen=True, slots=True)
class ParseComplete(Bare):
    kind: ClassVar[int] = ord("1")


@dataclass(frozen=True, slots=True)
class BindComplete(Bare):
    kind: ClassVar[int] = ord("2")


@dataclass(frozen=True, slots=True)
class CloseComplete(Bare):
    kind: ClassVar[int] = ord("3")


@dataclass(frozen=True, slots=True)
class NoData(Bare):
    kind: ClassVar[int] = ord("n")


@dataclass(frozen=True, slots=True)
class EmptyQueryResponse(Bare):
    kind: ClassVar[int] = ord("I")


@dataclass(frozen=True, slots=True)
class PortalSuspended(Bare):
    kind: ClassVar[int] = ord("s")


TypedBackendMessage = (
    BackendKeyData
    | ParameterStatus
    | NegotiateProtocolVersion
    | ReadyForQuery
    | ErrorResponse
    | NoticeResponse
    | NotificationResponse
    | CommandComplete
    | RowDescription
    | DataRow
    | ParameterDescription
    | FunctionCallResponse
    | CopyInResponse
    | CopyOutResponse
    | CopyBothResponse
    | CopyData
    | CopyDone
    | ParseComplete
    | BindComplete
    | CloseComplete
    | NoData
    | EmptyQueryResponse
    | PortalSuspended
)
BackendMessage = Authentication | TypedBackendMessage
_TYPES: tuple[type[TypedBackendMessage], ...] = TypedBackendMessage.__args__
_DECODERS: dict[int, Callable[[bytes], BackendMessage]] = {one.kind: one.decode for one in _TYPES}
_DECODERS[ord("R")] = decode_authentication


def decode_backend(kind: int, body: bytes) -> BackendMessage:
    """Decode one message of a server."""
    decode = _DECODERS.get(kind)
    if decode is None:
        raise ProtocolViolation(f"type 0x{kind:02x} is no message that a server sends")
    return decode(body)
