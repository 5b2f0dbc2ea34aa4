"""The engine factory, and the examples as they stand in `examples/`, through the proxy with a scripted model."""

import asyncio
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from end_to_end.wired import Agent, Wired

import sqlguard
from sqlguard.engine import comment
from sqlguard.errors import NotConfigured, TaskEnded
from sqlguard.policy import parse_policy
from sqlguard.postgres import plans
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.postgres.tasks import end_task, open_task
from sqlguard.postgres.undo import undo

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def actions(wired: Wired, agent: Agent) -> list[dict[str, Any]]:
    return wired.actions(agent)


def test_an_engine_goes_through_the_proxy_and_says_why(wired_world: Wired, agent: Agent) -> None:
    engine = sqlguard.create_engine(agent.dsn)
    said = {"sqlguard_reason": "100% 'sure'\n/* ticket */", "sqlguard_confidence": 0.9, "sqlguard_step": 3}
    with engine.begin() as conn:
        update = sa.text("UPDATE orders SET note = :note WHERE id = 60 -- the last line is a comment")
        conn.execute(update, {"note": "50%"}, execution_options=said)
    with engine.execution_options(sqlguard_reason="for all").begin() as conn:
        conn.exec_driver_sql("DELETE FROM orders WHERE id = 61")
    engine.dispose()
    first, second = actions(wired_world, agent)
    assert (first["reason"], first["confidence"], first["step"]) == (said["sqlguard_reason"], 0.9, "3")
    assert second["reason"] == "for all"
    assert wired_world.value("SELECT note FROM orders WHERE id = 60") == "50%"


def test_an_idempotency_key_of_an_engine(wired_world: Wired, agent: Agent) -> None:
    engine = sqlguard.create_engine(agent.dsn)
    for _ in range(2):
        with engine.begin() as conn:
            done = conn.execute(
                sa.text("UPDATE orders SET total = total + 1 WHERE id = 62 RETURNING total"),
                execution_options={"sqlguard_idempotency_key": "engine:1"},
            ).scalar_one()
    engine.dispose()
    assert wired_world.value("SELECT total FROM orders WHERE id = 62") == done


def test_what_reads_columns_finds_those_that_a_task_may_name(agent: Agent) -> None:
    engine = sqlguard.create_engine(agent.dsn)
    orders = sa.Table("orders", sa.MetaData(), autoload_with=engine)
    assert "note" in orders.c
    assert not {"deleted_at", "deleted_by_agent"} & set(orders.c.keys())
    with engine.connect() as conn:
        assert len(conn.execute(sa.select(orders).limit(3)).all()) == 3
    engine.dispose()


def test_nothing_said_is_no_comment() -> None:
    assert comment({"stream_results": True}) == ""


def test_an_engine_past_the_proxy_is_refused(agent: Agent) -> None:
    engine = sqlguard.create_engine(agent.direct)
    with pytest.raises(NotConfigured, match="do not go through the proxy"):
        engine.connect()
    engine.dispose()


