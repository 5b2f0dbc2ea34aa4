"""
The handed soft delete cases as stories: a fresh guarded database, an earlier task, the case's own task, an undo.

A case is set up as its owner had it and guarded in the mode of the run; its statements go through one of the
doors as a task's role. What the client saw and what is in the tables afterwards is a `Played`.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from end_to_end.inprocess import proxied
from psycopg import sql
from servers import Database, fresh_database

from sqlguard.dsn import url
from sqlguard.embedded import EmbeddedServer
from sqlguard.errors import GuardError
from sqlguard.policy import parse_policy
from sqlguard.postgres.guard_table import guard_tables, user_tables
from sqlguard.postgres.migrate import migrate
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.postgres.tasks import end_task, open_task
from sqlguard.postgres.undo import undo
from sqlguard.postgres.undo_report import UndoReport

CASES = Path(__file__).resolve().parents[3] / "shared" / "corpus" / "soft_delete_cases.yaml"
POLICY = """
name = "{name}"

[defaults]
max_rows = 100000
max_share = 1.0
on_excess = "refuse"
statement_timeout = "10s"
lock_timeout = "5s"

[tables."public.*"]
select = {select}
insert = {insert}
update = {update}
"""
#: Without a WHERE they need an approval under any policy; these conditions mean the same and are counted.
NARROWED = {
    "SD-A02": ("DELETE FROM orders", "DELETE FROM orders WHERE id > 0"),
    "SD-A19": ("DELETE FROM asset", "DELETE FROM asset WHERE id > 0"),
    "SD-A20": ("DELETE FROM ONLY asset", "DELETE FROM ONLY asset WHERE id > 0"),
    "SD-T01": ("DELETE FROM acct", "DELETE FROM acct WHERE id > 0"),
    "SD-U13": ("ELSE 1 END", "ELSE 1 END WHERE id > 0"),
}


def given(kind: str) -> list[Any]:
    """Return the cases as parameters of a test."""
    if not CASES.is_file():
        return [pytest.param(None, marks=pytest.mark.skip("the handed cases are not beside the project"))]
    document = yaml.load(CASES.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    return [pytest.param(case, id=case["id"]) for case in document[kind]]


@dataclass(frozen=True)
class Answer:
    """What a client saw of one message."""

    tag: str | None = None
    rows: tuple[tuple[Any, ...], ...] | None = None
    sqlstate: str | None = None
    message: str = ""
    hint: str = ""

    @property
    def count(self) -> int | None:
        last = (self.tag or "").rpartition(" ")[2]
        return int(last) if last.isdigit() else None


@dataclass
class Played:
    """A case after it was carried out: the answer that it is about, the tables before, after and undone."""

    answer: Answer
    answers: list[Answer]
    before: dict[str, str]
    after: dict[str, str]
    restored: dict[str, str] = field(default_factory=dict)
    report: UndoReport | None = None
    visible: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)
    physical: dict[str, int] = field(default_factory=dict)
    #: The tables with a primary key.
    keyed: set[str] = field(default_factory=set)

    @property
    def changed(self) -> bool:
        return self.before != self.after

    @property
    def lost(self) -> list[str]:
        """The tables that the undo did not bring back; of rows without a key it may say that it can't find them."""
        told = {c.table.rpartition(".")[2] for c in self.report.conflicts} if self.report else set()
        keyless = told - self.keyed
        return [n for n, rows in self.before.items() if self.restored.get(n) != rows and n not in keyless]


