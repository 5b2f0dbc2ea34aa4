"""An erasure leaves nothing of a row's contents, and a journal that still verifies."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from journaled import World, rows
from journaled import world as made_world
from psycopg.types.json import Jsonb
from servers import Database

from sqlguard.errors import Refused
from sqlguard.journal import Intent
from sqlguard.postgres import history, journal, undo
from sqlguard.postgres.erase import erase
from sqlguard.postgres.hold import hold, release
from sqlguard.postgres.purge import purge
from sqlguard.postgres.restore import restore

SCHEMA = """
    CREATE SCHEMA app;
    CREATE TABLE app.usr (id int PRIMARY KEY, email text UNIQUE, name text, profile jsonb);
    CREATE TABLE app.doc (id int PRIMARY KEY, usr int REFERENCES app.usr ON DELETE CASCADE);
    INSERT INTO app.usr VALUES (1, 'ann@example.org', 'ann', NULL), (471104711, 'bob@example.org', 'Bob Builder',
                                '{"phone": "+49 30 5550100", "tags": ["carpenter"]}');
"""
# A number of nine digits: a short one turns up in hashes and times.
PERSONAL = ("bob@example", "Bob Builder", "Bob", "5550100", "carpenter", "bobby", "471104711")
ALL = ("action", "event", "change_set", "row_change", "idempotency", "undo", "removal", "removed", "hold")


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with made_world(database) as made:
        made.op.execute(SCHEMA)
        made.grant()
        made.guard("app.usr", "app.doc", mode="soft")
        made.task("t")
        yield made


def delete(world: World, where: str) -> int:
    return world.act(
        world.agents[0],
        f"UPDATE app.usr SET deleted_at = statement_timestamp(), deleted_by_agent = sqlguard.agent() WHERE {where}",
    )


def life(world: World) -> list[int]:
    """Let the agent do this and that with the row, and delete it in the end."""
    agent = world.agents[0]
    done = [
        world.act(
            agent,
            "UPDATE app.usr SET name = 'bobby' WHERE email = E'bob\\x40example.org'",
            reason="Bob Builder (471104711) wants to be called bobby",
        ),
        world.act(agent, "UPDATE app.usr SET id = 4712 WHERE id = 471104711 /* user 471104711 */"),
        world.act(agent, "UPDATE app.usr SET profile = profile || '{\"x\": 1}'"),
        world.act(agent, "UPDATE app.usr SET id = 471104711 WHERE id = 4712"),
        delete(world, "email LIKE 'bob@example%'"),
    ]
    journal.record_event(
        world.op, done[0], "committed", {"rows": 1, "sample": [{"id": 471104711, "name": "Bob Builder"}]}
    )
    refused = journal.record_intent(
        world.op,
        Intent(
            task="t",
            verdict="refuse",
            statement="SELECT * FROM app.usr WHERE email = $1 OR id = $2",
            params=("bob@example.org", "471104711"),
            tables=("app.usr",),
        ),
    )
    elsewhere = journal.record_intent(
        world.op, Intent(task="t", statement="UPDATE app.doc SET id = 471104711", tables=("app.doc",))
    )
    return [*done, refused, elsewhere]


def everything(world: World, *, but: tuple[int, ...] = ()) -> str:
    """Return all that the journal knows, as text."""
    parts = []
    for table in ALL:
        leave = f"WHERE id <> ALL ('{{{','.join(map(str, but))}}}')" if table == "action" else ""
        parts += [str(r) for r in rows(world.op, f"SELECT t::text FROM sqlguard.{table} t {leave}")]
    return "\n".join(parts)


def test_nothing_is_left_and_the_journal_verifies(world: World) -> None:
    *_, elsewhere = life(world)
    world.op.execute(
        "INSERT INTO sqlguard.idempotency (scope, key, statement_hash, task_id, action_id, tag, columns, rows,"
        " expires_at) VALUES ('s', 'k', 'h', 't', 1, 'UPDATE 1', %s, %s, now() + interval '1 day')",
        [Jsonb([{"name": "id"}]), Jsonb([["471104711", "Bob Builder"]])],
    )
    assert all(word in everything(world) for word in PERSONAL)
    told = erase(world.op, "app.usr", keys=["471104711"], preview=True)
    assert (told.preview, told.erasure, told.stopped) == (True, None, False)
    assert all(word in everything(world) for word in PERSONAL)

    report = erase(world.op, "app.usr", keys=["471104711"], reason="request 31")
    assert (report.rows, report.images, report.actions, report.events, report.results) == (1, 5, 5, 1, 1)
    assert (told.rows, told.images, told.actions) == (report.rows, report.images, report.actions)
    left = everything(world, but=(elsewhere,))
    assert [word for word in PERSONAL if word.casefold() in left.casefold()] == []
    verified = journal.verify(world.op)
    assert (verified.ok, verified.faults) == (True, ())
    assert rows(world.op, "SELECT id FROM app.usr") == [(1,)]
    # Another row's images are as they were.
    assert [c.op for c in history.history(world.op, "app.usr", 1)] == ["update"]
    assert rows(world.op, "SELECT statement FROM sqlguard.action WHERE id = %s", [elsewhere]) == [
        ("UPDATE app.doc SET id = 471104711",)
    ]
    # The agent, the time and what became of it stay.
    detail = journal.show_action(world.op, 1).action
    assert (detail.agent, detail.outcome, detail.rows) == ("bot", "committed", 1)
    assert detail.statement == "UPDATE app.usr SET name = '***' WHERE email = '***'"
    assert detail.reason == "*** (***) wants to be called ***"
    assert journal.show_action(world.op, 2).action.statement == (
        "UPDATE app.usr SET id = '***' WHERE id = '***' /* user *** */"
    )


def test_an_undo_says_that_the_row_was_erased(world: World) -> None:
    actions = life(world)
    erase(world.op, "app.usr", keys=["471104711"])
    stopped = undo.undo(world.op, task="t")
    assert stopped.stopped
    assert {c.reason for c in stopped.conflicts} == {"the row was erased"}
    assert undo.undo(world.op, task="t", on_conflict="skip").rows == 1
    report = restore(world.op, action=actions[4])
    assert (report.stopped, [c.problem for c in report.conflicts]) == (True, ["the row was erased"])


def test_an_erasure_that_nobody_wrote_down_is_tampering(world: World) -> None:
    life(world)
    erase(world.op, "app.usr", keys=["471104711"])
    root = world.database.connect()
    root.execute("SET session_replication_role = replica")
    for table in ("action", "event"):
        root.execute(f"ALTER TABLE sqlguard.{table} DISABLE TRIGGER append_only")
    root.execute("UPDATE sqlguard.action SET statement = 'SELECT 1' WHERE id = 1")
    assert [(f.chain, f.entry) for f in journal.verify(world.op).faults] == [("action", 1)]
    root.execute(
        'UPDATE sqlguard.event SET detail = detail || \'{"now": "00"}\''
        " WHERE kind = 'erased' AND detail ->> 'entry' = '2' AND detail ->> 'chain' = 'action'"
    )
    found = {(f.chain, f.entry) for f in journal.verify(world.op).faults}
    assert {c for c, _ in found} == {"action", "event"}
    assert ("action", 2) in found


def test_the_wall_stays_up_for_everything_else(world: World) -> None:
    life(world)
    erase(world.op, "app.usr", keys=["471104711"])
    for statement in (
        "UPDATE sqlguard.action SET statement = 'x'",
        "UPDATE sqlguard.row_change SET before = NULL",
        "UPDATE sqlguard.event SET detail = '{}'",
        "UPDATE sqlguard.action SET agent = 'x'",
        "DELETE FROM sqlguard.removal",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            world.op.execute(statement)
    agent = world.agents[0].conn
    for statement in (
        "SELECT sqlguard.erase_action(1, 1, '{}')",
        "SELECT sqlguard.erase_event(1, 1, '{}')",
        "SELECT sqlguard.note_erasure(1, 't', 'action', 1, '', '')",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            agent.execute(statement)


def reasons(report: Any) -> list[str]:
    return [r.reason for r in report.refused]


def test_what_is_refused(world: World) -> None:
    before = everything(world)
    assert reasons(erase(world.op, "app.usr", keys=["471104711"])) == ["erase_live_row"]
    assert reasons(erase(world.op, "app.usr", keys=["77"])) == ["erase_nothing_found"]
    world.op.execute("INSERT INTO app.doc VALUES (1, 471104711)")
    assert reasons(erase(world.op, "app.usr", keys=["471104711"], live=True)) == ["purge_live_reference"]
    world.op.execute("UPDATE app.doc SET deleted_at = '2024-01-01'")
    assert reasons(erase(world.op, "app.usr", keys=["471104711"], live=True)) == ["erase_referenced"]
    assert everything(world) == before
    assert erase(world.op, "app.doc", keys=["1"]).rows == 1
    both = erase(world.op, "app.usr", keys=["471104711", "1"], live=True)
    assert (both.rows, both.refused) == (2, ())
    with pytest.raises(Refused, match="nothing was named"):
        erase(world.op, "app.usr", keys=[])


def test_legal_hold_wins(world: World) -> None:
    life(world)
    hold(world.op, "app.usr", keys=("471104711",), reason="case 7")
    assert reasons(erase(world.op, "app.usr", keys=["471104711"])) == ["erase_held"]
    release(world.op, "app.usr")
    hold(world.op, "app.usr", where="name = 'bobby' AND email LIKE '100%' IS FALSE", reason="case 8")
    assert reasons(erase(world.op, "app.usr", keys=["471104711"])) == ["erase_held"]
    release(world.op, "app.usr")
    assert erase(world.op, "app.usr", keys=["471104711"]).rows == 1
    assert rows(world.op, "SELECT key FROM sqlguard.hold ORDER BY id") == [(["erased"],), (None,)]


def test_a_row_that_is_gone_already_still_has_traces(world: World) -> None:
    life(world)
    assert purge(world.op, older_than=timedelta(0)).rows == 1
    hold(world.op, "app.usr", where="name = 'bobby'", reason="case 9")
    assert reasons(erase(world.op, "app.usr", keys=["471104711"])) == ["erase_held"]
    release(world.op, "app.usr")
    report = erase(world.op, "app.usr", keys=["471104711"])
    assert (report.rows, report.images) == (0, 5)
    assert journal.verify(world.op).ok
    assert reasons(erase(world.op, "app.usr", keys=["471104711"])) == ["erase_nothing_found"]


def test_another_row_that_had_the_key_keeps_its_images(world: World) -> None:
    agent = world.agents[0]
    world.act(agent, "UPDATE app.usr SET name = 'first' WHERE id = 1")
    world.act(agent, "UPDATE app.usr SET id = 2 WHERE id = 1")
    world.act(agent, "INSERT INTO app.usr VALUES (1, 'new@example.org', 'new')")
    world.act(agent, "UPDATE app.usr SET name = 'newer' WHERE id = 1")
    report = erase(world.op, "app.usr", keys=["2"], live=True)
    assert (report.rows, report.images) == (1, 2)
    assert [c.op for c in history.history(world.op, "app.usr", 1)] == ["insert", "update"]


def test_a_table_in_journal_mode(database: Database) -> None:
    with made_world(database) as world:
        world.op.execute(SCHEMA)
        world.grant()
        world.guard("app.usr", "app.doc", mode="journal")
        agent = world.task("t")
        action = world.act(agent, "DELETE FROM app.usr WHERE id = 471104711")
        assert "Bob Builder" in everything(world)
        assert erase(world.op, "app.usr", keys=["471104711"]).images == 1
        assert [w for w in PERSONAL if w in everything(world)] == []
        assert undo.undo(world.op, action=action).stopped
        assert journal.verify(world.op).ok
