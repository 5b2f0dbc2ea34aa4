"""Chinook, whole: an agent changes and deletes in all eleven tables, and the undo leaves the data as it was."""

from collections.abc import Iterator

import pytest
from journaled import GROUP, World, rows
from journaled import world as made_world
from psycopg import sql
from servers import Database

from sqlguard.postgres import undo
from sqlguard.postgres.catalog_reader import read_catalog
from sqlguard.postgres.guard_table import user_tables
from sqlguard.rewrite import rewrite
from sqlguard.statement.model import Session

STATEMENTS = (
    "UPDATE track SET unit_price = unit_price * 1.1, name = upper(name) WHERE genre_id < 5",
    "UPDATE invoice SET total = total + 1, billing_city = NULL WHERE invoice_id % 3 = 0",
    "DELETE FROM invoice_line WHERE invoice_id % 2 = 0",
    "DELETE FROM invoice WHERE invoice_id % 2 = 0",
    "DELETE FROM playlist_track WHERE playlist_id < 9",
    "DELETE FROM playlist WHERE playlist_id < 9",
    "UPDATE customer SET support_rep_id = NULL, email = 'x' || email",
    "DELETE FROM employee WHERE employee_id = 8",
    "UPDATE employee SET reports_to = 1 WHERE employee_id > 2",
    "INSERT INTO genre (genre_id, name) VALUES (100, 'new'), (101, 'newer')",
    "UPDATE track SET genre_id = 100 WHERE genre_id = 1",
    "DELETE FROM invoice_line WHERE track_id IN (SELECT track_id FROM track WHERE media_type_id = 3)",
    "DELETE FROM playlist_track WHERE track_id IN (SELECT track_id FROM track WHERE media_type_id = 3)",
    "DELETE FROM track WHERE media_type_id = 3",
    "DELETE FROM media_type WHERE media_type_id = 3",
    "UPDATE album SET title = title || '!' WHERE artist_id IN (SELECT artist_id FROM artist WHERE name < 'D')",
    "DELETE FROM artist WHERE artist_id NOT IN (SELECT artist_id FROM album)",
)


@pytest.fixture(params=["journal", "soft"])
def world(chinook: Database, request: pytest.FixtureRequest) -> Iterator[World]:
    with made_world(chinook) as made:
        tables = user_tables(made.op)
        assert len(tables) == 11
        made.guard(*tables, mode=request.param)
        for table in tables:
            name = sql.Identifier(*table.split("."))
            made.op.execute(sql.SQL("GRANT ALL ON {} TO {}").format(name, sql.Identifier(GROUP)))
        made.task("t")
        yield made


def test_the_whole_of_chinook_comes_back(world: World) -> None:
    tables = user_tables(world.op)
    before = world.contents(*tables)
    catalog = read_catalog(world.op)
    session = Session(search_path=("public",))
    for statement in STATEMENTS:
        world.act(world.agents[0], rewrite(statement, None, catalog, session).text)
    changed = rows(world.op, "SELECT DISTINCT table_name FROM sqlguard.change_set")
    assert len(changed) == 11
    after = world.contents(*tables)

    report = undo.undo(world.op, task="t")
    assert [str(c) for c in report.conflicts] == []
    assert world.contents(*tables) == before
    assert undo.undo(world.op, undo_id=report.undo).conflicts == ()
    assert world.contents(*tables) == after
    assert undo.undo(world.op, task="t").rows == report.rows
    assert world.contents(*tables) == before