class World:
    """A case's own database, guarded, with a proxy in front of it."""

    def __init__(self, database: Database, case: dict[str, Any], mode: str) -> None:
        self.database, self.case, self.mode = database, case, mode
        self.port = 0
        self.op = database.connect(database.owner_dsn)
        self.op.execute("SET timezone = 'UTC'")
        self.refusal: GuardError | None = None

    # --- the owner's part

    def prepare(self) -> None:
        self.op.execute(self.case["setup"].encode())
        tables = user_tables(self.op)
        soft = self.case.get("soft_tables")
        wanted = {f"public.{t}" for t in soft} if soft is not None else set(tables)
        self._guard([t for t in tables if t in wanted], self.mode)
        # Others are what the application writes to as well, but for the case of a table that nobody manages.
        if self.case["expect"].get("reason") != "unmanaged_table" or self.mode == "journal":
            self._guard([t for t in tables if t not in wanted], "journal")
        self._replace_views()
        self._apply("everything", select=True, insert=True, update=True, delete=self.mode)
        if self.case.get("role"):
            given = self.case["setup"].rpartition("GRANT ")[2].partition(" ON ")[0].lower()
            rights = {right: right in given for right in ("select", "insert", "update")}
            self._apply("mirror", **rights, delete=self.mode if "delete" in given else None)

    def _guard(self, tables: list[str], mode: str) -> None:
        """Guard *tables*; one that the pre-flight refuses stays as it is, and deletes in it are refused."""
        try:
            guard_tables(self.op, tables, mode)
        except GuardError as refusal:
            self.refusal = refusal
            for table in tables:
                with suppress(GuardError):
                    guard_tables(self.op, [table], mode)

    def _replace_views(self) -> None:
        """Run what the case's migration does to views; constraints are the guard's own matter."""
        for text in self.case.get("enable_extra", "").split(";"):
            if "VIEW" in text and self.mode == "soft":
                self.op.execute(text.encode())

    def _apply(self, name: str, *, delete: str | None, **rights: bool) -> None:
        """Apply a policy; None as *delete* is a policy that does not speak of deleting."""
        text = POLICY.format(name=name, **{key: str(value).lower() for key, value in rights.items()})
        if delete is not None:
            text += f'delete = "{delete}"\n'
        apply_policy(self.op, parse_policy(text, name))

    def state(self) -> dict[str, str]:
        """Everything in every table, tombstones and bookkeeping columns included, as text."""
        names = self.op.execute(
            "SELECT quote_ident(relname) FROM pg_class WHERE relnamespace = 'public'::regnamespace"
            " AND relkind IN ('r', 'm') ORDER BY 1"
        ).fetchall()
        found = {}
        for (name,) in names:
            rows = self.op.execute(f"SELECT t::text FROM ONLY {name} t ORDER BY 1".encode()).fetchall()
            found[name] = "\n".join(row[0] for row in rows)
        return found

    def keyed(self) -> set[str]:
        rows = self.op.execute(
            "SELECT c.relname FROM pg_class c JOIN pg_index i ON i.indrelid = c.oid AND i.indisprimary"
            " WHERE c.relnamespace = 'public'::regnamespace"
        ).fetchall()
        return {row[0] for row in rows}

    def count(self, table: str) -> int:
        query = sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(table))
        row = self.op.execute(query).fetchone()
        return int(row[0]) if row else -1

    def stamp(self, table: str, key: Any) -> tuple[Any, ...] | None:
        query = sql.SQL("SELECT deleted_at, deleted_by_agent FROM {} WHERE id = %s")
        return self.op.execute(query.format(sql.Identifier(table)), [key]).fetchone()

    # --- the agents' part

    @contextmanager
    def task(
        self, door: str, agent: str = "agent-1", policy: str = "everything"
    ) -> Iterator[tuple[str, psycopg.Connection[Any]]]:
        opened = open_task(self.op, agent=agent, policy=policy, ttl=timedelta(minutes=5))
        dsn = url(
            host="127.0.0.1",
            port=self.database.server.port if door == "direct" else self.port,
            user=opened.role,
            password=opened.password,
            dbname=self.database.name,
        )
        try:
            with psycopg.connect(dsn, autocommit=True) as conn:
                conn.execute("SET TIME ZONE 'UTC'")
                yield opened.task.id, conn
        finally:
            end_task(self.op, opened.task.id, "case done")

    def earlier(self) -> None:
        """Carry out what an earlier task did; real deletes in the case, so nothing of it may fail."""
        statements = self.case.get("earlier_agent_statements", ())
        if not statements:
            return
        with self.task("simple", agent="earlier") as (_, conn):
            for text in statements:
                answer = ask(conn, text)
                assert answer.sqlstate is None, (text, answer)

    def play(self, door: str, statements: list[str]) -> Played:
        policy = "mirror" if self.case.get("role") else "everything"
        with self.task(door, policy=policy) as (task, conn):
            before = self.state()
            answers: list[Answer] = []
            for text in statements:
                answers.append(ask(conn, text, door, self.case.get("copy_in")))
                if answers[-1].sqlstate is not None:
                    break
            number = self.case.get("agent_result_statement", len(statements) - 1)
            answer = answers[-1] if answers[-1].sqlstate is not None else answers[number]
            if answer.sqlstate is not None and conn.info.transaction_status == _IN_ERROR:
                assert ask(conn, "SELECT 1", door).sqlstate == "25P02"
            if not conn.closed:
                conn.rollback()
            played = Played(answer, answers, before, self.state(), keyed=self.keyed())
            for table in self.case["expect"].get("physical_rows", ()):
                played.physical[table] = self.count(table)
            if door != "direct":
                for table in self.case["expect"].get("visible", ()):
                    shown = ask(conn, f'SELECT * FROM "{table}"', door)
                    assert shown.rows is not None, shown
                    played.visible[table] = list(shown.rows)
            conn.close()
            played.report = undo(self.op, task=task, on_conflict="skip")
            played.restored = self.state()
        return played


_IN_ERROR = psycopg.pq.TransactionStatus.INERROR


def ask(conn: psycopg.Connection[Any], text: str, door: str = "simple", copy_in: str | None = None) -> Answer:
    """Send one message, simple or extended, and return what came of its last statement."""
    try:
        with conn.cursor() as cursor:
            if text.startswith("COPY") and copy_in is not None:
                with cursor.copy(text.encode()) as copy:
                    copy.write(copy_in)
                return Answer(cursor.statusmessage)
            if door == "extended" and ";" not in text:
                cursor.execute(text.encode(), prepare=True)
            else:
                cursor.execute(text.encode())
            while cursor.nextset():
                pass
            rows = tuple(map(plain, cursor.fetchall())) if cursor.description else None
            return Answer(cursor.statusmessage, rows)
    except psycopg.Error as fault:
        hint = fault.diag.message_hint or ""
        return Answer(sqlstate=fault.sqlstate or "closed", message=str(fault), hint=hint)


def plain(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a row as the cases write one down."""
    return tuple(str(v) if isinstance(v, datetime) else v for v in row)


@contextmanager
def world(server: EmbeddedServer, case: dict[str, Any], mode: str) -> Iterator[World]:
    """Give the database of one case, guarded as *mode*, with a proxy."""
    with fresh_database(server) as database:
        migrate(database.owner_dsn)
        with database.connect() as conn:
            if case.get("role") and conn.execute("SELECT to_regrole('agent')").fetchone() == (None,):
                conn.execute("CREATE ROLE agent")
        made = World(database, case, mode)
        made.prepare()
        with proxied(database.owner_dsn) as made.port:
            yield made
