"""
Text -> libpg_query's tree: the limits that hold before any parser sees the text, and the parse itself.

The tree is libpg_query's JSON as plain dicts: it is made and walked several times faster than the protobuf
messages, has the same nodes and fields, and no limit of 100 levels. Node types that stand in a field of
their own (`SelectStmt.larg`) come without their name; `grammar.TYPED` knows it.
"""

import json
from dataclasses import dataclass
from typing import Any

import postgast
from postgast.native import lib

from sqlguard.errors import NotUnderstood

#: What a person or an ORM writes stays far below; what exceeds it is refused before it is parsed.
MAX_BYTES = 1 << 20
MAX_TOKENS = 40_000
#: A text up to this size can't bring down the parser (its stack holds 20,000 levels), so it isn't scanned first.
SHORT = 8_192
#: libpg_query's scanner is quadratic in nested comments.
MAX_COMMENTS = 1_000
#: Levels of the tree, counted in tokens that can open one.
MAX_LEVELS = 400

_TOKEN = postgast.pg_query_pb2.Token
_QUOTED = frozenset(
    _TOKEN.Value(name) for name in ("SCONST", "USCONST", "BCONST", "XCONST", "SQL_COMMENT", "C_COMMENT")
)
_IDENT = frozenset(_TOKEN.Value(name) for name in ("IDENT", "UIDENT"))
_COMMENTS = frozenset(_TOKEN.Value(name) for name in ("SQL_COMMENT", "C_COMMENT"))
_OPEN = frozenset({_TOKEN.Value("ASCII_40"), _TOKEN.Value("ASCII_91")})
_CLOSE = frozenset({_TOKEN.Value("ASCII_41"), _TOKEN.Value("ASCII_93")})
#: After these a new, shallow part begins: list elements, statements, and the flat lists of AND and OR.
_RESET = frozenset(_TOKEN.Value(name) for name in ("ASCII_44", "ASCII_59", "AND", "OR"))
#: Leaves of the tree: constants, names, parameters, dots.
_LEAF = _QUOTED | _IDENT | frozenset(_TOKEN.Value(name) for name in ("ICONST", "FCONST", "PARAM", "ASCII_46"))


class SyntaxFault(NotUnderstood):
    """PostgreSQL's grammar does not accept the text; `position` counts characters from 1, 0 when unknown."""

    default_hint = "correct the statement"

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message, rules=("syntax",))
        self.position = position


@dataclass(frozen=True, slots=True)
class Parsed:
    """One statement of a message; `start` and `end` are byte offsets."""

    tree: dict[str, Any]
    text: str
    start: int
    end: int


def parse(text: str) -> tuple[Parsed, ...]:
    """Return the statements of *text*. Raises SyntaxFault, or NotUnderstood when a limit is exceeded."""
    raw = _checked(text)
    result = lib.pg_query_parse(raw)
    try:
        if result.error:
            fault = result.error.contents
            # libpg_query counts characters, from 1, as PostgreSQL does.
            raise SyntaxFault(fault.message.decode(errors="replace"), fault.cursorpos)
        document = json.loads(result.parse_tree)
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError:
        raise NotUnderstood("the statement is not valid UTF-8", rules=("encoding",)) from None
    finally:
        lib.pg_query_free_parse_result(result)
    found = document.get("stmts", [])
    if len(found) == 1:
        return (Parsed(found[0]["stmt"], text, 0, len(raw)),)
    return tuple(_cut(statement, raw) for statement in found)


def _cut(statement: dict[str, Any], raw: bytes) -> Parsed:
    start = statement.get("stmt_location", 0)
    length = statement.get("stmt_len", 0)
    end = start + length if length else len(raw)
    return Parsed(statement["stmt"], raw[start:end].decode(), start, end)


def _too_deep() -> NotUnderstood:
    return NotUnderstood(
        "the statement is nested too deeply",
        hint="use fewer nested parentheses, operators in a row or UNION arms",
        rules=("text-limits",),
    )


def _checked(text: str) -> bytes:
    """Return *text* as UTF-8 if it is within the limits."""
    if "\x00" in text:
        raise NotUnderstood("the statement contains a NUL character", rules=("characters",))
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        raise NotUnderstood("the statement is not valid UTF-8", rules=("encoding",)) from None
    plain = text.isascii()
    if len(raw) <= SHORT and plain:
        return raw
    if len(raw) > MAX_BYTES:
        raise NotUnderstood(
            f"the statement is longer than {MAX_BYTES} bytes",
            hint="send the data in several statements",
            rules=("text-limits",),
        )
    if raw.count(b"/*") > MAX_COMMENTS:
        raise NotUnderstood(
            f"the statement has more than {MAX_COMMENTS} comments",
            hint="leave them out",
            rules=("text-limits",),
        )
    _scan(raw, text, plain=plain)
    return raw


def _scan(raw: bytes, text: str, *, plain: bool) -> None:
    try:
        tokens = postgast.scan(text).tokens
    except postgast.PgQueryError as fault:
        raise SyntaxFault(fault.message, fault.cursorpos) from None
    if len(tokens) > MAX_TOKENS:
        raise NotUnderstood(
            f"the statement has more than {MAX_TOKENS} words",
            hint="send the data in several statements",
            rules=("text-limits",),
        )
    if not plain:
        _characters(tokens, raw)
    if len(raw) > SHORT:
        _levels(tokens)


def _characters(tokens: Any, raw: bytes) -> None:
    """Refuse characters that PostgreSQL takes for letters while people and other parsers take them for blanks."""
    for token in tokens:
        kind = token.token
        if kind in _QUOTED:
            continue
        word = raw[token.start : token.end]
        if word.isascii() or (kind in _IDENT and b'"' in word[:3]):
            continue
        raise NotUnderstood(
            "the statement has a non-ASCII character outside of quotes and comments",
            hint='use plain blanks, and write names with other letters in double quotes: "größe"',
            rules=("characters",),
        )


def _levels(tokens: Any) -> None:
    """Refuse a text that can make a tree of more than MAX_LEVELS; what it counts is never less than the tree has."""
    outer: list[int] = []
    here = total = 0
    for token in tokens:
        kind = token.token
        if kind in _LEAF:
            continue
        if kind in _OPEN:
            outer.append(here)
            here = 0
            total += 1
        elif kind in _CLOSE:
            total -= here + 1 if outer else 0
            here = outer.pop() if outer else 0
        elif kind in _RESET:
            total -= here
            here = 0
        else:
            here += 1
            total += 1
        if total > MAX_LEVELS:
            raise _too_deep()
