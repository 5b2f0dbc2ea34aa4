"""Judge the relations of pg_catalog and information_schema: a view is as its worst function."""

from collections.abc import Iterable, Mapping
from typing import Any

from sqlguard.functions.model import FunctionEffect

Judgement = tuple[str, str]
HARMLESS: Judgement = ("harmless", "")


def judge_relations(
    relations: Mapping[tuple[str, str], tuple[str, frozenset[str]]],
    rules: Iterable[Mapping[str, Any]],
    functions: Iterable[tuple[str, str, str]],
) -> dict[tuple[str, str], Judgement]:
    """
    Return effect and reason of each of *relations* (kind, names of functions and relations mentioned).

    *functions* are name, effect, reason of every built-in. A view reads its tables with its owner's rights
    and shows what it chooses to, so tables it mentions do not count: a rule speaks where that is not enough.
    """
    by_rule = {
        name if "." in name else f"pg_catalog.{name}": (rule["effect"], rule["reason"])
        for rule in rules
        for name in rule["names"]
    }
    absent = by_rule.keys() - {f"{schema}.{name}" for schema, name in relations}
    if absent:
        raise SystemExit(f"rules for relations that no server has: {sorted(absent)}")
    by_function: dict[str, Judgement] = {}
    for name, effect, reason in functions:
        by_function[name] = _worst([by_function.get(name, HARMLESS), (effect, reason)])
    kinds = {f"{schema}.{name}": (kind, mentioned) for (schema, name), (kind, mentioned) in relations.items()}

    def judge(name: str) -> Judgement:
        if name in by_rule:
            return by_rule[name]
        kind, mentioned = kinds[name]
        if kind != "v":
            return HARMLESS
        views = [judge(m) for m in mentioned if m in kinds and kinds[m][0] == "v"]
        calls = [by_function[m] for m in mentioned if "." not in m]
        return _worst([HARMLESS, *views, *calls])

    return {(schema, name): judge(f"{schema}.{name}") for schema, name in relations}


def _worst(judgements: list[Judgement]) -> Judgement:
    return max(judgements, key=lambda j: (FunctionEffect(j[0]).rank, j[1]))
