"""
How an answer is kept under an idempotency key, so that any door can give it again (`postgres.idempotency`).

A column is `[name, type, size, modifier, format]`, a row a list of values: null, the value's text, or in a binary
column (format 1) its bytes in base64.
"""

import json
from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Any

from sqlguard.wire.messages import Column, DataRow, RowDescription

_HEADER_BYTES = 5


@dataclass(frozen=True, slots=True)
class Answer:
    """`tag` is None when the write was done but its answer was not kept."""

    action: int | None
    tag: str | None
    columns: tuple[Column, ...] = ()
    rows: tuple[tuple[bytes | None, ...], ...] = ()

    @property
    def formats(self) -> tuple[int, ...]:
        return tuple([column.format for column in self.columns])

    def description(self, formats: tuple[int, ...]) -> bytes:
        columns = [
            Column(c.name, 0, 0, c.type, c.size, c.modifier, form)
            for c, form in zip(self.columns, formats, strict=True)
        ]
        return RowDescription(tuple(columns)).encode()


def wanted_formats(given: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return one result format per column, as PostgreSQL reads those of a Bind."""
    if len(given) == 1:
        return given * count
    return given if len(given) == count else (0,) * count


def to_store(description: bytes, rows: list[bytes], encoding: str) -> tuple[str, str]:
    """Return columns and rows as JSON, from whole messages as they went to the client."""
    columns = RowDescription.decode(description[_HEADER_BYTES:]).columns
    formats = [column.format for column in columns]
    stored = [
        [_to_json(value, form, encoding) for value, form in zip(_values(row), formats, strict=True)]
        for row in rows
    ]
    told = [[c.name.decode(encoding), c.type, c.size, c.modifier, c.format] for c in columns]
    return json.dumps(told, ensure_ascii=False), json.dumps(stored, ensure_ascii=False)


def from_store(captured: bytes, encoding: str) -> Answer | None:
    """Read the row of `claim_key`; None says that the key is ours and the write is to be done now."""
    claimed, action, tag, columns, rows = _values(captured)
    if claimed == b"t":
        return None
    number = None if action is None else int(action)
    if tag is None:
        return Answer(number, None)
    described = tuple(
        [Column(name.encode(encoding), 0, 0, *numbers) for name, *numbers in _json(columns, encoding)]
    )
    stored = [
        tuple([_from_json(value, c.format, encoding) for value, c in zip(row, described, strict=True)])
        for row in _json(rows, encoding)
    ]
    return Answer(number, tag.decode(encoding), described, tuple(stored))


def _values(row: bytes) -> tuple[bytes | None, ...]:
    return DataRow.decode(row[_HEADER_BYTES:]).values


def _json(text: bytes | None, encoding: str) -> list[Any]:
    found: list[Any] = [] if text is None else json.loads(text.decode(encoding))
    return found


def _to_json(value: bytes | None, form: int, encoding: str) -> str | None:
    if value is None:
        return None
    return value.decode(encoding) if form == 0 else b64encode(value).decode("ascii")


def _from_json(value: str | None, form: int, encoding: str) -> bytes | None:
    if value is None:
        return None
    return value.encode(encoding) if form == 0 else b64decode(value)
