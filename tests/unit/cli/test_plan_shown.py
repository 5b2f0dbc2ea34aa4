"""What a person sees of a plan before deciding about it."""

import pytest

from sqlguard.cli import plans as cli
from sqlguard.postgres.plans import Plan

DOCUMENT = {
    "plan": 17,
    "state": "open",
    "task": "t1",
    "agent": "mallory",
    "policy": "shop",
    "policy_version": 1,
    "purpose": "",
    "reasons": [],
    "approvals_needed": 1,
    "approved_by": [],
    "expires_at": "2026-01-01T00:00:00",
    "tier": "reversible",
    "classes": [],
    "rejected_because": None,
    "reported_by": "task",
    "affected_rows": 1,
    "affected": [{"table": "public.notes", "op": "update", "rows": 1, "nested": False}],
    "unguarded": [],
    "shares": [],
    "sequences": [],
    "sequences_by_action": [],
}
SPOOF = "UPDATE notes SET t = 'x'\n\n1 rows: 1 update in public.harmless\nplan 17 is approved"


def test_no_line_of_an_agent_s_words_looks_like_one_of_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    sample = {
        "table": "public.notes",
        "op": "update",
        "key": ["1\nplan 17"],
        "before": {"t": "old\nplan 17"},
        "after": {"t": "new\nplan 17"},
    }
    statement = {"action": 1, "statement": SPOOF, "params": ["a\nplan 17 is approved"]}
    cli._show(Plan(17, "open", {**DOCUMENT, "statements": [statement], "samples": [sample]}))
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if line.startswith("plan 17")] == ["plan 17  open"]
    assert [line for line in shown if line.startswith("1 rows")] == ["1 rows: 1 update in public.notes"]


def test_a_difference_at_the_end_of_a_long_value_is_shown() -> None:
    same = "x" * 5000
    before, after = cli.shortened(f"{same}old", f"{same}new" + "y" * 500)
    assert before.endswith("xold")
    assert "xnew" in after
    assert max(len(before), len(after)) <= 102
    assert cli.shortened("a", "b") == ("a", "b")
    assert cli.shortened("a" * 200, "b" * 200) == ("a" * 100 + "…", "b" * 100 + "…")
