"""The hash that SCRAM-SHA-256-PLUS binds to; the end-to-end tests compare it with OpenSSL's."""

import hashlib
import ssl
from base64 import b64encode

import pytest
import trustme

from sqlguard.wire.channel_binding import end_point_hash


def test_the_first_certificate_of_a_chain_counts() -> None:
    authority = trustme.CA()
    made = authority.issue_cert("localhost")
    pem = made.cert_chain_pems[0].bytes().decode()
    der = ssl.PEM_cert_to_DER_cert(pem)
    assert end_point_hash(pem) == hashlib.sha256(der).digest()
    assert end_point_hash("text before\n" + pem + authority.cert_pem.bytes().decode()) == end_point_hash(pem)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-----BEGIN CERTIFICATE-----\n",
        "-----BEGIN CERTIFICATE-----\nnot base64!\n-----END CERTIFICATE-----",
        f"-----BEGIN CERTIFICATE-----\n{b64encode(b'0').decode()}\n-----END CERTIFICATE-----",
        "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----",
    ],
)
def test_what_is_no_certificate(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (what the caller relies on)
        end_point_hash(text)
