"""The commands of retention: exit statuses, JSON, and what a person reads."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from journaled import World, rows
from journaled import world as made_world
from servers import Database
from terminal import on_terminal
from typer.testing import CliRunner

from sqlguard.cli import app
from sqlguard.errors import SqlguardError


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with made_world(database) as made:
        made.op.execute("""
            CREATE SCHEMA app;
            CREATE TABLE app.customer (id int PRIMARY KEY, name text);
            CREATE TABLE app.invoice (id int PRIMARY KEY, customer_id int REFERENCES app.customer ON DELETE CASCADE);
            INSERT INTO app.customer VALUES (1, 'ann'), (2, 'bob');
            INSERT INTO app.invoice VALUES (10, 1), (11, 2);
        """)
        made.grant()
        made.guard("app.customer", "app.invoice", mode="soft")
        made.task("t")
        yield made


def delete(world: World, where: str) -> int:
    return world.act(
        world.agents[0],
        "UPDATE app.customer SET deleted_at = statement_timestamp(), deleted_by_agent = sqlguard.agent()"
        f" WHERE {where}",
    )


def run(world: World, *arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*arguments, "--dsn", world.database.owner_dsn])
    if done.exception is not None and not isinstance(done.exception, SystemExit | SqlguardError):
        raise done.exception
    return done.exit_code, done.stdout


def run_json(world: World, *arguments: str) -> tuple[int, Any]:
    status, text = run(world, *arguments, "--json")
    return status, json.loads(text)


def test_restore(world: World) -> None:
    action = delete(world, "id = 1")
    status, told = run_json(world, "restore", "--action", str(action), "--preview")
    assert (status, told["preview"], told["rows"], told["undo"]) == (0, True, 2, None)
    status, done = run_json(world, "restore", "--action", str(action))
    assert (status, done["rows"], done["conflicts"], done["stopped"]) == (0, 2, [], False)
    status, text = run(world, "restore", "--table", "app.customer", "--key", "1")
    assert (status, "already restored" in text) == (0, True)
    delete(world, "true")
    status, refused = run_json(world, "restore", "--table", "app.invoice", "--where", "customer_id = 2")
    assert (status, refused["conflicts"][0]["reason"]) == (1, "restore_parent_is_deleted")
    status, text = run(world, "restore", "--table", "app.invoice", "--key", "11")
    assert (status, "restore_parent_is_deleted" in text, "nothing was changed" in text) == (1, True, True)
    assert run(world, "restore")[0] == 2
    assert run(world, "restore", "--table", "app.customer")[0] == 2


def test_purge(world: World) -> None:
    delete(world, "id = 1")
    assert run(world, "purge", "--all")[0] == 2
    assert run(world, "purge", "--older-than", "30d")[0] == 2
    assert run(world, "purge", "--all", "--older-than", "soon")[0] == 2
    assert run_json(world, "purge", "--all", "--older-than", "30d")[1]["rows"] == 0
    status, told = run_json(world, "purge", "app.customer", "app.invoice", "--older-than", "0s", "--dry-run")
    assert (status, told["rows"], told["dry_run"]) == (0, 2, True)
    world.op.execute("UPDATE app.invoice SET deleted_at = NULL, deleted_by_agent = NULL WHERE id = 10")
    status, blocked = run_json(world, "purge", "--all", "--older-than", "0s")
    assert (status, blocked["stopped"], blocked["blocked"][0]["reason"]) == (1, True, "purge_live_reference")
    status, text = run(world, "purge", "--all", "--older-than", "2100-01-01", "--skip-blocked")
    assert (status, "removed 0 row(s)" in text) == (0, True)
    world.op.execute("DELETE FROM app.invoice WHERE id = 10")
    status, text = run(world, "purge", "--all", "--older-than", "0s")
    assert (status, "removed 1 row(s)" in text) == (0, True)


def test_a_purge_on_a_terminal_shows_how_far_it_is(world: World) -> None:
    delete(world, "true")
    words = ("purge", "--all", "--older-than", "0s", "--batch", "1")
    status, shown = on_terminal(*words, dsn=world.database.owner_dsn)
    assert status == 0
    # A bar at least at the start, which is taken away before the result.
    assert "purging" in shown.partition("removed 4 row(s)")[0]
    assert "\x1b[" in shown
    assert "purging" not in run(world, *words)[1]


def test_hold_and_release(world: World) -> None:
    delete(world, "id = 1")
    assert run(world, "hold", "app.customer")[0] == 2
    status, made = run_json(world, "hold", "app.customer", "--key", "1", "--reason", "case 7")
    assert (status, made["rows"], made["holds"][0]["key"]) == (0, 1, ["1"])
    assert "case 7" in run(world, "hold")[1]
    assert run_json(world, "hold")[1]["holds"] == made["holds"]
    assert run_json(world, "purge", "--all", "--older-than", "0s")[1]["tables"][0]["held"] == 1
    assert run(world, "release")[0] == 2
    number = str(made["holds"][0]["hold"])
    assert run_json(world, "release", "--hold", number)[1]["released"][0]["reason"] == "case 7"
    assert "nothing was on hold" in run(world, "release", "app.customer")[1]


def test_erase(world: World) -> None:
    delete(world, "id = 1")
    assert run(world, "erase", "app.customer")[0] == 2
    status, refused = run_json(world, "erase", "app.customer", "--key", "2")
    assert (status, [r["reason"] for r in refused["refused"]]) == (
        1,
        ["erase_live_row", "purge_live_reference"],
    )
    assert run(world, "erase", "app.customer", "--key", "1")[0] == 1
    assert run_json(world, "erase", "app.invoice", "--key", "10")[1]["rows"] == 1
    assert run_json(world, "erase", "app.customer", "--key", "1", "--preview")[1]["erasure"] is None
    status, text = run(world, "erase", "app.customer", "--key", "1", "--reason", "request 31")
    assert (status, "1 row(s) removed" in text) == (0, True)
    assert run_json(world, "journal", "verify")[1]["ok"]
    assert rows(world.op, "SELECT kind, reason FROM sqlguard.removal ORDER BY id DESC LIMIT 1") == [
        ("erase", "request 31")
    ]
