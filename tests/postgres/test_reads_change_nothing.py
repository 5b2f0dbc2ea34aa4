"""
Whatever the text is, the gate raises nothing; and what it lets pass as a read changes nothing in the database.

Texts are grown from the grammar, with any function of PostgreSQL and of the schema in them, and made from the given guard
cases by small changes. What passes runs as the owner of the tables, who is no superuser, in a session that may write: so
nothing but the gate stands in front. `SQLGUARD_READS_EXAMPLES=5000` looks longer.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import postgast
import psycopg
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.pq import TransactionStatus
from servers import fit_to_server, fresh_database

from sqlguard.embedded import EmbeddedServer
from sqlguard.functions import data
from sqlguard.gate import Gate
from sqlguard.plan import Decision
from sqlguard.policy import Policy
from sqlguard.policy.context import Context
from sqlguard.policy.verdict import Effect
from sqlguard.postgres.catalog_reader import read_catalog
from sqlguard.statement.model import Session

EXAMPLES = int(os.environ.get("SQLGUARD_READS_EXAMPLES", "150"))
PATH = ("app", "public")
OWNER = "sg_owner"
PASSWORD = "the owner of the guard cases"
#: Rows and sequences are summed up one by one.
TABLES = """
SELECT c.oid::regclass::text, c.relkind FROM pg_class c
 WHERE c.relkind IN ('r', 'S') AND c.relnamespace IN ('app'::regnamespace, 'priv'::regnamespace)
 ORDER BY 1
