"""
The messages of a login, both ways.

A server's are all of type `R` and told apart by a number, a client's are all of type `p` and told apart by what
was asked of it.
"""

from dataclasses import dataclass
from struct import Struct
from typing import Self

from sqlguard.wire.buffer import message
from sqlguard.wire.reader import Reader, pack_texts, pack_value

_UINT32 = Struct(">I")


@dataclass(frozen=True, slots=True)
class AuthenticationOk:
    def encode(self) -> bytes:
        return message(b"R", _UINT32.pack(0))


@dataclass(frozen=True, slots=True)
class AuthenticationCleartextPassword:
    def encode(self) -> bytes:
        return message(b"R", _UINT32.pack(3))


@dataclass(frozen=True, slots=True)
class AuthenticationMD5Password:
    salt: bytes

    def encode(self) -> bytes:
        return message(b"R", _UINT32.pack(5) + self.salt)


@dataclass(frozen=True, slots=True)
class AuthenticationSASL:
    mechanisms: tuple[bytes, ...]

    def encode(self) -> bytes:
        return message(b"R", _UINT32.pack(10) + pack_texts(*self.mechanisms, b""))


@dataclass(frozen=True, slots=True)
class AuthenticationSASLContinue:
    data: bytes

    def encode(self) -> bytes:
        return message(b"R", _UINT32.pack(11) + self.data)


@dataclass(frozen=True, slots=True)
class AuthenticationSASLFinal:
    data: bytes

    def encode(self) -> bytes:
        return message(b"R", _UINT32.pack(12) + self.data)


@dataclass(frozen=True, slots=True)
class AuthenticationOther:
    """A method that we know of and don't speak: Kerberos, GSSAPI, SSPI."""

    method: int
    data: bytes = b""

    def encode(self) -> bytes:
        return message(b"R", _UINT32.pack(self.method) + self.data)


Authentication = (
    AuthenticationOk
    | AuthenticationCleartextPassword
    | AuthenticationMD5Password
    | AuthenticationSASL
    | AuthenticationSASLContinue
    | AuthenticationSASLFinal
    | AuthenticationOther
)
_KERBEROS_AND_KIN = (2, 6, 7, 8, 9)


def decode_authentication(body: bytes) -> Authentication:
    reader = Reader(body, "Authentication")
    method = reader.uint32()
    decoded: Authentication
    match method:
        case 0:
            decoded = AuthenticationOk()
        case 3:
            decoded = AuthenticationCleartextPassword()
        case 5:
            decoded = AuthenticationMD5Password(reader.take(4))
        case 10:
            decoded = AuthenticationSASL(reader.texts())
        case 11:
            decoded = AuthenticationSASLContinue(reader.rest())
        case 12:
            decoded = AuthenticationSASLFinal(reader.rest())
        case _ if method in _KERBEROS_AND_KIN:
            decoded = AuthenticationOther(method, reader.rest())
        case _:
            raise reader.broken(f"unknown method {method}")
    reader.end()
    return decoded


@dataclass(frozen=True, slots=True)
class PasswordMessage:
    password: bytes

    def encode(self) -> bytes:
        return message(b"p", pack_texts(self.password))

    @classmethod
    def decode(cls, body: bytes) -> Self:
        reader = Reader(body, "PasswordMessage")
        decoded = cls(reader.text())
        reader.end()
        return decoded


@dataclass(frozen=True, slots=True)
class SASLInitialResponse:
    mechanism: bytes
    data: bytes | None

    def encode(self) -> bytes:
        return message(b"p", pack_texts(self.mechanism) + pack_value(self.data))

    @classmethod
    def decode(cls, body: bytes) -> Self:
        reader = Reader(body, "SASLInitialResponse")
        decoded = cls(reader.text(), reader.value())
        reader.end()
        return decoded


@dataclass(frozen=True, slots=True)
class SASLResponse:
    data: bytes

    def encode(self) -> bytes:
        return message(b"p", self.data)

    @classmethod
    def decode(cls, body: bytes) -> Self:
        return cls(body)
