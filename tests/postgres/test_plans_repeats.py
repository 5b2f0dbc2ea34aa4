"""A statement that is sent again over the same rows commits, whatever the server makes anew in every run."""

from collections.abc import Iterator

import pytest
from plan_world import again, plan_only
from servers import Database

from sqlguard.embedded import EmbeddedServer

WORLD = """
CREATE TABLE events (
    id bigserial PRIMARY KEY, what text, n integer, at timestamptz DEFAULT clock_timestamp(),
    token uuid DEFAULT gen_random_uuid(), updated_at timestamptz,
    document jsonb DEFAULT jsonb_build_object('at', clock_timestamp()), whole text GENERATED ALWAYS AS (what || n) STORED);
CREATE TABLE named (id integer PRIMARY KEY, what text, at timestamptz DEFAULT clock_timestamp(), n integer);
CREATE TABLE numbered (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, what text, n integer);
CREATE TABLE tokens (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), what text, n integer);
CREATE TABLE keyed (id text PRIMARY KEY, what text, n integer);
CREATE TABLE loose (what text, at timestamptz DEFAULT clock_timestamp(), n integer);
CREATE TABLE audit (id bigserial PRIMARY KEY, what text, event text, at timestamptz DEFAULT clock_timestamp());
CREATE TABLE seen (what text PRIMARY KEY, n integer, at timestamptz);
CREATE TABLE parted (id bigserial, what text, n integer, at timestamptz, PRIMARY KEY (id, n)) PARTITION BY LIST (n);
CREATE TABLE parted_1 PARTITION OF parted FOR VALUES IN (1);
CREATE TABLE parted_2 PARTITION OF parted DEFAULT;
CREATE TABLE parents (id integer PRIMARY KEY, at timestamptz);
CREATE TABLE children (id integer PRIMARY KEY, parent integer REFERENCES parents ON UPDATE CASCADE ON DELETE CASCADE,
                       at timestamptz);

-- A row that was just made is changed by a trigger, in each of the ways to write it.
CREATE FUNCTION fill() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN EXECUTE format('UPDATE %I SET n = coalesce(n, 0) + 1 WHERE id = $1.id', TG_TABLE_NAME) USING NEW; RETURN NULL; END $$;
CREATE TRIGGER fill AFTER INSERT ON events FOR EACH ROW EXECUTE FUNCTION fill();
CREATE TRIGGER fill AFTER INSERT ON numbered FOR EACH ROW EXECUTE FUNCTION fill();
CREATE TRIGGER fill AFTER INSERT ON named FOR EACH ROW EXECUTE FUNCTION fill();
CREATE TRIGGER fill AFTER INSERT ON tokens FOR EACH ROW EXECUTE FUNCTION fill();
CREATE FUNCTION fill_loose() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN UPDATE loose SET n = 7 WHERE at = NEW.at; RETURN NULL; END $$;
CREATE TRIGGER fill AFTER INSERT ON loose FOR EACH ROW EXECUTE FUNCTION fill_loose();
-- Of a row that was changed twice, the second change starts from what the first has made.
CREATE FUNCTION touch() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN NEW.updated_at := clock_timestamp(); RETURN NEW; END $$;
CREATE TRIGGER touch BEFORE INSERT OR UPDATE ON events FOR EACH ROW EXECUTE FUNCTION touch();
CREATE FUNCTION twice() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN UPDATE events SET n = n + 1 WHERE id = NEW.id; RETURN NULL; END $$;
CREATE TRIGGER twice AFTER UPDATE OF what ON events FOR EACH ROW EXECUTE FUNCTION twice();
CREATE FUNCTION audited() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO audit (what, event) VALUES (TG_OP, coalesce(NEW.id, OLD.id)::text || NEW.at);
    UPDATE audit SET what = lower(what) WHERE event = coalesce(NEW.id, OLD.id)::text || NEW.at;
    INSERT INTO seen VALUES (TG_TABLE_NAME, 1, now()) ON CONFLICT (what) DO UPDATE SET n = seen.n + 1, at = now();
    RETURN NULL;
END $$;
CREATE TRIGGER audited AFTER INSERT OR UPDATE ON events FOR EACH ROW EXECUTE FUNCTION audited();
CREATE FUNCTION key_of() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN NEW.id := gen_random_uuid()::text; RETURN NEW; END $$;
CREATE TRIGGER key_of BEFORE INSERT ON keyed FOR EACH ROW EXECUTE FUNCTION key_of();
CREATE FUNCTION stamp_children() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN UPDATE children SET at = clock_timestamp() WHERE parent = NEW.id; RETURN NULL; END $$;
CREATE TRIGGER stamp_children AFTER UPDATE OF at ON parents FOR EACH ROW EXECUTE FUNCTION stamp_children();

INSERT INTO events (what, n) SELECT 'e' || n, n FROM generate_series(1, 6) n;
INSERT INTO named (id, what) SELECT n, 'n' || n FROM generate_series(1, 6) n;
INSERT INTO numbered (what, n) SELECT 'n' || n, n FROM generate_series(1, 6) n;
INSERT INTO loose (what) SELECT 'l' || n FROM generate_series(1, 6) n;
INSERT INTO parted (what, n) SELECT 'p' || n, 1 + n % 3 FROM generate_series(1, 6) n;
INSERT INTO parents SELECT n, now() FROM generate_series(1, 6) n;
INSERT INTO children SELECT n, 1 + n % 6, now() FROM generate_series(1, 24) n;
"""
GUARDED = [
    "events",
    "named",
    "numbered",
    "tokens",
    "keyed",
    "loose",
    "audit",
    "seen",
    "parted",
    "parents",
    "children",
]


