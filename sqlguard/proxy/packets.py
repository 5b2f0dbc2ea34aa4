"""
The messages that the proxy itself makes or takes apart on the hot path, as plain functions over bytes.

Text stays bytes in the client's encoding. Decoders raise ProtocolViolation for a body that is not of its form.
"""

from sqlguard.errors import ProtocolViolation, SqlguardError


def message(kind: bytes, body: bytes) -> bytes:
    return kind + (len(body) + 4).to_bytes(4, "big") + body


def query(text: bytes) -> bytes:
    return message(b"Q", text + b"\0")


def parse(name: bytes, text: bytes, rest: bytes = b"\0\0") -> bytes:
    """*rest* is the parameter types as they came: a count and so many oids."""
    return message(b"P", name + b"\0" + text + b"\0" + rest)


def utility(name: bytes, text: bytes) -> bytes:
    """
    Run a statement without parameters or rows by the extended protocol, under names of our own.

    Answered by ParseComplete, BindComplete, CommandComplete, CloseComplete, CloseComplete.
    """
    return (
        parse(name, text)
        + message(b"B", name + b"\0" + name + b"\0" + b"\0\0\0\0\0\0")
        + message(b"E", name + b"\0\0\0\0\0")
        + message(b"C", b"P" + name + b"\0")
        + message(b"C", b"S" + name + b"\0")
    )


def fetch_all(name: bytes, text: bytes) -> bytes:
    """Like `utility`, for a query: its rows come as text without a RowDescription."""
    return utility(name, text)


SYNC = message(b"S", b"")
FLUSH = message(b"H", b"")


def cstring(body: bytes, at: int) -> tuple[bytes, int]:
    """Return the zero-terminated string at *at* and the index behind it."""
    end = body.find(b"\0", at)
    if end < 0:
        raise ProtocolViolation("a string in the message has no end")
    return body[at:end], end + 1


def split_parse(body: bytes) -> tuple[bytes, bytes, bytes]:
    """Return name, text and the parameter types of a Parse."""
    name, at = cstring(body, 0)
    text, at = cstring(body, at)
    rest = body[at:]
    if len(rest) < 2 or len(rest) != 2 + 4 * int.from_bytes(rest[:2], "big"):  # noqa: PLR2004 (int16, int32s)
        raise ProtocolViolation("a Parse message is not of its form")
    return name, text, rest


def split_bind(body: bytes) -> tuple[bytes, bytes, list[bytes | None], list[int]]:
    """Return portal, statement, parameter values and their formats (0 text, 1 binary), one per parameter."""
    portal, at = cstring(body, 0)
    statement, at = cstring(body, at)
    formats, at = _int16s(body, at)
    count, at = _int16(body, at)
    values: list[bytes | None] = []
    for _ in range(count):
        if at + 4 > len(body):
            raise ProtocolViolation("a Bind message ends early")
        size = int.from_bytes(body[at : at + 4], "big", signed=True)
        at += 4
        if size == -1:
            values.append(None)
            continue
        if size < 0 or at + size > len(body):
            raise ProtocolViolation("a Bind message has a parameter of impossible length")
        values.append(body[at : at + size])
        at += size
    if not formats:
        formats = [0] * count
    elif len(formats) == 1:
        formats = formats * count
    return portal, statement, values, formats


def _int16(body: bytes, at: int) -> tuple[int, int]:
    if at + 2 > len(body):
        raise ProtocolViolation("the message ends early")
    return int.from_bytes(body[at : at + 2], "big"), at + 2


def _int16s(body: bytes, at: int) -> tuple[list[int], int]:
    count, at = _int16(body, at)
    if at + 2 * count > len(body):
        raise ProtocolViolation("the message ends early")
    return [int.from_bytes(body[i : i + 2], "big") for i in range(at, at + 2 * count, 2)], at + 2 * count


def error(fault: SqlguardError, *, severity: str = "ERROR", encoding: str = "utf-8") -> bytes:
    """Return the ErrorResponse for one of our errors."""
    fields: list[tuple[str, str | None]] = [
        ("S", severity),
        ("V", severity),
        ("C", fault.sqlstate),
        ("M", fault.message),
    ]
    return message(
        b"E",
        _fields(
            [*fields, ("D", fault.detail), ("H", fault.hint), ("P", str(fault.position or ""))], encoding
        ),
    )


def notice(text: str, *, detail: str | None = None, encoding: str = "utf-8") -> bytes:
    fields: list[tuple[str, str | None]] = [
        ("S", "NOTICE"),
        ("V", "NOTICE"),
        ("C", "00000"),
        ("M", text),
        ("D", detail),
    ]
    return message(b"N", _fields(fields, encoding))


def _fields(parts: list[tuple[str, str | None]], encoding: str) -> bytes:
    body = b"".join(
        name.encode() + value.replace("\0", "").encode(encoding, "replace") + b"\0"
        for name, value in parts
        if value
    )
    return body + b"\0"


def error_fields(response: bytes, encoding: str = "utf-8") -> dict[str, str]:
    """Return the fields of an ErrorResponse or NoticeResponse by their letters."""
    return {
        item[:1].decode("ascii", "replace"): item[1:].decode(encoding, "replace")
        for item in response[5:-1].split(b"\0")
        if item
    }


def row(data_row: bytes) -> list[bytes | None]:
    """Return the columns of a DataRow message."""
    count, at = _int16(data_row, 5)
    columns: list[bytes | None] = []
    for _ in range(count):
        size = int.from_bytes(data_row[at : at + 4], "big", signed=True)
        at += 4
        columns.append(None if size < 0 else data_row[at : at + size])
        at += max(size, 0)
    return columns


class FrameSplitter:
    """Cuts a client's bytes into messages; a length over the limit is judged before the body is waited for."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = b""

    @property
    def waiting(self) -> int:
        return len(self._left)

    def feed(self, chunk: bytes) -> list[tuple[int, bytes]]:
        """Return the messages that are whole. Raises ProtocolViolation."""
        if self._left:
            chunk = self._left + chunk
        frames: list[tuple[int, bytes]] = []
        at, size = 0, len(chunk)
        while size - at >= 5:  # noqa: PLR2004 (type and length)
            length = int.from_bytes(chunk[at + 1 : at + 5], "big")
            if length < 4 or length > self._limit:  # noqa: PLR2004 (the length counts itself)
                raise ProtocolViolation(
                    f"a message of {length} bytes is not accepted",
                    hint=f"messages may have up to {self._limit} bytes",
                )
            end = at + 1 + length
            if end > size:
                break
            frames.append((chunk[at], chunk[at + 5 : end]))
            at = end
        self._left = chunk[at:]
        return frames
