"""Guarded tables of every kind, straight behind their walls: what the tests of the walls start from."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from journaled import Agent, World, rows, world
from servers import Database

MARK = "deleted_at = pg_catalog.statement_timestamp(), deleted_by_agent = (SELECT sqlguard.agent())"
TABLES = """
CREATE SCHEMA app;
CREATE TABLE app.customer (id int PRIMARY KEY, email text UNIQUE, note text);
CREATE TABLE app.invoice (id int PRIMARY KEY, customer_id int REFERENCES app.customer ON DELETE CASCADE, total numeric);
CREATE TABLE app.log (id int PRIMARY KEY, what text);
CREATE TABLE app.loose (a int, b text);
INSERT INTO app.customer SELECT g, 'e' || g, 'n' FROM generate_series(1, 40) g;
INSERT INTO app.invoice SELECT g, 1 + g % 40, g FROM generate_series(1, 80) g;
INSERT INTO app.log SELECT g, 'x' FROM generate_series(1, 40) g;
INSERT INTO app.loose VALUES (1, 'x'), (1, 'x'), (2, 'y');
CREATE FUNCTION app.purge() RETURNS bigint LANGUAGE sql SECURITY DEFINER
    AS 'WITH d AS (DELETE FROM app.log WHERE id <= 3 RETURNING 1) SELECT count(*) FROM d';
CREATE FUNCTION app.revive() RETURNS void LANGUAGE plpgsql SECURITY DEFINER
    AS 'BEGIN UPDATE app.customer SET deleted_at = NULL, deleted_by_agent = NULL WHERE id = 1; END';
CREATE TABLE app.tree (id int, kind text, v text, PRIMARY KEY (id, kind)) PARTITION BY LIST (kind);
CREATE TABLE app.tree_a PARTITION OF app.tree FOR VALUES IN ('a');
CREATE TABLE app.tree_b (v text, kind text NOT NULL, id int NOT NULL);
ALTER TABLE app.tree ATTACH PARTITION app.tree_b FOR VALUES IN ('b');
INSERT INTO app.tree SELECT g, CASE WHEN g % 2 = 0 THEN 'a' ELSE 'b' END, 'v' FROM generate_series(1, 8) g;
CREATE TABLE app.base (id int PRIMARY KEY, v text);
CREATE TABLE app.sub (extra text, PRIMARY KEY (id)) INHERITS (app.base);
INSERT INTO app.base VALUES (1, 'b'); INSERT INTO app.sub VALUES (2, 's', 'only here');
"""


@contextmanager
def walled(database: Database) -> Iterator[World]:
    with world(database) as made:
        made.op.execute(TABLES)
        made.guard("app.customer", "app.tree", "app.base", mode="soft")
        made.guard("app.log", "app.loose", mode="journal")
        made.op.execute("UPDATE sqlguard.policy_table SET max_rows = 20, max_share = 0.5")
        made.grant()
        made.op.execute("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA app TO PUBLIC")
        yield made


def refused(agent: Agent, text: str) -> str | None:
    with pytest.raises(psycopg.Error) as caught:
        agent.conn.execute(text.encode())
    return caught.value.sqlstate


def changes(walls: World) -> list[tuple[Any, ...]]:
    return rows(walls.op, "SELECT table_name, op, rows FROM sqlguard.change_set ORDER BY id")


def images(walls: World) -> list[tuple[Any, ...]]:
    return rows(
        walls.op,
        "SELECT r.key, r.new_key, r.before FROM sqlguard.row_change r ORDER BY r.change_set_id, r.key, r.id",
    )
