"""
SCRAM-SHA-256 (RFC 5802, 7677) for both ends, with and without channel binding.

Theory of operation. A verifier holds StoredKey = H(ClientKey) and ServerKey. A client proves that it has the
ClientKey by sending ClientKey XOR HMAC(StoredKey, AuthMessage); whoever has the verifier gets the ClientKey
back out of a proof that fits, and can prove itself to PostgreSQL with it for as long as PostgreSQL has the same
verifier. So no password is stored, and none is needed: `ServerExchange` gives the `Keys` that `ClientExchange`
takes. The ClientKey is worth as much as the password here and must not be written down.

Nonces, salts and secrets are arguments.
"""

import hashlib
import hmac
from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Self

from sqlguard.errors import ProtocolViolation
from sqlguard.wire.saslprep import prepared

MECHANISM = "SCRAM-SHA-256"
MECHANISM_PLUS = "SCRAM-SHA-256-PLUS"
#: PostgreSQL's default, and its length of a salt: made-up verifiers must look like real ones.
ITERATIONS, SALT_BYTES = 4096, 16
_KEY_BYTES = 32
_INT32_MAX = 0x7FFFFFFF
#: More than anybody sets; a server that we don't trust yet must not keep us busy for minutes.
_CLIENT_ITERATIONS_MAX = 10_000_000
_BINDING_TYPE = b"tls-server-end-point"


class WrongPassword(Exception):
    """The proof does not fit the verifier."""


@dataclass(frozen=True, slots=True, repr=False)
class Keys:
    """What logs a client in without its password; never shown."""

    client_key: bytes
    server_key: bytes

    @classmethod
    def derive(cls, password: str | bytes, salt: bytes, iterations: int) -> Self:
        salted = hashlib.pbkdf2_hmac("sha256", prepared(password), salt, iterations)
        return cls(_hmac(salted, b"Client Key"), _hmac(salted, b"Server Key"))


@dataclass(frozen=True, slots=True, repr=False)
class Verifier:
    """What a server keeps instead of a password; a salt may have any length."""

    iterations: int
    salt: bytes
    stored_key: bytes
    server_key: bytes
    #: False for the verifier of a user that does not exist: no proof fits it.
    is_real: bool = True

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read PostgreSQL's text `SCRAM-SHA-256$iterations:salt$StoredKey:ServerKey`. Raises ValueError."""
        mechanism, _, rest = text.partition("$")
        head, _, keys = rest.partition("$")
        iterations, _, salt = head.partition(":")
        stored, _, server = keys.partition(":")
        is_number = iterations.isascii() and iterations.isdigit() and len(iterations) <= len(str(_INT32_MAX))
        if mechanism != MECHANISM or not is_number or not 0 < int(iterations) <= _INT32_MAX:
            raise ValueError("not a SCRAM-SHA-256 verifier")
        salt_bytes, stored_key, server_key = (
            b64decode(part, validate=True) for part in (salt, stored, server)
        )
        if len(stored_key) != _KEY_BYTES or len(server_key) != _KEY_BYTES:
            raise ValueError("not a SCRAM-SHA-256 verifier")
        return cls(int(iterations), salt_bytes, stored_key, server_key)

    @classmethod
    def make(cls, password: str | bytes, salt: bytes, iterations: int = ITERATIONS) -> Self:
        """Make the verifier of *password* as PostgreSQL would."""
        keys = Keys.derive(password, salt, iterations)
        return cls(iterations, salt, _hash(keys.client_key), keys.server_key)

    @classmethod
    def mock(cls, secret: bytes, user: str | bytes, iterations: int = ITERATIONS) -> Self:
        """Make up a verifier that no proof fits, the same each time, so that users can't be guessed."""
        name = user.encode("utf-8", "surrogateescape") if isinstance(user, str) else user
        salt, stored, server = (
            _hmac(secret, what + b"\0" + name) for what in (b"salt", b"stored", b"server")
        )
        return cls(iterations, salt[:SALT_BYTES], stored, server, is_real=False)

    def __str__(self) -> str:
        salt, stored, server = map(_b64, (self.salt, self.stored_key, self.server_key))
        return f"{MECHANISM}${self.iterations}:{salt}${stored}:{server}"


