"""What clients send. Each message is a frozen value with `encode`; `decode` reads its body, strictly."""

from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct
from typing import ClassVar, Self

from sqlguard.errors import ProtocolViolation
from sqlguard.wire.buffer import message
from sqlguard.wire.reader import Bare, Reader, pack_int16s, pack_texts, pack_uint32s, pack_values

_INT32 = Struct(">i")
_UINT32 = Struct(">I")
_TWO_UINT32 = Struct(">II")

PROTOCOL_3_0 = 3 << 16
PROTOCOL_3_2 = 3 << 16 | 2
_CANCEL_CODE = 1234 << 16 | 5678
_SSL_CODE = 1234 << 16 | 5679
_GSSENC_CODE = 1234 << 16 | 5680
#: Lengths of a cancel key: 4 in protocol 3.0, up to 256 in 3.2.
CANCEL_KEY_MIN, CANCEL_KEY_MAX = 4, 256


# --- packets before the login, without a type byte


@dataclass(frozen=True, slots=True)
class StartupMessage:
    """*parameters* in the order they came; PostgreSQL takes the last of two with the same name."""

    protocol: int
    parameters: tuple[tuple[bytes, bytes], ...]

    def encode(self) -> bytes:
        pairs = b"".join([pack_texts(name, value) for name, value in self.parameters])
        return _packet(self.protocol, pairs + b"\0")

    def get(self, name: bytes) -> bytes | None:
        return dict(self.parameters).get(name)


@dataclass(frozen=True, slots=True)
class SSLRequest:
    def encode(self) -> bytes:
        return _packet(_SSL_CODE, b"")


@dataclass(frozen=True, slots=True)
class GSSENCRequest:
    def encode(self) -> bytes:
        return _packet(_GSSENC_CODE, b"")


@dataclass(frozen=True, slots=True)
class CancelRequest:
    pid: int
    key: bytes

    def encode(self) -> bytes:
        return _packet(_CANCEL_CODE, _UINT32.pack(self.pid) + self.key)


StartupPacket = StartupMessage | SSLRequest | GSSENCRequest | CancelRequest


def decode_startup(packet: bytes) -> StartupPacket:
    """Decode a packet without its length."""
    reader = Reader(packet, "startup packet")
    code = reader.uint32()
    match code:
        case 80877103:
            reader.end()
            return SSLRequest()
        case 80877104:
            reader.end()
            return GSSENCRequest()
        case 80877102:
            pid, key = reader.uint32(), reader.rest()
            if not CANCEL_KEY_MIN <= len(key) <= CANCEL_KEY_MAX:
                raise reader.broken(f"a cancel key of {len(key)} bytes")
            return CancelRequest(pid, key)
    major, minor = code >> 16, code & 0xFFFF
    if major != 3:  # noqa: PLR2004 (the protocol's major version)
        raise ProtocolViolation(f"protocol {major}.{minor} is not spoken here, only 3.0 to 3.2")
    parameters = []
    while name := reader.text():
        parameters.append((name, reader.text()))
    reader.end()
    return StartupMessage(code, tuple(parameters))


def _packet(code: int, body: bytes) -> bytes:
    return _TWO_UINT32.pack(len(body) + 8, code) + body


# --- a session's messages


@dataclass(frozen=True, slots=True)
class Query:
    kind: ClassVar[int] = ord("Q")
    text: bytes

    def encode(self) -> bytes:
        return message(b"Q", pack_texts(self.text))

    @classmethod
    def decode(cls, body: bytes) -> Self:
        # By hand: the hottest message of all.
        if body.find(b"\0") != len(body) - 1 or not body:
            raise ProtocolViolation("malformed Query: its text must end with the only NUL")
        return cls(body[:-1])


@dataclass(frozen=True, slots=True)
class Parse:
    kind: ClassVar[int] = ord("P")
    statement: bytes
    text: bytes
    parameter_types: tuple[int, ...] = ()

    def encode(self) -> bytes:
        return message(b"P", pack_texts(self.statement, self.text) + pack_uint32s(self.parameter_types))

    @classmethod
    def decode(cls, body: bytes) -> Self:
        reader = Reader(body, "Parse")
        decoded = cls(reader.text(), reader.text(), reader.uint32s())
        reader.end()
        return decoded


@dataclass(frozen=True, slots=True)
class Bind:
    """The portal comes first, then the statement."""

    kind: ClassVar[int] = ord("B")
    portal: bytes
    statement: bytes
    formats: tuple[int, ...] = ()
    values: tuple[bytes | None, ...] = ()
    result_formats: tuple[int, ...] = ()

    def encode(self) -> bytes:
        return message(
            b"B",
            pack_texts(self.portal, self.statement)
            + pack_int16s(self.formats)
            + pack_values(self.values)
            + pack_int16s(self.result_formats),
        )

    @classmethod
    def decode(cls, body: bytes) -> Self:
        reader = Reader(body, "Bind")
        decoded = cls(reader.text(), reader.text(), reader.formats(), reader.values(), reader.formats())
        reader.end()
        if len(decoded.formats) not in (0, 1, len(decoded.values)):
            raise reader.broken("the parameters' formats and values do not match")
        return decoded


