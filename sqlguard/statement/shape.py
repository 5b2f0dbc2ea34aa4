"""
The shape of a statement: what stays the same when its values change, for counting and for reports.

No value of the statement is in a shape: constants are cut out at the places that PostgreSQL's own scanner gives,
and comments with them, because agents write about people in comments too.
"""

import hashlib
from dataclasses import dataclass

import postgast

_TOKEN = postgast.pg_query_pb2.Token
_CONSTANTS = frozenset(_TOKEN.Value(n) for n in ("SCONST", "USCONST", "BCONST", "XCONST", "ICONST", "FCONST"))
_COMMENTS = frozenset(_TOKEN.Value(n) for n in ("SQL_COMMENT", "C_COMMENT"))
#: A longer text is cut: what is to be recognised is at its beginning.
LONGEST = 2000
#: libpg_query's scanner is quadratic in nested comments, and what is longer than this is data.
_SCANNED = 64 * 1024


@dataclass(frozen=True, slots=True)
class Shape:
    """`fingerprint` is libpg_query's where the grammar takes the text, a hash of the rest otherwise."""

    fingerprint: str
    text: str


def shape(text: str) -> Shape:
    """Return the shape of one statement; never raises."""
    plain = without_values(text)
    return Shape(_fingerprint(text) or hashlib.sha256(plain.encode()).hexdigest()[:16], plain)


def without_values(text: str) -> str:
    """Return *text* with `?` for every constant and without comments; one that can't be read is left out."""
    raw = text.encode("utf-8", "replace")
    if len(raw) > _SCANNED:
        return f"(a text of {len(raw)} bytes)"
    try:
        tokens = postgast.scan(raw.decode()).tokens
    except (postgast.PgQueryError, ValueError):
        return f"(a text of {len(raw)} bytes that can't be read)"
    words: list[str] = []
    end = 0
    for token in tokens:
        if token.token in _COMMENTS:
            continue
        if token.start > end and words:
            words.append(" ")
        is_value = token.token in _CONSTANTS
        words.append("?" if is_value else raw[token.start : token.end].decode("utf-8", "replace"))
        end = token.end
    whole = "".join(words)
    return whole if len(whole) <= LONGEST else whole[: LONGEST - 1] + "…"


def _fingerprint(text: str) -> str | None:
    if len(text) > _SCANNED or "\x00" in text:
        return None
    try:
        found: str = postgast.fingerprint(text).hex
    except (postgast.PgQueryError, UnicodeError):
        return None
    return found