class ServerExchange:
    """The server's half: `first` takes the client's first message, `final` its last; both return the answer."""

    def __init__(self, verifier: Verifier, nonce: str, binding: bytes | None = None) -> None:
        """*binding* is the hash of our certificate if the client came by TLS (then PLUS is offered), or None."""
        self._verifier = verifier
        self._nonce = nonce.encode("ascii")
        self._binding = binding
        self._channel = b""
        self._bare = b""
        self._server_first = b""
        #: Learned from a proof that fits.
        self.client_key = b""

    @property
    def mechanisms(self) -> tuple[str, ...]:
        return (MECHANISM,) if self._binding is None else (MECHANISM_PLUS, MECHANISM)

    @property
    def keys(self) -> Keys:
        """Return what logs in to PostgreSQL as this client; only after `final`."""
        if not self.client_key:
            raise ValueError("nothing is proved yet")
        return Keys(self.client_key, self._verifier.server_key)

    def first(self, mechanism: str, message: bytes) -> bytes:
        """Answer client-first. Raises ProtocolViolation."""
        if self._server_first or mechanism not in self.mechanisms:
            raise ProtocolViolation("the client chose a SASL mechanism that was not offered")
        flag, comma, rest = message.partition(b",")
        authzid, second, self._bare = rest.partition(b",")
        if not comma or not second:
            raise _malformed()
        if authzid:
            raise ProtocolViolation("logging in as one user with the password of another is not offered")
        self._check_binding(flag, is_plus=mechanism == MECHANISM_PLUS)
        gs2 = flag + b",,"
        self._channel = b64encode(
            gs2 + self._binding if mechanism == MECHANISM_PLUS and self._binding else gs2
        )
        # The user name is the startup packet's: what is here does not count, as in PostgreSQL.
        _, nonce = _attributes(self._bare, b"n", b"r")
        if not nonce or not _is_printable(nonce):
            raise _malformed()
        self._nonce = nonce + self._nonce
        salt = _b64(self._verifier.salt).encode()
        self._server_first = b"r=%b,s=%b,i=%d" % (self._nonce, salt, self._verifier.iterations)
        return self._server_first

    def _check_binding(self, flag: bytes, *, is_plus: bool) -> None:
        if is_plus:
            if flag != b"p=" + _BINDING_TYPE:
                raise ProtocolViolation("SCRAM-SHA-256-PLUS needs channel binding by `tls-server-end-point`")
        elif flag == b"y":
            if self._binding is not None:
                # It would have taken PLUS had it seen our offer: somebody in between has removed it.
                raise ProtocolViolation("channel binding was offered and the client did not see it")
        elif flag != b"n":
            raise ProtocolViolation("channel binding without SCRAM-SHA-256-PLUS")

    def final(self, message: bytes) -> bytes:
        """Check client-final and return server-final. Raises WrongPassword or ProtocolViolation."""
        if not self._server_first or self.client_key:
            raise ProtocolViolation("a SCRAM message out of turn")
        without_proof, marker, proof_text = message.rpartition(b",p=")
        if not marker:
            raise _malformed()
        channel, nonce = _attributes(without_proof, b"c", b"r")
        proof = _from_b64(proof_text)
        if len(proof) != _KEY_BYTES:
            raise _malformed()
        if channel != self._channel:
            raise ProtocolViolation("the client is bound to another channel: somebody is in between")
        if nonce != self._nonce:
            raise ProtocolViolation("the client's nonce is not the one of this login")
        spoken = b",".join((self._bare, self._server_first, without_proof))
        client_key = _xor(proof, _hmac(self._verifier.stored_key, spoken))
        fits = hmac.compare_digest(_hash(client_key), self._verifier.stored_key)
        signature = _hmac(self._verifier.server_key, spoken)
        if not (fits and self._verifier.is_real):
            raise WrongPassword
        self.client_key = client_key
        return b"v=" + b64encode(signature)


