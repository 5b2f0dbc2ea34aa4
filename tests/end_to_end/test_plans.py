"""Gates, plans and approvals through the proxy, by both protocols, with the client that an agent has."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import psycopg
import pytest
from end_to_end.inprocess import Proxy, proxy
from plan_world import POLICY, World, plan_shop
from psycopg import pq
from terminal import on_terminal
from typer.testing import CliRunner

from sqlguard.cli import app
from sqlguard.dsn import url
from sqlguard.embedded import EmbeddedServer
from sqlguard.policy import parse_policy
from sqlguard.postgres import plans
from sqlguard.postgres.journal import list_actions, verify
from sqlguard.postgres.policy_apply import apply_policy

SURE = "/*confidence='0.9'*/"
DELETE = f"DELETE FROM customers WHERE id = %s {SURE}"


class Shop(World):
    proxy: Proxy

    def agent(self, **options: Any) -> psycopg.Connection[Any]:
        task = self.task(**options)
        dsn = url(
            host="127.0.0.1",
            port=self.proxy.port,
            user=task.role,
            password=task.password,
            dbname=self.database.name,
        )
        made = self.database.connect(dsn)
        made.execute("SET client_min_messages = notice")
        return made


@pytest.fixture
def shop(server: EmbeddedServer) -> Iterator[Shop]:
    with plan_shop(server) as (database, owner), proxy(database.owner_dsn) as running:
        made = Shop(database, owner)
        made.proxy = running
        yield made


@pytest.fixture(params=["simple", "extended", "prepared"])
def run(request: pytest.FixtureRequest) -> Any:
    """Send a statement by one of the protocols."""

    def send(conn: psycopg.Connection[Any], text: str, *params: Any) -> psycopg.Cursor[Any]:
        if request.param == "simple":
            return psycopg.ClientCursor(conn).execute(text, params)
        return conn.execute(text.encode(), params, prepare=request.param == "prepared")

    return send


def stopped(run: Any, conn: psycopg.Connection[Any], text: str, *params: Any) -> int:
    with pytest.raises(psycopg.DatabaseError) as caught:
        run(conn, text, *params)
    assert caught.value.sqlstate == "SG001", caught.value
    assert "send the very same statement again" in (caught.value.diag.message_hint or "")
    return int((caught.value.diag.message_detail or "").split(":")[0].removeprefix("plan "))


def test_stopped_approved_and_done(shop: Shop, run: Any) -> None:
    agent = shop.agent()
    plan = stopped(run, agent, DELETE, 1)
    assert agent.info.transaction_status == pq.TransactionStatus.IDLE
    assert plans.show(shop.owner, plan).document["affected_rows"] == 31
    assert stopped(run, agent, DELETE, 1) == plan
    assert shop.approve(plan) == "approved"
    shop.owner.execute("UPDATE customers SET name = 'another one' WHERE id = 2")
    assert run(agent, DELETE, 1).statusmessage == "DELETE 1"
    assert plans.show(shop.owner, plan).state == "committed"
    assert shop.value("SELECT count(*) FROM customers WHERE deleted_at IS NULL") == 59
    assert stopped(run, agent, DELETE, 1) != plan
    shown = agent.execute("SHOW sqlguard.last_plan").fetchone()
    assert shown is not None
    assert json.loads(shown[0])["affected_rows"] == 0
    assert verify(shop.owner).ok


def test_the_last_plan_is_the_one_that_was_told_last(shop: Shop, run: Any) -> None:
    def last(conn: psycopg.Connection[Any]) -> int:
        shown = conn.execute("SHOW sqlguard.last_plan").fetchone()
        assert shown is not None
        return int(json.loads(shown[0])["plan"])

    agent = shop.agent()
    first, second = stopped(run, agent, DELETE, 1), stopped(run, agent, DELETE, 2)
    assert last(agent) == second
    assert stopped(run, agent, DELETE, 1) == first
    assert last(agent) == first
    # A later task of the same agent gets the same ticket.
    later = shop.agent()
    assert later.execute("SHOW sqlguard.last_plan").fetchone() == (None,)
    assert stopped(run, later, DELETE, 2) == second
    assert (last(later), last(agent)) == (second, first)


def test_a_read_is_run_when_it_is_approved(shop: Shop, run: Any) -> None:
    agent = shop.agent()
    text = f"SELECT count(*) FROM generate_series(1, (SELECT max(id) FROM customers)) n WHERE n <= %s {SURE}"
    plan = stopped(run, agent, text, 5)
    assert stopped(run, agent, text, 5) == plan
    assert stopped(run, agent, text, 6) != plan
    shop.approve(plan)
    assert run(agent, text, 5).fetchone() == (5,)
    assert plans.show(shop.owner, plan).state == "committed"
    fresh = stopped(run, agent, text, 5)
    assert fresh != plan
    shop.approve(fresh)
    # In a batch with a write behind it.
    with agent.pipeline():
        read, write = run(agent, text, 5), run(agent, f"UPDATE customers SET name = 'x' WHERE id = 3 {SURE}")
        assert (read.fetchone(), write.statusmessage) == ((5,), "UPDATE 1")
    assert shop.value("SELECT name FROM customers WHERE id = 3") == "x"
    assert verify(shop.owner).ok


def test_what_nobody_may_let_over_its_cap_is_counted_and_not_run(shop: Shop, run: Any) -> None:
    policy = POLICY.replace('on_excess = "approve"', 'on_excess = "refuse"')
    apply_policy(shop.owner, parse_policy(policy, "p"))
    shop.owner.execute(
        "CREATE FUNCTION told() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''it was run''; END';"
        "CREATE TRIGGER told BEFORE UPDATE ON items EXECUTE FUNCTION told()"
    )
    agent = shop.agent()
    update = f"UPDATE items SET quantity = %s WHERE order_id <= %s {SURE}"
    for dry in ("off", "on"):
        agent.execute(f"SET sqlguard.dry_run = {dry}".encode())
        for begin in (False, True):
            if begin:
                agent.execute("BEGIN")
            with pytest.raises(psycopg.DatabaseError, match=r"600 rows.*nothing was run") as caught:
                run(agent, update, 7, 300)
            assert caught.value.sqlstate == "SG006"
            agent.execute("ROLLBACK")
    agent.execute("SET sqlguard.dry_run = off")
    with pytest.raises(psycopg.DatabaseError, match="it was run"):
        run(agent, update, 7, 50)
    assert run(agent, f"DELETE FROM items WHERE order_id <= %s {SURE}", 50).statusmessage == "DELETE 100"


def test_a_row_of_it_has_changed(shop: Shop, run: Any) -> None:
    agent = shop.agent()
    plan = stopped(run, agent, DELETE, 1)
    shop.approve(plan)
    shop.owner.execute("UPDATE items SET quantity = 7 WHERE id = 1")
    with pytest.raises(psycopg.DatabaseError) as caught:
        run(agent, DELETE, 1)
    assert caught.value.sqlstate == "SG003"
    assert shop.value("SELECT count(*) FROM customers WHERE deleted_at IS NULL") == 60
    fresh = plans.list_plans(shop.owner)[-1]
    assert fresh.document["drift_of"] == plan
    shop.approve(fresh.id)
    assert run(agent, DELETE, 1).statusmessage == "DELETE 1"


def test_measured_gates(shop: Shop, run: Any) -> None:
    agent = shop.agent()
    touch = f"UPDATE orders SET note = 'y' WHERE id <= %s {SURE}"
    assert run(agent, touch, 3).statusmessage == "UPDATE 3"
    plan = stopped(run, agent, touch, 4)
    assert plans.show(shop.owner, plan).document["approvals_needed"] == 2
    with pytest.raises(psycopg.DatabaseError) as caught:
        run(agent, touch, 21)
    assert caught.value.sqlstate == "SG002"
    assert caught.value.diag.message_hint
    assert shop.approve(plan) == "open"
    stopped(run, agent, touch, 4)
    assert shop.approve(plan, "eve") == "approved"
    assert run(agent, touch, 4).statusmessage == "UPDATE 4"
    assert run(agent, f"UPDATE customers SET name = 'y' WHERE id = %s {SURE}", 1).statusmessage == "UPDATE 1"
    stopped(run, agent, "UPDATE customers SET name = 'z' WHERE id = %s", 1)
    assert agent.execute("SELECT count(*) FROM customers WHERE name = 'z'").fetchone() == (0,)


def test_over_a_cap(shop: Shop, run: Any) -> None:
    agent = shop.agent()
    delete = f"DELETE FROM items WHERE id <= %s {SURE}"
    plan = stopped(run, agent, delete, 150)
    assert shop.value("SELECT count(*) FROM items") == 1200
    assert agent.execute("SELECT 1").fetchone() == (1,)
    shop.approve(plan)
    assert run(agent, delete, 150).statusmessage == "DELETE 150"
    assert shop.value("SELECT count(*) FROM items") == 1050
    assert shop.value("SELECT count(*) FROM sqlguard.plan_run") == 0


def test_inside_a_block(shop: Shop, run: Any) -> None:
    agent = shop.agent()
    rename = f"UPDATE customers SET name = 'in a block' WHERE id = %s {SURE}"
    agent.execute("BEGIN")
    run(agent, rename, 9)
    plan = stopped(run, agent, DELETE, 1)
    assert agent.info.transaction_status == pq.TransactionStatus.INERROR
    agent.execute("ROLLBACK")
    shop.approve(plan)
    agent.execute("BEGIN")
    run(agent, rename, 9)
    assert run(agent, DELETE, 1).statusmessage == "DELETE 1"
    agent.execute("COMMIT")
    assert shop.value("SELECT name FROM customers WHERE id = 9") == "in a block"
    assert plans.show(shop.owner, plan).state == "committed"


def test_idempotency_keys_go_together_with_it(shop: Shop, run: Any) -> None:
    agent = shop.agent()
    delete = "DELETE FROM customers WHERE id = %s /*confidence='0.9',idempotency_key='k1'*/"
    plan = stopped(run, agent, delete, 1)
    shop.approve(plan)
    assert run(agent, delete, 1).statusmessage == "DELETE 1"
    assert run(agent, delete, 1).statusmessage == "DELETE 1"
    assert shop.value("SELECT count(*) FROM customers WHERE deleted_at IS NULL") == 59


def test_several_in_one_message(shop: Shop) -> None:
    agent = shop.agent()
    two = f"UPDATE customers SET name = 'm' WHERE id = 3 {SURE}; DELETE FROM customers WHERE id = 1 {SURE}"
    with pytest.raises(psycopg.DatabaseError) as caught:
        agent.execute(two.encode())
    assert caught.value.sqlstate == "SG001"
    assert agent.info.transaction_status == pq.TransactionStatus.IDLE
    assert shop.value("SELECT count(*) FROM customers WHERE name = 'm'") == 0
    shop.approve(plans.list_plans(shop.owner)[-1].id)
    agent.execute(two.encode())
    assert shop.value("SELECT count(*) FROM customers WHERE name = 'm'") == 1
    assert shop.value("SELECT count(*) FROM customers WHERE deleted_at IS NULL") == 59


def test_a_pipeline(shop: Shop) -> None:
    agent = shop.agent()
    with pytest.raises(psycopg.DatabaseError), agent.pipeline():
        agent.execute(f"UPDATE customers SET name = 'p' WHERE id = %s {SURE}".encode(), [3])
        agent.execute(DELETE.encode(), [1])
        agent.execute(b"SELECT 1")
    assert agent.info.transaction_status == pq.TransactionStatus.IDLE
    assert shop.value("SELECT count(*) FROM customers WHERE name = 'p'") == 0
    assert len(plans.list_plans(shop.owner)) == 1


def test_a_preview_is_a_plan(shop: Shop, run: Any) -> None:
    agent = shop.agent()
    told: list[dict[str, Any]] = []
    agent.add_notice_handler(lambda n: told.append(json.loads(n.message_detail or "{}")))
    agent.execute("SET sqlguard.dry_run = on")
    run(agent, DELETE, 1)
    with agent.transaction():
        run(agent, f"UPDATE customers SET name = 'b' WHERE id = %s {SURE}", 1)
        run(agent, f"DELETE FROM items WHERE id = %s {SURE}", 1)
    agent.execute("SET sqlguard.dry_run = off")
    single, block = plans.list_plans(shop.owner)
    assert told[0]["plan"] == single.id
    assert told[0]["affected_rows"] == 31
    assert told[-1]["plan"] == block.id
    assert (block.document["is_block"], len(block.document["statements"])) == (True, 2)
    shop.approve(single.id)
    assert run(agent, DELETE, 1).statusmessage == "DELETE 1"


@pytest.mark.parametrize("staged", [False, True])
def test_sequences_of_each_statement(shop: Shop, run: Any, staged: bool) -> None:  # noqa: FBT001
    agent = shop.agent(plan_only=staged)
    if not staged:
        agent.execute("SET sqlguard.dry_run = on")
    agent.execute("BEGIN")
    run(agent, f"INSERT INTO orders (customer_id) VALUES (%s) {SURE}", 1)
    run(agent, f"UPDATE customers SET name = 'b' WHERE id = %s {SURE}", 1)
    run(agent, f"INSERT INTO orders (customer_id) VALUES (%s) {SURE}", 1)
    with pytest.raises(psycopg.DatabaseError) if staged else nullcontext():
        agent.execute("COMMIT")
    (plan,) = plans.list_plans(shop.owner)
    places = [step["action"] for step in plan.document["statements"]]
    moved = [(places.index(m["action"]), m["sequences"]) for m in plan.document["sequences_by_action"]]
    assert moved == [(0, ["public.orders_id_seq"]), (2, ["public.orders_id_seq"])]
    shown = CliRunner().invoke(app, ["plan", "show", str(plan.id), "--dsn", shop.database.owner_dsn]).output
    assert "not taken back: public.orders_id_seq (sequences of statement 3)" in " ".join(shown.split())


def test_plan_only(shop: Shop, run: Any) -> None:
    agent = shop.agent(plan_only=True)
    rename = f"UPDATE customers SET name = 'staged' WHERE id = %s {SURE}"
    alone = stopped(run, agent, rename, 5)
    shop.approve(alone)
    assert run(agent, rename, 5).statusmessage == "UPDATE 1"

    def block() -> None:
        agent.execute("BEGIN")
        run(agent, rename, 1)
        agent.execute("SAVEPOINT a")
        run(agent, rename, 2)
        agent.execute("ROLLBACK TO a")
        run(agent, f"DELETE FROM items WHERE id = %s {SURE}", 1)
        agent.execute("COMMIT")

    with pytest.raises(psycopg.DatabaseError) as caught:
        block()
    assert caught.value.sqlstate == "SG001"
    assert agent.info.transaction_status == pq.TransactionStatus.IDLE
    assert shop.value("SELECT count(*) FROM customers WHERE name = 'staged'") == 1
    plan = plans.list_plans(shop.owner)[-1]
    assert (len(plan.document["statements"]), plan.document["affected_rows"]) == (2, 2)
    shop.approve(plan.id)
    block()
    assert plans.show(shop.owner, plan.id).state == "committed"
    assert shop.value("SELECT count(*) FROM customers WHERE name = 'staged'") == 2


def test_the_journal_has_every_step(shop: Shop) -> None:
    agent = shop.agent()
    with pytest.raises(psycopg.DatabaseError):
        agent.execute(DELETE.encode(), [1])
    plan = plans.list_plans(shop.owner)[-1]
    shop.approve(plan.id)
    agent.execute(DELETE.encode(), [1])
    agent.close()
    outcomes = [a.outcome for a in list_actions(shop.owner)]
    assert outcomes[0] == "approved"
    assert outcomes[-1] in ("committed", "unsettled")


def test_the_command_line(shop: Shop) -> None:
    agent = shop.agent()
    task = shop.task()
    direct = shop.database.dsn_for(task.role, task.password)
    with pytest.raises(psycopg.DatabaseError):
        agent.execute(DELETE.encode(), [1])
    plan = str(plans.list_plans(shop.owner)[-1].id)
    shop.person("dana").close()
    dana = shop.database.dsn_for("sg_dana", "secret")

    def run(*words: str, dsn: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "sqlguard", *words],
            env={**os.environ, "SQLGUARD_DSN": dsn},
            input="y\n",
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return done.returncode, done.stdout + done.stderr

    status, said = run("approve", plan, dsn=dana)
    assert (status, "terminal" in said) == (1, True)
    # A terminal does not make an agent a person.
    for dsn in (direct, shop.database.owner_dsn):
        status, said = on_terminal("approve", plan, dsn=dsn, answer="y\n")
        assert status == 1, said
        assert plans.show(shop.owner, int(plan)).state == "open"
    status, said = on_terminal("approve", plan, dsn=dana, answer="n\n")
    assert plans.show(shop.owner, int(plan)).state == "open"
    status, said = on_terminal("approve", plan, dsn=dana, answer="y\n")
    assert status == 0, said
    assert "public.items" in said
    assert plans.show(shop.owner, int(plan)).state == "approved"
    assert run("approve", plan, "--revoke", dsn=dana)[0] == 0
    assert run("reject", plan, "--reason", "no", dsn=dana)[0] == 0
    status, said = run("plan", "show", plan, "--json", dsn=dana)
    assert json.loads(said)["rejected_because"] == "no"
    status, said = run("plan", "list", "--json", dsn=shop.database.owner_dsn)
    assert [p["plan"] for p in json.loads(said)["plans"]] == [int(plan)]
    assert "public.customers" in run("plan", "show", plan, dsn=dana)[1]


@pytest.mark.parametrize("staged", [False, True])
def test_gates_decide_over_a_block_by_its_rows(shop: Shop, run: Any, staged: bool) -> None:  # noqa: FBT001
    """A gate that refuses can't be approved, and one that wants two people gets them, though the block is one plan."""
    agent = shop.agent(plan_only=staged)
    if not staged:
        agent.execute("SET sqlguard.dry_run = on")

    def block(text: str, rows: int) -> None:
        agent.execute("BEGIN")
        run(agent, f"UPDATE late SET id = 1 WHERE id = %s {SURE}", 0)
        run(agent, f"{text} WHERE id <= %s {SURE}", rows)
        agent.execute("COMMIT")

    with pytest.raises(psycopg.DatabaseError, match="a gate of the policy refuses this"):
        block("UPDATE items SET quantity = 2", 30)
    assert agent.info.transaction_status == pq.TransactionStatus.IDLE
    assert shop.states() == []
    with pytest.raises(psycopg.DatabaseError) if staged else nullcontext():
        block("UPDATE orders SET note = 'b'", 5)
    (plan,) = plans.list_plans(shop.owner)
    assert plan.document["approvals_needed"] == 2
    assert shop.approve(plan.id) == "open"
