"""Commands that need no database, run in-process as `main` runs them: output, JSON, exit status."""

import json
import sys
from pathlib import Path

import pytest

from sqlguard.cli import main

POLICY = """
name = "support"
[tables."public.*"]
select = true
[tables."public.orders"]
update = ["status"]
delete = "soft"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SQLGUARD_DSN", raising=False)
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "support.toml").write_text(POLICY, encoding="utf-8")
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["sqlguard", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("sql", "status", "verdict"),
    [
        ("SELECT * FROM orders", 0, "allow"),
        ("DELETE FROM orders WHERE id = 1", 0, "rewrite"),
        ("DELETE FROM orders", 1, "refuse"),
        ("DROP TABLE orders", 1, "refuse"),
        ("SELECT FROM WHERE", 1, "refuse"),
    ],
)
def test_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sql: str, status: int, verdict: str
) -> None:
    assert run(monkeypatch, "check", sql, "--json") == status
    (statement,) = json.loads(capsys.readouterr().out)["statements"]
    assert statement["verdict"] == verdict
    assert statement["resolved"] is False
    assert "rules" not in statement
    assert run(monkeypatch, "check", sql, "--why") == status
    assert "rules:" in capsys.readouterr().out


GATES = """
[[gates]]
when = { confidence = "<0.70", kind = "delete" }
then = "approve"
[[gates]]
when = { confidence = "<0.30" }
then = "refuse"
[[gates]]
when = { rows = ">10" }
then = "approve"
"""
DELETE = "DELETE FROM orders WHERE id = 1"
UPDATE = "UPDATE orders SET status = 'paid' WHERE id = 1"


@pytest.mark.parametrize(
    ("words", "status", "verdict"),
    [
        ((DELETE,), 3, "approve"),
        ((DELETE, "--confidence", "0.9"), 0, "rewrite"),
        ((f"{DELETE} /*confidence='0.9'*/",), 0, "rewrite"),
        ((f"{DELETE} /*confidence='0.9'*/", "--confidence", "0.5"), 3, "approve"),
        ((UPDATE,), 1, "refuse"),
        ((UPDATE, "--confidence", "0.5"), 0, "allow"),
        (("DELETE FROM orders",), 1, "refuse"),
    ],
)
def test_check_says_what_gates_say_before_a_run(
    *,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    words: tuple[str, ...],
    status: int,
    verdict: str,
) -> None:
    (folder / "policies" / "support.toml").write_text(POLICY + GATES, encoding="utf-8")
    assert run(monkeypatch, "check", *words, "--json") == status
    (statement,) = json.loads(capsys.readouterr().out)["statements"]
    assert statement["verdict"] == verdict
    assert ("sqlstate" in statement) == bool(status)


def test_check_reads_a_file_and_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    (folder / "all.sql").write_text("SELECT 1; SELECT 2;", encoding="utf-8")
    assert run(monkeypatch, "check", "--file", "all.sql", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["statements"]) == 2
    assert run(monkeypatch, "check", "--file", "missing.sql") == 2
    assert "missing.sql" in capsys.readouterr().err


def test_policy_cases_pass_or_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    cases = folder / "policies" / "support.cases.toml"
    cases.write_text(
        '[[cases]]\nsql = "DELETE FROM orders WHERE id = 1"\nverdict = "rewrite"\n', encoding="utf-8"
    )
    assert run(monkeypatch, "policy", "test") == 0
    assert "1 passed, 0 failed" in capsys.readouterr().out
    cases.write_text('[[cases]]\nsql = "DROP TABLE orders"\nverdict = "allow"\n', encoding="utf-8")
    assert run(monkeypatch, "policy", "test", "--json") == 1
    assert json.loads(capsys.readouterr().out)["failed"][0]["found"] == "refuse"
    cases.write_text("[[cases]]\nquery = 1\n", encoding="utf-8")
    assert run(monkeypatch, "policy", "test") == 2


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (["policy", "check", "nope"], 2, "policies/nope.toml"),
        (["policy", "check"], 0, "ok: support"),
        (["journal", "list"], 2, "SQLGUARD_DSN"),
        (["task", "open"], 2, "--agent"),
        (["task", "open", "--agent", "a", "--policy", "p", "--ttl", "soon"], 2, "duration"),
        (["guard"], 2, "SQLGUARD_DSN"),
        (["undo", "--dsn", "postgresql://x"], 2, "--task"),
        (["serve", "--dsn", "postgresql://x@127.0.0.1:1/x", "--listen", "nonsense"], 1, "nonsense"),
        (["migrate", "--dsn", "postgresql://x@127.0.0.1:1/x?connect_timeout=2"], 1, "can't connect"),
        (["plan", "list"], 2, "SQLGUARD_DSN"),
        (["approve", "7", "--json"], 1, "terminal"),
        (["mcp"], 2, "SQLGUARD_DSN"),
        (["mcp", "--ttl", "soon"], 2, "duration"),
        (["init"], 2, "SQLGUARD_DSN"),
        (["no-such-command"], 2, "no-such-command"),
    ],
)
def test_what_goes_wrong_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    status: int,
    told: str,
) -> None:
    assert run(monkeypatch, *words) == status
    output = capsys.readouterr()
    assert told in output.out + output.err


def test_an_error_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "journal", "list", "--json") == 2
    document = json.loads(capsys.readouterr().out)
    assert document["sqlstate"] == "58000"
    assert document["hint"]


def test_the_schema_of_policies_is_json_schema(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "policy", "schema") == 0
    assert "tables" in json.loads(capsys.readouterr().out)["properties"]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["task", "open"],
        ["guard"],
        ["policy", "apply"],
        ["preview"],
        ["exec"],
        ["undo"],
        ["journal", "list"],
        ["serve"],
    ],
)
def test_help_has_an_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert run(monkeypatch, *words, "--help") == 0
    assert not words or "Example: sqlguard" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ("approve", "17"),
        ("reject", "17", "--reason", "no"),
        ("step", "approve", "17"),
        ("step", "reject", "17", "--reason", "no"),
    ],
)
def test_no_file_of_the_working_directory_says_where_a_person_decides(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path, words: tuple[str, ...]
) -> None:
    """An agent that works there could stand between the person and the database, and decide in that name."""
    (folder / "sqlguard.toml").write_text('dsn = "postgresql://127.0.0.1:1/stand_in"\n', encoding="utf-8")
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    assert run(monkeypatch, "check", "SELECT FROM WHERE", "--json") == 1
    assert "sqlstate" in capsys.readouterr().out, "the command after it answers a person all the same"
    assert run(monkeypatch, *words) == 2
    assert "sqlguard.toml does not count here" in capsys.readouterr().err
    assert run(monkeypatch, "plan", "list") == 1
    assert "connect" in capsys.readouterr().err