@pytest.fixture(scope="module")
def shop(server: EmbeddedServer) -> Iterator[Database]:
    with plan_only(server, WORLD, GUARDED) as database:
        yield database


@pytest.mark.parametrize(
    "text",
    [
        "INSERT INTO events (what, n) VALUES ('x', 1), ('y', 2)",
        "INSERT INTO events (what, n) SELECT what, 3 FROM named",
        "INSERT INTO events (what, at) VALUES ('x', now()), ('y', clock_timestamp())",
        "UPDATE events SET what = what || '!' WHERE id < 4",
        "UPDATE events SET updated_at = now(), document = jsonb_build_object('at', clock_timestamp()) WHERE id = 1",
        "INSERT INTO named (id, what) VALUES (101, 'x'), (102, 'y')",
        "INSERT INTO named (id, what) VALUES (1, 'x'), (103, 'y') ON CONFLICT (id) DO UPDATE SET at = now()",
        "INSERT INTO numbered (what) VALUES ('x')",
        "INSERT INTO tokens (what) SELECT what FROM named",
        "INSERT INTO keyed (id, what) VALUES ('a', 'x'), ('b', 'y')",
        "INSERT INTO named (id, what) SELECT (random() * 1000000)::integer + 1000, 'r'",
        "INSERT INTO loose (what) VALUES ('x'), ('y')",
        "UPDATE loose SET at = clock_timestamp() WHERE what = 'l1'",
        "INSERT INTO parted (what, n) VALUES ('x', 1), ('y', 5)",
        "UPDATE parted SET n = n + 1, at = clock_timestamp() WHERE id > 0",
        "UPDATE parents SET at = clock_timestamp() WHERE id < 4",
        "UPDATE parents SET id = id + 100, at = clock_timestamp() WHERE id = 5",
        (
            "MERGE INTO named n USING events e ON n.id = e.id WHEN MATCHED AND n.id < 3 THEN UPDATE SET at = now()"
            " WHEN NOT MATCHED THEN INSERT (id, what) VALUES (e.id + 1000, e.what)"
        ),
        (
            "WITH made AS (INSERT INTO events (what) VALUES ('w') RETURNING id)"
            " INSERT INTO audit (what, event) SELECT 'by hand', id::text FROM made"
        ),
        (
            "WITH gone AS (DELETE FROM named WHERE id = 6 RETURNING id, at)"
            " INSERT INTO audit (what, at) SELECT 'gone', now() FROM gone"
        ),
    ],
)
def test_what_every_run_makes_anew(shop: Database, text: str) -> None:
    assert again(shop, text, "SELECT 1") == "committed"
