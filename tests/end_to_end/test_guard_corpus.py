"""
Every handed statement through the proxy as a task's role, on the handed schema, judged in the database.

`refuse`: an error and nothing changed. `allow`: PostgreSQL's own answer. `rewrite`: a soft delete.
`needs_approval`: SG001, or refused, or within the caps. Whatever was changed is undone afterwards, and the
undo must give back every table to the byte.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from end_to_end.inprocess import proxied
from servers import Database
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.postgres.tasks import end_task, open_task

from sqlguard.dsn import url
from sqlguard.policy import parse_policy
from sqlguard.postgres.migrate import migrate
from sqlguard.postgres.undo import undo

POLICY = """
name = "corpus"

[defaults]
search_path = ["app", "public"]
statement_timeout = "5s"
lock_timeout = "1s"
max_ttl = "2h"

[tables."app.*"]
select = true
insert = true
update = true
delete = "soft"

[tables."app.audit_log"]
insert = false
update = false
delete = "refuse"
"""
ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT.parent / "shared" / "corpus" / "guard_cases.yaml"


def cases() -> list[Any]:
    if not CASES.is_file():
        return [pytest.param(None, marks=pytest.mark.skip("the handed cases are not beside the project"))]
    document = yaml.load(CASES.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    return [pytest.param(entry, id=entry["id"]) for entry in document["entries"]]


class Corpus:
    """The handed schema, guarded, with a proxy; one task for all statements of the module."""

    def __init__(self, database: Database, port: int) -> None:
        self.database = database
        self.port = port
        self.owner = database.connect()
        self.owner.execute("SET search_path = app, public")
        rows = self.owner.execute(
            "SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE n.nspname IN ('app', 'priv', 'public') AND c.relkind IN ('r', 'm', 'S') ORDER BY 1"
        ).fetchall()
        self.relations = [r[0] for r in rows]

    def state(self) -> dict[str, str]:
        """Everything that a statement could have changed for good, as text."""
        found = {}
        for relation in self.relations:
            rows = self.owner.execute(f"SELECT t::text FROM {relation} t ORDER BY 1").fetchall()
            found[relation] = "\n".join(r[0] for r in rows)
        found["catalog"] = self._one(
            "SELECT json_agg(x ORDER BY x)::text FROM (SELECT n.nspname || '.' || c.relname || c.relkind || c.relowner"
            " || coalesce(c.relacl::text, '') || c.relrowsecurity AS x FROM pg_class c JOIN pg_namespace n"
            " ON n.oid = c.relnamespace WHERE n.nspname NOT LIKE 'pg\\_%' AND n.nspname <> 'sqlguard') q"
        )
        found["columns"] = self._one(
            "SELECT json_agg(x ORDER BY x)::text FROM (SELECT attrelid::regclass || '.' || attname || atttypid AS x"
            " FROM pg_attribute JOIN pg_class c ON c.oid = attrelid WHERE attnum > 0 AND NOT attisdropped"
            " AND relnamespace IN ('app'::regnamespace, 'priv'::regnamespace, 'public'::regnamespace)) q"
        )
        found["functions"] = self._one(
            "SELECT json_agg(x ORDER BY x)::text FROM (SELECT oid::regprocedure || md5(prosrc) || coalesce(proacl::text,"
            " '') AS x FROM pg_proc WHERE pronamespace IN ('app'::regnamespace, 'public'::regnamespace)) q"
        )
        found["roles"] = self._one(
            "SELECT json_agg(x ORDER BY x)::text FROM (SELECT rolname || rolcanlogin || rolsuper ||"
            " coalesce(rolconfig::text, '') AS x FROM pg_roles) q"
        )
        found["large objects"] = self._one("SELECT count(*)::text FROM pg_largeobject_metadata")
        return found

    def _one(self, sql: str) -> str:
        row = self.owner.execute(sql.encode()).fetchone()
        return str(row[0]) if row else ""

    @contextmanager
    def task(self) -> Iterator[tuple[str, psycopg.Connection[Any]]]:
        opened = open_task(self.owner, agent="corpus", policy="corpus", ttl=timedelta(minutes=5))
        dsn = url(
            host="127.0.0.1",
            port=self.port,
            user=opened.role,
            password=opened.password,
            dbname=self.database.name,
        )
        try:
            with psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as agent:
                yield opened.task.id, agent
        finally:
            end_task(self.owner, opened.task.id, "case done")


@pytest.fixture(scope="module")
def corpus(guard_schema_module: Database) -> Iterator[Corpus]:
    database = guard_schema_module
    migrate(database.dsn)
    with psycopg.connect(database.dsn, autocommit=True) as owner:
        guard_tables(owner, ["app.accounts", "app.orders", "app.tickets"], mode="soft")
        apply_policy(owner, parse_policy(POLICY, "corpus"))
    with proxied(database.dsn) as port:
        yield Corpus(database, port)


def run(agent: psycopg.Connection[Any], sql: Any) -> list[Any]:
    """Send each message as one simple Query; parameters in corpus texts are typed by the server."""
    results = []
    for text in sql if isinstance(sql, list) else [sql]:
        cursor = agent.execute(text.encode() if isinstance(text, str) else text)
        results.append(cursor.statusmessage)
        while cursor.nextset():
            results.append(cursor.statusmessage)
    return results


@pytest.mark.parametrize("entry", cases())
def test_entry(corpus: Corpus, entry: dict[str, Any]) -> None:
    before = corpus.state()
    outcome: str
    with corpus.task() as (task, agent):
        before = corpus.state()
        try:
            outcome = json.dumps(run(agent, entry["sql"]))
        except psycopg.Error as fault:
            outcome = f"{fault.sqlstate}: {fault}"
        if not agent.closed and agent.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            agent.rollback()
        after = corpus.state()
        agent.close()
        undo(corpus.owner, task=task)
        restored = corpus.state()
    changed = sorted(k for k in after if after[k] != before[k])
    assert restored == before, (
        f"not restored: {sorted(k for k in restored if restored[k] != before[k])} after {outcome}"
    )
    judge(entry, outcome, changed)


def judge(entry: dict[str, Any], outcome: str, changed: list[str]) -> None:
    refused = outcome[:2] == "SG"
    failed = not outcome.startswith("[")
    match entry["expected"]:
        case "refuse":
            assert failed, outcome
            assert not changed, (outcome, changed)
        case "allow":
            assert not refused, outcome
        case "rewrite":
            assert not refused, outcome
            assert not any(c.startswith("app.order_items") for c in changed), changed
        case "needs_approval":
            assert failed or not changed or len(changed) <= 2, (outcome, changed)
