"""
The soft delete cases against the walls: the statement as the rewriter makes it, sent by a task's own role.

Each case runs beside the real DELETE on the same server; tags, rows, errors and what an agent sees afterwards
have to be the same. What happens to other tables is done by the walls alone.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import postgast
import psycopg
import pytest
import yaml
from journaled import World, world
from psycopg import sql
from servers import Database

from sqlguard.errors import GuardError, SqlguardError
from sqlguard.postgres.catalog_reader import read_catalog
from sqlguard.rewrite import rewrite
from sqlguard.statement.model import Session

GROUPS = frozenset(
    {
        *("delete", "returning", "join_dml", "inheritance", "partition", "no_pk", "cte", "fk", "unique"),
        *("trigger", "update", "columns", "insert", "transaction"),
    }
)
#: Cases that the walls have no part in, with the reason.
ELSEWHERE = {
    "SD-B10": "the policy refuses EXPLAIN ANALYZE of DML",
    "SD-D09": "PostgreSQL has no COPY FROM with row-level security",
    "SD-T06": "the statement is on a table that is not guarded, which the policy refuses",
}


def cases(kind: str) -> list[Any]:
    path = Path(__file__).resolve().parents[3] / "shared" / "corpus" / "soft_delete_cases.yaml"
    if not path.is_file():
        return [pytest.param(None, marks=pytest.mark.skip(reason="the soft delete cases are not there"))]
    found = yaml.safe_load(path.read_text(encoding="utf-8"))[kind]
    return [
        pytest.param(case, id=case["id"])
        for case in found
        if kind == "concurrency_cases" or (case["group"] in GROUPS and case["id"] not in ELSEWHERE)
    ]


class Twin:
    """One database with the case's tables twice: in `hard` a DELETE is a DELETE, `soft` is guarded."""

    def __init__(self, database: Database, walls: World, setup: str) -> None:
        self.database, self.walls = database, walls
        walls.op.execute("SET timezone = 'UTC'")
        for schema in ("hard", "soft"):
            walls.op.execute(
                sql.SQL("CREATE SCHEMA {0}; SET search_path = {0}").format(sql.Identifier(schema))
            )
            walls.op.execute(setup)
            walls.op.execute("RESET search_path")
        self.hard = database.connect(database.owner_dsn, options="-csearch_path=hard -ctimezone=UTC")

    def guard(self, tables: list[str]) -> None:
        self.walls.guard(*(f"soft.{t}" for t in tables), mode="soft")
        self.walls.op.execute("UPDATE sqlguard.policy_table SET max_rows = NULL, max_share = 1")
        self.walls.grant("soft")
        self.catalog = read_catalog(self.walls.op)

    def agent(self, name: str = "t1") -> psycopg.Connection[Any]:
        made = self.walls.task(name)
        made.conn.execute("SET search_path = soft; SET timezone = 'UTC'; SET statement_timeout = '10s'")
        return made.conn

    def rewritten(self, text: str) -> tuple[str, str | None]:
        stmts = postgast.parse(text).stmts
        if not stmts or not any(
            stmts[0].stmt.HasField(f)
            for f in ("delete_stmt", "update_stmt", "insert_stmt", "select_stmt", "merge_stmt")
        ):
            return text, None
        done = rewrite(text, stmts[0].stmt, self.catalog, Session(search_path=("soft",)))
        return done.text, done.tag

    def visible(self, agent: psycopg.Connection[Any], table: str) -> tuple[list[Any], list[Any]]:
        names = [
            row[0]
            for row in self.hard.execute(
                "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0"
                " AND NOT attisdropped ORDER BY attnum",
                [f"hard.{table}"],
            )
        ]
        columns = sql.SQL(", ").join(map(sql.Identifier, names))
        query = sql.SQL(
            "SELECT {} FROM {} ORDER BY 1, 2" if len(names) > 1 else "SELECT {} FROM {} ORDER BY 1"
        )
        built = query.format(columns, sql.Identifier(table))
        return self.hard.execute(built).fetchall(), agent.execute(built).fetchall()


def ask(conn: psycopg.Connection[Any], text: str, tag: str | None = None) -> tuple[Any, ...]:
    """Return tag, rows and SQLSTATE as a client sees them; the tag is the rewritten statement's."""
    try:
        cursor = conn.execute(text.encode())
    except psycopg.Error as error:
        return None, (), "23503" if error.sqlstate == "23001" else error.sqlstate
    rows = sorted(map(repr, cursor.fetchall())) if cursor.description else []
    shown = cursor.statusmessage or ""
    if tag is not None:
        shown = f"{tag} {shown.split()[-1]}"
    return shown, tuple(rows), None


