"""`undo --tools` and `step` as a person uses them: what can't be called here is said, and left pending."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from journaled import PASSWORD, World, rows
from journaled import world as made_world
from servers import Database
from typer.testing import CliRunner

from sqlguard.cli import app
from sqlguard.errors import NotConfigured, SqlguardError
from sqlguard.postgres.steps import Steps

REGISTRY = """
from pathlib import Path
from sqlguard.steps import Tools

guard = Tools()
nothing = 5

@guard.compensation
def refund(done):
    with Path("calls.txt").open("a") as log:
        log.write(f"{done.result} {done.idempotency_key}\\n")

@guard.tool(tier="compensable", compensation=refund)
def charge(cents):
    return f"receipt {cents}"
"""


@pytest.fixture
def world(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "till_tools.py").write_text(REGISTRY)
    with made_world(database) as made:
        made.op.execute("""
            CREATE SCHEMA app;
            CREATE TABLE app.item (id int PRIMARY KEY, note text);
            INSERT INTO app.item VALUES (1, 'n1');
        """)
        made.grant()
        made.guard("app.item")
        made.task("t")
        made.act(made.agents[0], "UPDATE app.item SET note = 'x'")
        yield made
    sys.modules.pop("till_tools", None)


def run(world: World, *arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*arguments, "--dsn", world.database.owner_dsn])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


def charge(world: World) -> None:
    sys.path.insert(0, ".")
    try:
        import till_tools  # type: ignore[import-not-found]  # noqa: PLC0415
    finally:
        sys.path.pop(0)
    with Steps.connect(world.database.dsn_for(world.agents[0].role, PASSWORD)) as steps:
        with till_tools.guard.on(steps):
            till_tools.charge(5)


def note(world: World) -> Any:
    return rows(world.op, "SELECT note FROM app.item")[0][0]


def test_without_a_registry_it_waits_and_with_one_it_goes_on(world: World, tmp_path: Path) -> None:
    charge(world)
    status, text = run(world, "undo", "--task", "t")
    assert (status, note(world)) == (1, "x")
    assert "pending" in text
    assert "--tools module:registry" in text
    status, text = run(world, "undo", "--task", "t", "--preview", "--tools", "till_tools:guard", "--json")
    told = json.loads(text)
    assert (status, told["compensations"][0]["state"]) == (0, "would be called")
    status, text = run(world, "undo", "--task", "t", "--tools", "till_tools:guard", "--json")
    told = json.loads(text)
    assert (status, told["complete"], told["rows"]) == (0, True, 1)
    assert [(c["step"], c["answer"], c["state"]) for c in told["compensations"]] == [
        ("charge", "refund", "compensated")
    ]
    assert (tmp_path / "calls.txt").read_text() == "receipt 5 t:2:compensation\n"
    assert note(world) == "n1"
    status, text = run(world, "undo", "--task", "t")
    assert (status, "already undone" in text) == (0, True)


def test_a_person_can_answer_instead(world: World) -> None:
    charge(world)
    assert run(world, "step", "resolve", "2", "--note", "at the counter")[0] == 0
    assert run(world, "undo", "--task", "t")[0] == 0
    assert note(world) == "n1"


@pytest.mark.parametrize("name", ["till_tools", "nowhere:guard", "till_tools:nothing", "till_tools:missing"])
def test_what_is_no_registry_is_said(world: World, name: str) -> None:
    with pytest.raises(NotConfigured):
        run(world, "undo", "--task", "t", "--tools", name)
    assert note(world) == "x"


def test_an_approval_wants_a_terminal(world: World) -> None:
    assert json.loads(run(world, "step", "list", "--json")[1]) == {"steps": []}
    with pytest.raises(SqlguardError, match="by a person"):
        run(world, "step", "approve", "1")
