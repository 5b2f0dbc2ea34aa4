"""The header of the PROXY protocol: whole or in pieces, of both versions, and everything that is none."""

import ipaddress
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlguard.errors import ProtocolViolation
from sqlguard.wire.proxy_protocol import V1_LIMIT, V2_LIMIT, Origin, Preface

SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
BEHIND = b"\0\0\0\x08\x04\xd2\x16\x2f"


def v2(command: int, family: int, block: bytes, length: int | None = None) -> bytes:
    size = len(block) if length is None else length
    return SIGNATURE + bytes([command, family]) + size.to_bytes(2, "big") + block


def inet(source: str, destination: str = "192.0.2.1") -> bytes:
    pair = ipaddress.ip_address(source), ipaddress.ip_address(destination)
    return b"".join(a.packed for a in pair) + (40_000).to_bytes(2, "big") + (6543).to_bytes(2, "big")


TLV = b"\x04\x00\x03abc" + b"\xe0\x00\x02xy"
WHOLE: dict[str, tuple[bytes, Origin]] = {
    "v1 IPv4": (b"PROXY TCP4 203.0.113.9 192.0.2.1 40000 6543\r\n", Origin("203.0.113.9")),
    "v1 IPv6": (b"PROXY TCP6 2001:DB8::9 2001:db8::1 1 65535\r\n", Origin("2001:db8::9")),
    "v1 mapped": (b"PROXY TCP6 ::ffff:203.0.113.9 ::1 1 0\r\n", Origin("203.0.113.9")),
    "v1 unknown": (b"PROXY UNKNOWN\r\n", Origin()),
    "v1 unknown with more": (b"PROXY UNKNOWN ffff:f:f 1 2 3 4 5\r\n", Origin()),
    "v1 the longest": (b"PROXY UNKNOWN " + b"x" * (V1_LIMIT - 16) + b"\r\n", Origin()),
    "v2 IPv4": (v2(0x21, 0x11, inet("203.0.113.9")), Origin("203.0.113.9")),
    "v2 with TLVs": (v2(0x21, 0x11, inet("203.0.113.9") + TLV), Origin("203.0.113.9")),
    "v2 IPv6": (v2(0x21, 0x21, inet("2001:db8::9", "2001:db8::1")), Origin("2001:db8::9")),
    "v2 mapped": (v2(0x21, 0x21, inet("::ffff:203.0.113.9", "::1")), Origin("203.0.113.9")),
    "v2 Unix": (v2(0x21, 0x31, b"/run/a".ljust(108, b"\0") + b"/run/b".ljust(108, b"\0")), Origin()),
    "v2 local": (v2(0x20, 0x00, b""), Origin()),
    "v2 local, whatever it says": (v2(0x20, 0x11, inet("203.0.113.9")), Origin()),
    "v2 local, of a strange family": (v2(0x20, 0x77, TLV), Origin()),
    "v2 unspecified": (v2(0x21, 0x00, TLV), Origin()),
    "v2 the longest": (
        v2(0x21, 0x11, inet("203.0.113.9").ljust(V2_LIMIT - 16, b"\0")),
        Origin("203.0.113.9"),
    ),
}
BROKEN: dict[str, bytes] = {
    "a StartupMessage": b"\0\0\0\x10\0\x03\0\0user\0a\0\0",
    "an SSLRequest": BEHIND,
    "a TLS handshake": b"\x16\x03\x01\x02\0",
    "HTTP": b"GET / HTTP/1.1\r\n",
    "v1 in small letters": b"proxy TCP4 1.2.3.4 1.2.3.4 1 2\r\n",
    "v1 without CR": b"PROXY TCP4 1.2.3.4 1.2.3.4 1 2\n",
    "v1 without words": b"PROXY \r\n",
    "v1 too long": b"PROXY UNKNOWN " + b"x" * (V1_LIMIT - 15) + b"\r\n",
    "v1 that does not end": b"PROXY UNKNOWN " + b"x" * V1_LIMIT,
    "v1 UDP": b"PROXY UDP4 1.2.3.4 1.2.3.4 1 2\r\n",
    "v1 of the other family": b"PROXY TCP4 ::1 ::1 1 2\r\n",
    "v1 a name": b"PROXY TCP4 localhost 1.2.3.4 1 2\r\n",
    "v1 zeros in front": b"PROXY TCP4 1.2.3.04 1.2.3.4 1 2\r\n",
    "v1 a port too high": b"PROXY TCP4 1.2.3.4 1.2.3.4 65536 2\r\n",
    "v1 a port with zeros": b"PROXY TCP4 1.2.3.4 1.2.3.4 01 2\r\n",
    "v1 a port with a sign": b"PROXY TCP4 1.2.3.4 1.2.3.4 +1 2\r\n",
    "v1 digits of another script": "PROXY TCP4 1.2.3.4 1.2.3.4 \N{ARABIC-INDIC DIGIT ONE} 2\r\n".encode(),
    "v1 two spaces": b"PROXY TCP4  1.2.3.4 1.2.3.4 1 2\r\n",
    "v1 a word too few": b"PROXY TCP4 1.2.3.4 1.2.3.4 1\r\n",
    "v1 a word too many": b"PROXY TCP4 1.2.3.4 1.2.3.4 1 2 3\r\n",
    "v2 version 1": v2(0x11, 0x11, inet("1.2.3.4")),
    "v2 command 2": v2(0x22, 0x11, inet("1.2.3.4")),
    "v2 UDP": v2(0x21, 0x12, inet("1.2.3.4")),
    "v2 a strange family": v2(0x21, 0x41, inet("1.2.3.4")),
    "v2 half an address": v2(0x21, 0x11, inet("1.2.3.4")[:-1]),
    "v2 IPv4 for IPv6": v2(0x21, 0x21, inet("1.2.3.4")),
    "v2 too long": v2(0x21, 0x11, b"", V2_LIMIT),
}


