"""Every PostgreSQL type comes back exactly: what was deleted, updated or moved reads byte for byte as before."""

from collections.abc import Iterator

import psycopg
import pytest
from journaled import World
from journaled import world as made_world
from servers import Database

from sqlguard.postgres import undo

SCHEMA = """
    CREATE SCHEMA app;
    CREATE TYPE app.mood AS ENUM ('sad', 'so ''so''', 'happy, "very"');
    CREATE TYPE app.pair AS (a int, b text, c timestamptz);
    CREATE DOMAIN app.positive AS numeric CHECK (VALUE > 0);
    CREATE TYPE app.span AS RANGE (subtype = float8);
    CREATE TABLE app.t (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        c_bool boolean, c_int2 smallint, c_int8 bigint, c_numeric numeric, c_scaled numeric(20, 5),
        c_float4 real, c_float8 double precision, c_money money,
        c_text text, c_varchar varchar(20), c_char char(10), c_name name, c_onechar "char",
        c_bytea bytea, c_date date, c_time time, c_timetz timetz, c_ts timestamp, c_tstz timestamptz(3),
        c_interval interval, c_uuid uuid, c_json json, c_jsonb jsonb, c_xml xml,
        c_bit bit(5), c_varbit varbit, c_inet inet, c_cidr cidr, c_mac macaddr, c_mac8 macaddr8,
        c_point point, c_line line, c_lseg lseg, c_box box, c_path path, c_polygon polygon, c_circle circle,
        c_tsvector tsvector, c_tsquery tsquery, c_oid oid, c_regclass regclass, c_regtype regtype,
        c_lsn pg_lsn, c_tid tid, c_jsonpath jsonpath,
        c_int4range int4range, c_tstzrange tstzrange, c_multi nummultirange, c_span app.span,
        c_mood app.mood, c_pair app.pair, c_positive app.positive,
        c_ints int[], c_texts text[], c_moods app.mood[], c_pairs app.pair[], c_spans app.span[],
        "Weird, ""name"" ()" text, c_generated text GENERATED ALWAYS AS (c_text || '!') STORED);
"""
NULLS = "INSERT INTO app.t DEFAULT VALUES"
ORDINARY = r"""
    INSERT INTO app.t OVERRIDING SYSTEM VALUE VALUES (
        DEFAULT, true, -32768, 9223372036854775807, 1.2300, 1.23, 1.1, 0.1, 12.34,
        'it''s (a, "b"), \ {c}' || E'\n\t\\', 'v', 'c', 'n', 'x',
        '\x00ff5c', 'infinity', '23:59:59.999999', '10:00+05:30', '4713-01-01 BC', '2024-02-29 12:00:00.123+02',
        '-1 year 2 days -03:00:00.5', gen_random_uuid(), ' { "b" : 1, "a":2, "a" : 3 } ', '{"b": 1.10}', '<a>&lt;</a>',
        B'10101', B'1', '10.0.0.1/8', '10.0.0.0/8', '08:00:2b:01:02:03', '08:00:2b:01:02:03:04:05',
        '(1.5,-0)', '{1,2,3}', '[(0,0),(1,1)]', '((1,1),(0,0))', '[(0,0),(1,1)]', '((0,0),(1,1),(1,0))', '<(0,0),1>',
        'a:1A fat:2 ''it''''s''', 'fat & (rat | !cat:A)', 4294967295, 'app.t', 'app.mood',
        '16/B374D848', '(1,2)', '$.a[*]',
        '(,5)', '[2024-01-01 00:00+01,infinity)', '{[1.50,2),(3,)}', '[0.1,0.30000000000000004]',
        'happy, "very"', ROW(1, 'x, "y" (z)', '2024-01-01 00:00+00'), 0.10,
        '[5:6]={7,8}', ARRAY['a,b', '{"c"}', NULL, 'NULL', '', E'\\'], ARRAY['sad', 'happy, "very"']::app.mood[],
        ARRAY[ROW(NULL, '', NULL)::app.pair], ARRAY['[1,2]', 'empty']::app.span[], '', DEFAULT)
"""
EXTREME = r"""
    INSERT INTO app.t (c_numeric, c_float4, c_float8, c_date, c_ts, c_tstz, c_interval, c_text, c_bytea, c_ints,
                       c_texts, c_int4range, c_multi, c_json, c_pair, c_char, c_money)
    VALUES ('NaN', '-Infinity', '-0', '-infinity', 'infinity', '-infinity', '178000000 years',
            repeat('toast me ', 20000), decode(repeat('00ff', 50000), 'hex'), '{{{1,2},{3,NULL}}}',
            '{}', 'empty',
            '{}', 'null', ROW(NULL, NULL, NULL), '', '-92233720368547758.08'),
           ('Infinity', '1e-45', '5e-324', '5874897-12-31', '294276-12-31 23:59:59.999999', '2024-10-27 02:30+02',
            '-178000000 years -1 mon', E'é𝄞\u2028\x7f', '', '[-2:-1][3:3]={{1},{2}}', '{NULL}', '[1,1]', '{(,)}',
            '"\u0000"', NULL, 'x ', '92233720368547758.07')
"""


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with made_world(database) as made:
        made.op.execute(SCHEMA if has_xml(made.op) else SCHEMA.replace("c_xml xml", "c_xml text"))
        for statement in (NULLS, ORDINARY, EXTREME):
            made.op.execute(statement)
        made.op.execute(
            "ALTER TABLE app.t DROP COLUMN c_cidr; ALTER TABLE app.t ADD COLUMN late int DEFAULT 7"
        )
        made.grant()
        made.guard("app.t")
        made.task("t")
        yield made


