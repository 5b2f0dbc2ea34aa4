"""
The PROXY protocol, versions 1 and 2: how a load balancer says who the client is, before the client's first byte.

Theory of operation
-------------------
`Preface` takes bytes until the header is whole and returns the `Origin` that it tells; what is behind it stays in
`rest` for the connection proper. A byte that can't belong to a header is refused at once, so a client that comes
without one (its first byte is 0, or 22 for TLS) is not waited for. Nothing here says whether the sender may be
believed: that is the caller's to ask first.

Written after HAProxy's specification of 2020/03/05. TLVs are skipped. A datagram's header is refused: it can't
be what this connection is about.
"""

import ipaddress
from dataclasses import dataclass

from sqlguard.errors import ProtocolViolation

#: The longest line of version 1, CR and LF included.
V1_LIMIT = 107
#: HAProxy sends no more than its buffer holds (`tune.bufsize`), TLVs included.
V2_LIMIT = 16 * 1024
_V1_BEGIN = b"PROXY "
_V2_BEGIN = b"\r\n\r\n\0\r\nQUIT\n"
_V2_FIXED = 16
#: Version and command.
_LOCAL, _PROXY = 0x20, 0x21
_MOST_PORT = 65535
#: How many bytes the addresses of a family take, and the source's address of them; AF_UNIX has none that is of use.
_UNSPECIFIED = 0x00
_FAMILIES = {0x11: (12, 4), 0x21: (36, 16), 0x31: (216, 0)}
_V1_FIELDS = 6


@dataclass(frozen=True, slots=True)
class Origin:
    """Who the client is; None: the sender does not say, as when it speaks for itself (LOCAL, UNKNOWN)."""

    address: str | None = None


class Preface:
    """One per connection. `rest` is what came behind the header."""

    def __init__(self) -> None:
        self._held = b""
        self.rest = b""

    def receive(self, data: bytes) -> Origin | None:
        """Take bytes; return the origin once the header is whole. Raises ProtocolViolation."""
        self._held += data
        if _V2_BEGIN.startswith(self._held[: len(_V2_BEGIN)]):
            end = _end_of_v2(self._held)
        elif _V1_BEGIN.startswith(self._held[: len(_V1_BEGIN)]):
            end = _end_of_v1(self._held)
        else:
            raise _malformed("there is none")
        if end is None:
            return None
        header, self.rest, self._held = self._held[:end], self._held[end:], b""
        return _read_v2(header) if header.startswith(_V2_BEGIN) else _read_v1(header)


def address_of(text: str) -> str:
    """Return an address in its one spelling: IPv4 that is written as IPv6 is IPv4. Raises ValueError."""
    found = ipaddress.ip_address(text)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)


def _end_of_v1(held: bytes) -> int | None:
    end = held.find(b"\n", 0, V1_LIMIT)
    if end < 0 and len(held) >= V1_LIMIT:
        raise _malformed("its line does not end")
    return end + 1 if end >= 0 else None


def _read_v1(line: bytes) -> Origin:
    if not line.endswith(b"\r\n"):
        raise _malformed("its line does not end with CR LF")
    fields = line[:-2].split(b" ")
    if fields[1] == b"UNKNOWN":
        return Origin()  # whatever else the line says
    if len(fields) != _V1_FIELDS:
        raise _malformed("its line has not six words")
    kind, source, destination, *ports = [field.decode("ascii", "replace") for field in fields[1:]]
    made = {"TCP4": ipaddress.IPv4Address, "TCP6": ipaddress.IPv6Address}.get(kind)
    if made is None:
        raise _malformed(f"`{kind}` is no protocol that it knows")
    try:
        made(source), made(destination)
    except ValueError:
        raise _malformed("its addresses are none of its protocol") from None
    if not all(map(_is_port, ports)):
        raise _malformed("its ports are none")
    return Origin(address_of(source))


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and str(int(text)) == text and int(text) <= _MOST_PORT


def _end_of_v2(held: bytes) -> int | None:
    if len(held) > len(_V2_BEGIN) and held[len(_V2_BEGIN)] not in (_LOCAL, _PROXY):
        raise _malformed("its version or command is unknown")
    if len(held) < _V2_FIXED:
        return None
    end = _V2_FIXED + int.from_bytes(held[_V2_FIXED - 2 : _V2_FIXED], "big")
    if end > V2_LIMIT:
        raise _malformed(f"it is longer than {V2_LIMIT} bytes")
    return end if len(held) >= end else None


def _read_v2(header: bytes) -> Origin:
    command, family = header[_V2_FIXED - 4 : _V2_FIXED - 2]
    # What a LOCAL header says of addresses counts for nothing, its family neither.
    if command == _LOCAL or family == _UNSPECIFIED:
        return Origin()
    if family not in _FAMILIES:
        raise _malformed("its protocol is not TCP")
    size, length = _FAMILIES[family]
    if len(header) < _V2_FIXED + size:
        raise _malformed("its addresses are not whole")
    source = header[_V2_FIXED : _V2_FIXED + length]
    return Origin(address_of(str(ipaddress.ip_address(source))) if source else None)


def _malformed(why: str) -> ProtocolViolation:
    return ProtocolViolation(
        f"no valid PROXY protocol header: {why}",
        hint="have the load balancer send it (HAProxy: `send-proxy-v2`), or set `proxy_protocol` to `off`",
    )
