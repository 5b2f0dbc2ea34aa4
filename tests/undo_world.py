"""Parents, children and links under guard, and the task `t`: what the tests of undo start from."""

from collections.abc import Iterator
from contextlib import contextmanager

from journaled import World
from journaled import world as made_world
from servers import Database

SCHEMA = """
    CREATE SCHEMA app;
    CREATE TABLE app.parent (id int PRIMARY KEY, email text UNIQUE, note text, updated_at timestamptz DEFAULT now());
    CREATE TABLE app.child (
        id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        parent_id int REFERENCES app.parent ON DELETE CASCADE ON UPDATE CASCADE,
        qty numeric(10, 2),
        double numeric GENERATED ALWAYS AS (qty * 2) STORED);
    CREATE TABLE app.link (id int PRIMARY KEY, parent_id int REFERENCES app.parent ON DELETE SET NULL ON UPDATE CASCADE,
                           "sg row" text, "key" text, image text);
    CREATE FUNCTION app.touch() RETURNS trigger LANGUAGE plpgsql
        AS $$ BEGIN NEW.updated_at = clock_timestamp(); RETURN NEW; END $$;
    CREATE TRIGGER touch BEFORE UPDATE ON app.parent FOR EACH ROW EXECUTE FUNCTION app.touch();
    INSERT INTO app.parent SELECT g, 'e' || g, 'n' || g FROM generate_series(1, 20) g;
    INSERT INTO app.child (parent_id, qty) SELECT 1 + g % 20, g * 1.50 FROM generate_series(1, 60) g;
    INSERT INTO app.link SELECT g, 1 + g % 20, 'x' FROM generate_series(1, 40) g;
"""
TABLES = ("app.parent", "app.child", "app.link")


@contextmanager
def undo_world(database: Database) -> Iterator[World]:
    with made_world(database) as made:
        made.op.execute(SCHEMA)
        made.grant()
        made.guard(*TABLES)
        made.task("t")
        yield made


def act(world: World, *statements: str) -> int:
    return world.act(world.agents[0], *statements)
