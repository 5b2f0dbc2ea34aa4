"""
What an agent says about a statement: reason, confidence, idempotency key, step (DESIGN 3.7).

Three ways in, one value out: sqlcommenter tags in a comment of the statement, `SET sqlguard.…` of a session,
or arguments of the Python and MCP doors. A tag in the statement wins over the session's setting.
The comment is found by PostgreSQL's own scanner, so a string that looks like a tag is never taken for one.
sqlcommenter: https://google.github.io/sqlcommenter/spec/ (keys and values are URL-encoded, values quoted).
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import postgast

from sqlguard.errors import NotUnderstood

FIELDS = ("reason", "confidence", "idempotency_key", "step", "traceparent")


@dataclass(frozen=True, slots=True)
class Annotation:
    """`confidence` is between 0 and 1, as the agent claims it."""

    reason: str | None = None
    confidence: float | None = None
    idempotency_key: str | None = None
    step: str | None = None
    traceparent: str | None = None

    def merged(self, over: "Annotation") -> "Annotation":
        """Return this annotation with every field that *over* has set taken from it."""
        if self == EMPTY:
            return over
        return Annotation(*(b if (b := getattr(over, n)) is not None else getattr(self, n) for n in FIELDS))


EMPTY = Annotation()
#: Characters of a text whose annotation is remembered.
_REMEMBERED_TEXT = 16_384
#: Characters; an idempotency key is the key of an index, and PostgreSQL's index rows are short.
LIMITS = {"reason": 10_000, "idempotency_key": 500, "step": 500}


def given(
    reason: str | None = None,
    confidence: float | None = None,
    idempotency_key: str | None = None,
    step: str | None = None,
) -> Annotation:
    """
    Return what was given as arguments; an empty text counts as not given.

    Raises NotUnderstood for what a comment or a setting could not say either: a caller of ours hears of its mistake.
    """
    if confidence is not None and not 0 <= confidence <= 1:
        raise NotUnderstood(f"the confidence {confidence} is not between 0 and 1", hint="give 0.9 for 90 %")
    return checked(Annotation(reason or None, confidence, idempotency_key or None, step or None))


def checked(annotation: Annotation) -> Annotation:
    """Return *annotation*. Raises NotUnderstood for a text in it that the journal can't take as it is."""
    for name, limit in LIMITS.items():
        text = getattr(annotation, name)
        if text is not None and len(text) > limit:
            raise NotUnderstood(f"`{name}` is longer than {limit} characters", hint=f"give a shorter {name}")
        if text is not None and "\0" in text:
            raise NotUnderstood(
                f"`{name}` holds a NUL, which no text of PostgreSQL's can", hint="leave it out"
            )
    return annotation


def clipped(annotation: Annotation) -> Annotation:
    """Return *annotation* as the journal can take it: what is refused is written down whatever was said about it."""
    if annotation == EMPTY:
        return annotation
    fitting: Any = {
        name: text[:limit].replace("\0", "\ufffd")
        for name, limit in LIMITS.items()
        if (text := getattr(annotation, name)) is not None
    }
    return replace(annotation, **fitting)


def confidence(text: str) -> float | None:
    """Read a confidence; anything that is no number between 0 and 1 counts as not given."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0.0 <= value <= 1.0 else None


def with_field(annotation: Annotation, name: str, value: str | None) -> Annotation:
    """Return *annotation* with one field set from text; an empty value clears it."""
    if name not in FIELDS:
        return annotation
    if name == "confidence":
        return replace(annotation, confidence=confidence(value) if value else None)
    given: Any = {name: value or None}
    return replace(annotation, **given)


def read(text: str) -> Annotation:
    """Return what the comments of *text* say; a text without comments costs one `in`."""
    if "/*" not in text and "--" not in text:
        return EMPTY
    return _read(text) if len(text) > _REMEMBERED_TEXT else _remembered(text)


# A statement is asked for what it says several times on its way.
@lru_cache(64)
def _remembered(text: str) -> Annotation:
    return _read(text)


def _read(text: str) -> Annotation:
    try:
        tokens = postgast.scan(text).tokens
    except postgast.PgQueryError:
        return EMPTY
    raw = text.encode()
    annotation = EMPTY
    for token in tokens:
        if token.token not in _COMMENTS:
            continue
        comment = raw[token.start : token.end].decode(errors="replace")
        annotation = annotation.merged(
            _tags(comment.removeprefix("/*").removesuffix("*/").removeprefix("--"))
        )
    return annotation


def _tags(comment: str) -> Annotation:
    annotation = EMPTY
    for name, value in _pairs(comment):
        if name in FIELDS:
            annotation = with_field(annotation, name, value)
    return annotation


def _pairs(comment: str) -> list[tuple[str, str]]:
    """Split `a='b',c='d\\'e'` into pairs; stops at the first thing that is not of that form."""
    pairs: list[tuple[str, str]] = []
    # By places in the one text: cutting off what is done would copy the rest for every pair.
    begin, end = 0, len(comment)
    while (equals := comment.find("='", begin)) >= 0:
        value: list[str] = []
        position = equals + 2
        while position < end and comment[position] != "'":
            if comment[position] == "\\" and position + 1 < end:
                position += 1
            value.append(comment[position])
            position += 1
        if position >= end:
            break
        name = comment[begin:equals].strip().lstrip(",").strip()
        pairs.append((unquote(name), unquote("".join(value))))
        begin = position + 1
    return pairs


# By name, not number: libpg_query renumbers its tokens with every grammar.
_TOKEN = postgast.pg_query_pb2.Token
_COMMENTS = frozenset({_TOKEN.Value("SQL_COMMENT"), _TOKEN.Value("C_COMMENT")})