@pytest.mark.parametrize(("header", "origin"), WHOLE.values(), ids=WHOLE)
def test_a_header_cut_anywhere(header: bytes, origin: Origin) -> None:
    data = header + BEHIND
    for cut in range(len(header)):
        preface = Preface()
        assert preface.receive(data[:cut]) is None
        assert preface.receive(data[cut:]) == origin
        assert preface.rest == BEHIND


@pytest.mark.parametrize(("header", "origin"), WHOLE.values(), ids=WHOLE)
def test_a_header_byte_by_byte(header: bytes, origin: Origin) -> None:
    preface = Preface()
    found = [preface.receive(bytes([byte])) for byte in header]
    assert found == [None] * (len(header) - 1) + [origin]
    assert preface.rest == b""


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("step", [1, 7, 1 << 16])
def test_what_is_no_header(data: bytes, step: int) -> None:
    preface = Preface()
    with pytest.raises(ProtocolViolation, match="no valid PROXY protocol header"):
        for at in range(0, len(data), step):
            assert preface.receive(data[at : at + step]) is None


@pytest.mark.parametrize("first", [byte for byte in range(256) if byte not in b"P\r"])
def test_who_comes_without_one_is_not_waited_for(first: int) -> None:
    with pytest.raises(ProtocolViolation, match="there is none"):
        Preface().receive(bytes([first]))


@given(
    st.sampled_from([header for header, _ in WHOLE.values()]),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4),
    st.binary(max_size=40),
    st.integers(1, 50),
)
def test_mutations(header: bytes, changes: list[tuple[int, int]], more: bytes, step: int) -> None:
    """Whatever comes: an origin with an address or none, a refusal, or a wait that is bounded."""
    data = bytearray(header)
    for at, byte in changes:
        data[at % len(data)] = byte
    data += more
    preface, taken = Preface(), 0
    with suppress(ProtocolViolation):
        for at in range(0, len(data), step):
            origin = preface.receive(bytes(data[at : at + step]))
            taken = min(at + step, len(data))
            if origin is not None:
                assert bytes(data[:taken]).endswith(preface.rest)
                if origin.address is not None:
                    assert str(ipaddress.ip_address(origin.address)) == origin.address
                return
            assert taken <= V2_LIMIT


@given(st.binary(max_size=300))
def test_noise(data: bytes) -> None:
    with suppress(ProtocolViolation):
        assert Preface().receive(data) in (None, Origin()) or data[:1] in (b"P", b"\r")
