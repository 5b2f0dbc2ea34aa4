"""
Reads that change something through what the owner has made: types, casts, defaults, bodies, operators.

Each text is sent to the server without any guard first, so that it is sure to change something; then the gate has to
refuse it with a catalog read from that server.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import psycopg
import pytest
from servers import Database, fresh_database

from sqlguard.embedded import EmbeddedServer
from sqlguard.gate import Gate
from sqlguard.policy import Policy
from sqlguard.policy.context import Context
from sqlguard.policy.verdict import Effect
from sqlguard.postgres.catalog_reader import read_catalog
from sqlguard.statement.model import Session

SCHEMA = """
CREATE SCHEMA app;
CREATE SCHEMA other;
SET search_path = app;
CREATE TABLE victims (id int PRIMARY KEY);
INSERT INTO victims VALUES (1), (2), (3);
CREATE SEQUENCE numbers;
CREATE FUNCTION purge() RETURNS int LANGUAGE plpgsql AS 'BEGIN DELETE FROM app.victims; RETURN 1; END';
CREATE FUNCTION purges(text) RETURNS int[] LANGUAGE plpgsql AS 'BEGIN DELETE FROM app.victims; RETURN ARRAY[1]; END';
CREATE FUNCTION purge_any(anyelement) RETURNS int LANGUAGE plpgsql AS 'BEGIN DELETE FROM app.victims; RETURN 1; END';
CREATE FUNCTION purge_row(victims) RETURNS int LANGUAGE plpgsql AS 'BEGIN DELETE FROM app.victims; RETURN 1; END';

-- types
CREATE DOMAIN risky AS int CHECK (app.purge() = 1);
CREATE DOMAIN riskier AS risky;
CREATE TYPE pair AS (a int, b risky);
CREATE TYPE pairs AS (p pair[]);
CREATE TYPE span AS RANGE (subtype = risky);
CREATE TABLE holder (x risky, xs risky[], p pair, s span);
INSERT INTO holder VALUES (1, '{1}', '(1,1)', '[1,2]');
INSERT INTO victims VALUES (1), (2), (3) ON CONFLICT DO NOTHING;
CREATE VIEW casting AS SELECT '1'::risky AS x;
CREATE TYPE coin AS (v int);

-- functions
CREATE FUNCTION by_default(x int DEFAULT app.purge()) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT $1';
CREATE FUNCTION takes(risky) RETURNS int LANGUAGE plpgsql IMMUTABLE AS 'BEGIN RETURN 1; END';
CREATE FUNCTION gives(int) RETURNS risky LANGUAGE plpgsql IMMUTABLE AS 'BEGIN RETURN 1; END';
CREATE FUNCTION gives_rows() RETURNS TABLE (x risky) LANGUAGE plpgsql STABLE AS 'BEGIN x := 1; RETURN NEXT; END';
CREATE FUNCTION helper() RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT 1';
CREATE FUNCTION other.helper() RETURNS int LANGUAGE plpgsql AS 'BEGIN DELETE FROM app.victims; RETURN 1; END';
CREATE FUNCTION asks() RETURNS int LANGUAGE plpgsql STABLE AS 'BEGIN RETURN helper(); END';
CREATE TYPE mood AS ENUM ('good', 'bad');
CREATE FUNCTION counted(upto int, how mood, OUT odd int, OUT even int) RETURNS SETOF record LANGUAGE plpgsql STABLE AS
    'BEGIN upto := upto + 1; FOR odd IN 1..upto LOOP even := odd * 2; RETURN NEXT; END LOOP; END';
CREATE FUNCTION as_table(m mood) RETURNS TABLE (id int, "of Mood" mood) LANGUAGE plpgsql STABLE AS
    'DECLARE n mood := m; BEGIN id := 1; "of Mood" := n; RETURN NEXT; RETURN QUERY SELECT v.id, m FROM app.victims v; END';
