"""
The handed statements and the handed schema, guarded and behind a proxy, for the tests that send one at the other.

Whatever a statement has changed is undone after it, so that one world does for all of a module.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from end_to_end.inprocess import proxied
from servers import Database

from sqlguard.dsn import url
from sqlguard.policy import parse_policy
from sqlguard.postgres import plans
from sqlguard.postgres.guard_table import guard_tables, user_tables
from sqlguard.postgres.migrate import migrate
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.postgres.tasks import end_task, open_task
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
SEQUENCES = "sequences"
#: A task's own role is there while its task is.
ROLES = "roles"
CASES = Path(__file__).resolve().parents[3] / "shared" / "corpus" / "guard_cases.yaml"


def cases() -> list[Any]:
    if not CASES.is_file():
        return [pytest.param(None, marks=pytest.mark.skip("the handed cases are not beside the project"))]
    document = yaml.load(CASES.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    return [pytest.param(entry, id=entry["id"]) for entry in document["entries"]]


OURS = "('app'::regnamespace, 'priv'::regnamespace, 'public'::regnamespace)"
CATALOG = {
    "catalog": "SELECT concat_ws(' ', n.nspname, c.relname, c.relkind, c.relowner, c.relacl, c.relrowsecurity)"
    " FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
    " WHERE n.nspname NOT LIKE 'pg\\_%' AND n.nspname NOT IN ('sqlguard', 'information_schema')",
    "columns": "SELECT concat_ws(' ', attrelid::regclass, attname, atttypid, attnotnull) FROM pg_attribute"
    f" JOIN pg_class c ON c.oid = attrelid WHERE attnum > 0 AND NOT attisdropped AND relnamespace IN {OURS}",
    "functions": "SELECT concat_ws(' ', oid::regprocedure, md5(prosrc), proacl) FROM pg_proc"
    f" WHERE pronamespace IN {OURS}",
    ROLES: "SELECT concat_ws(' ', rolname, rolcanlogin, rolsuper, rolconfig) FROM pg_roles",
    "comments": "SELECT concat_ws(' ', objoid, objsubid, description) FROM pg_description WHERE objoid > 16384",
    SEQUENCES: "SELECT concat_ws(' ', schemaname || '.' || sequencename, last_value) FROM pg_sequences"
    " WHERE schemaname IN ('app', 'priv', 'public')",
}


class Corpus:
    """The handed schema, guarded, with a proxy."""

    def __init__(self, database: Database, port: int) -> None:
        self.database = database
        self.port = port
        self.owner = database.connect()
        self.owner.execute("SET search_path = app, public")
        rows = self.owner.execute(
            "SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE n.nspname IN ('app', 'priv', 'public') AND c.relkind IN ('r', 'm') ORDER BY 1"
        ).fetchall()
        self.relations = [r[0] for r in rows]
        self.roles_at_first = self.roles()

    def state(self) -> dict[str, str]:
        """Everything that a statement could have changed for good, as text."""
        found = {}
        for relation in self.relations:
            rows = self.owner.execute(f"SELECT t::text FROM ONLY {relation} t ORDER BY 1").fetchall()
            found[relation] = "\n".join(r[0] for r in rows)
        for name, sql in CATALOG.items():
            found[name] = self._one(f"SELECT string_agg(x, E'\\n' ORDER BY x) FROM ({sql}) q (x)")
        found["large objects"] = self._one("SELECT count(*)::text FROM pg_largeobject_metadata")
        return found

    def _one(self, sql: str) -> str:
        row = self.owner.execute(sql.encode()).fetchone()
        return str(row[0]) if row else ""

    def roles(self) -> set[str]:
        return {r[0] for r in self.owner.execute("SELECT rolname FROM pg_roles").fetchall()}

    def journaled(self, task: str) -> Counter[tuple[str, str]]:
        """The rows of the change sets that *task* has committed, by table and kind."""
        rows = self.owner.execute(
            "SELECT schema_name || '.' || table_name, op, sum(rows)::integer FROM sqlguard.change_set"
            " WHERE task_id = %s GROUP BY 1, 2",
            [task],
        ).fetchall()
        return Counter({(table, op): count for table, op, count in rows})

    def approve(self, plan: int) -> None:
        """As a person who has nothing to do with the task."""
        if not self.owner.execute("SELECT FROM pg_roles WHERE rolname = 'sg_dana'").rowcount:
            self.owner.execute("CREATE ROLE sg_dana LOGIN PASSWORD 'secret' IN ROLE sqlguard_approver")
        with psycopg.connect(self.database.dsn_for("sg_dana", "secret"), autocommit=True) as dana:
            plans.approve(dana, plan, plans.show(dana, plan).document["digest"])

    def take_back(self, task: str, before: dict[str, str]) -> None:
        """Undo what *task* has done, and put back what the undo says it could not."""
        report = undo(self.owner, task=task, on_conflict="skip")
        lost = {k for k, v in self.state().items() if v != before[k]} - {ROLES, SEQUENCES}
        if lost and report.conflicts:
            # Rows of the schema that refer to one that was deleted before: no undo makes such rows.
            self.owner.execute("SET session_replication_role = replica")
            self.repair(before, lost & set(self.relations))
            self.owner.execute("RESET session_replication_role")

    def repair(self, before: dict[str, str], lost: set[str]) -> None:
        """Put back what the undo said it could not, so that the next case begins as this one did."""
        for relation in lost:
            rows = before[relation].splitlines()
            self.owner.execute(f"DELETE FROM ONLY {relation}")
            for row in rows:
                self.owner.execute(f"INSERT INTO {relation} SELECT (%s::text::{relation}).*", [row])

    @contextmanager
    def task(self, door: str) -> Iterator[tuple[str, psycopg.Connection[Any]]]:
        opened = open_task(self.owner, agent="corpus", policy="corpus", ttl=timedelta(minutes=5))
        dsn = url(
            host="127.0.0.1",
            port=self.port if door == "proxy" else self.database.server.port,
            user=opened.role,
            password=opened.password,
            dbname=self.database.name,
        )
        try:
            with psycopg.connect(dsn, autocommit=True) as agent:
                yield opened.task.id, agent
        finally:
            end_task(self.owner, opened.task.id, "case done")


@contextmanager
def guarded(database: Database, policy: str = POLICY) -> Iterator[Corpus]:
    """Guard the handed schema in *database* under *policy* and put a proxy in front of it."""
    migrate(database.dsn)
    with psycopg.connect(database.dsn, autocommit=True) as owner:
        guard_tables(owner, ["app.accounts", "app.orders"], mode="soft", fix_views=True)
        # The ticket trigger waits for DELETE; the cases want a soft delete all the same.
        guard_tables(owner, ["app.tickets"], mode="soft", accept=["user_delete_trigger"])
        rest = [t for t in user_tables(owner) if t not in ("app.accounts", "app.orders", "app.tickets")]
        guard_tables(owner, rest, mode="journal")
        apply_policy(owner, parse_policy(policy, "corpus"))
    with proxied(database.dsn) as port:
        yield Corpus(database, port)


def run(
    agent: psycopg.Connection[Any], sql: Any, params: Sequence[Any] | None = None, *, extended: bool = False
) -> list[Any]:
    """Send each message, as one simple Query unless it has parameters ($1 …) or is to be *extended*."""
    results: list[Any] = []
    for text in sql if isinstance(sql, list) else [sql]:
        if text.startswith("COPY"):
            with agent.cursor().copy(text.encode()) as copy:
                results.append("COPY" if not any(False for _ in copy) else "")
            continue
        cursor = psycopg.RawCursor(agent)
        cursor.execute(text.encode(), params, prepare=extended)
        results.append(cursor.statusmessage)
        while cursor.nextset():
            results.append(cursor.statusmessage)
    return results
