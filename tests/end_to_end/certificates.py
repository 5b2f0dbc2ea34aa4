"""Certificates for the proxies of tests."""

import ssl
from pathlib import Path

import trustme

HERE = ("127.0.0.1", "localhost")


def issued(
    folder: Path, name: str = "here", hosts: tuple[str, ...] = HERE, authority: trustme.CA | None = None
) -> dict[str, Path]:
    """Write a certificate for *hosts* and its key; return them under the names of the proxy's settings."""
    made = (authority or trustme.CA()).issue_cert(*hosts)
    key, cert = folder / f"{name}.key", folder / f"{name}.pem"
    made.private_key_pem.write_to_path(key)
    cert.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    key.chmod(0o600)
    return {"tls_cert": cert, "tls_key": key}


def trusting(*protocols: str) -> ssl.SSLContext:
    """Return what speaks TLS to anybody, and says that it will speak *protocols*."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context
