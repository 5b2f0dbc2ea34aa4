"""
SCRAM-SHA-256 arithmetic (RFC 5802, RFC 7677) for both ends: checking a client against a verifier, and logging
in to PostgreSQL with the ClientKey learned from that, without any password (PgBouncer's pass-through).

Pure: nonces and salts are arguments. Verifiers are PostgreSQL's own text,
`SCRAM-SHA-256$<iterations>:<salt>$<StoredKey>:<ServerKey>`.
"""

import hashlib
import hmac
import stringprep
import unicodedata
from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Self

from sqlguard.errors import ProtocolViolation

MECHANISM = "SCRAM-SHA-256"
MECHANISM_PLUS = "SCRAM-SHA-256-PLUS"
ITERATIONS = 4096


class WrongPassword(Exception):
    """The proof does not fit the verifier."""


@dataclass(frozen=True, slots=True)
class Verifier:
    """What a server keeps instead of a password; a salt may have any length."""

    iterations: int
    salt: bytes
    stored_key: bytes
    server_key: bytes

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read PostgreSQL's text. Raises ValueError."""
        mechanism, _, rest = text.partition("$")
        head, _, keys = rest.partition("$")
        iterations, _, salt = head.partition(":")
        stored, _, server = keys.partition(":")
        if mechanism != MECHANISM or not iterations.isdigit():
            raise ValueError("not a SCRAM-SHA-256 verifier")
        return cls(int(iterations), b64decode(salt, validate=True), _key(stored), _key(server))

    @classmethod
    def make(cls, password: str, salt: bytes, iterations: int = ITERATIONS) -> Self:
        """Make the verifier of *password* as PostgreSQL would."""
        salted = hashlib.pbkdf2_hmac("sha256", prepared(password), salt, iterations)
        client_key = _hmac(salted, b"Client Key")
        return cls(iterations, salt, _hash(client_key), _hmac(salted, b"Server Key"))

    @classmethod
    def mock(cls, secret: bytes, user: str) -> Self:
        """Make up a verifier that no password fits, the same each time, so that users can't be guessed."""
        salt = _hmac(secret, user.encode())[:16]
        return cls(ITERATIONS, salt, _hmac(secret, b"stored" + salt), _hmac(secret, b"server" + salt))

    def __str__(self) -> str:
        return (
            f"{MECHANISM}${self.iterations}:{_b64(self.salt)}${_b64(self.stored_key)}:{_b64(self.server_key)}"
        )


class ServerExchange:
    """The server's half: `first` takes the client's first message, `final` its last; both return the answer."""

    def __init__(self, verifier: Verifier, nonce: str, binding: bytes | None = None) -> None:
        """*binding* is the tls-server-end-point hash when PLUS was offered, None without TLS."""
        self._verifier = verifier
        self._nonce = nonce
        self._binding = binding
        self._plus = False
        self._gs2 = b""
        self._bare = b""
        self._server_first = b""
        #: Learned from a proof that fits.
        self.client_key = b""

    def first(self, mechanism: str, message: bytes) -> bytes:
        """Answer client-first. Raises ProtocolViolation."""
        flag, _, rest = message.partition(b",")
        authzid, comma, bare = rest.partition(b",")
        if not comma or authzid:
            raise ProtocolViolation("the SCRAM message is not of its form")
        self._plus = mechanism == MECHANISM_PLUS
        self._check_binding(flag)
        fields = bare.split(b",")
        if len(fields) < 2 or fields[0][:2] != b"n=" or fields[1][:2] != b"r=" or len(fields[1]) < 3:  # noqa: PLR2004
            raise ProtocolViolation("the SCRAM message is not of its form")
        self._gs2, self._bare = flag + b",,", bare
        self._nonce = fields[1][2:].decode("ascii", "replace") + self._nonce
        self._server_first = (
            f"r={self._nonce},s={_b64(self._verifier.salt)},i={self._verifier.iterations}".encode()
        )
        return self._server_first

    def _check_binding(self, flag: bytes) -> None:
        if self._plus:
            if self._binding is None or flag != b"p=tls-server-end-point":
                raise ProtocolViolation("the SCRAM channel binding is not supported")
        elif flag == b"y" and self._binding is not None:
            # The client believes that we can't do channel binding, though we offered it: a downgrade.
            raise ProtocolViolation("SCRAM channel binding was offered and is denied: downgraded in between?")
        elif flag not in (b"n", b"y"):
            raise ProtocolViolation("the SCRAM channel binding is not supported")

    def final(self, message: bytes) -> bytes:
        """Check client-final and return server-final. Raises WrongPassword or ProtocolViolation."""
        without_proof, marker, proof_text = message.rpartition(b",p=")
        fields = without_proof.split(b",")
        if not marker or len(fields) < 2 or fields[0][:2] != b"c=":  # noqa: PLR2004 (c= and r=)
            raise ProtocolViolation("the SCRAM message is not of its form")
        expected = self._gs2 + (self._binding or b"" if self._plus else b"")
        if fields[0][2:] != b64encode(expected) or fields[1] != b"r=" + self._nonce.encode():
            raise WrongPassword
        try:
            proof = b64decode(proof_text, validate=True)
        except ValueError:
            raise ProtocolViolation("the SCRAM message is not of its form") from None
        auth = b",".join((self._bare, self._server_first, without_proof))
        signature = _hmac(self._verifier.stored_key, auth)
        if len(proof) != len(signature):
            raise WrongPassword
        client_key = _xor(proof, signature)
        if not hmac.compare_digest(_hash(client_key), self._verifier.stored_key):
            raise WrongPassword
        self.client_key = client_key
        return b"v=" + b64encode(_hmac(self._verifier.server_key, auth))