@contextmanager
def twin(database: Database, setup: str) -> Iterator[Twin]:
    with world_of(database) as walls:
        yield Twin(database, walls, setup)


@contextmanager
def world_of(database: Database) -> Iterator[World]:
    with world(database) as made:
        yield made


@pytest.mark.parametrize("case", cases("cases"))
def test_case(database: Database, case: dict[str, Any]) -> None:
    with twin(database, case["setup"]) as both:
        expect = case["expect"]
        if refused_at_guard(both, case):
            return
        agent = both.agent()
        for text in case.get("earlier_agent_statements", ()):
            assert ask(agent, *both.rewritten(text)) == ask(both.hard, text)
        if expect["outcome"] == "refuse":
            assert_refused(both, agent, case["agent"][-1])
        else:
            for text in case["agent"]:
                assert ask(agent, *both.rewritten(text)) == ask(both.hard, text), text
        agent.rollback()
        both.hard.rollback()
        for table, count in expect.get("physical_rows", {}).items():
            (found,) = both.walls.op.execute(f"SELECT count(*) FROM soft.{table}").fetchone() or (0,)
            assert found == count, table
        if expect["outcome"] != "refuse":
            for table in expect.get("visible", ()):
                hard, soft = both.visible(agent, table)
                assert soft == hard, table
        kept = expect.get("keeps_stamp")
        if kept:
            row = both.walls.op.execute(
                f"SELECT deleted_at < now() - interval '1 microsecond' FROM soft.{kept['table']}"
                f" WHERE id = {kept['id']}"
            ).fetchone()
            assert row == (True,)


def refused_at_guard(both: Twin, case: dict[str, Any]) -> bool:
    refusals = []
    try:
        both.guard(case["soft_tables"])
    except GuardError as refusal:
        refusals.append(str(refusal))
    for text in refusals:
        assert case["expect"]["outcome"] == "refuse", text
        assert case["expect"]["reason"] in text
    return bool(refusals)


def assert_refused(both: Twin, agent: psycopg.Connection[Any], text: str) -> None:
    """The walls alone must stop what the policy would refuse: an error, and nothing changed."""
    try:
        text, _ = both.rewritten(text)
    except SqlguardError:
        return
    assert ask(agent, text)[2] is not None


def steps_of(case: dict[str, Any]) -> list[dict[str, Any]]:
    return case.get("real_steps") or []


@pytest.mark.parametrize("case", cases("concurrency_cases"))
def test_concurrency(database: Database, case: dict[str, Any] | None) -> None:
    assert case is not None
    if not steps_of(case):
        pytest.skip("an operator's restore or purge, which the walls have no part in")
    with twin(database, case["setup"]) as both:
        tables = sorted(
            {
                r[0]
                for r in both.hard.execute(
                    "SELECT relname FROM pg_class WHERE relnamespace = 'hard'::regnamespace AND relkind = 'r'"
                )
            }
        )
        both.guard(tables)
        sessions = {"A": both.agent("a"), "B": both.agent("b")}
        with ThreadPoolExecutor(2) as pool:
            waiting: dict[str, tuple[Future[Any], dict[str, Any]]] = {}

            def settle(name: str) -> None:
                future, step = waiting.pop(name)
                compare(future.result(10), step)

            for step in steps_of(case):
                name = step["session"]
                if name in waiting:
                    settle(name)
                text, tag = both.rewritten(step["sql"])
                future = pool.submit(ask, sessions[name], text, tag)
                time.sleep(0.5 if step["blocked"] else 0.05)
                if step["blocked"]:
                    assert not future.done(), step
                    waiting[name] = future, step
                else:
                    compare(future.result(10), step)
            for name in list(waiting):
                settle(name)
        agent = sessions["A"]
        for conn in sessions.values():
            conn.rollback()
        finals = case["expect"]["final"]
        got = {table: len(agent.execute(f"SELECT * FROM {table}").fetchall()) for table in tables}
        assert sum(got.values()) == sum(len(rows) for rows in finals.values()), (got, finals)


def compare(answer: tuple[Any, ...], step: dict[str, Any]) -> None:
    tag, _, state = answer
    wanted = step.get("error")
    if wanted:
        assert state == (wanted["sqlstate"] if isinstance(wanted, dict) else wanted), step
    else:
        assert (tag, state) == (step["tag"], None), step