CREATE FUNCTION one_out(a int, OUT b int) LANGUAGE plpgsql IMMUTABLE AS 'BEGIN b := a; END';
CREATE FUNCTION hidden_in_out(a int, OUT b int) LANGUAGE plpgsql STABLE AS 'BEGIN b := a + app.purge(); END';
CREATE FUNCTION same(regclass, regclass) RETURNS regclass LANGUAGE sql IMMUTABLE AS 'SELECT $2';
CREATE AGGREGATE counting(regclass) (SFUNC = same, STYPE = regclass, FINALFUNC = pg_catalog.nextval);
CREATE AGGREGATE mode(ORDER BY regclass) (SFUNC = same, STYPE = regclass, FINALFUNC = pg_catalog.nextval);
CREATE OPERATOR @#@ (RIGHTARG = regclass, FUNCTION = pg_catalog.nextval);
CREATE FUNCTION coin_plus(coin, int) RETURNS int LANGUAGE plpgsql AS 'BEGIN DELETE FROM app.victims; RETURN 1; END';
CREATE OPERATOR + (LEFTARG = coin, RIGHTARG = int, FUNCTION = coin_plus);
CREATE FUNCTION first_of(anyelement, anyelement) RETURNS anyelement LANGUAGE sql IMMUTABLE AS 'SELECT $1';
CREATE FUNCTION f2(record) RETURNS int LANGUAGE plpgsql AS 'BEGIN DELETE FROM app.victims; RETURN 1; END';
CREATE FUNCTION pong(n int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS 'BEGIN RETURN n; END';
CREATE FUNCTION ping(n int) RETURNS int LANGUAGE plpgsql STABLE AS
    'BEGIN IF n > 0 THEN RETURN app.pong(n - 1); END IF; RETURN app.purge(); END';
CREATE OR REPLACE FUNCTION pong(n int) RETURNS int LANGUAGE plpgsql STABLE AS 'BEGIN RETURN app.ping(n - 1); END';
CREATE FUNCTION below(int, int) RETURNS bool LANGUAGE plpgsql AS 'BEGIN DELETE FROM app.victims; RETURN $1 < $2; END';
"""
#: A cast of its own, which any value of a composite type may set off: apart, so that it hides nothing else.
CASTS = """
SET search_path = app;
CREATE FUNCTION to_coin(text) RETURNS coin LANGUAGE plpgsql AS 'BEGIN DELETE FROM app.victims; RETURN ROW(1)::app.coin; END';
CREATE CAST (text AS coin) WITH FUNCTION to_coin(text);
CREATE FUNCTION from_inet(inet) RETURNS coin LANGUAGE plpgsql AS 'BEGIN DELETE FROM app.victims; RETURN ROW(1)::app.coin; END';
CREATE FUNCTION body_mint() RETURNS int LANGUAGE plpgsql STABLE AS
    $b$ DECLARE c app.coin; BEGIN c := 'x'::text::app.coin; RETURN 1; END $b$;
CREATE CAST (inet AS coin) WITH FUNCTION from_inet(inet) AS IMPLICIT;
CREATE FUNCTION weighs(coin) RETURNS int LANGUAGE plpgsql IMMUTABLE AS 'BEGIN RETURN 1; END';
CREATE FUNCTION weigh_all(VARIADIC coin[]) RETURNS int LANGUAGE plpgsql IMMUTABLE AS 'BEGIN RETURN 1; END';
CREATE FUNCTION heavier(coin, text) RETURNS bool LANGUAGE plpgsql IMMUTABLE AS 'BEGIN RETURN true; END';
CREATE OPERATOR ### (LEFTARG = coin, RIGHTARG = text, FUNCTION = heavier);
CREATE OPERATOR @> (LEFTARG = coin, RIGHTARG = text, FUNCTION = heavier);
CREATE VIEW minting AS SELECT 'x'::text::coin AS c;
"""
#: Bodies of STABLE plpgsql functions; each calls purge() in another place of the language.
BODIES = {
    "target": "DECLARE a int[] := '{1}'; BEGIN a[app.purge()] := 1; RETURN 1; END",
    "declared": "DECLARE x app.risky := 1; BEGIN RETURN 1; END",
    "cast_on_assignment": "DECLARE x app.riskier; BEGIN x := 1; RETURN 1; END",
    "declared_type_of": "DECLARE x app.holder.x%TYPE; BEGIN x := 1; RETURN 1; END",
    "declared_row": "DECLARE h app.holder; BEGIN h.x := 1; RETURN 1; END",
    "declared_rowtype": "DECLARE h app.holder%ROWTYPE; BEGIN h.x := 1; RETURN 1; END",
    "default": "DECLARE x int := app.purge(); BEGIN RETURN 1; END",
    "default_word": "DECLARE x int DEFAULT app.purge(); BEGIN RETURN 1; END",
    "inner_default": "BEGIN DECLARE x int := app.purge(); BEGIN RETURN 1; END; END",
    "if_": "BEGIN IF app.purge() = 1 THEN RETURN 1; END IF; RETURN 2; END",
    "elsif": "BEGIN IF false THEN RETURN 1; ELSIF app.purge() = 1 THEN RETURN 2; END IF; RETURN 3; END",
    "else_": "BEGIN IF false THEN RETURN 1; ELSE PERFORM app.purge(); END IF; RETURN 3; END",
    "case_": "BEGIN CASE app.purge() WHEN 1 THEN RETURN 1; ELSE RETURN 2; END CASE; END",
    "case_when": "BEGIN CASE WHEN app.purge() = 1 THEN RETURN 1; ELSE RETURN 2; END CASE; END",
    "case_else": "BEGIN CASE 3 WHEN 1 THEN RETURN 1; ELSE PERFORM app.purge(); RETURN 2; END CASE; END",
    "while_": "BEGIN WHILE app.purge() = 2 LOOP NULL; END LOOP; RETURN 1; END",
    "loop_body": "BEGIN LOOP PERFORM app.purge(); EXIT; END LOOP; RETURN 1; END",
    "exit_when": "BEGIN LOOP EXIT WHEN app.purge() = 1; END LOOP; RETURN 1; END",
    "for_to": "BEGIN FOR i IN 1..app.purge() LOOP NULL; END LOOP; RETURN 1; END",
    "for_from": "BEGIN FOR i IN app.purge()..2 LOOP NULL; END LOOP; RETURN 1; END",
    "for_by": "BEGIN FOR i IN 1..2 BY app.purge() LOOP NULL; END LOOP; RETURN 1; END",
    "for_query": "DECLARE r record; BEGIN FOR r IN SELECT app.purge() LOOP NULL; END LOOP; RETURN 1; END",
    "for_execute": "DECLARE r record; BEGIN FOR r IN EXECUTE 'SELECT app.purge()' LOOP NULL; END LOOP; RETURN 1; END",
    "for_cursor": "DECLARE c CURSOR FOR SELECT app.purge(); BEGIN FOR r IN c LOOP NULL; END LOOP; RETURN 1; END",
    "open_cursor": "DECLARE c CURSOR FOR SELECT app.purge(); x int; BEGIN OPEN c; FETCH c INTO x; RETURN 1; END",
    "foreach": "DECLARE x int; BEGIN FOREACH x IN ARRAY app.purges('') LOOP NULL; END LOOP; RETURN 1; END",
    "assert_": "BEGIN ASSERT app.purge() = 1; RETURN 1; END",
    "assert_message": "BEGIN ASSERT false, app.purge()::text; EXCEPTION WHEN assert_failure THEN PERFORM app.purge(); RETURN 1; END",
    "raise_parameter": "BEGIN RAISE DEBUG '%', app.purge(); RETURN 1; END",
    "raise_option": "BEGIN RAISE DEBUG USING MESSAGE = app.purge()::text; RETURN 1; END",
    "handler": "BEGIN PERFORM 1 / 0; RETURN 1; EXCEPTION WHEN division_by_zero THEN RETURN app.purge(); END",
    "execute_": "BEGIN EXECUTE 'SELECT app.purge()'; RETURN 1; END",
    "into_": "DECLARE x int; BEGIN SELECT app.purge() INTO x; RETURN x; END",
    "into_target": "DECLARE x app.risky; BEGIN SELECT 1 INTO x; RETURN 1; END",
    "call_": "BEGIN PERFORM 1 WHERE app.purge() = 1; RETURN 1; END",
}


def _function(name: str, body: str) -> str:
    return f"CREATE FUNCTION app.body_{name}() RETURNS int LANGUAGE plpgsql STABLE AS $b$ {body} $b$;\n"


READS: dict[str, str] = {
    "domain": "SELECT '1'::risky",
    "domain of a domain": "SELECT '1'::riskier",
    "function-style cast": "SELECT risky('1')",
    "function-style cast with schema": "SELECT app.risky('1')",
    "CAST AS": "SELECT CAST('1' AS app.risky)",
    "typed constant": "SELECT risky '1'",
    "array of domain": "SELECT '{1}'::risky[]",
    "array type by its own name": "SELECT '{1}'::_risky",
    "composite": "SELECT '(1,1)'::pair",
    "row cast to composite": "SELECT ROW(1, 1)::pair",
    "composite in an array in a composite": """SELECT '("{""(1,1)""}")'::pairs""",
    "range": "SELECT '[1,2]'::span",
    "multirange": "SELECT '{[1,2]}'::span_multirange",
    "range constructor": "SELECT span(1, 2)",
    "populated record": "SELECT jsonb_populate_record(NULL::holder, '{\"x\": 1}')",
    "record of columns": "SELECT * FROM jsonb_to_record('{\"x\": 1}') AS r(x risky)",
    "column of arrays meets a constant": "SELECT 1 FROM holder WHERE xs = '{5}'",
    "column of ranges meets a constant": "SELECT 1 FROM holder WHERE s = '[5,6]'",
    "column of arrays in a star meets a constant": "SELECT '{5}' UNION ALL SELECT s.* FROM (SELECT xs FROM holder) s",
    "column of rows meets a constant in a UNION": "SELECT p FROM holder UNION ALL SELECT '(5,5)'",
    "column of rows meets a constant in CASE": "SELECT CASE WHEN random() < 2 THEN '(5,5)' ELSE p END FROM holder",
    "column of rows meets a constant in GREATEST": "SELECT greatest(p, '(5,5)') FROM holder",
    "domain meets a constant in a window function": "SELECT lag(x, 1, '1') OVER () FROM holder",
    "domain meets a constant in a function of any type": "SELECT first_of('1', x) FROM holder",
    "array of columns meets a constant": "SELECT 1 FROM holder WHERE ARRAY[x] = '{5}'",
    "view that casts": "SELECT * FROM casting",
    "default argument": "SELECT by_default()",
    "argument of a domain": "SELECT takes(1)",
    "result of a domain": "SELECT gives(1)",
    "rows of a domain": "SELECT * FROM gives_rows()",
    "body with arguments that are results": "SELECT hidden_in_out(1)",
    "aggregate over a built-in": "SELECT counting('app.numbers')",
    "aggregate over a built-in, of a built-in's name": "SELECT mode() WITHIN GROUP (ORDER BY 'app.numbers'::regclass)",
    "operator over a built-in": "SELECT @#@ 'app.numbers'::regclass",
    "operator of a prepared parameter": "PREPARE p (coin) AS SELECT $1 + 1; EXECUTE p (ROW(1))",
    "dot on a sub-select": "SELECT (SELECT v FROM victims v LIMIT 1).purge_row",
    "dot on a row": "SELECT (ROW(1)::victims).purge_row",
    "dot on a row that has no such field": "SELECT (ROW(1)).f2",
    "dot on a WITH query": "WITH c AS (SELECT * FROM victims) SELECT c.purge_any FROM c",
    "dot on a sub-select's alias": "SELECT s.purge_any FROM (SELECT 1) s",
    "dot on VALUES": "SELECT s.purge_any FROM (VALUES (1)) s",
    "dot on a function's rows": "SELECT g.purge_any FROM jsonb_each('{\"a\": 1}') g",
    "quoted": 'SELECT "purge"()',
    "escaped": r'SELECT U&"p\0075rge"()',
    "escaped with another sign": """SELECT U&"p!0075rge" UESCAPE '!' ()""",
    "in ROWS FROM": "SELECT * FROM ROWS FROM (generate_series(1, 2), purge()) WITH ORDINALITY",
    "in LATERAL": "SELECT * FROM victims, LATERAL (SELECT purge()) p",
    "in TABLESAMPLE": "SELECT * FROM victims TABLESAMPLE system (purge())",
    "in LIMIT": "SELECT 1 LIMIT purge()",
    "in a frame": "SELECT sum(id) OVER (ORDER BY id ROWS purge() PRECEDING) FROM victims",
    "in FILTER": "SELECT count(*) FILTER (WHERE purge() = 1) FROM victims",
    "in WITHIN GROUP": "SELECT percentile_disc(0.5) WITHIN GROUP (ORDER BY purge()) FROM victims",
    "in GROUPING SETS": "SELECT count(*) FROM victims GROUP BY GROUPING SETS ((purge()), ())",
    "in DISTINCT ON": "SELECT DISTINCT ON (purge()) id FROM victims",
    "in VALUES": "VALUES (purge())",
    "in a subscript": "SELECT ('{1}'::int[])[purge()]",
    "in XMLTABLE's default": "SELECT * FROM xmltable('/a' PASSING '<a/>' COLUMNS x int PATH 'b' DEFAULT purge())",
    "in XMLTABLE's column": "SELECT * FROM xmltable('/a' PASSING '<a>1</a>' COLUMNS x risky PATH '.')",
    "in CASE": "SELECT CASE 1 WHEN purge() THEN 1 END",
    "in EXISTS": "SELECT EXISTS (SELECT FROM victims WHERE purge() = 1)",
    "in COPY": "COPY (SELECT purge()) TO STDOUT",
    "in EXPLAIN": "EXPLAIN (ANALYZE) SELECT purge()",
    "in EXPLAIN with options twice": "EXPLAIN (ANALYZE false, ANALYZE true) SELECT purge()",
    "in EXECUTE's argument": "PREPARE q (int) AS SELECT $1; EXECUTE q (purge())",
    "in a cursor": "BEGIN; DECLARE c CURSOR FOR SELECT purge(); FETCH c; COMMIT",
    "type named in a string": "SELECT pg_input_is_valid('1', 'app.risky')",
    "input function called": "SELECT domain_in('1'::cstring, 'app.risky'::regtype, -1)",
    "SQL in a string": "SELECT query_to_xml('SELECT app.purge()', true, true, '')",
    **{f"body: {name}": f"SELECT body_{name}()" for name in BODIES},
}
CASTING: dict[str, str] = {
    "cast by a function": "SELECT 'x'::text::coin",
    "argument that is cast without a word": "SELECT weighs(inet '::1')",
    "arguments that are cast without a word": "SELECT weigh_all(inet '::1', inet '::2')",
    "operand that is cast without a word": "SELECT inet '::1' ### 'a'",
    "operand of an operator that is built in, too": "SELECT inet '::1' @> 'a'::text",
    "assignment in a body": "SELECT body_mint()",
    "view that casts by a function": "SELECT * FROM minting",
    "view in a sub-select": "SELECT (SELECT count(*) FROM (SELECT * FROM minting OFFSET 0) m WHERE m.c IS NOT NULL)",
    "view named in a string": "SELECT table_to_xml('app.minting', true, true, '')",
}
#: What not every release or build runs; it is refused on all of them.
UNSURE = {
    "type named in a string",
    "input function called",
    "SQL in a string",
    "view named in a string",
    "in XMLTABLE's default",
    "in XMLTABLE's column",
}
HARMLESS = (
    "SELECT x FROM holder",
    "SELECT x + 1 FROM holder WHERE x > 0",
    "SELECT int4range(1, 2), text('a'), \"char\"('b'), date('2024-01-01'), tsquery('a & b')",
    "SELECT helper()",
    "SELECT (ROW(1, 2)).f2",
    "SELECT percentile_disc(0.5) WITHIN GROUP (ORDER BY id) FROM victims",
    "SELECT lag(id, 1, 0) OVER (ORDER BY id) FROM victims",
    "SELECT * FROM counted(2, 'good')",
    "SELECT * FROM as_table('bad')",
    "SELECT one_out(1)",
    "WITH RECURSIVE a AS (SELECT * FROM b), b AS (SELECT 1) SELECT * FROM a",
)


@dataclass
class World:
    database: Database
    context: Context

    def allows(self, text: str, path: tuple[str, ...] = ("app",)) -> bool:
        decisions = Gate(self.context).decide(text, Session(search_path=path))
        return all(d.verdict.effect < Effect.APPROVE for d in decisions)

    def changes(self, text: str, path: str = "app") -> bool:
        """Run *text* as the owner without a guard; say whether anything is another one, and put it back."""
        with psycopg.connect(self.database.owner_dsn, autocommit=True) as conn:
            before = self._state(conn)
            conn.execute(f"SET search_path = {path}")
            # One simple query; libpq itself ends a COPY when the next one is sent.
            conn.pgconn.exec_(text.encode())
            conn.pgconn.exec_(b"ROLLBACK")
        with psycopg.connect(self.database.owner_dsn, autocommit=True) as conn:
            after = self._state(conn)
            conn.execute("INSERT INTO app.victims VALUES (1), (2), (3) ON CONFLICT DO NOTHING")
        return before != after

    @staticmethod
    def _state(conn: psycopg.Connection[tuple[object, ...]]) -> object:
        return conn.execute(
            "SELECT (SELECT count(*) FROM app.victims), last_value, is_called FROM app.numbers"
        ).fetchone()


@pytest.fixture(scope="module")
def world(server: EmbeddedServer) -> Iterator[World]:
    with fresh_database(server) as database:
        yield _world(database)


@pytest.fixture
def minting(database: Database) -> World:
    return _world(database, CASTS)


def _world(database: Database, more: str = "") -> World:
    database.load(
        SCHEMA + more + "".join(_function(*item) for item in BODIES.items()), dsn=database.owner_dsn
    )
    with database.connect() as conn:
        catalog = read_catalog(conn)
    policy = {"name": "reads", "defaults": {"search_path": ("app",)}, "tables": {"app.*": {"select": True}}}
    return World(database, Context(catalog, Policy.model_validate(policy), None))


@pytest.mark.parametrize("name", READS)
def test_a_read_that_changes_something_is_refused(name: str, world: World) -> None:
    if name not in UNSURE:
        assert world.changes(READS[name]), "the case does nothing"
    assert not world.allows(READS[name])


@pytest.mark.parametrize("name", CASTING)
def test_a_cast_that_changes_something_is_refused(name: str, minting: World) -> None:
    if name not in UNSURE:
        assert minting.changes(CASTING[name]), "the case does nothing"
    assert not minting.allows(CASTING[name])


@pytest.mark.parametrize("order", [("ping", "pong"), ("pong", "ping")])
def test_functions_that_call_one_another_stand_and_fall_together(
    order: tuple[str, str], database: Database
) -> None:
    world = _world(database)
    for name in order:
        text = f"SELECT {name}(3)"
        assert world.changes(text)
        assert not world.allows(text)
    assert not world.allows(f"SELECT {order[0]}(3)")


def test_a_cast_of_another_type_has_no_say(minting: World) -> None:
    assert minting.allows("SELECT jsonb_populate_record(NULL::victims, '{\"id\": 1}'), v FROM victims v")


@pytest.mark.parametrize("text", HARMLESS)
def test_their_harmless_neighbours_pass(text: str, world: World) -> None:
    assert not world.changes(text)
    assert world.allows(text)


def test_a_body_is_read_with_the_path_of_the_session(world: World) -> None:
    assert not world.changes("SELECT app.asks()", "app, other")
    assert world.allows("SELECT app.asks()", ("app", "other"))
    assert world.changes("SELECT app.asks()", "other, app")
    assert not world.allows("SELECT app.asks()", ("other", "app"))


def test_the_types_that_a_client_says_its_parameters_have_count(world: World) -> None:
    (coin,) = (t.oid for t in world.context.catalog.types.values() if t.name == "coin")
    gate, session = Gate(world.context), Session(search_path=("app",))
    for types, effect in (
        ((), Effect.ALLOW),
        ((23,), Effect.ALLOW),
        ((coin,), Effect.REFUSE),
        ((), Effect.ALLOW),
    ):
        (decision,) = gate.decide("SELECT $1 + 1", session, types)
        assert decision.verdict.effect is effect, types


def test_a_function_put_into_pg_catalog_is_one_of_theirs(database: Database) -> None:
    world = _world(database)
    body = "LANGUAGE plpgsql AS 'BEGIN DELETE FROM app.victims; RETURN 1; END'"
    with database.connect() as conn:
        conn.execute(f"CREATE FUNCTION pg_catalog.lower(int) RETURNS int {body}")
        conn.execute(f"CREATE FUNCTION pg_catalog.lowest() RETURNS int {body}")
        world.context = Context(read_catalog(conn), world.context.policy, None)
    for text in ("SELECT lower(1)", "SELECT pg_catalog.lower(1)", "SELECT lowest()"):
        assert world.changes(text)
        assert not world.allows(text)