class ClientExchange:
    """The client's half, from `Keys` or from a password; the server must prove that it knows the verifier."""

    def __init__(
        self,
        secret: Keys | str | bytes,
        nonce: str,
        binding: bytes | None = None,
        *,
        is_binding_possible: bool = False,
    ) -> None:
        """
        *binding* is the hash of the server's certificate, for SCRAM-SHA-256-PLUS. *is_binding_possible* says
        that we would have taken PLUS but it was not offered, which the server is told so that it can object.
        """
        self._secret = secret
        self._nonce = nonce.encode("ascii")
        if binding is not None:
            self.mechanism, gs2 = MECHANISM_PLUS, b"p=" + _BINDING_TYPE + b",,"
        else:
            self.mechanism, gs2 = MECHANISM, b"y,," if is_binding_possible else b"n,,"
        self._gs2 = gs2
        self._channel = b64encode(gs2 + (binding or b""))
        self._bare = b"n=,r=" + self._nonce
        self._signature = b""

    def first(self) -> bytes:
        return self._gs2 + self._bare

    def final(self, server_first: bytes) -> bytes:
        """Answer server-first with the proof. Raises ProtocolViolation."""
        nonce, salt_text, count = _attributes(server_first, b"r", b"s", b"i")
        if not nonce.startswith(self._nonce) or len(nonce) == len(self._nonce) or not _is_printable(nonce):
            raise ProtocolViolation("the server's nonce does not continue ours")
        if not count.isdigit() or len(count) > len(str(_INT32_MAX)) or int(count) < 1:
            raise _malformed()
        keys = self._keys(_from_b64(salt_text), int(count))
        without_proof = b"c=" + self._channel + b",r=" + nonce
        spoken = b",".join((self._bare, server_first, without_proof))
        self._signature = _hmac(keys.server_key, spoken)
        proof = _xor(keys.client_key, _hmac(_hash(keys.client_key), spoken))
        return without_proof + b",p=" + b64encode(proof)

    def _keys(self, salt: bytes, iterations: int) -> Keys:
        if isinstance(self._secret, Keys):
            return self._secret
        if iterations > _CLIENT_ITERATIONS_MAX:
            raise ProtocolViolation(f"the server wants {iterations} rounds of hashing")
        return Keys.derive(self._secret, salt, iterations)

    def check(self, server_final: bytes) -> None:
        """Make sure that the server knows the verifier too. Raises ProtocolViolation."""
        name, _, text = server_final.partition(b"=")
        if name != b"v" or not self._signature:
            raise ProtocolViolation("the server has refused the SCRAM proof")
        if not hmac.compare_digest(_from_b64(text), self._signature):
            raise ProtocolViolation("the server could not prove that it knows the password's verifier")


def _attributes(message: bytes, *names: bytes) -> list[bytes]:
    """Return the values of the attributes that must come, in this order; extensions behind them are ignored."""
    items = message.split(b",")
    values = []
    for name, item in zip(names, items, strict=False):
        if not item.startswith(name + b"="):
            raise _malformed()
        values.append(item[2:])
    if len(values) < len(names) or not all(_is_attribute(item) for item in items[len(names) :]):
        raise _malformed()
    return values


def _is_attribute(item: bytes) -> bool:
    # `m` is a mandatory extension, of which none is known (RFC 5802, 5.1).
    return item[:1].isalpha() and item[1:2] == b"=" and item[:1] != b"m"


def _is_printable(text: bytes) -> bool:
    return all(0x21 <= byte <= 0x7E for byte in text)  # noqa: PLR2004 (printable ASCII; commas split before)


def _malformed() -> ProtocolViolation:
    return ProtocolViolation("malformed SCRAM message")


def _from_b64(text: bytes) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError:
        raise _malformed() from None


def _b64(data: bytes) -> str:
    return b64encode(data).decode()


def _hmac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256")


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))
