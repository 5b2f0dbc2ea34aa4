"""
Read the constants of a statement: what an argument's value is, where the text alone tells.

`now()` and its kin count as one fixed moment, the length of a value as 10,000 and a month as 30 days: good
enough to say how many rows a series between two of them has, and for nothing else. What is not certain is
NOT_CONSTANT.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, Final

from postgast import pg_query_pb2 as pb


class _Marker(Enum):
    NOT_CONSTANT = "not constant"


NOT_CONSTANT: Final = _Marker.NOT_CONSTANT
#: The moment that stands for now(); only differences to it count.
NOW = datetime(2000, 1, 1, tzinfo=UTC)
_CLOCKS = frozenset({"now", "transaction_timestamp", "statement_timestamp", "clock_timestamp"})
# How long an array or a text of a row is, nobody knows before; it is in memory already, so it is not endless.
_SIZES = frozenset(
    {
        *("array_length", "array_upper", "cardinality", "jsonb_array_length", "json_array_length"),
        *("length", "char_length", "octet_length"),
    }
)
NOMINAL_SIZE = 10_000
# 300,000 years: more than a timestamp holds, less than a timedelta does.
MAX_SECONDS = 1e13
#: Numbers longer than this, on either side of the point, are not looked at.
MAX_DIGITS = 40
_VALUE_CLOCKS = frozenset(
    {
        pb.SVFOP_CURRENT_DATE,
        pb.SVFOP_CURRENT_TIMESTAMP,
        pb.SVFOP_CURRENT_TIMESTAMP_N,
        pb.SVFOP_LOCALTIMESTAMP,
        pb.SVFOP_LOCALTIMESTAMP_N,
    }
)
_UNITS = {
    "microsecond": 1e-6,
    "millisecond": 1e-3,
    "second": 1,
    "sec": 1,
    "minute": 60,
    "min": 60,
    "hour": 3600,
    "day": 86_400,
    "week": 7 * 86_400,
    "month": 30 * 86_400,
    "mon": 30 * 86_400,
    "quarter": 90 * 86_400,
    "year": 365 * 86_400,
    "decade": 3650 * 86_400,
}


def fold(node: Any, parameters: Sequence[object] = ()) -> object:
    """
    Return the value of an expression *node* (libpg_query's), or NOT_CONSTANT.

    None is SQL's NULL; arrays are tuples. *parameters* are the values of $1, $2 …, where they are known.
    """
    kind = node.WhichOneof("node")
    reader = _READERS.get(kind)
    return NOT_CONSTANT if reader is None else reader(getattr(node, kind), parameters)


def as_moment(value: object) -> datetime | None:
    """Read a date or timestamp out of a folded value; None when it is none or has no end (`infinity`)."""
    if isinstance(value, datetime):
        return value
    if not isinstance(value, str):
        return None
    text = value.strip()
    if text.lower() in ("now", "today", "tomorrow", "yesterday"):
        return NOW
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def as_interval(value: object) -> timedelta | None:
    """Read `1 day`, `2 hours 30 minutes`, `01:30:00` out of a folded value; None when unsure."""
    if isinstance(value, timedelta):
        return value
    if not isinstance(value, str):
        return None
    words = value.replace("+", " ").split()
    total = 0.0
    while words:
        word = words.pop(0)
        seconds = _clock_time(word) if ":" in word else _amount(word, words)
        if seconds is None:
            return None
        total += seconds
    return timedelta(seconds=total) if abs(total) < MAX_SECONDS else None


def _amount(word: str, rest: list[str]) -> float | None:
    """Read `3 days` or `3days`, taking the unit from *rest*."""
    digits = word.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = word[len(digits) :] or (rest.pop(0) if rest else "")
    try:
        return float(digits) * _UNITS[unit.lower().removesuffix("s")]
    except (KeyError, ValueError):
        return None


def _clock_time(word: str) -> float | None:
    try:
        parts = [float(part) for part in word.split(":")]
    except ValueError:
        return None
    return sum(part * scale for part, scale in zip(parts, (3600, 60, 1), strict=False))


def _constant(node: Any, _: Sequence[object]) -> object:
    if node.isnull:
        return None
    match node.WhichOneof("val"):
        case "ival":
            return int(node.ival.ival)
        case "fval":
            return _number(node.fval.fval)
        case "boolval":
            return bool(node.boolval.boolval)
        case "sval":
            return str(node.sval.sval)
    return NOT_CONSTANT


def _number(text: str) -> object:
    try:
        value = Decimal(text.replace("_", ""))
    except ArithmeticError:
        # 0x…, 0o…, 0b… of more than 32 bits
        return int(text, 0) if text[:1] == "0" else NOT_CONSTANT
    # Also keeps 1e999999999 from being written out.
    if not value.is_finite() or abs(value.adjusted()) > MAX_DIGITS:
        return NOT_CONSTANT
    return int(value) if value == value.to_integral_value() else value


def _cast(node: Any, parameters: Sequence[object]) -> object:
    value, target = fold(node.arg, parameters), node.type_name
    name = target.names[-1].string.sval if target.names else ""
    if not isinstance(value, str) or target.array_bounds:
        return value
    if name in ("date", "timestamp", "timestamptz"):
        return as_moment(value) or NOT_CONSTANT
    if name == "interval":
        # INTERVAL '1' DAY: the unit stands in the type, where we don't look.
        return as_interval(value) if as_interval(value) is not None else NOT_CONSTANT
    if name in ("int2", "int4", "int8", "numeric", "float4", "float8"):
        return _number(value.strip())
    return value


def _array(node: Any, parameters: Sequence[object]) -> object:
    values = [fold(element, parameters) for element in node.elements]
    return NOT_CONSTANT if NOT_CONSTANT in values else tuple(values)


_OPERATIONS: Mapping[str, Callable[[Any, Any], object]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}


def _operate(node: Any, parameters: Sequence[object]) -> object:
    operation = _OPERATIONS.get(node.name[-1].string.sval)
    if node.kind != pb.AEXPR_OP or operation is None:
        return NOT_CONSTANT
    right = fold(node.rexpr, parameters)
    left = fold(node.lexpr, parameters) if node.HasField("lexpr") else 0
    if isinstance(left, datetime) and isinstance(right, str):
        right = as_interval(right)
    if isinstance(left, datetime) and isinstance(right, int):
        right = timedelta(days=min(abs(right), 10**6)) * (1 if right > 0 else -1)
    numbers = (int, Decimal, datetime, timedelta)
    if not isinstance(left, numbers) or not isinstance(right, numbers):
        return NOT_CONSTANT
    try:
        return operation(left, right)
    except (TypeError, ArithmeticError, ValueError):
        return NOT_CONSTANT


def _call(node: Any, parameters: Sequence[object]) -> object:
    name = node.funcname[-1].string.sval
    if name in _CLOCKS and not node.args:
        return NOW
    if name in _SIZES:
        return NOMINAL_SIZE
    # Truncating moves a moment by less than one unit: the count of rows is off by one.
    if name == "date_trunc" and len(node.args) > 1:
        moment = fold(node.args[1], parameters)
        return moment if isinstance(moment, datetime) else NOT_CONSTANT
    return NOT_CONSTANT


def _parameter(node: Any, parameters: Sequence[object]) -> object:
    return parameters[node.number - 1] if 0 < node.number <= len(parameters) else NOT_CONSTANT


def _clock(node: Any, _: Sequence[object]) -> object:
    return NOW if node.op in _VALUE_CLOCKS else NOT_CONSTANT


_READERS: Mapping[str, Callable[[Any, Sequence[object]], object]] = {
    "a_const": _constant,
    "param_ref": _parameter,
    "type_cast": _cast,
    "a_array_expr": _array,
    "a_expr": _operate,
    "func_call": _call,
    "sqlvalue_function": _clock,
}