class ClientExchange:
    """The client's half, with the ClientKey instead of a password; the server has to know the ServerKey."""

    def __init__(self, client_key: bytes, server_key: bytes, nonce: str) -> None:
        self._client_key = client_key
        self._server_key = server_key
        self._nonce = nonce
        self._bare = f"n=,r={nonce}".encode()
        self._auth = b""

    def first(self) -> bytes:
        return b"n,," + self._bare

    def final(self, server_first: bytes) -> bytes:
        """Answer server-first with the proof. Raises ProtocolViolation."""
        fields = dict(item.partition(b"=")[::2] for item in server_first.split(b","))
        nonce = fields.get(b"r", b"")
        if not nonce.startswith(self._nonce.encode()) or len(nonce) == len(self._nonce):
            raise ProtocolViolation("PostgreSQL's SCRAM nonce does not fit")
        without_proof = b"c=" + b64encode(b"n,,") + b",r=" + nonce
        self._auth = b",".join((self._bare, server_first, without_proof))
        proof = _xor(self._client_key, _hmac(_hash(self._client_key), self._auth))
        return without_proof + b",p=" + b64encode(proof)

    def check(self, server_final: bytes) -> None:
        """Make sure that the server knows the verifier too. Raises ProtocolViolation."""
        expected = b"v=" + b64encode(_hmac(self._server_key, self._auth))
        if not hmac.compare_digest(server_final, expected):
            raise ProtocolViolation("PostgreSQL could not prove that it knows the verifier")


def prepared(password: str) -> bytes:
    """SASLprep as PostgreSQL does it: a password that it does not fit is used as it is (RFC 4013)."""
    mapped = "".join(
        " " if stringprep.in_table_c12(c) else c for c in password if not stringprep.in_table_b1(c)
    )
    text = unicodedata.normalize("NFKC", mapped)
    prohibited = (
        stringprep.in_table_c12,
        stringprep.in_table_c21_c22,
        stringprep.in_table_c3,
        stringprep.in_table_c4,
        stringprep.in_table_c5,
        stringprep.in_table_c6,
        stringprep.in_table_c7,
        stringprep.in_table_c8,
        stringprep.in_table_c9,
        stringprep.in_table_a1,
    )
    if not text or any(check(c) for c in text for check in prohibited):
        return password.encode()
    return text.encode()


def _key(text: str) -> bytes:
    key = b64decode(text, validate=True)
    if len(key) != hashlib.sha256().digest_size:
        raise ValueError("not a SCRAM-SHA-256 verifier")
    return key


def _hmac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256")


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


def _b64(data: bytes) -> str:
    return b64encode(data).decode()
