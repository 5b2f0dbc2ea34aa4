"""Other sessions make and drop relations all the time: the catalog is read all the same, for every door."""

import threading
from collections.abc import Iterator

import pytest
from end_to_end.wired import Wired, wired_shop
from servers import Database, fresh_database
from structlog.typing import EventDict

import sqlguard
from sqlguard.embedded import EmbeddedServer

#: A view and a rule are printed by opening what they speak of, which may be gone by then.
MADE = """
CREATE TABLE passing_{0} (id integer PRIMARY KEY, t text);
CREATE VIEW seen_{0} AS SELECT id, t FROM passing_{0};
CREATE RULE also AS ON DELETE TO passing_{0} DO ALSO UPDATE passing_{0} SET t = 'x' WHERE id = OLD.id;
CREATE DOMAIN kind_{0} AS integer CHECK (VALUE > 0);
CREATE FUNCTION counted_{0} (x integer DEFAULT 1 + 2) RETURNS bigint LANGUAGE sql STABLE RETURN x;
DROP FUNCTION counted_{0};
DROP DOMAIN kind_{0};
DROP VIEW seen_{0};
DROP TABLE passing_{0}
"""
CYCLES, SESSIONS = 80, 2


@pytest.fixture(scope="module")
def world(server: EmbeddedServer) -> Iterator[Wired]:
    with fresh_database(server) as database, wired_shop(database, catalog_check_seconds=0.02) as made:
        yield made


def makes_and_drops(database: Database, number: int) -> None:
    with database.connect() as conn:
        for _ in range(CYCLES):
            for statement in MADE.format(number).split(";"):
                conn.execute(statement.encode())


def test_relations_come_and_go_all_the_time(world: Wired, logged: list[EventDict]) -> None:
    threads = [threading.Thread(target=makes_and_drops, args=(world.database, n)) for n in range(SESSIONS)]
    with world.visiting() as agent, agent.connect() as conn, sqlguard.connect(agent.direct) as door:
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                assert conn.execute("SELECT count(*) FROM staff").fetchone() == (8,)
                assert door.execute("SELECT count(*) FROM staff").rows == ((8,),)
        finally:
            for thread in threads:
                thread.join()
    events = [entry["event"] for entry in logged]
    assert events.count("catalog read") >= 3
    assert "catalog not read" not in events
