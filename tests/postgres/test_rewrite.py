"""What the rewriter makes of a statement gives on a real server what the real DELETE gives."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from servers import Database, fresh_database
from soft_catalog import FIXTURES, MIGRATION, SOFT
from soft_statements import texts
from soft_world import Worlds, outcome

from sqlguard.embedded import EmbeddedServer
from sqlguard.errors import NotUnderstood, SqlguardError

GROUPS = frozenset(
    {
        *(
            "delete",
            "returning",
            "join_dml",
            "subquery",
            "inheritance",
            "partition",
            "no_pk",
            "cte",
            "parser",
        ),
        *("read", "view", "cursor", "insert", "update", "unique", "columns"),
    }
)
#: Tables whose rows are compared after each statement.
TABLES = ("customers", "orders", "items", "tags", "usr", "base", "sub", "part", "plain", "log")
#: Cases whose outcome is another module's work, with the reason.
ELSEWHERE = {
    "SD-A08": "the guard's own trigger puts the row back, which these worlds don't have",
    "SD-B10": "the policy refuses EXPLAIN ANALYZE of DML",
    "SD-D09": "PostgreSQL has no COPY FROM with row-level security",
    "SD-U12": "a unique value that a foreign key points to stays taken; 23505 at run time",
}


def cases() -> list[Any]:
    path = Path(__file__).resolve().parents[3] / "shared" / "corpus" / "soft_delete_cases.yaml"
    if not path.is_file():
        return [pytest.param(None, marks=pytest.mark.skip(reason="the soft delete cases are not there"))]
    found = yaml.safe_load(path.read_text(encoding="utf-8"))["cases"]
    return [
        pytest.param(case, id=case["id"])
        for case in found
        if case["group"] in GROUPS and case["id"] not in ELSEWHERE
    ]


@pytest.fixture
def worlds(database: Database) -> Worlds:
    return Worlds(database)


@pytest.mark.parametrize("case", cases())
def test_case(worlds: Worlds, case: dict[str, Any]) -> None:
    worlds.build(case["setup"], case["soft_tables"], case.get("enable_extra", ""))
    for text in case.get("earlier_agent_statements", ()):
        assert worlds.ask_hard(text) == worlds.ask_soft(text)
    if case["expect"]["outcome"] == "refuse":
        *before, last = case["agent"]
        assert before == []
        with pytest.raises(SqlguardError) as caught:
            worlds.ask_soft(last)
        assert caught.value.rules == (case["expect"]["reason"],)
        return
    for text in case["agent"]:
        for part in text.split("; ") if text.startswith("CREATE TEMP") else [text]:
            assert worlds.ask_soft(part) == worlds.ask_hard(part), worlds.rewritten(part)
    for table in case["expect"].get("visible", ()):
        hard, soft = worlds.visible(table)
        assert soft == hard


@pytest.fixture(scope="module")
def fixture_worlds(server: EmbeddedServer) -> Iterator[Worlds]:
    """The two worlds with the tables of the fixtures; every statement is rolled back."""
    with fresh_database(server) as database:
        worlds = Worlds(database)
        worlds.build((FIXTURES / "schema.sql").read_text(encoding="utf-8"), sorted(SOFT), MIGRATION)
        worlds.hard.autocommit = worlds.soft.autocommit = False
        yield worlds


def same(worlds: Worlds, text: str) -> None:
    """Check that *text* gives the same in both worlds, and leaves the same."""
    try:
        hard, soft = outcome(worlds, text)
        assert soft == hard, f"{text}\n{hard}\n{soft}"
        if hard.error is None:
            for table in TABLES:
                left, right = worlds.visible(table)
                assert right == left, (text, table)
    finally:
        worlds.hard.rollback()
        worlds.soft.rollback()


def statements() -> list[str]:
    text = (FIXTURES / "same.sql").read_text(encoding="utf-8")
    return re.split(r"^--\n", text.partition("\n\n")[2], flags=re.MULTILINE)


@pytest.mark.parametrize("text", statements())
def test_it_is_the_same_in_both_worlds(fixture_worlds: Worlds, text: str) -> None:
    if "MERGE" in text and "RETURNING" in text and fixture_worlds.catalog.server_version < 170000:
        pytest.skip("MERGE has no RETURNING before PostgreSQL 17")
    same(fixture_worlds, text)


@given(text=texts())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_statement_is_the_same_in_both_worlds(fixture_worlds: Worlds, text: str) -> None:
    try:
        fixture_worlds.rewritten(text)
    except NotUnderstood:
        raise
    except SqlguardError:
        return
    same(fixture_worlds, text)


def test_a_deleted_row_is_gone_for_the_next_statement(fixture_worlds: Worlds) -> None:
    worlds = fixture_worlds
    try:
        for text in (
            "DELETE FROM orders WHERE id = 1",
            "SELECT * FROM orders",
            "DELETE FROM orders WHERE id < 3",
        ):
            assert worlds.ask_soft(text) == worlds.ask_hard(text)
        assert worlds.visible("orders")[0] == worlds.visible("orders")[1]
    finally:
        worlds.hard.rollback()
        worlds.soft.rollback()


def test_the_stamp_names_the_agent(worlds: Worlds) -> None:
    worlds.build("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1), (2)", ["t"])
    worlds.ask_soft("DELETE FROM t WHERE id = 1")
    rows = worlds.admin.execute(
        "SELECT id, deleted_at IS NOT NULL, deleted_by_agent FROM soft.t ORDER BY id"
    ).fetchall()
    assert rows == [(1, True, "agent-1"), (2, False, None)]
