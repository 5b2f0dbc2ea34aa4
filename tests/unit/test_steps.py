"""The registry of tools: what may be registered, and that nothing runs before it is written down."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from sqlguard.errors import ApprovalRequired, NotConfigured
from sqlguard.steps import Answer, Begun, Call, Done, NotDone, Tools, answers_text, read_answers


@dataclass
class Notebook:
    """A journal in memory; a key that has ended gives its result again."""

    calls: list[Call] = field(default_factory=list)
    ends: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)

    def begin(self, call: Call) -> Begun:
        if call.tier == "irreversible":
            raise ApprovalRequired("not yet")
        self.calls.append(call)
        number = len(self.calls)
        for action, kind, detail in self.ends:
            if (
                kind == "committed"
                and call.idempotency_key
                and self.calls[action - 1].idempotency_key == call.idempotency_key
            ):
                return Begun(number, call.idempotency_key, action, detail["result"])
        return Begun(number, call.idempotency_key or f"t:{number}")

    def refused(self, call: Call) -> int:
        self.calls.append(call)
        return len(self.calls)

    def ended(self, action: int, kind: str, detail: Mapping[str, Any]) -> None:
        self.ends.append((action, kind, dict(detail)))


def shop() -> tuple[Tools, list[Any], Any]:
    guard, done = Tools(), []

    @guard.compensation
    def refund(one: Done) -> None:
        done.append(("refund", one.result))

    @guard.tool(tier="compensable", compensation=refund)
    def charge(order: int, cents: int = 5, *, idempotency_key: str = "") -> str:
        done.append(("charge", order, cents, idempotency_key))
        if cents < 0:
            raise TimeoutError
        if cents == 0:
            raise NotDone
        return f"receipt {order}"

    return guard, done, charge


def test_a_call_is_written_down_before_it_is_made_and_after() -> None:
    guard, done, charge = shop()
    book = Notebook()
    with guard.on(book), guard.because("asked for", confidence=0.9):
        assert charge(7) == "receipt 7"
    assert done == [("charge", 7, 5, "t:1")]
    (call,) = book.calls
    assert (call.tool, call.tier, call.arguments) == ("charge", "compensable", {"order": 7, "cents": 5})
    assert (call.answer, call.reason, call.confidence) == (Answer("refund"), "asked for", 0.9)
    assert book.ends == [(1, "committed", {"result": "receipt 7"})]


def test_a_key_that_was_done_is_answered_and_not_called_again() -> None:
    guard, done, charge = shop()
    book = Notebook()
    with guard.on(book):
        assert charge(7, idempotency_key="k") == charge(7, idempotency_key="k") == "receipt 7"
        with guard.because(idempotency_key="k"):
            assert charge(7) == "receipt 7"
    assert done == [("charge", 7, 5, "k")]


def test_only_a_tool_that_says_so_had_no_effect() -> None:
    guard, _, charge = shop()
    book = Notebook()
    with guard.on(book):
        with pytest.raises(TimeoutError):
            charge(7, -1)
        with pytest.raises(NotDone):
            charge(7, 0)
    assert [(kind, detail["effect"]) for _, kind, detail in book.ends] == [
        ("failed", "unknown"),
        ("failed", "none"),
    ]


def test_outside_of_a_task_nothing_runs() -> None:
    guard, done, charge = shop()
    with pytest.raises(NotConfigured, match="outside of any task"):
        charge(7)
    with pytest.raises(NotConfigured), guard.step("x", {}, tier="compensable", compensation="refund"):
        done.append("ran")
    assert done == []


def test_an_irreversible_call_is_refused_with_its_ticket() -> None:
    guard, done = Tools(), []
    guard.tool(tier="irreversible", name="launch")(print)
    launch = guard.tool(tier="irreversible", name="wipe")(done.append)
    book = Notebook()
    with guard.on(book), pytest.raises(ApprovalRequired) as caught:
        launch("sda")
    assert (done, caught.value.detail) == ([], "action 1")
    assert "step approve 1" in (caught.value.hint or "")


def test_a_block_is_a_step_too() -> None:
    guard, _, _ = shop()
    book = Notebook()
    with guard.on(book), guard.step("ship", {"to": "Ada"}, tier="compensable", compensation="refund") as step:
        assert step.key == "t:1"
        step.result = {"parcel": 9}
    assert book.ends == [(1, "committed", {"result": {"parcel": 9}})]


def test_asynchronous_tools() -> None:
    guard = Tools()
    book = Notebook()

    @guard.tool(tier="compensable", mitigation="say_sorry")
    async def mail(to: str) -> int:
        await asyncio.sleep(0)
        return len(to)

    async def main() -> int:
        with guard.on(book):
            return await mail("ada@shop.example")

    assert asyncio.run(main()) == 16
    assert book.ends == [(1, "committed", {"result": 16})]
    assert book.calls[0].answer == Answer("say_sorry", "mitigation")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"tier": "harmless"}, "a tier is one of"),
        ({"tier": "compensable"}, "name its compensation"),
        ({"tier": "irreversible", "compensation": "back"}, "irreversible"),
        ({"tier": "reversible", "mitigation": "sorry"}, "takes nothing back"),
        ({"tier": "compensable", "compensation": "a", "mitigation": "b"}, "not both"),
    ],
)
def test_what_can_not_be_registered(wrong: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Tools().tool(**wrong)(print)  # type: ignore[arg-type]


def test_two_of_one_name() -> None:
    guard = Tools()
    guard.tool(tier="irreversible", name="x")(print)
    with pytest.raises(ValueError, match="two tools"):
        guard.tool(tier="irreversible", name="x")(repr)
    guard.compensation(print)
    with pytest.raises(ValueError, match="two compensations"):
        guard.compensation(type("", (), {"__name__": "print", "__call__": print})())


def test_answers_are_read_as_they_were_written() -> None:
    answers = (
        Answer("refund"),
        Answer("sorry", "mitigation"),
        Answer("app.back(integer)", where="sql", arguments=("5", None)),
        Answer("app.back(integer)", where="sql", arguments=None),
    )
    assert read_answers(answers_text(answers)) == answers
    assert read_answers(None) == read_answers("none") == read_answers("[3]") == read_answers('{"a": 1}') == ()
    assert answers_text(()) is None
