"""Every rule's docstring is its page, and what the page says is so."""

import re
from collections.abc import Iterator

import guard_world
import pytest

from sqlguard.errors import SqlguardError
from sqlguard.policy.registry import RULES
from sqlguard.policy.verdict import Effect

SECTIONS = ("Why", "Finds", "Ignores", "Misses")


def section(page: str, name: str) -> str:
    match = re.search(rf"## {name}\n(.*?)(?=\n\s*## |\Z)", page, re.DOTALL)
    return match[1] if match else ""


def statements(name: str) -> Iterator[tuple[str, str]]:
    for id_, rule in RULES.items():
        lines = section(rule.page, name).splitlines()
        for line in lines:
            if line.startswith(" " * 8) and line.strip():
                yield id_, line.strip()


@pytest.mark.parametrize("id_", RULES)
def test_a_page_has_its_sections(id_: str) -> None:
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", id_)
    page = RULES[id_].page
    assert page.strip()
    for name in SECTIONS:
        assert section(page, name).strip(), name
    assert any(i == id_ for i, _ in statements("Finds"))
    assert any(i == id_ for i, _ in statements("Ignores"))


@pytest.mark.parametrize(("id_", "text"), list(statements("Finds")))
def test_it_finds(id_: str, text: str) -> None:
    assert id_ in guard_world.verdict(text).rules


@pytest.mark.parametrize(("id_", "text"), list(statements("Ignores")))
def test_it_ignores(id_: str, text: str) -> None:
    try:
        found = guard_world.verdict(text)
    except SqlguardError:
        pytest.fail("not understood")
    objections = [f for f in found.findings if f.rule == id_ and f.effect > Effect.ALLOW]
    assert not objections
    if id_.startswith("allow-"):
        assert id_ not in found.rules


@pytest.mark.parametrize(("id_", "text"), list(statements("Finds")))
def test_agents_are_told_what_is_wrong_and_never_which_rule(id_: str, text: str) -> None:
    for finding in guard_world.verdict(text).findings:
        if finding.effect > Effect.REWRITE:
            assert finding.hint, text
            said = f"{finding.message} {finding.hint} {finding.detail or ''}".lower()
            assert finding.rule not in said
            assert not finding.message.endswith(".")
            assert ".py" not in said
