"""
Whether the constants of one call keep a function harmless that is not harmless in general.

The numbers are those above which a single value or series is no longer what an agent reads: they are not a
wall. The wall is statement_timeout and temp_file_limit; this only turns the obvious away before it runs.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

from sqlguard.functions import data
from sqlguard.functions.classify import classify_setting
from sqlguard.functions.constants import NOT_CONSTANT, as_interval, as_moment
from sqlguard.functions.model import FunctionClass, FunctionEffect
from sqlguard.functions.pattern import tame

#: Rows of one generate_series(), normal_rand(), ST_GeneratePoints(), elements of one array_fill().
MAX_ROWS = 1_000_000
#: Characters of one value made by repeat(), lpad(), format().
MAX_LENGTH = 10_000_000
#: Cost 12 of bcrypt is about a quarter of a second, each step more doubles it.
MAX_BCRYPT_COST = 12
MAX_ROUNDS = 100_000
# Type names as people write them that format_type() spells otherwise.
_SPELLINGS = frozenset(
    {
        *("int", "int2", "int4", "int8", "float", "float4", "float8", "decimal", "dec", "bool", "varchar"),
        *("char", "timestamp", "timestamptz", "time", "timetz"),
    }
)

Constants = Sequence[object]


def harmless_with(name: str, found: FunctionClass, constants: Constants) -> bool:
    """
    Whether a call of *name*, classified as *found*, is harmless with these arguments.

    *constants* holds what `constants.fold` made of each argument, NOT_CONSTANT included, in the order of the
    declaration (named arguments put in their place).
    """
    if found.bounded_argument is None:
        return found.effect is FunctionEffect.HARMLESS
    if found.bounded_argument >= len(constants):
        # The deciding argument is left out, or the call is one that the server refuses.
        return found.effect is FunctionEffect.HARMLESS
    value = constants[found.bounded_argument]
    if value is None:
        return True
    if value is NOT_CONSTANT:
        return found.effect is FunctionEffect.HARMLESS or (name == "generate_series" and _calendar(constants))
    check = _CHECKS.get(name, _pattern)
    return check(value, constants)


def series_rows(constants: Constants) -> int | None:
    """How many rows generate_series() with these arguments makes; None when unsure. A caller may multiply."""
    start, stop, *rest = constants
    step = rest[0] if rest else 1
    numbers = [Fraction(n) for n in (start, stop, step) if isinstance(n, int | Decimal)]
    if len(numbers) == 3:  # noqa: PLR2004  start, stop, step
        return _steps(numbers[1] - numbers[0], numbers[2], Fraction())
    first, last, by = as_moment(start), as_moment(stop), as_interval(step)
    if first is None or last is None or by is None:
        return None
    return _steps(last - first, by, timedelta())


def _steps(distance: Any, step: Any, nothing: Any) -> int:
    """Count the ends and what lies between; a series that goes the other way, or nowhere, is empty."""
    backwards = distance != nothing and (distance > nothing) is not (step > nothing)
    return 0 if step == nothing or backwards else int(abs(distance) // abs(step)) + 1


def _series(_: object, constants: Constants) -> bool:
    rows = series_rows(constants) if len(constants) > 1 else None
    return rows <= MAX_ROWS if rows is not None else _calendar(constants) and NOT_CONSTANT in constants[:1]


def _calendar(constants: Constants) -> bool:
    """
    Whether the step is an hour or more.

    Ends that come from the data are how reports are written, and between two of them lie so many hours only.
    """
    step = as_interval(constants[2]) if len(constants) > 2 else None  # noqa: PLR2004  start, stop, step
    known_ends = [c for c in constants[:2] if c is not NOT_CONSTANT]
    return (
        step is not None
        and abs(step) >= timedelta(hours=1)
        and all(as_moment(end) is not None for end in known_ends)
    )


def _count(value: object, _: Constants) -> bool:
    return isinstance(value, int) and value <= MAX_ROWS


def _length(value: object, _: Constants) -> bool:
    return isinstance(value, int) and value <= MAX_LENGTH


def _repeat(value: object, constants: Constants) -> bool:
    # A text that is not constant is taken as 100 characters: a row's value, not a document.
    each = len(constants[0]) if isinstance(constants[0], str) else 100
    return isinstance(value, int) and value * each <= MAX_LENGTH


def _dimensions(value: object, _: Constants) -> bool:
    if not isinstance(value, tuple):
        return False
    total = 1
    for size in value:
        total *= size if isinstance(size, int) else MAX_ROWS + 1
    return total <= MAX_ROWS


def _format(value: object, _: Constants) -> bool:
    """Add up the widths in a format() string; a width that is an argument (`*`) is not looked up."""
    if not isinstance(value, str):
        return False
    total = 0
    for piece in value.replace("%%", "").split("%")[1:]:
        digits = ""
        for char in piece:
            if char == "*":
                return False
            if char.isdigit():
                digits += char
            elif char == "$":
                digits = ""
            elif char != "-":
                break
        # Twenty digits are more than any width the server takes.
        total += int(digits[:20] or 0)
    return total <= MAX_LENGTH


def _pattern(value: object, _: Constants) -> bool:
    # substring(text, integer) shares its name with substring(text, pattern).
    return tame(value) if isinstance(value, str) else isinstance(value, int)


def _setting(value: object, _: Constants) -> bool:
    return isinstance(value, str) and classify_setting(value).effect is FunctionEffect.HARMLESS


def _builtin_type(value: object, _: Constants) -> bool:
    if not isinstance(value, str):
        return False
    name = " ".join(value.lower().split("(")[0].split()).removeprefix("pg_catalog.")
    return name in _SPELLINGS or name in data.types()


def _salt(value: object, _: Constants) -> bool:
    if not isinstance(value, str):
        return False
    kind, _, rest = value.removeprefix("$").partition("$")
    if kind.startswith("2"):
        return _number(rest.partition("$")[0]) <= MAX_BCRYPT_COST
    if rest.startswith("rounds="):
        return _number(rest.removeprefix("rounds=").partition("$")[0]) <= MAX_ROUNDS
    return not value.startswith("_")


def _number(text: str) -> int:
    return int(text[:12]) if text.isdecimal() else MAX_ROUNDS + 1


def _salt_rounds(value: object, constants: Constants) -> bool:
    most = MAX_BCRYPT_COST if constants[0] in ("bf", NOT_CONSTANT) else MAX_ROUNDS
    return isinstance(value, int) and value <= most


def _crypt(value: object, constants: Constants) -> bool:
    return _salt(value, constants)


# What is not here has a regular expression as its deciding argument.
_CHECKS: Mapping[str, Callable[[object, Constants], bool]] = {
    "generate_series": _series,
    "repeat": _repeat,
    "lpad": _length,
    "rpad": _length,
    "array_fill": _dimensions,
    "normal_rand": _count,
    "st_generatepoints": _count,
    "format": _format,
    "current_setting": _setting,
    "pg_input_is_valid": _builtin_type,
    "pg_input_error_info": _builtin_type,
    "crypt": _salt,
    "gen_salt": _salt_rounds,
}