@dataclass(frozen=True, slots=True)
class Describe:
    kind: ClassVar[int] = ord("D")
    is_portal: bool
    name: bytes

    def encode(self) -> bytes:
        return message(b"D", _encode_target(self.is_portal, self.name))

    @classmethod
    def decode(cls, body: bytes) -> Self:
        return cls(*_decode_target(body, "Describe"))


@dataclass(frozen=True, slots=True)
class Close:
    kind: ClassVar[int] = ord("C")
    is_portal: bool
    name: bytes

    def encode(self) -> bytes:
        return message(b"C", _encode_target(self.is_portal, self.name))

    @classmethod
    def decode(cls, body: bytes) -> Self:
        return cls(*_decode_target(body, "Close"))


def _encode_target(is_portal: bool, name: bytes) -> bytes:  # noqa: FBT001 (the wire's own flag)
    return (b"P" if is_portal else b"S") + pack_texts(name)


def _decode_target(body: bytes, what: str) -> tuple[bool, bytes]:
    reader = Reader(body, what)
    target, name = reader.take(1), reader.text()
    reader.end()
    if target not in (b"P", b"S"):
        raise reader.broken("it names neither a statement nor a portal")
    return target == b"P", name


@dataclass(frozen=True, slots=True)
class Execute:
    """*max_rows* below 1 means all rows."""

    kind: ClassVar[int] = ord("E")
    portal: bytes
    max_rows: int = 0

    def encode(self) -> bytes:
        return message(b"E", pack_texts(self.portal) + _INT32.pack(self.max_rows))

    @classmethod
    def decode(cls, body: bytes) -> Self:
        reader = Reader(body, "Execute")
        decoded = cls(reader.text(), reader.int32())
        reader.end()
        return decoded


@dataclass(frozen=True, slots=True)
class FunctionCall:
    kind: ClassVar[int] = ord("F")
    function: int
    formats: tuple[int, ...] = ()
    values: tuple[bytes | None, ...] = ()
    result_format: int = 0

    def encode(self) -> bytes:
        return message(
            b"F",
            _UINT32.pack(self.function)
            + pack_int16s(self.formats)
            + pack_values(self.values)
            + self.result_format.to_bytes(2, "big"),
        )

    @classmethod
    def decode(cls, body: bytes) -> Self:
        reader = Reader(body, "FunctionCall")
        decoded = cls(reader.uint32(), reader.formats(), reader.values(), reader.uint16())
        reader.end()
        return decoded


@dataclass(frozen=True, slots=True)
class CopyData:
    kind: ClassVar[int] = ord("d")
    data: bytes

    def encode(self) -> bytes:
        return message(b"d", self.data)

    @classmethod
    def decode(cls, body: bytes) -> Self:
        return cls(body)


@dataclass(frozen=True, slots=True)
class CopyFail:
    kind: ClassVar[int] = ord("f")
    reason: bytes

    def encode(self) -> bytes:
        return message(b"f", pack_texts(self.reason))

    @classmethod
    def decode(cls, body: bytes) -> Self:
        reader = Reader(body, "CopyFail")
        decoded = cls(reader.text())
        reader.end()
        return decoded


@dataclass(frozen=True, slots=True)
class CopyDone(Bare):
    kind: ClassVar[int] = ord("c")


@dataclass(frozen=True, slots=True)
class Flush(Bare):
    kind: ClassVar[int] = ord("H")


@dataclass(frozen=True, slots=True)
class Sync(Bare):
    kind: ClassVar[int] = ord("S")


@dataclass(frozen=True, slots=True)
class Terminate(Bare):
    kind: ClassVar[int] = ord("X")


FrontendMessage = (
    Query
    | Parse
    | Bind
    | Describe
    | Execute
    | Close
    | Flush
    | Sync
    | CopyData
    | CopyDone
    | CopyFail
    | FunctionCall
    | Terminate
)
_TYPES: tuple[type[FrontendMessage], ...] = FrontendMessage.__args__
_DECODERS: dict[int, Callable[[bytes], FrontendMessage]] = {one.kind: one.decode for one in _TYPES}


def decode_frontend(kind: int, body: bytes) -> FrontendMessage:
    """Decode one message of a session; those of a login (`p`) are told apart by who asked."""
    decode = _DECODERS.get(kind)
    if decode is None:
        raise ProtocolViolation(f"type 0x{kind:02x} is no message that a client sends in a session")
    return decode(body)