def has_xml(conn: psycopg.Connection[object]) -> bool:
    """Tell whether the server was built with XML; the wheels are not."""
    try:
        conn.execute("SELECT '<a/>'::xml")
    except psycopg.errors.FeatureNotSupported:
        return False
    return True


def wild(conn: psycopg.Connection[object]) -> None:
    """Settings that change how values are written and read."""
    conn.execute(
        "SET DateStyle = 'SQL, DMY'; SET IntervalStyle = 'sql_standard'; SET TimeZone = 'Asia/Kathmandu'"
    )
    conn.execute("SET extra_float_digits = -10; SET bytea_output = 'escape'; SET search_path = app, public")
    conn.execute("SET xmloption = 'document'")


@pytest.mark.parametrize("settings", ["plain", "wild"])
@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM app.t",
        "UPDATE app.t SET c_text = 'x', c_ints = NULL, c_json = '{}', c_float8 = 1, c_numeric = 1, c_interval = NULL",
        "UPDATE app.t SET id = DEFAULT",
        NULLS,
        EXTREME,
    ],
    ids=lambda text: " ".join(text.split()[:6]),
)
def test_everything_comes_back(world: World, statement: str, settings: str) -> None:
    if settings == "wild":
        wild(world.op)
        wild(world.agents[0].conn)
    before = world.contents("app.t")
    action = world.act(world.agents[0], statement)
    after = world.contents("app.t")
    assert after != before
    report = undo.undo(world.op, action=action)
    assert report.conflicts == ()
    assert world.contents("app.t") == before
    assert undo.undo(world.op, undo_id=report.undo).conflicts == ()
    assert world.contents("app.t") == after


KEYS = {
    "text": ["'it''s'", "'a,b'", "''", "'{x}'", "'NULL'", "'é'"],
    "app.mood": ["'sad'", "'happy, \"very\"'"],
    "numeric": ["1.10", "1.2", "'NaN'", "1e30"],
    "timestamptz": ["'2024-01-01 00:00+05'", "'infinity'"],
    "float8": ["0.1", "1e-300", "'-Infinity'"],
    "bytea": ["'\\x00'", "'\\xff'"],
    "uuid": ["'00000000-0000-0000-0000-000000000001'"],
    "int4range": ["'[1,5)'", "'empty'"],
    "varchar(5)": ["'a'", "'b '"],
    "char(3)": ["'a'", "'b'"],
    "date": ["'2024-02-29'", "'-infinity'"],
    "interval": ["'1 day'", "'25:00'"],
    "inet": ["'10.0.0.1'", "'::1'"],
    "int[]": ["'{1,2}'", "'[0:0]={1}'"],
    "app.positive": ["0.5", "7"],
    '"char"': ["'a'", "'b'"],
    "name": ["'a'", "'b'"],
    "oid": ["1", "4294967295"],
    "jsonb": ["'{\"a\": 1}'", "'[]'"],
}


@pytest.mark.parametrize("type", KEYS, ids=str)
def test_rows_are_found_by_a_key_of_any_type(world: World, type: str) -> None:
    world.op.execute(f"CREATE TABLE app.k (k {type}, n int, v text, PRIMARY KEY (n, k))")
    for value in KEYS[type]:
        world.op.execute(f"INSERT INTO app.k VALUES ({value}, 1, 'v'), ({value}, 2, 'w')")
    world.grant()
    world.guard("app.k")
    wild(world.agents[0].conn)
    before = world.contents("app.k")
    action = world.act(
        world.agents[0],
        "UPDATE app.k SET v = 'x'",
        "DELETE FROM app.k WHERE n = 1",
        "INSERT INTO app.k SELECT k, 5, 'y' FROM app.k",
        "UPDATE app.k SET n = n + 10",
    )
    assert undo.undo(world.op, action=action).conflicts == ()
    assert world.contents("app.k") == before
