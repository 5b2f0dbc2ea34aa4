"""
The reviewed lists as values, read once from the package's own files when first asked for.

`scripts/build_functions.py` writes those files; nothing here judges.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType

from sqlguard.functions.model import FunctionClass, FunctionEffect

SYSTEM_SCHEMAS = ("pg_catalog", "information_schema")
#: The arguments of a function that is documented but was never seen on a server.
ANY_ARGUMENTS = ("*",)
#: The newest release in the lists.
NEWEST = 18
_NOT_TYPES = frozenset({"", "internal", "cstring", "trigger", "event_trigger", "void"})


@dataclass(frozen=True, slots=True)
class Entry:
    """One function with its arguments; `versions` are PostgreSQL's (`15-18`) or an extension's own."""

    name: str
    args: tuple[str, ...]
    kind: str
    volatility: str
    returns: str
    defaults: int
    variadic: bool
    versions: str
    judged: FunctionClass

    def is_in(self, server_version: int) -> bool:
        """Whether a server of that version has it, as far as the list says which ones do."""
        first, _, last = self.versions.partition("-")
        if not (first.isdigit() and (last or first).isdigit()):
            return True
        # A release that is newer than the list has what the newest one in it has.
        return int(first) * 10_000 <= server_version and (
            server_version < (int(last or first) + 1) * 10_000 or int(last or first) >= NEWEST
        )

    def takes(self, arguments: int) -> bool:
        """Whether a call with so many arguments may mean this function."""
        if self.args == ANY_ARGUMENTS:
            return True
        least = len(self.args) - max(self.defaults, int(self.variadic))
        return arguments >= least and (self.variadic or arguments <= len(self.args))


def _rows(name: str) -> Iterator[list[str]]:
    lines = files("sqlguard.functions").joinpath(name).read_text("utf-8").splitlines()
    return (line.split("\t") for line in lines[1:])


@cache
def _functions(file: str) -> Mapping[tuple[str, str], tuple[Entry, ...]]:
    # Thousands of rows share a few dozen classes.
    classes: dict[tuple[str, str, str], FunctionClass] = {}
    found: dict[tuple[str, str], list[Entry]] = {}
    for row in _rows(file):
        (
            of,
            name,
            args,
            kind,
            volatility,
            _,
            returns,
            _,
            defaults,
            variadic,
            versions,
            effect,
            argument,
            why,
        ) = row
        key = (effect, argument, why)
        if key not in classes:
            number = int(argument) if argument else None
            classes[key] = FunctionClass(FunctionEffect(effect), why, number)
        entry = Entry(
            name=name,
            args=tuple(args.split(",")) if args else (),
            kind=kind,
            volatility=volatility,
            returns=returns,
            defaults=int(defaults or 0),
            variadic=bool(variadic),
            versions=versions,
            judged=classes[key],
        )
        found.setdefault((of, name), []).append(entry)
    return MappingProxyType({key: tuple(entries) for key, entries in found.items()})


def builtins() -> Mapping[tuple[str, str], tuple[Entry, ...]]:
    """Every function of pg_catalog and information_schema, by schema and name."""
    return _functions("functions.tsv")


def extensions() -> Mapping[tuple[str, str], tuple[Entry, ...]]:
    """Every function of the extensions we know, by extension and name."""
    return _functions("extensions.tsv")


@cache
def operators() -> Mapping[str, Mapping[tuple[str, str], tuple[str, tuple[str, ...]]]]:
    """Operators of pg_catalog: name -> (left, right) -> its function and that one's arguments."""
    found: dict[str, dict[tuple[str, str], tuple[str, tuple[str, ...]]]] = {}
    for name, left, right, function, args, _ in _rows("operators.tsv"):
        found.setdefault(name, {})[left, right] = (function, tuple(args.split(",")))
    return MappingProxyType(found)


@cache
def casts() -> Mapping[str, Mapping[str, tuple[str, tuple[str, ...]] | None]]:
    """Casts between built-in types: target -> source -> function and its arguments, or None without one."""
    found: dict[str, dict[str, tuple[str, tuple[str, ...]] | None]] = {}
    for source, target, _, _, function, args, _ in _rows("casts.tsv"):
        found.setdefault(target, {})[source] = (function, tuple(args.split(","))) if function else None
    return MappingProxyType(found)


@cache
def relations() -> Mapping[tuple[str, str], FunctionClass]:
    """Relations of pg_catalog and information_schema, by schema and name."""
    return MappingProxyType(
        {(row[0], row[1]): FunctionClass(FunctionEffect(row[4]), row[5]) for row in _rows("relations.tsv")}
    )


@cache
def settings() -> Mapping[str, FunctionEffect]:
    """Settings of the server by name, in lower case: harmless or infrastructure."""
    return MappingProxyType({row[0].lower(): FunctionEffect(row[1]) for row in _rows("settings.tsv")})


@cache
def types() -> frozenset[str]:
    """Built-in types as format_type() names them: whatever a built-in function takes or returns."""
    found: set[str] = set()
    for (schema, _), entries in builtins().items():
        if schema == "pg_catalog":
            for entry in entries:
                found.update(entry.args, [entry.returns.removeprefix("setof ")])
    return frozenset(found - _NOT_TYPES)
