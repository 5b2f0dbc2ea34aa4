"""
What answers a statement when it is undone: the compensations that the policy lists for the functions it calls.

Rows come back from their images. What a function did elsewhere does not, so the policy names a function that
answers it, called with the same arguments. They are known when the statement is nothing but such calls, with
constants or parameters; else the journal says that there is something to answer, and a person has to do it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from sqlguard.policy.calls import rule_for
from sqlguard.policy.context import Context
from sqlguard.statement.model import Statement
from sqlguard.steps import Answer

#: A parameter of the statement, until its value is known.
_PLACE = "\0$"
_PLAIN_SELECT = frozenset({"targetList", "fromClause", "limitOption", "op"})


def answers_to(statement: Statement, context: Context) -> tuple[Answer, ...]:
    """Return what answers the functions that *statement* calls, in the order in which they are called."""
    if not context.policy.functions or not statement.calls:
        return ()
    names = _compensations(statement, context)
    if not names:
        return ()
    found = []
    for call in _direct(statement.tree):
        name = _last(call)
        if name in names:
            found.append(Answer(names[name], where="sql", arguments=_arguments(call)))
    told = {a.name for a in found}
    return (*found, *(Answer(n, where="sql", arguments=None) for n in names.values() if n not in told))


def bound(answers: Sequence[Answer], params: Sequence[object] | None) -> tuple[Answer, ...]:
    """Return *answers* with the values of the statement's parameters in their places."""
    return tuple(_bound(a, params or ()) for a in answers)


def _bound(answer: Answer, params: Sequence[object]) -> Answer:
    if not answer.arguments:
        return answer
    values: list[str | None] = []
    for given in answer.arguments:
        if given is None or not given.startswith(_PLACE):
            values.append(given)
            continue
        number = int(given.removeprefix(_PLACE))
        if number > len(params):
            return replace(answer, arguments=None)
        value = params[number - 1]
        values.append(None if value is None else str(value))
    return replace(answer, arguments=tuple(values))


def _compensations(statement: Statement, context: Context) -> dict[str, str]:
    """Return the compensation of each function that the statement may mean, by the function's bare name."""
    found: dict[str, str] = {}
    for call in statement.calls:
        for oid in call.candidates:
            function = context.catalog.functions.get(oid)
            rule = rule_for(function, context) if function is not None else None
            if rule is not None and rule.compensation is not None:
                found[call.name] = rule.compensation
    return found


def _direct(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield the calls that the statement makes exactly once each: `SELECT f(1), g(2)`, `SELECT * FROM f(1)`."""
    select = tree.get("SelectStmt") if isinstance(tree, dict) else None
    if not isinstance(select, dict) or not select.keys() <= _PLAIN_SELECT:
        return
    sources = select.get("fromClause", [])
    targets = [t.get("ResTarget", {}).get("val", {}) for t in select.get("targetList", [])]
    if not sources:
        yield from (t["FuncCall"] for t in targets if "FuncCall" in t)
    elif len(sources) == 1 and not any("FuncCall" in t for t in targets):
        functions = sources[0].get("RangeFunction", {}).get("functions", [])
        items = [f.get("List", {}).get("items", [{}])[0] for f in functions]
        if len(items) == 1 and "FuncCall" in items[0]:
            yield items[0]["FuncCall"]


def _last(call: dict[str, Any]) -> str:
    return str(call["funcname"][-1]["String"].get("sval", ""))


def _arguments(call: dict[str, Any]) -> tuple[str | None, ...] | None:
    if call.keys() & {"agg_filter", "agg_order", "over", "func_variadic", "agg_star"}:
        return None
    values: list[str | None] = []
    for node in call.get("args", []):
        known, value = _value(node)
        if not known:
            return None
        values.append(value)
    return tuple(values)


def _value(node: dict[str, Any]) -> tuple[bool, str | None]:
    """Return whether *node* is a constant or a parameter, and its text."""
    if "TypeCast" in node:
        return _value(node["TypeCast"]["arg"])
    if "ParamRef" in node:
        return True, f"{_PLACE}{node['ParamRef'].get('number', 0)}"
    constant = node.get("A_Const")
    if constant is None:
        return False, None
    if constant.get("isnull"):
        return True, None
    for kind, member in (("ival", "ival"), ("fval", "fval"), ("sval", "sval"), ("bsval", "bsval")):
        if kind in constant:
            default: object = 0 if kind == "ival" else ""
            return True, str(constant[kind].get(member, default))
    return True, "true" if constant.get("boolval", {}).get("boolval") else "false"