"""
COUNTS = ("pg_class", "pg_proc", "pg_attribute", "pg_type", "pg_namespace", "pg_trigger", "pg_roles", "pg_db_role_setting",
          "pg_largeobject_metadata", "pg_prepared_xacts", "pg_description", "pg_cast", "pg_operator", "pg_rewrite",
          "pg_auth_members", "pg_policy", "pg_constraint", "pg_index", "pg_statistic_ext")  # fmt: skip
#: Values that a function does something with, by the name of a type.
VALUES = {
    "text": ("'a'", "'app.orders'", "'SELECT app.purge_all()'", "'app.ticket_no_seq'", "repeat('a', 3)"),
    "cstring": ("'a'",),
    "name": ("'app'::name",),
    "integer": ("1", "0", "-1", "(1 + 1)"),
    "bigint": ("1::bigint", "7::bigint"),
    "smallint": ("1::smallint",),
    "oid": ("'app.orders'::regclass::oid", "1::oid"),
    "regclass": ("'app.ticket_no_seq'::regclass", "'app.orders'::regclass"),
    "boolean": ("true", "false"),
    "double precision": ("0.001::double precision",),
    "numeric": ("1.5",),
    "jsonb": ("""'{"a": [1, 2]}'::jsonb""",),
    "json": ("""'{"a": [1, 2]}'::json""",),
    "bytea": (r"'\x00'::bytea",),
    "date": ("'2024-02-29'::date",),
    "timestamp with time zone": ("now()", "'2024-02-29'::timestamptz"),
    "interval": ("'1 day'::interval",),
    "anyelement": ("1", "'a'::text"),
    "anyarray": ("ARRAY[1, 2]",),
    "record": ("ROW(1, 'a')",),
    '"any"': ("1", "'a'"),
    "tsquery": ("'a & b'::tsquery",),
    "xid": ("'1'::xid",),
    "pg_lsn": ("'0/1'::pg_lsn",),
}
COLUMNS = (
    "id",
    "status",
    "a.id",
    "a.owner_name",
    "a",
    "a.*",
    "o.total",
    "o.purge_row",
    "a.purge_row",
    "count(*)",
    "v",
)
TYPES = (
    "text",
    "int",
    "app.money_kind",
    "jsonb",
    "regclass",
    "app.accounts",
    "numeric(10, 2)",
    "text[]",
    "app._accounts",
)
OPERATORS = (
    "=",
    "<",
    "+",
    "||",
    "->>",
    "@>",
    "===",
    "~",
    "LIKE",
    "IS DISTINCT FROM",
    "OPERATOR(app.===)",
    "AND",
    "OR",
)
FROM = (
    "app.accounts a",
    "accounts a",
    "orders o",
    "accounts a JOIN orders o ON o.account_id = a.id",
    "v_active_accounts a",
    "v_sleepy",
    "(SELECT * FROM accounts) a",
    "accounts a, LATERAL (SELECT * FROM orders o WHERE o.account_id = a.id) o",
    "kv TABLESAMPLE system (50)",
    "pg_class a",
)


def _names(schema_functions: Sequence[tuple[str, tuple[str, ...]]]) -> list[tuple[str, tuple[str, ...]]]:
    known = [
        (e.name, e.args)
        for (schema, _), some in data.builtins().items()
        if schema == "pg_catalog"
        for e in some
    ]
    # A schema's own functions are few beside PostgreSQL's three thousand.
    return known + list(schema_functions) * 20


OWN = tuple((name, args) for name, args in (
    ("f_read", ("integer",)), ("purge_all", ()), ("innocent", ("integer",)), ("lower", ("text",)), ("json_value", ("text",)),
    ("agg_nosy", ("integer",)), ("to_money_kind", ("text",)), ("nosy_eq", ("integer", "integer")), ("purge_order", ("integer",)),
))  # fmt: skip
FUNCTIONS = _names(OWN)


def value(kind: str) -> st.SearchStrategy[str]:
    return st.sampled_from(
        VALUES.get(kind, (f"NULL::{kind}" if kind.replace(" ", "").isalpha() else "NULL",))
    )


@st.composite
def calls(draw: Any, inside: st.SearchStrategy[str]) -> str:
    name, args = draw(st.sampled_from(FUNCTIONS))
    given_ = [draw(value(a) if draw(st.integers(0, 4)) else inside) for a in args]
    schema = draw(st.sampled_from(("", "", "", "pg_catalog.", "app.")))
    spelt = draw(st.sampled_from((name, f'"{name}"', name.upper())))
    tail = draw(
        st.sampled_from(("", "", "", " OVER ()", " FILTER (WHERE true)", " WITHIN GROUP (ORDER BY 1)"))
    )
    return f"{schema}{spelt}({', '.join(given_)}){tail}"


def _grown(inside: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pair = st.tuples(inside, st.sampled_from(OPERATORS), inside)
    return st.one_of(
        calls(inside),
        calls(inside),
        pair.map(lambda p: f"({p[0]} {p[1]} {p[2]})"),
        st.tuples(inside, st.sampled_from(TYPES)).map(lambda p: f"({p[0]})::{p[1]}"),
        st.tuples(st.sampled_from(("money_kind", "text", "int4", "app.accounts")), inside).map(
            lambda p: f"{p[0]}({p[1]})"
        ),
        st.tuples(inside, inside).map(lambda p: f"CASE {p[0]} WHEN {p[1]} THEN 1 END"),
        st.tuples(inside, st.sampled_from(("purge_row", "id", "owner_name"))).map(
            lambda p: f"({p[0]}).{p[1]}"
        ),
        inside.map(lambda e: f"(SELECT {e} FROM accounts a LIMIT 1)"),
        inside.map(lambda e: f"ARRAY[{e}]"),
        inside.map(lambda e: f"COALESCE({e}, NULL)"),
    )


expressions = st.recursive(
    st.sampled_from(COLUMNS) | value("text") | value("integer") | value("jsonb"), _grown, max_leaves=5
)
ENDS = ("", "", " ORDER BY 1", " LIMIT 3", " FOR UPDATE", " GROUP BY 1", " FETCH FIRST 1 ROWS WITH TIES")


@st.composite
def selects(draw: Any) -> str:
    targets = ", ".join(draw(st.lists(expressions, min_size=1, max_size=3)))
    source = draw(
        st.sampled_from(("", *(f" FROM {f}" for f in FROM)))
        | calls(expressions).map(lambda c: f" FROM {c} a")
    )
    where = draw(st.just("") | expressions.map(lambda e: f" WHERE {e} IS NOT NULL"))
    return f"SELECT {targets}{source}{where}{draw(st.sampled_from(ENDS))}"


WRAPPED = (
    "{}",
    "{}",
    "{}",
    "EXPLAIN (ANALYZE) {}",
    "COPY ({}) TO STDOUT",
    "WITH c AS ({}) SELECT * FROM c",
    "PREPARE p AS {}; EXECUTE p",
    "BEGIN; DECLARE c CURSOR FOR {}; FETCH ALL FROM c; COMMIT",
    "SELECT * FROM ({}) s",
    "{0} UNION ALL {0}",
    "SELECT 1; {}",
    "VALUES (({}))",
    "SET search_path = app, public; {}",
)
grown = st.tuples(st.sampled_from(WRAPPED), selects()).map(lambda p: p[0].format(p[1]))


@st.composite
def mutated(draw: Any, texts: Sequence[Sequence[str]]) -> str:
    words = list(draw(st.sampled_from(texts)))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, max(len(words) - 1, 0)))
        match draw(st.sampled_from(("drop", "double", "swap", "splice", "call"))):
            case "drop":
                del words[at : at + 1]
            case "double":
                words.insert(at, words[at] if words else ";")
            case "swap":
                words[at : at + 2] = reversed(words[at : at + 2])
            case "splice":
                other = draw(st.sampled_from(texts))
                cut = draw(st.integers(0, max(len(other) - 1, 0)))
                words[at : at + 1] = other[cut : cut + draw(st.integers(1, 8))]
            case "call":
                words[at : at + 1] = [draw(expressions)]
    return " ".join(words)


@dataclass
class World:
    gate: Gate
    owner: psycopg.Connection[Any]
    #: A superuser's: what the owner may not read could be changed all the same.
    watch: psycopg.Connection[Any]
    query: str
    texts: list[list[str]]
    allowed: int = 0

    def state(self) -> object:
        return self.watch.execute(self.query).fetchone()  # type: ignore[call-overload]

    def run(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            self.owner.pgconn.exec_(decision.text.encode("utf-8", "replace"))
        if self.owner.info.transaction_status != TransactionStatus.IDLE:
            self.owner.pgconn.exec_(b"COMMIT")
        self.owner.pgconn.exec_(b"DISCARD ALL")
        self.owner.pgconn.exec_(b"SET statement_timeout = 300")

    def holds(self, text: str) -> None:
        decisions = self.gate.decide(text, Session(search_path=PATH))
        if any(d.verdict.effect is not Effect.ALLOW or d.is_write for d in decisions):
            return
        before = self.state()
        self.run(decisions)
        self.allowed += 1
        assert self.state() == before, text


@pytest.fixture(scope="module")
def world(server: EmbeddedServer, shared: Path) -> Iterator[World]:
    schema, cases = (shared / "corpus" / name for name in ("guard_schema.sql", "guard_cases.yaml"))
    if not (schema.is_file() and cases.is_file()):
        pytest.skip("the guard cases are not there")
    with fresh_database(server) as database:
        with database.connect() as conn:
            text, missing = fit_to_server(schema.read_text(encoding="utf-8"), conn)
            if "cube" in missing:
                pytest.skip(f"PostgreSQL {database.server.version} is here without the extension cube")
            conn.execute(text)
            conn.execute(f"ALTER ROLE {OWNER} PASSWORD '{PASSWORD}'")
            catalog = read_catalog(conn)
        rights = {"select": True, "insert": True, "update": True}
        policy = {"name": "reads", "defaults": {"search_path": PATH}, "tables": {"app.*": rights}}
        gate = Gate(Context(catalog, Policy.model_validate(policy), None))
        owner = database.connect(database.dsn_for(OWNER, PASSWORD))
        watch = database.connect()
        entries = yaml.safe_load(cases.read_text(encoding="utf-8"))["entries"]
        yield World(gate, owner, watch, _query(watch), _words(entries))


def _query(watch: psycopg.Connection[Any]) -> str:
    """Return the statement that sums up all rows of all tables, all sequences, and what the catalogs count."""
    parts = []
    for name, kind in watch.execute(TABLES).fetchall():
        if kind in (b"S", "S"):
            parts.append(f"(SELECT last_value || ':' || is_called FROM {name})")
        else:
            parts.append(f"(SELECT md5(string_agg(t::text, '|' ORDER BY t::text)) FROM ONLY {name} t)")
    parts += [f"(SELECT count(*) FROM {name})" for name in COUNTS]
    return "SELECT " + ", ".join(parts)


def _words(entries: Sequence[Any]) -> list[list[str]]:
    found = []
    for entry in entries:
        text = entry["sql"] if isinstance(entry["sql"], str) else "; ".join(entry["sql"])
        try:
            tokens = postgast.scan(text).tokens
        except postgast.PgQueryError:
            continue
        raw = text.encode()
        found.append([raw[t.start : t.end].decode("utf-8", "replace") for t in tokens])
    return found


bounded = partial(
    settings,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


def test_what_grows_from_the_grammar_changes_nothing(world: World) -> None:
    before = world.allowed

    @bounded(max_examples=EXAMPLES)
    @given(grown)
    def check(text: str) -> None:
        world.holds(text)

    check()
    assert world.allowed > before + EXAMPLES // 20, "hardly any text passes: nothing is tested"


def test_what_the_guard_cases_become_changes_nothing(world: World) -> None:
    @bounded(max_examples=EXAMPLES)
    @given(mutated(world.texts))
    def check(text: str) -> None:
        world.holds(text)

    check()
