"""
What a call may do: built-in functions by the reviewed list, users' functions by policy or by their bodies.

A call that may mean several functions is judged by all of them.
"""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from sqlguard import functions
from sqlguard.catalog import FIRST_NORMAL_OID, SYSTEM_SCHEMAS, Function
from sqlguard.functions.model import FunctionClass, FunctionEffect
from sqlguard.policy import bodies
from sqlguard.policy.context import Context
from sqlguard.policy.model import FunctionRule
from sqlguard.policy.verdict import Effect
from sqlguard.statement.model import Call


@dataclass(frozen=True, slots=True)
class Objection:
    """Why a call does not pass, for the agent."""

    effect: Effect
    message: str
    hint: str | None = None
    sqlstate: str = "SG002"
    detail: str | None = None


_HARMLESS = FunctionEffect.HARMLESS
#: What PostgreSQL makes along with a range type, by the names of its C functions.
_CONSTRUCTORS = frozenset(
    {
        "range_constructor2",
        "range_constructor3",
        "multirange_constructor0",
        "multirange_constructor1",
        "multirange_constructor2",
    }
)
#: It gives back locks that only this session can hold; asyncpg and Npgsql tidy up with it.
_RELEASES = frozenset({"pg_advisory_unlock_all"})
#: What would pass instead of a call that is refused.
_INSTEAD = {
    "nextval": "leave the column to its default and read the number with RETURNING, or call it in the INSERT itself"
}
_DOES = {
    FunctionEffect.INFRASTRUCTURE: "shows how the server is set up",
    FunctionEffect.READS_DATA: "reads data that the statement does not name",
    FunctionEffect.DENIAL_OF_SERVICE: "can hold the session or fill memory",
    FunctionEffect.INTERNAL: "is for the server itself",
    FunctionEffect.SIDE_EFFECT: "has effects that can't be taken back",
    FunctionEffect.WRITES: "changes data",
}


def objection(call: Call, context: Context, path: tuple[str, ...]) -> Objection | None:
    """Return why *call* does not pass, or None; *path* is the search_path that bodies without one run with."""
    if call.what == "column" and (call.builtin or call.candidates):
        return Objection(
            Effect.REFUSE,
            f"`.{call.name}` is no column: it calls the function {call.name}()",
            "select columns by their names, and call functions with parentheses",
        )
    strongest: Objection | None = None
    if call.builtin:
        strongest = _builtin(call)
    elif not call.candidates:
        return _unknown(call)
    for oid in call.candidates:
        found = _user(oid, call, context, path)
        if found is not None and (strongest is None or found.effect > strongest.effect):
            strongest = found
    return strongest


def _builtin(call: Call) -> Objection | None:
    judged = classify(call)
    if call.name in _RELEASES or (
        call.name == "current_setting" and functions.NOT_CONSTANT in call.values[:1]
    ):
        # A setting that only the data or the client names: PostgreSQL itself hides the superuser's ones.
        return None
    values = call.values or (functions.NOT_CONSTANT,) * call.arguments
    if functions.harmless_with(call.name, judged, values):
        return None
    found = _from_class(_shown(call), judged)
    return replace(found, hint=_INSTEAD[call.name]) if found and call.name in _INSTEAD else found


def classify(call: Call) -> FunctionClass:
    """Return the class of the built-in that *call* may mean."""
    if call.what == "operator":
        return functions.classify_operator(call.name)
    if call.what == "sampling":
        return functions.classify_sampling(call.name)
    return functions.classify(call.name, None, schema=call.schema or "pg_catalog", arguments=call.arguments)


def _from_class(shown: str, judged: FunctionClass) -> Objection | None:
    effect = judged.effect
    if effect is _HARMLESS and judged.bounded_argument is None:
        return None
    bounded = judged.bounded_argument is not None and effect in (_HARMLESS, FunctionEffect.DENIAL_OF_SERVICE)
    if bounded:
        return Objection(
            Effect.APPROVE,
            f"{shown} could run for very long or make a very large value here",
            "use a smaller constant, or a simpler pattern",
        )
    if effect is FunctionEffect.INFRASTRUCTURE:
        return Objection(
            Effect.APPROVE,
            f"{shown} {_DOES[effect]}",
            "leave it out, or have it approved",
            detail=judged.reason or None,
        )
    does = _DOES.get(effect, "is not known to be harmless")
    return Objection(Effect.REFUSE, f"{shown} {does}", "leave it out", detail=judged.reason or None)


