"""
Values as JSON that every client reads alike, and results cut to what a model can take in, with a mark and a count.

Numbers that JSON readers round (numeric, integers beyond 2^53) and those that JSON has no word for (NaN, Infinity)
are strings; bytes are PostgreSQL's own `\\x…`; dates and times are ISO 8601.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

from pydantic import JsonValue

#: The largest integer that every JSON reader keeps exactly.
_EXACT = 2**53 - 1
#: Characters of one value, and of all rows together, that are passed on.
LONGEST_VALUE = 10_000
LONGEST_RESULT = 200_000


def safe(value: object) -> JsonValue:  # noqa: PLR0911, C901 (one line per type)
    """Return *value* as JSON has it; what JSON can't hold becomes text."""
    match value:
        case None | bool():
            return value
        case int():
            return value if -_EXACT <= value <= _EXACT else str(value)
        case float():
            return (
                value
                if math.isfinite(value)
                else {"inf": "Infinity", "-inf": "-Infinity"}.get(str(value), "NaN")
            )
        case str():
            # A lone surrogate can't be sent as UTF-8.
            return value.encode("utf-8", "replace").decode()
        case Decimal():
            return _number(value)
        case bytes() | bytearray() | memoryview():
            return "\\x" + bytes(value).hex()
        case datetime() | date() | time():
            return value.isoformat()
        case timedelta():
            return str(value)
        case Mapping():
            return {str(key): safe(inner) for key, inner in value.items()}
        case list() | tuple() | set() | frozenset():
            return [safe(inner) for inner in value]
        case _:
            return str(value)


def _number(value: Decimal) -> str:
    return {"sNaN": "NaN"}.get(text := str(value), text) if value.is_nan() else format(value, "f")


@dataclass(frozen=True)
class Cut:
    """Rows as they are passed on; `total` is how many there were."""

    rows: list[list[JsonValue]]
    total: int
    note: str | None

    @property
    def truncated(self) -> bool:
        return self.note is not None


def cut(rows: Sequence[Sequence[Any]], most: int, total: int | None = None, *, has_more: bool = False) -> Cut:
    """
    Return at most *most* of *rows* as JSON, fewer when they are long; the note says what was left out.

    *total* is how many there were, or where *has_more* were counted, if that is not just *rows*.
    """
    total = len(rows) if total is None else total
    kept: list[list[JsonValue]] = []
    length = 0
    shortened = 0
    for row in rows[:most]:
        values = []
        for value in map(safe, row):
            short = _shortened(value)
            shortened += short is not value
            values.append(short)
        length += len(repr(values))
        if kept and length > LONGEST_RESULT:
            break
        kept.append(values)
    return Cut(kept, total, _note(len(kept), total, shortened, has_more=has_more))


def _note(kept: int, total: int, shortened: int, *, has_more: bool) -> str | None:
    notes = []
    if kept < total:
        of = f"more than {total:,}" if has_more else f"{total:,}"
        notes.append(
            f"CUT: these are the first {kept:,} of {of} rows; narrow the WHERE, aggregate, or page with LIMIT"
        )
    if shortened:
        notes.append(f"CUT: {shortened:,} long values are shortened, each marked with its length")
    return "; ".join(notes) or None


def _shortened(value: JsonValue) -> JsonValue:
    text = value if isinstance(value, str) else repr(value) if isinstance(value, list | dict) else ""
    if len(text) <= LONGEST_VALUE:
        return value
    return f"{text[:LONGEST_VALUE]}… (CUT: {len(text):,} characters in all)"
