"""
The hash of a certificate that SCRAM-SHA-256-PLUS binds to (tls-server-end-point, RFC 5929 section 4.1):
by the hash of the certificate's own signature, SHA-256 where that is MD5 or SHA-1.
"""

import hashlib
from base64 import b64decode

#: DER of the signature algorithms whose hash is not SHA-256 (RFC 4055, RFC 5758).
_HASHES = {
    bytes.fromhex("2a864886f70d01010c"): "sha384",  # sha384WithRSAEncryption
    bytes.fromhex("2a864886f70d01010d"): "sha512",  # sha512WithRSAEncryption
    bytes.fromhex("2a8648ce3d040303"): "sha384",  # ecdsa-with-SHA384
    bytes.fromhex("2a8648ce3d040304"): "sha512",  # ecdsa-with-SHA512
}
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_LONG, _LENGTH_MASK = 0x80, 0x7F


def end_point_hash(pem: str) -> bytes:
    """Return the hash of the first certificate in *pem*. Raises ValueError."""
    _, found, rest = pem.partition(_BEGIN)
    text, complete, _ = rest.partition(_END)
    if not found or not complete:
        raise ValueError("there is no certificate in the file")
    der = b64decode("".join(text.split()), validate=True)
    return hashlib.new(_HASHES.get(_signature_algorithm(der), "sha256"), der).digest()


def _signature_algorithm(der: bytes) -> bytes:
    """Certificate ::= SEQUENCE { tbsCertificate, signatureAlgorithm SEQUENCE { OID … }, … }"""
    start, _ = _element(der, 0)
    _, tbs_end = _element(der, start)
    algorithm, _ = _element(der, tbs_end)
    oid, oid_end = _element(der, algorithm)
    return der[oid:oid_end]


def _element(der: bytes, at: int) -> tuple[int, int]:
    """Return where the content of the DER element at *at* begins and ends. Raises ValueError."""
    if at + 2 > len(der):
        raise ValueError("the certificate ends too early")
    length, at = der[at + 1], at + 2
    if length & _LONG:
        count = length & _LENGTH_MASK
        length, at = int.from_bytes(der[at : at + count], "big"), at + count
    return at, at + length
