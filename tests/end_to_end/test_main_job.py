"""The main job through the real proxy with psycopg: delete, look, preview, refuse, undo, expire."""

import time

import psycopg
import pytest
from end_to_end.shop import TABLES, Task, World


def test_a_delete_is_a_soft_delete_that_cascades(shop: World, task: Task) -> None:
    with task.connect() as agent:
        cursor = agent.execute("DELETE FROM customers WHERE id = 42 RETURNING id, name")
        assert cursor.fetchall() == [(42, "Customer 42")]
        assert cursor.statusmessage == "DELETE 1"
        assert agent.execute("SELECT count(*) FROM orders WHERE customer_id = 42").fetchone() == (0,)
        assert agent.execute("DELETE FROM customers WHERE id = 42").statusmessage == "DELETE 0"
    assert shop.value("SELECT deleted_by_agent FROM customers WHERE id = 42") == "tester"
    assert shop.value("SELECT count(*) FROM orders WHERE customer_id = 42 AND deleted_at IS NOT NULL") == 4


def test_a_dry_run_reports_and_changes_nothing(shop: World, task: Task) -> None:
    before = shop.dump(*TABLES)
    notices: list[str] = []
    with task.connect() as agent:
        agent.add_notice_handler(lambda n: notices.append(n.message_primary or ""))
        agent.execute("SET sqlguard.dry_run = on")
        assert agent.execute("DELETE FROM customers WHERE id = 7").statusmessage == "DELETE 1"
        assert agent.execute("SELECT count(*) FROM customers WHERE id = 7").fetchone() == (1,)
    assert len(notices) == 1
    assert "4 soft_delete in public.orders" in notices[0]
    assert shop.dump(*TABLES) == before


@pytest.mark.parametrize(
    "sql",
    [
        "DROP TABLE orders",
        "TRUNCATE orders",
        "ALTER TABLE orders DROP COLUMN note",
        "UPDATE orders SET status = 'x'",
        "UPDATE orders SET status = 'x' WHERE id = id",
        "DELETE FROM orders WHERE true",
        "DELETE FROM orders",
        "SELECT pg_sleep(1)",
        "COPY orders TO '/tmp/x'",
        "DO $$ BEGIN DELETE FROM orders; END $$",
        "SET ROLE app_owner",
        "SELECT 1; DROP TABLE orders",
    ],
)
def test_what_is_refused(shop: World, task: Task, sql: str) -> None:
    before = shop.dump(*TABLES)
    with task.connect() as agent:
        with pytest.raises(psycopg.Error) as caught:
            agent.execute(sql.encode())
        assert (caught.value.sqlstate or "")[:2] == "SG"
        assert caught.value.diag.message_hint
        assert agent.execute("SELECT 1").fetchone() == (1,)
    assert shop.dump(*TABLES) == before


def test_undo_brings_everything_back(shop: World) -> None:
    before = shop.dump(*TABLES)
    task = shop.task()
    with task.connect() as agent:
        agent.execute("DELETE FROM customers WHERE id = 10")
        agent.execute("UPDATE orders SET status = 'lost' WHERE id = 5")
        agent.execute("INSERT INTO staff (id, name) VALUES (99, 'Nobody')")
    assert shop.dump(*TABLES) != before
    listed = shop.run("journal", "list", "--task", task.id)["actions"]
    assert [a["kind"] for a in listed] == ["delete", "update", "insert"]
    preview = shop.run("undo", "--task", task.id, "--preview")
    assert shop.dump(*TABLES) != before
    report = shop.run("undo", "--task", task.id)
    assert report["rows"] == preview["rows"]
    assert shop.dump(*TABLES) == before
    assert shop.run("undo", "--task", task.id)["already_undone"]


def test_a_task_ends_with_its_ttl(shop: World) -> None:
    task = shop.task(ttl="2s")
    with task.connect() as agent, task.connect(direct=True) as direct:
        agent.execute("SELECT 1")
        time.sleep(4.2)
        for session in (agent, direct):
            with pytest.raises(psycopg.Error):
                session.execute("SELECT 1")
    for direct_too in (False, True):
        with pytest.raises(psycopg.OperationalError):
            task.connect(direct=direct_too)
    assert shop.value(f"SELECT count(*) FROM pg_roles WHERE rolname = '{task.role}'") == 0


def test_transactions(shop: World, task: Task) -> None:
    with task.connect(autocommit=False) as agent:
        agent.execute("UPDATE orders SET note = 'one' WHERE id = 1")
        agent.rollback()
        assert agent.execute("SELECT note FROM orders WHERE id = 1").fetchone() == (None,)
        agent.execute("UPDATE orders SET note = 'two' WHERE id = 1")
        with pytest.raises(psycopg.Error) as caught:
            agent.execute("DROP TABLE orders")
        assert caught.value.sqlstate == "SG002"
        assert agent.info.transaction_status == psycopg.pq.TransactionStatus.INERROR
        agent.rollback()
        agent.execute("UPDATE orders SET note = 'three' WHERE id = 1")
        agent.commit()
    assert shop.value("SELECT note FROM orders WHERE id = 1") == "three"


def test_exec_and_preview_from_the_command_line(shop: World, task: Task) -> None:
    sql = "DELETE FROM customers WHERE id = 11"
    seen = shop.run("preview", "--task", task.id, sql)
    assert {(a["table"], a["op"]): a["rows"] for a in seen["affected"]}[
        "public.customers", "soft_delete"
    ] == 1
    assert shop.value("SELECT count(*) FROM customers WHERE id = 11 AND deleted_at IS NULL") == 1
    done = shop.run("exec", "--task", task.id, sql, "--reason", "a test")
    assert done["affected"] == seen["affected"]
    assert done["tag"] == "DELETE 1"
    assert shop.value("SELECT count(*) FROM customers WHERE id = 11 AND deleted_at IS NULL") == 0
    refused = shop.run("exec", "--task", task.id, "DROP TABLE orders", status=1)
    assert refused["sqlstate"] == "SG002"
    assert refused["hint"]


def test_tasks_from_the_command_line(shop: World) -> None:
    opened = shop.run("task", "open", "--agent", "cli", "--policy", "support", "--ttl", "2min")
    assert set(opened) >= {"task", "role", "dsn", "direct_dsn", "expires_at"}
    assert opened["task"] in {t["id"] for t in shop.run("task", "list")["tasks"]}
    with psycopg.connect(opened["direct_dsn"]) as agent:
        assert agent.execute("SELECT session_user").fetchone() == (opened["role"],)
    with psycopg.connect(opened["dsn"].replace(":6543/", f":{shop.port}/")) as agent:
        assert agent.execute("SELECT session_user").fetchone() == (opened["role"],)
    shop.run("task", "end", opened["task"])
    assert opened["task"] not in {t["id"] for t in shop.run("task", "list")["tasks"]}
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(opened["direct_dsn"])