def test_an_operators_engine_is_a_login_of_its_own(
    wired_world: Wired, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQLGUARD_LISTEN", f"127.0.0.1:{wired_world.proxy.port}")
    task = agent.task.task.id
    engine = sqlguard.create_engine(wired_world.database.owner_dsn, task=task)
    with engine.connect() as conn:
        role = conn.execute(sa.text("SELECT session_user")).scalar_one()
        assert conn.execute(sa.text("SELECT count(*) FROM orders WHERE id = 1")).scalar_one() == 1
    assert role.startswith("sg_tk_")
    assert role != agent.task.role
    engine.dispose()
    assert wired_world.value(f"SELECT count(*) FROM pg_roles WHERE rolname = '{role}'") == 0
    end_task(wired_world.owner, task, "over")
    with pytest.raises(TaskEnded):
        sqlguard.create_engine(wired_world.database.owner_dsn, task=task)


async def _asynchronously(agent: Agent) -> tuple[Any, ...]:
    engine = sqlguard.create_async_engine(agent.dsn)
    said = {"sqlguard_reason": "100% 'sure'", "sqlguard_confidence": 0.9}
    async with engine.begin() as conn:
        update = sa.text("UPDATE orders SET note = :note WHERE id = 64 RETURNING note")
        done = (await conn.execute(update, {"note": "50%"}, execution_options=said)).scalar_one()
        orders = await conn.run_sync(lambda c: sa.Table("orders", sa.MetaData(), autoload_with=c))
    await engine.dispose()
    past = sqlguard.create_async_engine(agent.direct)
    with pytest.raises(NotConfigured, match="do not go through the proxy"):
        await past.connect()
    await past.dispose()
    return done, set(orders.c.keys())


def test_an_asynchronous_engine(wired_world: Wired, agent: Agent) -> None:
    done, columns = asyncio.run(_asynchronously(agent))
    assert done == "50%"
    assert "note" in columns
    assert "deleted_at" not in columns
    (action,) = actions(wired_world, agent)
    assert (action["reason"], action["confidence"]) == ("100% 'sure'", 0.9)


def test_the_langchain_example(wired_world: Wired, agent: Agent) -> None:
    before = wired_world.value("SELECT count(*) FROM orders WHERE deleted_at IS NULL")
    done = subprocess.run(
        [sys.executable, EXAMPLES / "langchain_sql.py", agent.dsn],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert "SG002" in done.stdout or "every row" in done.stdout
    assert "Customer 42's orders are deleted." in done.stdout
    assert before - wired_world.value("SELECT count(*) FROM orders WHERE deleted_at IS NULL") == 4
    kinds = [(a["kind"], a["verdict"], a["reason"]) for a in actions(wired_world, agent)]
    assert ("delete", "rewrite", "clean up after customer 42") in kinds


CAREFUL = """
name = "careful"

[defaults]
max_share = 1.0

[tables."public.*"]
select = true
insert = true
update = true
delete = "soft"

[[gates]]
when = { rows = ">3" }
then = "approve"
"""


def approver(wired: Wired) -> str:
    with wired.database.connect() as admin:
        admin.execute("CREATE ROLE sg_dana LOGIN PASSWORD 'secret'")
        admin.execute("GRANT sqlguard_approver TO sg_dana")
    return wired.database.dsn_for("sg_dana", "secret")


@pytest.mark.parametrize("approved", [True, False])
def test_the_langgraph_example(wired_world: Wired, *, approved: bool) -> None:
    apply_policy(wired_world.owner, parse_policy(CAREFUL, "careful.toml"))
    task = open_task(wired_world.owner, agent="graph", policy="careful", ttl=timedelta(minutes=5))
    agent = Agent(task, "127.0.0.1", wired_world.proxy.port, wired_world.database.name, "")
    customer = 43 if approved else 44
    living = f"SELECT count(*) FROM orders WHERE customer_id = {customer} AND deleted_at IS NULL"
    text = (EXAMPLES / "langgraph_approval.py").read_text().replace("id = 42", f"id = {customer}")
    # Another statement under a key that is used up would be refused before anybody is asked.
    text = text.replace('"key": "731"', f'"key": "{customer}"')
    process = subprocess.Popen(
        [sys.executable, "-c", text, agent.dsn],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        waiting = process.stdout.readline() + process.stdout.readline()
        assert "soft_delete in public.orders" in waiting
        assert wired_world.value(living) == 4
        (plan,) = plans.list_plans(wired_world.owner, task=task.task.id)
        if approved:
            with wired_world.database.connect(approver(wired_world)) as dana:
                plans.approve(dana, plan.id, plan.document["digest"])
        said, _ = process.communicate("\n", timeout=60)
        assert process.returncode == 0
        # Resuming a graph is no approval.
        assert ("1 row(s)" in said) == approved
        assert ("SG001" in said) != approved
        assert wired_world.value(living) == (0 if approved else 4)
    finally:
        process.kill()
        process.communicate()
        undo(wired_world.owner, task=task.task.id)
        end_task(wired_world.owner, task.task.id, "tested")
