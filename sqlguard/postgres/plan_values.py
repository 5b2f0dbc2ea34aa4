"""Parameters as they go over the wire, kept in a plan and sent again."""

from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.adapt import Dumper, PyFormat, Transformer
from psycopg.pq import Format

Kept = tuple[int, int, str | None]


@dataclass(frozen=True, slots=True)
class WireText:
    """A value in PostgreSQL's text format, of the type *oid* (0: the server finds out)."""

    oid: int
    value: bytes


@dataclass(frozen=True, slots=True)
class WireBinary:
    """The same in its binary format."""

    oid: int
    value: bytes


class _TextDumper(Dumper):
    def dump(self, obj: Any) -> bytes:
        value: bytes = obj.value
        return value

    def get_key(self, obj: Any, format: PyFormat) -> tuple[type, ...]:
        # One dumper per type: the oid stands in for a class.
        return self.cls, type(format), obj.oid

    def upgrade(self, obj: Any, format: PyFormat) -> Dumper:  # noqa: ARG002 (psycopg's signature)
        made = type(self)(self.cls)
        made.oid = obj.oid
        return made


class _BinaryDumper(_TextDumper):
    format = Format.BINARY


def register(conn: psycopg.Connection[Any]) -> None:
    """Let *conn* take kept values as parameters."""
    conn.adapters.register_dumper(WireText, _TextDumper)
    conn.adapters.register_dumper(WireBinary, _BinaryDumper)


def keep(conn: psycopg.Connection[Any], values: Sequence[Any] | None) -> tuple[Kept, ...]:
    """Return *values* as psycopg would send them."""
    if not values:
        return ()
    transformer = Transformer(conn)
    raw = transformer.dump_sequence(values, [PyFormat.AUTO] * len(values))
    return tuple(
        (oid, int(form), None if value is None else b64encode(bytes(value)).decode("ascii"))
        for oid, form, value in zip(transformer.types or (), transformer.formats or (), raw, strict=True)
    )


def load(kept: Sequence[Sequence[Any]]) -> list[Any] | None:
    """Return kept values as parameters of a connection that is registered."""
    if not kept:
        return None
    return [
        None if value is None else (WireBinary if form else WireText)(oid, b64decode(value))
        for oid, form, value in kept
    ]