def _shown(call: Call) -> str:
    if call.what == "operator":
        return f"operator `{call.name}`"
    if call.what == "sampling":
        return f"TABLESAMPLE {call.name}"
    return f"`{call.schema}.{call.name}()`" if call.schema else f"`{call.name}()`"


def _unknown(call: Call) -> Objection:
    name = f"{call.schema}.{call.name}" if call.schema else call.name
    if call.what == "operator":
        return Objection(Effect.REFUSE, f"operator does not exist: {name}", "check its operands", "42883")
    hint = "no function of that name is known here; check its name and the number of its arguments"
    return Objection(Effect.REFUSE, f"function {name} does not exist", hint, "42883")


def rule_for(function: Function, context: Context) -> FunctionRule | None:
    """Return what the policy says about *function*: by signature, by name, or by a pattern of either."""
    listed = context.policy.functions
    if not listed:
        return None
    signature = function.signature
    name = f"{function.schema}.{function.name}"
    for key, rule in listed.items():
        compact = key.replace(" ", "") if "(" in key else key
        if (
            compact in (signature.replace(" ", ""), name)
            or fnmatchcase(signature, key)
            or fnmatchcase(name, key)
        ):
            return rule
    return None


def _user(oid: int, call: Call, context: Context, path: tuple[str, ...]) -> Objection | None:
    key = (oid, call.values, path)
    judged = context.judged.setdefault("functions", {})
    if key not in judged:
        before = len(judged)
        found = _judge(oid, call, context, path)
        if found is not None:
            # What was found harmless on the way may call this one, which was taken for harmless meanwhile.
            for other in list(judged)[before:]:
                del judged[other]
        judged[key] = found
    return judged[key]  # type: ignore[no-any-return]


def _judge(  # noqa: PLR0911  one return per kind
    oid: int, call: Call, context: Context, path: tuple[str, ...]
) -> Objection | None:
    function = context.catalog.functions.get(oid)
    if function is None:
        return Objection(Effect.REFUSE, f"{_shown(call)} is not known", "leave it out", "SG007")
    if function.schema in SYSTEM_SCHEMAS and oid < FIRST_NORMAL_OID:
        return _with_the_server(function, call)
    if rule_for(function, context) is not None or _is_constructor(function):
        return None
    shown = f"`{function.schema}.{function.name}()`"
    if function.extension is not None:
        judged = functions.classify_extension(function.extension, function.name, function.arg_type_names)
        values = call.values or (functions.NOT_CONSTANT,) * len(function.arg_types)
        if functions.harmless_with(function.name, judged, values):
            return None
        if judged.effect is not FunctionEffect.UNKNOWN:
            return _from_class(shown, judged)
    if function.kind == "a":
        return _aggregate(function, call, context, path)
    reason = bodies.objection(function, context, path)
    if reason is None:
        return None
    return Objection(
        Effect.REFUSE,
        f"{shown} {reason}",
        f"leave it out, or ask for it to be listed in the policy as `{function.signature}`",
    )


def _is_constructor(function: Function) -> bool:
    return function.language == "internal" and function.source in _CONSTRUCTORS


def _with_the_server(function: Function, call: Call) -> Objection | None:
    """Judge a built-in function that is called by another name: an operator's, a cast's, an aggregate's."""
    judged = functions.classify(function.name, function.arg_type_names, schema=function.schema)
    if judged.effect is FunctionEffect.INTERNAL and call.what == "function":
        # A step of an aggregate: PostgreSQL has seen to it that it gets what it is made for.
        return None
    values = (functions.NOT_CONSTANT,) * len(function.arg_types)
    if functions.harmless_with(function.name, judged, values):
        return None
    return _from_class(_shown(call), judged)


def _aggregate(function: Function, call: Call, context: Context, path: tuple[str, ...]) -> Objection | None:
    for oid in function.calls:
        found = _user(oid, call, context, path)
        if found is not None:
            return found
    return None


def is_listed(call: Call, context: Context) -> bool:
    """Whether the policy has a rule for a function that *call* may mean: calling that is more than a read."""
    if not context.policy.functions:
        return False
    found = (context.catalog.functions.get(oid) for oid in call.candidates)
    return any(function is not None and rule_for(function, context) is not None for function in found)


def tier(call: Call, context: Context) -> str:
    """Return the highest tier that the policy gives to a function that *call* may mean."""
    order = ("reversible", "costly", "compensable", "irreversible")
    found = ["reversible"]
    for oid in call.candidates:
        function = context.catalog.functions.get(oid)
        rule = rule_for(function, context) if function is not None else None
        if rule is not None:
            found.append(rule.tier)
    return max(found, key=order.index)
