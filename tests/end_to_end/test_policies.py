"""Policies and guards in either order, from the command line."""

from pathlib import Path

import psycopg
import pytest
from end_to_end.shop import POLICY, SHOP, World
from servers import Database


@pytest.fixture
def world(database: Database, tmp_path: Path) -> World:
    made = World(database, database.owner_dsn, tmp_path)
    made.owner.execute(SHOP.encode())
    made.run("migrate")
    return made


def test_a_policy_first_and_guards_later(world: World) -> None:
    path = world.folder / "support.toml"
    path.write_text(POLICY, encoding="utf-8")
    planned = world.run("policy", "apply", str(path), "--dry-run")["policies"][0]
    assert planned["guarded"] == [
        f"public.{t}" for t in ("customers", "items", "orders", "products", "staff")
    ]
    assert world.value("SELECT count(*) FROM sqlguard.guarded_table") == 0
    applied = world.run("policy", "apply", str(path))["policies"][0]
    assert applied["guarded"] == planned["guarded"]
    assert world.run("policy", "apply", str(path))["policies"][0]["guarded"] == []
    task = world.task()
    before = world.dump("customers", "orders", "items")
    with task.connect(direct=True) as agent:
        assert agent.execute("UPDATE orders SET note = 'seen' WHERE id = 1").statusmessage == "UPDATE 1"
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            agent.execute("DELETE FROM orders WHERE id = 2")
    world.run("undo", "--task", task.id)
    assert world.dump("customers", "orders", "items") == before
    # From now on deletes are soft, for the task that is open as well: the grants follow the guard.
    world.run("guard", "orders", "items", "--mode", "soft")
    done = world.run("exec", "--task", task.id, "DELETE FROM orders WHERE id = 2")
    assert done["verdict"] == "rewrite"
    assert world.value("SELECT count(*) FROM orders WHERE id = 2 AND deleted_by_agent = 'tester'") == 1


def test_without_guarding_no_write_is_granted(world: World) -> None:
    path = world.folder / "support.toml"
    path.write_text(POLICY, encoding="utf-8")
    applied = world.run("policy", "apply", str(path), "--no-guard")["policies"][0]
    assert applied["guarded"] == []
    assert any("public.orders" in w for w in applied["warnings"])
    task = world.task()
    with task.connect(direct=True) as agent:
        assert agent.execute("SELECT count(*) FROM orders").fetchone() == (2400,)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            agent.execute("UPDATE orders SET note = 'seen' WHERE id = 1")


def test_one_table_that_can_not_be_soft_does_not_keep_the_others_waiting(world: World) -> None:
    world.owner.execute(
        "CREATE FUNCTION no_update() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'append only'; END $$;"
        " CREATE TRIGGER no_update BEFORE DELETE ON staff FOR EACH ROW EXECUTE FUNCTION no_update()"
    )
    report = world.run("guard", "staff", "products", "--mode", "soft", status=1)
    assert [t["table"] for t in report["tables"]] == ["public.products"]
    (refused,) = report["refused"]
    assert refused["table"] == "staff"
    assert "user_delete_trigger" in refused["error"]
    assert "journal" in refused["hint"]
    report = world.run("guard", "--all")
    assert {t["table"]: t["mode"] for t in report["tables"]}["public.staff"] == "journal"
    assert not any(t["changed"] for t in world.run("guard", "--all")["tables"])
