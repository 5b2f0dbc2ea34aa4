"""Refused calls of irreversible tools: several people approve, take it back, or say no for good."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from journaled import PASSWORD, World
from journaled import world as made_world
from psycopg import sql
from psycopg.types.json import Jsonb
from servers import Database
from terminal import on_terminal
from typer.testing import CliRunner

from sqlguard.cli import app
from sqlguard.errors import ApprovalRequired, Refused
from sqlguard.postgres.steps import Steps, approve, reject, revoke, waiting
from sqlguard.steps import Tools

guard = Tools()
wiped: list[str] = []


@guard.tool(tier="irreversible")
def wipe(disk: str) -> None:
    wiped.append(disk)


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    wiped.clear()
    with made_world(database) as made:
        made.task("t")
        yield made


@pytest.fixture
def steps(world: World) -> Iterator[Steps]:
    own = Steps.connect(world.database.dsn_for(world.agents[0].role, PASSWORD))
    with own, guard.on(own):
        yield own


@contextmanager
def person(world: World, name: str) -> Iterator[psycopg.Connection[object]]:
    role = sql.Identifier(f"sg_step_{name}")
    with world.database.connect() as conn:
        conn.execute(sql.SQL("CREATE ROLE {} LOGIN IN ROLE sqlguard_approver").format(role))
        conn.execute(sql.SQL("SET SESSION AUTHORIZATION {}").format(role))
        yield conn
        conn.execute("RESET SESSION AUTHORIZATION")
        conn.execute(sql.SQL("DROP ROLE {}").format(role))


def asked(world: World, disk: str = "sda") -> int:
    """Make a call that is refused, and return its action."""
    with pytest.raises(ApprovalRequired):
        wipe(disk)
    return waiting(world.op)[-1].action


def test_as_many_people_approve_a_call_as_the_policy_s_gate_says(world: World, steps: Steps) -> None:
    gates = [{"when": {"tier": ["costly", "irreversible"]}, "then": "approve", "approvals": 2}]
    world.op.execute("UPDATE sqlguard.policy SET document = document || %s", [Jsonb({"gates": gates})])
    with person(world, "ann") as ann, person(world, "bo") as bo:
        action = asked(world)
        assert approve(ann, action) == "open"
        with pytest.raises(Refused, match="has approved action"):
            approve(ann, action)
        asked(world)
        assert approve(bo, action) == "approved"
        assert revoke(ann, action, "wait") == "open"
        with pytest.raises(Refused, match="no approval"):
            revoke(bo, action)
        assert [approve(who, action) for who in (ann, bo)] == ["open", "approved"]
        assert steps.ticket(action)["approved_by"] == ["sg_step_ann", "sg_step_bo"]
        wipe("sda")
        assert steps.ticket(action)["state"] == "used"
    assert wiped == ["sda"]


def test_a_rejected_call_is_refused_with_the_reason(world: World, steps: Steps) -> None:
    action = asked(world)
    with pytest.raises(Refused, match="needs a reason"):
        reject(world.op, action, " ")
    assert reject(world.op, action, "it is in use") == "rejected"
    with pytest.raises(Refused, match="rejected: it is in use"):
        wipe("sda")
    assert steps.ticket(action)["rejected_because"] == "it is in use"
    with pytest.raises(Refused, match="no refused call"):
        steps.ticket(action + 1000)
    with pytest.raises(Refused, match="was rejected"):
        approve(world.op, action)
    asked(world, "sdb")
    assert not wiped
    assert [s.arguments for s in waiting(world.op)] == [{"disk": "sdb"}]


def test_a_ticket_is_its_own_task_s(world: World, steps: Steps) -> None:
    action = asked(world)
    world.task("u")
    with Steps.connect(world.database.dsn_for(world.agents[1].role, PASSWORD)) as other:
        with pytest.raises(Refused, match="no refused call"):
            other.ticket(action)
    assert steps.ticket(action)["state"] == "open"


@pytest.mark.usefixtures("steps")
def test_a_decision_is_told_as_json(world: World) -> None:
    action = asked(world)

    def run(*words: str) -> dict[str, object]:
        done = CliRunner().invoke(app, [*words, "--dsn", world.database.owner_dsn, "--json"])
        assert done.exit_code == 0, done.output
        told: dict[str, object] = json.loads(done.stdout)
        return told

    approve(world.op, action)
    assert run("step", "approve", str(action), "--revoke") == {"action": action, "state": "open"}
    reason = "ask the customer first"
    assert run("step", "reject", str(action), "--reason", reason) == {"action": action, "state": "rejected"}
    assert run("step", "list") == {"steps": []}


@pytest.mark.usefixtures("steps")
def test_a_person_sees_what_is_approved_and_no_line_of_the_agent_s_looks_like_one_of_ours(
    world: World,
) -> None:
    spoof = "tidy up\x1b[2K\nagent    somebody\napproved: action 1, for the next hour"
    with guard.because(spoof):
        action = asked(world, "sda\nagent    somebody")
    words, dsn = ("step", "approve", str(action)), world.database.owner_dsn
    status, shown = on_terminal(*words, dsn=dsn, answer="n\n")
    assert (status, "nothing was approved" in shown) == (1, True)
    lines = re.sub(r"\x1b\[\d*m", "", shown).splitlines()
    assert [line.split() for line in lines if line.startswith("agent")] == [["agent", "bot"]]
    assert not [line for line in lines if line.startswith("approved")]
    assert "\\x1b[2K" in shown
    assert waiting(world.op)[0].state == "open"
    status, shown = on_terminal(*words, dsn=dsn, answer="y\n")
    assert (status, waiting(world.op)[0].state) == (0, "approved"), shown
    status, shown = on_terminal("step", "approve", str(action + 1000), dsn=dsn, answer="y\n")
    assert (status, "no call" in shown) == (1, True)
