"""What somebody else did to a row between two changes of the agent's is seen, however many rows a statement changed."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from journaled import World, rows
from journaled import world as made_world
from servers import Database

from sqlguard.postgres import compensate, undo, walls_capture
from sqlguard.postgres.undo_between import REASON
from sqlguard.postgres.undo_plan import Scope

SCHEMA = """
    CREATE SCHEMA app;
    CREATE TABLE app.t (id int PRIMARY KEY, n int, note text);
    INSERT INTO app.t SELECT g, g, 'n' || g FROM generate_series(1, 2000) g;
    CREATE TABLE app.part (id int, n int, note text, PRIMARY KEY (id, n)) PARTITION BY RANGE (n);
    CREATE TABLE app.part_low PARTITION OF app.part FOR VALUES FROM (0) TO (100000);
    CREATE TABLE app.part_high PARTITION OF app.part FOR VALUES FROM (100000) TO (MAXVALUE);
    INSERT INTO app.part SELECT g, g, 'n' || g FROM generate_series(1, 2000) g;
    CREATE TABLE app.swap (id int PRIMARY KEY DEFERRABLE, note text);
    INSERT INTO app.swap SELECT g, 'n' || g FROM generate_series(1, 2000) g;
"""
TABLES = ("app.t", "app.part", "app.swap")
MARKS = "deleted_at = statement_timestamp(), deleted_by_agent = (SELECT sqlguard.agent())"
#: Statements of 2,000 rows each, that leave the row 17 in the table.
MANY = {
    "update": "UPDATE app.t SET note = note || '+'",
    "insert": "INSERT INTO app.t SELECT g, g, 'made' FROM generate_series(3001, 5000) g",
    "upsert": "INSERT INTO app.t SELECT g, g, 'made' FROM generate_series(1, 2000) g"
    " ON CONFLICT (id) DO UPDATE SET note = excluded.note",
    "merge": "MERGE INTO app.t USING (SELECT * FROM generate_series(1, 3000) g) s ON t.id = s.g"
    " WHEN MATCHED AND t.id % 2 = 0 THEN DELETE WHEN MATCHED THEN UPDATE SET note = 'merged'"
    " WHEN NOT MATCHED THEN INSERT VALUES (s.g, s.g, 'made')",
    "rekey": "UPDATE app.t SET id = id + 2983, note = note || '+'",
}


@contextmanager
def prepared(database: Database, mode: str) -> Iterator[World]:
    with made_world(database) as made:
        made.op.execute(SCHEMA)
        made.grant()
        made.guard(*TABLES, mode=mode)
        made.task("t")
        yield made


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with prepared(database, "journal") as made:
        yield made


@pytest.fixture
def soft(database: Database) -> Iterator[World]:
    with prepared(database, "soft") as made:
        yield made


def act(world: World, *statements: str) -> int:
    return world.act(world.agents[0], *statements)


def conflicts(report: undo.UndoReport) -> dict[str, str]:
    return {str(c.key["id"]): c.reason for c in report.conflicts}


def note(world: World, key: int, table: str = "app.t") -> str:
    return str(rows(world.op, f"SELECT note FROM {table} WHERE id = %s", [key])[0][0])


@pytest.mark.parametrize("kind", MANY)
def test_the_one_row_of_many_that_the_owner_changed_is_the_conflict(world: World, kind: str) -> None:
    before = world.contents("app.t")
    key = {"insert": 3017, "rekey": 3000}.get(kind, 17)
    first = act(world, MANY[kind])
    world.op.execute("UPDATE app.t SET note = 'of the owner' WHERE id = %s", [key])
    act(world, f"UPDATE app.t SET note = 'again' WHERE id BETWEEN {key} - 5 AND {key} + 5")
    done = world.contents("app.t")
    report = undo.undo(world.op, task="t")
    assert (report.stopped, conflicts(report)) == (True, {str(key): REASON})
    # As it is once the newer change is taken back, and as it was at the start.
    current, wanted = report.conflicts[0].current, report.conflicts[0].wanted
    assert current is not None
    assert current["note"] == "of the owner"
    assert (wanted and wanted["note"]) == (None if kind == "insert" else "n17")
    assert world.contents("app.t") == done
    skipped = undo.undo(world.op, task="t", on_conflict="skip")
    assert (skipped.conflict_count, note(world, key)) == (1, "of the owner")
    assert undo.undo(world.op, task="t", on_conflict="skip").rows == 0
    forced = undo.undo(world.op, action=first, on_conflict="force")
    assert (forced.conflicts, world.contents("app.t")) == ((), before)


def test_it_can_be_settled_by_column_and_done_again(world: World) -> None:
    act(world, "UPDATE app.t SET note = note || '+', n = -n")
    world.op.execute("UPDATE app.t SET note = 'of the owner' WHERE id = 17")
    act(world, "UPDATE app.t SET n = n - 1 WHERE id < 30")
    done = world.contents("app.t")
    compensate.undo(world.op, Scope(task="t"), columns=["n"])
    assert rows(world.op, "SELECT n, note FROM app.t WHERE id = 17") == [(17, "of the owner")]
    assert rows(world.op, "SELECT count(*) FROM app.t WHERE n <> id OR note <> 'n' || id") == [(1,)]
    ((number,),) = rows(world.op, "SELECT id FROM sqlguard.undo")
    assert undo.undo(world.op, undo_id=number).conflicts == ()
    assert world.contents("app.t") == done


def test_a_row_that_the_owner_changed_before_it_was_deleted_softly(soft: World) -> None:
    act(soft, "UPDATE app.t SET note = note || '+' WHERE id <= 1500", MANY["insert"])
    soft.op.execute("UPDATE app.t SET note = 'of the owner' WHERE id IN (17, 3017)")
    act(soft, f"UPDATE app.t SET {MARKS} WHERE id < 1600 OR id > 3000")
    report = undo.undo(soft.op, task="t", on_conflict="skip")
    assert conflicts(report) == {"17": REASON, "3017": REASON}
    assert (note(soft, 17), note(soft, 3017)) == ("of the owner", "of the owner")
    assert rows(soft.op, "SELECT count(*) FROM app.t WHERE deleted_at IS NOT NULL OR note LIKE '%%+'") == [
        (0,)
    ]


def test_a_deleted_row_that_the_owner_changed(soft: World) -> None:
    act(soft, "UPDATE app.t SET note = note || '+' WHERE id <= 1500")
    act(soft, f"UPDATE app.t SET {MARKS} WHERE id < 1600")
    soft.op.execute("UPDATE app.t SET note = 'of the owner' WHERE id = 17")
    report = undo.undo(soft.op, task="t", on_conflict="skip")
    assert (conflicts(report), note(soft, 17)) == ({"17": REASON}, "of the owner")


def test_a_deleted_row_that_the_owner_brought_back_and_changed(soft: World) -> None:
    act(soft, "UPDATE app.t SET note = note || '+' WHERE id <= 1500")
    deleted = act(soft, f"UPDATE app.t SET {MARKS} WHERE id < 1600")
    assert undo.undo(soft.op, action=deleted).conflicts == ()
    soft.op.execute("UPDATE app.t SET note = 'of the owner' WHERE id = 17")
    act(soft, "UPDATE app.t SET note = note || '!' WHERE id BETWEEN 10 AND 20")
    report = undo.undo(soft.op, task="t", on_conflict="skip")
    assert (conflicts(report), note(soft, 17)) == ({"17": REASON}, "of the owner")


def test_what_was_undone_or_done_again_in_between(world: World) -> None:
    before = world.contents("app.t")
    first = act(world, "UPDATE app.t SET note = note || '+'")
    second = act(world, "UPDATE app.t SET note = note || '!' WHERE id < 1800")
    for action in (second, first):
        back = undo.undo(world.op, action=action)
    assert world.contents("app.t") == before
    assert undo.undo(world.op, undo_id=back.undo).conflicts == ()  # the first is done again
    world.op.execute("UPDATE app.t SET note = 'of the owner' WHERE id = 17")
    third = act(world, "UPDATE app.t SET note = note || '?' WHERE id BETWEEN 10 AND 1500")
    world.op.execute("UPDATE app.t SET note = note WHERE id = 1900")
    assert undo.undo(world.op, action=third).conflicts == ()
    world.op.execute("UPDATE app.t SET note = 'and again' WHERE id = 18")
    act(world, "UPDATE app.t SET note = note || '.' WHERE id BETWEEN 10 AND 1200")
    report = undo.undo(world.op, task="t", on_conflict="skip")
    assert conflicts(report) == {"17": REASON, "18": REASON, "1900": "the row was changed since"}
    assert (note(world, 17), note(world, 18), note(world, 19)) == ("of the owner", "and again", "n19")


def test_what_the_agent_alone_did_to_many_rows_is_no_conflict(soft: World) -> None:
    before = soft.contents(*TABLES)
    for n in range(2):
        act(
            soft,
            f"UPDATE app.t SET note = note || '{n}'",
            f"UPDATE app.t SET id = id + 2000 + {n} WHERE id > 700",
            f"UPDATE app.t SET note = note || '-{n}' WHERE id < 1200",
            # All to another partition at first.
            "UPDATE app.part SET n = 100000 + id - n % 100000, note = note || '.'",
            "UPDATE app.swap SET id = 2001 - id, note = note || '.'",
        )
    act(soft, f"UPDATE app.t SET {MARKS} WHERE id < 1500", "UPDATE app.swap SET note = 'end'")
    report = undo.undo(soft.op, task="t")
    assert conflicts(report) == {}
    assert soft.contents(*TABLES) == before


def test_a_row_that_moved_to_another_partition_and_was_changed(world: World) -> None:
    act(world, "UPDATE app.part SET n = n + 100000 * (id % 2), note = note || '+'")
    world.op.execute("UPDATE app.part SET note = 'of the owner' WHERE id IN (17, 18)")
    act(world, "UPDATE app.part SET note = note || '!' WHERE id < 1600")
    report = undo.undo(world.op, task="t", on_conflict="skip")
    assert conflicts(report) == {"17": REASON, "18": REASON}
    assert (note(world, 17, "app.part"), note(world, 18, "app.part")) == ("of the owner", "of the owner")


def test_more_rows_than_hashes_fit_in_memory_are_brought_together_all_the_same(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walls_capture, "HASHED", 100)
    monkeypatch.setattr(walls_capture, "MANY", 100)
    with prepared(database, "soft") as world:
        before = world.contents(*TABLES)
        act(
            world,
            "UPDATE app.t SET note = note || '+'",
            "UPDATE app.swap SET id = 2001 - id, note = note || '.'",
        )
        world.op.execute("UPDATE app.t SET note = 'of the owner' WHERE id = 17")
        act(world, "UPDATE app.t SET note = note || '!'", "UPDATE app.swap SET note = note || '.'")
        assert conflicts(undo.undo(world.op, task="t")) == {"17": REASON}
        assert undo.undo(world.op, task="t", on_conflict="force").conflicts == ()
        assert world.contents(*TABLES) == before


def test_a_row_without_a_key_must_not_get_lost_between_partitions(world: World) -> None:
    world.op.execute("""
        CREATE TABLE app.log (n int, note text) PARTITION BY RANGE (n);
        CREATE TABLE app.log_low PARTITION OF app.log FOR VALUES FROM (0) TO (10);
        CREATE TABLE app.log_high PARTITION OF app.log FOR VALUES FROM (10) TO (20);
        CREATE FUNCTION app.stop() RETURNS trigger LANGUAGE plpgsql
            AS $$ BEGIN RETURN CASE WHEN NEW.n <> 12 THEN NEW END; END $$;
        CREATE TRIGGER stop BEFORE INSERT ON app.log_high FOR EACH ROW EXECUTE FUNCTION app.stop();
        INSERT INTO app.log SELECT g, 'n' || g FROM generate_series(1, 5) g;
    """)
    world.grant()
    world.guard("app.log")
    with pytest.raises(psycopg.errors.DatabaseError, match="got lost on their way"):
        act(world, "UPDATE app.log SET n = n + 10")
    act(world, "UPDATE app.log SET n = n + 10 WHERE n <> 2")
    before = rows(world.op, "SELECT n, note FROM app.log ORDER BY note")
    assert undo.undo(world.op, task="t").conflicts == ()
    assert (
        rows(world.op, "SELECT n, note FROM app.log ORDER BY note")
        == [(g, f"n{g}") for g in range(1, 6)]
        != before
    )


def test_a_row_that_the_owner_took_away_before_the_agent_made_another_of_its_key(world: World) -> None:
    act(world, "UPDATE app.t SET note = note || '+'", MANY["insert"])
    world.op.execute("DELETE FROM app.t WHERE id IN (17, 18, 3017)")
    act(world, "INSERT INTO app.t VALUES (17, 1, 'anew'), (3017, 1, 'anew')")
    act(world, "UPDATE app.t SET id = 18 WHERE id = 19")
    report = undo.undo(world.op, task="t", on_conflict="skip")
    # What the agent had made is to go anyway.
    assert conflicts(report) == {"17": REASON, "18": REASON}
    assert rows(world.op, "SELECT count(*), max(id) FROM app.t WHERE note LIKE 'n%%'") == [(1998, 2000)]
    assert rows(world.op, "SELECT id FROM app.t WHERE id IN (17, 18, 19, 3017)") == [(19,)]


def test_rows_that_came_by_copy(world: World) -> None:
    agent = world.agents[0].conn
    before = world.contents("app.t")
    with agent.cursor().copy("COPY app.t FROM STDIN") as copy:
        for number in range(3001, 4501):
            copy.write_row((number, number, "made"))
    world.op.execute("UPDATE app.t SET note = 'of the owner' WHERE id = 3017")
    act(world, "UPDATE app.t SET note = 'again' WHERE id > 3000")
    assert conflicts(undo.undo(world.op, task="t")) == {"3017": REASON}
    assert undo.undo(world.op, task="t", on_conflict="force").conflicts == ()
    assert world.contents("app.t") == before
