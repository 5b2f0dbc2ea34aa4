"""
Cutting given values out of texts: of a statement its constants and comments, of plain text the words.

What a constant says is asked of PostgreSQL's own grammar, so `'it''s'`, `E'it\\'s'` and `$$it's$$` are one value.
A text that can't be read is left out as a whole: what is to be erased must not stay because nobody understood
where it was.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any

import postgast

from sqlguard.errors import NotUnderstood
from sqlguard.statement.text import parse

BLANK = "***"
_LITERAL = b"'***'"
#: A value from so many characters on is looked for inside of longer ones, too.
INSIDE = 4
#: A value that is shorter, and no key, says too little to be looked for among words.
_WORD = 3
_TOKEN = postgast.pg_query_pb2.Token
_CONSTANTS = frozenset(_TOKEN.Value(n) for n in ("SCONST", "USCONST", "BCONST", "XCONST", "ICONST", "FCONST"))
_COMMENTS = frozenset(_TOKEN.Value(n) for n in ("SQL_COMMENT", "C_COMMENT"))


@dataclass(frozen=True, slots=True)
class Values:
    """What to cut out; *keys* are cut however short they are. Letter case does not matter."""

    keys: frozenset[str]
    others: frozenset[str] = frozenset()
    _whole: frozenset[str] = field(init=False)
    _numbers: frozenset[Decimal] = field(init=False)
    _inside: tuple[str, ...] = field(init=False)
    _words: re.Pattern[str] | None = field(init=False)

    def __post_init__(self) -> None:
        every = {v.casefold() for v in self.keys | self.others if v}
        words = {v.casefold() for v in self.keys if v} | {v for v in every if len(v) >= _WORD}
        numbers = frozenset(n for v in every if (n := _number(v)) is not None)
        set_ = object.__setattr__
        set_(self, "_whole", frozenset(every))
        set_(self, "_numbers", numbers)
        set_(self, "_inside", tuple(sorted((v for v in every if len(v) >= INSIDE), key=len, reverse=True)))
        longest_first = sorted(words, key=lambda v: (-len(v), v))
        pattern = "|".join(re.escape(v) for v in longest_first)
        set_(self, "_words", re.compile(rf"(?<!\w)(?:{pattern})(?!\w)", re.IGNORECASE) if words else None)

    def in_constant(self, text: str) -> bool:
        """Tell whether a constant with the value *text* has to go."""
        folded = text.casefold()
        if folded in self._whole or any(value in folded for value in self._inside):
            return True
        part = folded.strip("%_")  # a pattern that looks for a part of a value
        if len(part) >= INSIDE and any(part in value for value in self._inside):
            return True
        number = _number(text)
        return number is not None and number in self._numbers

    def in_words(self, text: str) -> str:
        """Return plain *text* without the values."""
        return self._words.sub(BLANK, text) if self._words is not None else text


def blank(text: str, values: Values) -> str:
    """Return the statement *text* without constants, and words of comments, that are among *values*."""
    raw = text.encode("utf-8", "replace")
    try:
        tokens = postgast.scan(raw.decode()).tokens
    except postgast.PgQueryError:
        return text if values.in_words(text) == text else f"(erased: a text of {len(raw)} bytes)"
    parts: list[bytes] = []
    end = 0
    for token in tokens:
        piece = raw[token.start : token.end]
        new = piece
        if token.token in _COMMENTS:
            new = values.in_words(piece.decode()).encode()
        elif token.token in _CONSTANTS and values.in_constant(_value(piece.decode())):
            new = _LITERAL
        if new != piece:
            parts += [raw[end : token.start], new]
            end = token.end
    return b"".join([*parts, raw[end:]]).decode() if parts else text


def blank_params(params: Sequence[Any] | None, values: Values) -> list[Any] | None:
    """Return parameters without those that are among *values*."""
    if params is None:
        return None
    return [BLANK if isinstance(p, str) and values.in_constant(p) else p for p in params]


def blank_json(document: Any, values: Values, *, kept: frozenset[str] = frozenset()) -> Any:
    """Return *document* with the values cut out, at any depth; names of members stay, and what is under *kept*."""
    match document:
        case dict():
            return {
                name: value if name in kept else blank_json(value, values, kept=kept)
                for name, value in document.items()
            }
        case list():
            return [blank_json(value, values, kept=kept) for value in document]
        case str():
            return BLANK if values.in_constant(document) else values.in_words(document)
        case int() | float() if not isinstance(document, bool):
            return BLANK if values.in_constant(str(document)) else document
    return document


def _value(constant: str) -> str:
    """Return what a constant says, as text."""
    try:
        (statement,) = parse(f"SELECT {constant}")
    except (NotUnderstood, ValueError):
        return constant  # one that continues on the next line, say: at least its text is looked at
    return next(_constants(statement.tree), constant)


def _constants(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        constant = node.get("A_Const")
        if isinstance(constant, dict):
            for kind, name in (("sval", "sval"), ("ival", "ival"), ("fval", "fval"), ("bsval", "bsval")):
                if kind in constant:
                    yield str(constant[kind].get(name, 0))
                    return
        for body in node.values():
            yield from _constants(body)
    elif isinstance(node, list):
        for item in node:
            yield from _constants(item)


def _number(text: str) -> Decimal | None:
    """Return the number that *text* is, without its sign, which is no part of a constant."""
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return abs(number) if number.is_finite() else None
