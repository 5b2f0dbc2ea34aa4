"""
Errors and notices: made, and edited on their way from the server.

Our own text is ASCII or UTF-8 and is put into the client's encoding; what the server says stays bytes.
"""

from collections.abc import Callable, Iterable, Mapping

from sqlguard.errors import ProtocolViolation, SqlguardError
from sqlguard.wire.buffer import message
from sqlguard.wire.messages import ErrorResponse, NoticeResponse

#: PostgreSQL's letters for the fields that we set or read by name.
LETTERS: Mapping[str, bytes] = {
    "severity_shown": b"S",
    "severity": b"V",
    "sqlstate": b"C",
    "message": b"M",
    "detail": b"D",
    "hint": b"H",
    "position": b"P",
    "internal_position": b"p",
    "internal_query": b"q",
    "where": b"W",
    "schema": b"s",
    "table": b"t",
    "column": b"c",
    "data_type": b"d",
    "constraint": b"n",
    "file": b"F",
    "line": b"L",
    "routine": b"R",
}
_HEADER_BYTES = 5
#: How the names of sqlguard's functions and tables begin in a context or an internal query.
_OURS = b"sqlguard."


def error_response(
    severity: str, sqlstate: str, text: str, *, encoding: str = "utf-8", **more: object
) -> bytes:
    """Return an ErrorResponse; *more* are `detail`, `hint`, `position` and the other names of `LETTERS`."""
    return ErrorResponse(_fields(severity, sqlstate, text, more, encoding)).encode()


def notice_response(
    severity: str, sqlstate: str, text: str, *, encoding: str = "utf-8", **more: object
) -> bytes:
    """Return a NoticeResponse, like `error_response`."""
    return NoticeResponse(_fields(severity, sqlstate, text, more, encoding)).encode()


def from_error(fault: SqlguardError, *, severity: str = "ERROR", encoding: str = "utf-8") -> bytes:
    """Return the ErrorResponse that tells a client of one of our errors; the rules' names stay with us."""
    return error_response(
        severity,
        fault.sqlstate,
        fault.message,
        detail=fault.detail,
        hint=fault.hint,
        position=fault.position or None,
        encoding=encoding,
    )


def _fields(
    severity: str, sqlstate: str, text: str, more: Mapping[str, object], encoding: str
) -> tuple[tuple[bytes, bytes], ...]:
    named = {"severity_shown": severity, "severity": severity, "sqlstate": sqlstate, "message": text, **more}
    return tuple(
        (LETTERS[name], _text(value, encoding)) for name, value in named.items() if value not in (None, "")
    )


def _text(value: object, encoding: str) -> bytes:
    raw = value if isinstance(value, bytes) else str(value).encode(encoding, "replace")
    # A NUL would end the field, and what follows it would be another.
    return raw.replace(b"\0", b"")


def fields_of(report: bytes) -> dict[bytes, bytes]:
    """Return the fields of a whole ErrorResponse or NoticeResponse, by letter."""
    return dict(ErrorResponse.decode(report[_HEADER_BYTES:]).fields)


def with_fields(report: bytes, changes: Mapping[bytes, bytes | None]) -> bytes:
    """Return *report* with fields replaced, added, or (None) dropped; the others keep their place."""
    _check_letters(changes)
    kept = [
        (letter, changes.get(letter, text))
        for letter, text in ErrorResponse.decode(report[_HEADER_BYTES:]).fields
    ]
    had = {letter for letter, _ in kept}
    kept += [(letter, text) for letter, text in changes.items() if letter not in had]
    body = b"".join([letter + text.replace(b"\0", b"") + b"\0" for letter, text in kept if text is not None])
    return message(report[:1], body + b"\0")


def _check_letters(letters: Iterable[bytes]) -> None:
    if any(len(letter) != 1 or letter == b"\0" for letter in letters):
        raise ValueError("a field's name is one letter")


def without_ours(report: bytes) -> bytes:
    """
    Return *report* without the context (`W`) and the internal query (`q`, `p`) that tell of sqlguard's own functions.

    Which wall function stopped a statement, at which line, is nothing for the agent; a context that speaks of the
    application's functions alone stays.
    """
    if _OURS not in report:
        return report
    fields = fields_of(report)
    ours = [letter for letter in (b"W", b"q") if _OURS in fields.get(letter, b"")]
    if b"q" in ours and b"p" in fields:
        ours.append(b"p")
    return with_fields(report, dict.fromkeys(ours)) if ours else report


def moved(report: bytes, position: Callable[[int], int | None]) -> bytes:
    """
    Return *report* with its position (`P`) mapped, or dropped where *position* says None.

    Positions count characters from 1. A report without one comes back as it is.
    """
    found = fields_of(report).get(b"P")
    if found is None:
        return report
    if not found.isdigit() or len(found) > len(str(2**31)):
        raise ProtocolViolation("malformed ErrorResponse: its position is no number")
    place = position(int(found))
    return with_fields(report, {b"P": None if place is None or place < 1 else b"%d" % place})


def shifted(report: bytes, offset: int) -> bytes:
    """Return *report* with its position moved by *offset*; one that would lie before the text is dropped."""
    return moved(report, lambda place: place + offset)


def with_verb(raw: bytes, verb: str) -> bytes:
    """Replace the verb of a CommandComplete's tag: `UPDATE 3` becomes `DELETE 3`."""
    _, blank, rest = raw[_HEADER_BYTES:-1].partition(b" ")
    return message(b"C", verb.encode() + blank + rest + b"\0")
