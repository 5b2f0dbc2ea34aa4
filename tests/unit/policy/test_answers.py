"""What answers the functions that a statement calls, and when its arguments are known."""

import pytest
from guard_world import SESSION, context

from sqlguard import gate as gates
from sqlguard.annotation import EMPTY
from sqlguard.gate import Gate
from sqlguard.steps import Answer, read_answers

GATE = Gate(
    context(functions={"app.refund(integer)": {"tier": "compensable", "compensation": "app.back(integer)"}})
)


def answers(text: str, *params: object) -> list[tuple[str, object]]:
    (decision,) = GATE.decide(text, SESSION)
    assert decision.allowed
    intent = gates.intent(decision, params or None, EMPTY, via="test")
    found = read_answers(intent.compensation)
    assert all(a == Answer("app.back(integer)", "reversal", "sql", a.arguments) for a in found)
    return [(a.name, a.arguments) for a in found]


@pytest.mark.parametrize(
    ("text", "params", "arguments"),
    [
        ("SELECT app.refund(5)", (), [("5",)]),
        ("SELECT refund(-5), refund(7), refund(7)", (), [("-5",), ("7",), ("7",)]),
        ("SELECT refund('6'::int) AS done", (), [("6",)]),
        ("SELECT refund(NULL)", (), [(None,)]),
        ("SELECT refund($1)", ("8",), [("8",)]),
        ("SELECT refund($1)", (None,), [(None,)]),
        ("SELECT refund($1)", (), [None]),
        ("SELECT * FROM app.refund(5)", (), [("5",)]),
        ("SELECT refund(id) FROM accounts", (), [None]),
        ("SELECT refund(5) WHERE false", (), [None]),
        ("SELECT refund(5) + 1", (), [None]),
        ("SELECT refund(1 + 1)", (), [None]),
        ("SELECT refund(5) FROM accounts", (), [None]),
        ("UPDATE accounts SET balance = refund(9) WHERE id = 1", (), [None]),
        ("SELECT 1", (), []),
        ("UPDATE accounts SET balance = 9 WHERE id = 1", (), []),
    ],
)
def test_arguments(text: str, params: tuple[object, ...], arguments: list[object]) -> None:
    assert answers(text, *params) == [("app.back(integer)", a) for a in arguments]
