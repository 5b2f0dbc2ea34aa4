"""psycopg's placeholders, numbered so that PostgreSQL's own grammar can judge the text."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import psycopg
from psycopg.adapt import PyFormat, Transformer

Params = Sequence[Any] | Mapping[str, Any] | None
#: psycopg's own placeholder rule is textual (it knows no grammar), so a regular expression is exact here.
_PLACEHOLDER = re.compile(r"%(?:\((?P<name>[^)]+)\)(?P<named>[sbt])|(?P<plain>[sbt%]))")


def number_placeholders(text: str, params: Params) -> tuple[str, list[Any] | None]:
    """
    Turn psycopg's `%s` and `%(name)s` into `$1`, `$2` …, so that PostgreSQL's grammar can judge the text.

    Without parameters the text is left alone, as psycopg does.
    """
    if params is None:
        return text, None
    if not _PLACEHOLDER.search(text):
        return text, list(params.values() if isinstance(params, Mapping) else params)
    values: list[Any] = []
    numbers: dict[str, int] = {}

    def place(match: re.Match[str]) -> str:
        if match["plain"] == "%":
            return "%"
        name = match["name"]
        if name is None:
            assert not isinstance(params, Mapping)  # noqa: S101 (psycopg's own rule: no mixing)
            values.append(params[len(values)])
            return f"${len(values)}"
        assert isinstance(params, Mapping)  # noqa: S101
        if name not in numbers:
            values.append(params[name])
            numbers[name] = len(values)
        return f"${numbers[name]}"

    try:
        numbered = _PLACEHOLDER.sub(place, text)
    except (IndexError, KeyError, AssertionError) as fault:
        raise psycopg.ProgrammingError("the parameters do not fit the placeholders") from fault
    if not values:
        # Nothing but `%%`: the parameters are numbered already.
        values = list(params.values() if isinstance(params, Mapping) else params)
    return numbered, values


def parameter_types(conn: psycopg.Connection[Any], values: Sequence[Any] | None) -> tuple[int, ...]:
    """Return the types that psycopg would tell PostgreSQL that *values* have, as oids; 0 leaves it to the server."""
    if not values:
        return ()
    transformer = Transformer(conn)
    transformer.dump_sequence(values, [PyFormat.AUTO] * len(values))
    return tuple(transformer.types or ())
