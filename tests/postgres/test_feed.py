"""The journal for other systems: nothing is missed, whatever order transactions commit in."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from journaled import World, rows
from journaled import world as made_world
from servers import Database
from typer.testing import CliRunner

from sqlguard.cli import app
from sqlguard.cli import feed as cli_feed
from sqlguard.errors import NotConfigured, Refused
from sqlguard.journal import ACTION_FIELDS, Intent, chained
from sqlguard.postgres import feed, journal


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with made_world(database) as made:
        made.op.execute("""
            CREATE SCHEMA app;
            CREATE TABLE app.item (id int PRIMARY KEY, note text);
            INSERT INTO app.item SELECT n, 'n' || n FROM generate_series(1, 9) n;
        """)
        made.grant()
        made.guard("app.item")
        made.task("t")
        yield made


def write(world: World, number: int) -> int:
    return world.act(world.agents[0], f"UPDATE app.item SET note = 'x' WHERE id = {number}")


def run(world: World, *arguments: str) -> list[Any]:
    done = CliRunner().invoke(app, [*arguments, "--dsn", world.database.owner_dsn])
    if done.exception is not None:
        raise done.exception
    return [json.loads(line) for line in done.stdout.splitlines()]


def ids(events: list[dict[str, Any]]) -> list[str]:
    return [e["id"] for e in events]


def test_the_export_has_all_that_is_needed_to_check_the_chain_elsewhere(world: World) -> None:
    first, second = write(world, 1), write(world, 2)
    journal.record_event(world.op, first, "committed", {"tag": "UPDATE 1"})
    lines = run(world, "journal", "export", "--task", "t", "--rows")
    assert [line["type"] for line in lines] == ["action", "row", "action", "row"]
    assert [line["id"] for line in lines[::2]] == [first, second]
    assert lines[1]["key"] == ["1"]
    assert lines[1]["before"] == "(1,n1)"
    assert [e["kind"] for e in lines[0]["events"]] == ["committed"]
    assert [(c["table"], c["op"], c["rows"]) for c in lines[0]["changes"]] == [("app.item", "update", 1)]
    assert lines[2]["prev_hash"] == lines[0]["hash"]
    stored = rows(world.op, "SELECT sqlguard.action_values(a) FROM sqlguard.action a ORDER BY id")
    assert len(stored[0][0]) == len(ACTION_FIELDS)
    assert chained(b"", stored[0][0]).hex() == lines[0]["hash"]


def test_filters_by_row_and_time(world: World) -> None:
    first, second, third = write(world, 1), write(world, 2), write(world, 1)
    wanted = {"table": "app.item", "row": ["1"]}
    assert [a.id for a in journal.list_actions(world.op, **wanted)] == [first, third]  # type: ignore[arg-type]
    middle = journal.show_action(world.op, second).action.at
    assert [a.id for a in journal.list_actions(world.op, since=middle)] == [second, third]
    assert [a.id for a in journal.list_actions(world.op, until=middle)] == [first]
    with pytest.raises(Refused, match="a row is one of a table"):
        journal.list_actions(world.op, row=["1"])
    lines = run(world, "journal", "export", "--table", "item", "--row", "2")
    assert [line["id"] for line in lines] == [second]


def test_a_feed_begins_now_and_goes_on_where_it_was(world: World) -> None:
    write(world, 1)
    one = feed.Feed(world.op, "one")
    with pytest.raises(NotConfigured):
        one.deliver(print)
    assert one.create()
    assert not one.create()
    got: list[dict[str, Any]] = []
    assert one.deliver(got.extend) == 0
    action = write(world, 2)
    journal.record_event(world.op, action, "committed")
    assert one.deliver(got.extend) == 2
    assert one.deliver(got.extend) == 0
    assert [e["type"] for e in got] == ["dev.sqlguard.action", "dev.sqlguard.event.committed"]
    assert got[0]["subject"] == "t"
    assert got[0]["data"]["statement"].startswith("UPDATE app.item")
    everything = feed.Feed(world.op, "all")
    everything.create(from_start=True)
    assert everything.deliver(got.extend) == 3


def test_what_commits_late_is_not_missed(world: World) -> None:
    other = world.task("u")
    late = world.database.connect(world.database.owner_dsn, autocommit=False)
    gone = world.database.connect(world.database.owner_dsn, autocommit=False)
    one = feed.Feed(world.op, "one")
    one.create()
    got: list[dict[str, Any]] = []
    first = journal.record_intent(late, Intent(task="t", statement="SELECT 1"))
    world.task("v")
    lost = journal.record_intent(gone, Intent(task="v", statement="SELECT 2"))
    second = journal.record_intent(world.op, Intent(task=other.task, statement="SELECT 3"))
    begun_now = feed.Feed(world.op, "two")
    begun_now.create()
    assert one.deliver(got.extend) == 1
    assert one.deliver(got.extend) == 0
    gone.rollback()
    late.commit()
    assert one.deliver(got.extend) == 1
    assert ids(got) == [f"action-{second}", f"action-{first}"]
    assert begun_now.deliver(got.extend) == 1
    assert ids(got)[-1] == f"action-{first}"
    assert one.deliver(got.extend) == 0
    assert rows(world.op, "SELECT action_gaps FROM sqlguard.feed WHERE name = 'one'") == [([],)]
    assert lost not in (first, second)


def test_a_delivery_that_fails_is_made_again(world: World) -> None:
    one = feed.Feed(world.op, "one")
    one.create()
    write(world, 1)

    def broken(_: object) -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        one.deliver(broken)
    got: list[dict[str, Any]] = []
    assert one.deliver(got.extend) == 1


def test_who_follows_is_notified_and_nobody_else_pays(world: World) -> None:
    listener = world.database.connect(world.database.owner_dsn)
    listener.execute("LISTEN sqlguard_journal")
    write(world, 1)
    assert list(listener.notifies(timeout=0.2, stop_after=1)) == []
    feed.Feed(world.op, "one").create()
    write(world, 2)
    assert [n.payload for n in listener.notifies(timeout=5, stop_after=1)] == ["action"]


def test_following_prints_and_lists(world: World) -> None:
    first = write(world, 1)
    assert ids(run(world, "journal", "follow", "one", "--from-start", "--once")) == [f"action-{first}"]
    second = write(world, 2)
    (told,) = [
        f
        for f in json.loads(_text(world, "journal", "follow", "--list", "--json"))["feeds"]
        if f["name"] == "one"
    ]
    assert told["behind"] == 1
    assert ids(run(world, "journal", "follow", "one", "--once")) == [f"action-{second}"]
    assert run(world, "journal", "follow", "one", "--drop") == []
    with pytest.raises(NotConfigured):
        run(world, "journal", "follow", "one", "--drop")


def _text(world: World, *arguments: str) -> str:
    return CliRunner().invoke(app, [*arguments, "--dsn", world.database.owner_dsn]).stdout


class Receiver(BaseHTTPRequestHandler):
    """Answers 503 as often as it was told, then takes what it gets."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server: Any = self.server
        server.seen.append((self.headers["Content-Type"], json.loads(body)))
        if server.refuses:
            server.refuses -= 1
            self.send_error(503)
        else:
            self.send_response(204)
            self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_webhook_gets_each_batch_until_it_has_taken_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_feed, "_FIRST", 0.01)
    server: Any = HTTPServer(("127.0.0.1", 0), Receiver)
    server.seen, server.refuses = [], 2
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        action = write(world, 1)
        address = f"http://127.0.0.1:{server.server_address[1]}/events"
        for _ in range(2):
            run(world, "journal", "follow", "hook", "--from-start", "--once", "--webhook", address)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert [kind for kind, _ in server.seen] == ["application/cloudevents-batch+json; charset=UTF-8"] * 3
    assert [ids(batch) for _, batch in server.seen] == [[f"action-{action}"]] * 3
