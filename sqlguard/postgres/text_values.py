"""
Values that Python's own types can't all hold, read as text: infinite and ancient dates, months, ranges.

psycopg raises on `'infinity'::timestamptz`, counts a month as 30 days and makes an object of a range. A door that
hands values on as JSON wants none of that: dates and times become ISO 8601 where they fit Python's types and
PostgreSQL's own text where they don't; intervals and ranges are always PostgreSQL's text.
"""

from datetime import date, datetime, time
from typing import Any

import psycopg
from psycopg.abc import Buffer
from psycopg.adapt import Loader
from psycopg.types.datetime import (
    DateLoader,
    TimeLoader,
    TimestampLoader,
    TimestamptzLoader,
    TimetzLoader,
)

_AS_TEXT = (
    "interval",
    "int4range",
    "int8range",
    "numrange",
    "daterange",
    "tsrange",
    "tstzrange",
    "int4multirange",
    "int8multirange",
    "nummultirange",
    "datemultirange",
    "tsmultirange",
    "tstzmultirange",
)


class _Text(Loader):
    def load(self, data: Buffer) -> str:
        return bytes(data).decode()


def _iso(base: type[Loader]) -> type[Loader]:
    class Iso(base):  # type: ignore[misc,valid-type]  # one of psycopg's loaders
        def load(self, data: Buffer) -> str:
            try:
                value: date | time | datetime = super().load(data)
            except (psycopg.DataError, ValueError, OverflowError):
                return bytes(data).decode()
            return value.isoformat()

    return Iso


_LOADERS: dict[str, type[Loader]] = {
    "date": _iso(DateLoader),
    "time": _iso(TimeLoader),
    "timetz": _iso(TimetzLoader),
    "timestamp": _iso(TimestampLoader),
    "timestamptz": _iso(TimestamptzLoader),
    **dict.fromkeys(_AS_TEXT, _Text),
}


def register(conn: psycopg.Connection[Any]) -> None:
    """Have *conn* read such values as text from now on, also inside arrays."""
    for name, loader in _LOADERS.items():
        conn.adapters.register_loader(name, loader)
