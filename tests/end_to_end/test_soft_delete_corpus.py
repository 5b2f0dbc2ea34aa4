"""
Every handed soft delete case through the proxy as a task's role, in both modes, and straight to PostgreSQL.

`soft`: what the case expects, in tag, rows, visible rows, physical rows and SQLSTATE. `journal`: what the real
DELETE did. With the proxy taken away: nothing that an undo does not bring back.
"""

from pathlib import Path
from typing import Any

import pytest
from end_to_end.soft_cases import NARROWED, Played, World, given, world

from sqlguard.embedded import EmbeddedServer

#: Long: run on the newest server only (.ci/run).
pytestmark = pytest.mark.slow

#: Expected to pass and refused, or refused by another SQLSTATE: docs/soft_delete_cases.md says why.
ARGUED_SOFT = {
    "SD-B25": "SG002",  # temporary tables
    "SD-T03": "P0001",  # the application's own trigger refuses
}
#: What the real DELETE would do and no mode lets through.
REFUSED_JOURNAL = {
    *("SD-B10", "SD-B12", "SD-B13", "SD-B15", "SD-B17", "SD-B18"),
    "SD-B25",
}
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "soft_delete_cases.md"
CASES = [p for p in given("cases") if p.values[0] is None or "agent" in p.values[0]]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("door", ["simple", "extended"])
def test_soft(server: EmbeddedServer, case: dict[str, Any], door: str) -> None:
    with world(server, case, "soft") as made:
        made.earlier()
        kept = case["expect"].get("keeps_stamp")
        stamp = made.stamp(kept["table"], kept["id"]) if kept else None
        played = made.play(door, statements(made, door))
        if case["id"] in ARGUED_SOFT:
            refused(played, ARGUED_SOFT[case["id"]])
        else:
            judge(case, played, server)
        if kept:
            assert made.stamp(kept["table"], kept["id"]) == stamp
            assert stamp is not None
            assert stamp[1] == "earlier"
        assert not played.lost


@pytest.mark.parametrize("case", CASES)
def test_journal(server: EmbeddedServer, case: dict[str, Any]) -> None:
    with world(server, case, "journal") as made:
        made.earlier()
        played = made.play("simple", statements(made, "simple"))
        if case["id"] in REFUSED_JOURNAL:
            refused(played, "SG002")
        else:
            judge_real(case, played, server)
        assert not played.lost


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", ["soft", "journal"])
def test_direct(server: EmbeddedServer, case: dict[str, Any], mode: str) -> None:
    with world(server, case, mode) as made:
        made.earlier()
        played = made.play("direct", case["agent"])
        assert not played.lost, (played.answer, played.report)


def test_document() -> None:
    """Every case that is refused or not exact in some mode is told of, with its reason."""
    text = DOCUMENT.read_text(encoding="utf-8")
    expected = {
        p.values[0]["id"] for p in CASES if p.values[0] and p.values[0]["expect"]["outcome"] == "refuse"
    }
    assert not {i for i in expected | REFUSED_JOURNAL | ARGUED_SOFT.keys() | NARROWED.keys() if i not in text}


def refused(played: Played, sqlstate: str) -> None:
    assert played.answer.sqlstate == sqlstate, played.answer
    assert not played.changed
    assert played.answer.message


def statements(made: World, door: str) -> list[str]:
    """Return what to send; a text without a condition is refused first, then sent with one."""
    case = made.case
    if case["id"] not in NARROWED:
        return list(case["agent"])
    played = made.play(door, case["agent"])
    assert played.answer.sqlstate in ("SG001", "SG002"), played.answer
    assert not played.changed
    return [text.replace(*NARROWED[case["id"]]) for text in case["agent"]]


def judge(case: dict[str, Any], played: Played, server: EmbeddedServer) -> None:
    expect, answer = case["expect"], played.answer
    match expect["outcome"]:
        case "allow":
            assert answer.sqlstate is None, answer
            if "command_tag_count" in expect:
                assert answer.count == expect["command_tag_count"], answer
                assert answer.tag == case["real_delete"]["tag"]
            if "returned_rows" in expect:
                same_rows(answer.rows, expect["returned_rows"], case)
        case "db_error":
            assert answer.sqlstate in sqlstates(expect["sqlstate"], case, server), answer
        case "refuse":
            assert (answer.sqlstate or "").startswith("SG"), answer
            assert answer.message, answer
            assert answer.hint, answer
    if expect.get("nothing_changes"):
        assert not played.changed, answer
    for table, rows in expect["visible"].items():
        same_rows(played.visible[table], rows, case, ordered=False)
    assert played.physical == expect["physical_rows"]
    not_naive(case, played)


def judge_real(case: dict[str, Any], played: Played, server: EmbeddedServer) -> None:
    real, answer = case["real_delete"], played.answer
    if "error" in real:
        assert answer.sqlstate in sqlstates(real["error"]["sqlstate"], case, server), answer
        assert not played.changed
        return
    assert answer.sqlstate is None, answer
    assert answer.tag == real["tag"]
    if "rows" in real:
        same_rows(answer.rows, real["rows"], case)
    for table, rows in real.get("rows_left", {}).items():
        if table in played.visible:
            same_rows(played.visible[table], rows, case, ordered=False)


def sqlstates(wanted: str, case: dict[str, Any], server: EmbeddedServer) -> set[str]:
    """RESTRICT has an SQLSTATE of its own since PostgreSQL 18."""
    if wanted == "23503" and server.version >= 18 and "RESTRICT" in case["setup"]:
        return {"23503", "23001"}
    if wanted == "0A000" and "CREATE RULE" in case["setup"]:
        # The pre-flight refuses to guard a table with a rule, and nothing is written where nothing guards.
        return {"0A000", "SG002"}
    return {wanted}


def same_rows(found: Any, wanted: list[list[Any]], case: dict[str, Any], *, ordered: bool = True) -> None:
    rows, given_rows = [tuple(r) for r in found or ()], [tuple(r) for r in wanted]
    if ordered and "ORDER BY" in case["agent"][-1]:
        assert rows == given_rows
    else:
        assert sorted(rows, key=repr) == sorted(given_rows, key=repr)


def not_naive(case: dict[str, Any], played: Played) -> None:
    """Whatever the naive rewrite gets wrong must not be what came out."""
    naive = case.get("naive_result") or {}
    ours = {
        "count": played.answer.count,
        "visible": {t: sorted(map(list, rows), key=repr) for t, rows in played.visible.items()},
        "physical_rows": played.physical,
        "rows": None if played.answer.rows is None else [list(r) for r in played.answer.rows],
    }
    wrong = {k: naive.get(k) for k in naive.get("differs_in", ()) if k in ours}
    if "visible" in wrong:
        wrong["visible"] = {t: sorted(rows, key=repr) for t, rows in (wrong["visible"] or {}).items()}
    assert not wrong or any(ours[k] != v for k, v in wrong.items()), naive
