"""
Ask what a function, operator, cast, setting or system view does. Nothing is refused here: a rule decides.

The one idea: only what is in the reviewed lists is known; everything else is `unknown`, and unknown is a
refusal. Names are the catalog's own, folded and unquoted already: `pg_sleep`, never `PG_SLEEP`.
"""

from functools import lru_cache

from sqlguard.functions import data
from sqlguard.functions.data import Entry
from sqlguard.functions.model import FunctionClass, FunctionEffect, worst

UNKNOWN = FunctionClass(FunctionEffect.UNKNOWN, "is not in the reviewed list")
_HARMLESS = FunctionClass(FunctionEffect.HARMLESS)
_INFRASTRUCTURE = FunctionClass(FunctionEffect.INFRASTRUCTURE, "shows how the server is set up")
# TABLESAMPLE methods are handlers that nobody calls; the clause itself only reads.
_SAMPLING = {
    "bernoulli": None,
    "system": None,
    "system_rows": "tsm_system_rows",
    "system_time": "tsm_system_time",
}


@lru_cache(maxsize=4096)
def classify(
    name: str,
    arg_types: tuple[str, ...] | None = None,
    *,
    schema: str = "pg_catalog",
    arguments: int | None = None,
) -> FunctionClass:
    """
    Say what the built-in function *name* does.

    *arg_types* are the declared types as format_type() names them. Where they are unknown, or name no
    overload exactly, the worst overload that takes *arguments* arguments answers (of all overloads, when
    that is None).
    """
    return _judge(data.builtins().get((schema, name), ()), arg_types, arguments)


@lru_cache(maxsize=4096)
def classify_extension(
    extension: str,
    name: str,
    arg_types: tuple[str, ...] | None = None,
    *,
    arguments: int | None = None,
) -> FunctionClass:
    """Say what function *name* of *extension* does, whatever schema the extension was put in."""
    return _judge(data.extensions().get((extension, name), ()), arg_types, arguments)


@lru_cache(maxsize=4096)
def classify_operator(name: str, left: str | None = None, right: str | None = None) -> FunctionClass:
    """
    Say what the built-in operator *name* does: its function's class.

    None for a side means that its type is unknown; a prefix operator has the left type `''`.
    """
    overloads = data.operators().get(name, {})
    # A pair of types that no operator has is resolved by the server through casts: then any of them may
    # answer.
    exact = (
        [overloads[left, right]]
        if left is not None and right is not None and (left, right) in overloads
        else []
    )
    some = exact or list(overloads.values())
    return worst([classify(function, args) for function, args in some]) if some else UNKNOWN


@lru_cache(maxsize=4096)
def classify_cast(source: str | None, target: str) -> FunctionClass:
    """
    Say what a cast between built-in types does; *source* None means unknown.

    Without an entry in pg_cast the input function of *target* runs; those of built-in types are harmless.
    """
    if target not in data.types():
        return UNKNOWN
    by_source = data.casts().get(target, {})
    some = list(by_source.values()) if source is None else [by_source.get(source)]
    return worst([classify(*call) if call else _HARMLESS for call in some] or [_HARMLESS])


def classify_setting(name: str) -> FunctionClass:
    """Say what SHOW *name* and current_setting(*name*) show; custom settings may hold secrets."""
    lowered = name.lower()
    if lowered.startswith("sqlguard."):
        return _HARMLESS
    if data.settings().get(lowered) is FunctionEffect.HARMLESS:
        return _HARMLESS
    return _INFRASTRUCTURE


def classify_relation(name: str, *, schema: str = "pg_catalog") -> FunctionClass:
    """Say what reading a system table or view shows: what its worst function does."""
    return data.relations().get((schema, name), UNKNOWN)


def classify_sampling(method: str) -> FunctionClass:
    """Say what TABLESAMPLE *method* does."""
    return _HARMLESS if method in _SAMPLING else UNKNOWN


def known(name: str, *, schema: str = "pg_catalog") -> bool:
    """Whether *schema* has a function of that name in any supported release."""
    return (schema, name) in data.builtins()


def known_extension(extension: str) -> bool:
    """Whether the functions of *extension* were reviewed."""
    return any(of == extension for of, _ in data.extensions())


def _judge(
    entries: tuple[Entry, ...], arg_types: tuple[str, ...] | None, arguments: int | None
) -> FunctionClass:
    if not entries:
        return UNKNOWN
    if arg_types is not None:
        exact = [e.judged for e in entries if e.args == arg_types]
        if exact:
            return exact[0]
        arguments = len(arg_types)
    fitting = [e.judged for e in entries if arguments is None or e.takes(arguments)]
    # No overload takes so many: the server will refuse the call, unless our list is behind. So the worst.
    return worst(fitting or [e.judged for e in entries])
