"""A migrated database with a task whose role is logged in: what the tests of the journal and of undo start from."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb
from servers import Database

from sqlguard.journal import Intent
from sqlguard.postgres import journal
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.migrate import migrate

PASSWORD = "a lease of this test"
POLICY = "tester"
GROUP = "sg_po_tester_1"


@dataclass
class Agent:
    """One login role of a task, with its session."""

    task: str
    role: str
    conn: psycopg.Connection[Any]


@dataclass(repr=False)
class World:
    """`op` is the operator's connection: the owner of the database, no superuser."""

    database: Database
    op: psycopg.Connection[Any]
    agents: list[Agent] = field(default_factory=list)

    def _repr_pretty_(self, printer: Any, _cycle: object) -> None:
        """Keep hypothesis from printing every connection."""
        printer.text(f"World({self.database.name!r})")

    def task(self, name: str, *, params: dict[str, str] | None = None, agent: str = "bot") -> Agent:
        """Open a task with one lease and log in; the session is in autocommit mode."""
        role = f"sg_tk_{name}"
        self.op.execute(
            "INSERT INTO sqlguard.task (id, agent, policy, policy_version, params, state, expires_at,"
            " max_expires_at) VALUES (%s, %s, %s, 1, %s, 'open', now() + interval '1d', now() + interval '1d')",
            [name, agent, POLICY, Jsonb(params or {})],
        )
        return self.lease(name, role)

    def lease(self, task: str, role: str) -> Agent:
        self.op.execute(
            sql.SQL("CREATE ROLE {} LOGIN PASSWORD {} IN ROLE {}").format(
                sql.Identifier(role), PASSWORD, sql.Identifier(GROUP)
            )
        )
        self.op.execute(
            "INSERT INTO sqlguard.lease (role, task_id, group_role, state, expires_at)"
            " VALUES (%s, %s, %s, 'live', now() + interval '1d')",
            [role, task, GROUP],
        )
        made = Agent(task, role, self.database.connect(self.database.dsn_for(role, PASSWORD)))
        self.agents.append(made)
        return made

    def grant(self, schema: str = "app") -> None:
        """Let the agents do everything with the tables of *schema*."""
        for text in (
            "GRANT USAGE ON SCHEMA {schema} TO {group}",
            "GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO {group}",
            "GRANT ALL ON ALL SEQUENCES IN SCHEMA {schema} TO {group}",
        ):
            self.op.execute(sql.SQL(text).format(schema=sql.Identifier(schema), group=sql.Identifier(GROUP)))

    def guard(self, *tables: str, mode: str = "journal") -> None:
        """Guard *tables* and let the agents change as much of them as they like."""
        guard_tables(self.op, tables, mode)
        self.op.execute(
            "INSERT INTO sqlguard.policy_table (policy, version, relid, schema_name, table_name, can_select,"
            " can_insert, can_update, delete_mode, max_share)"
            " SELECT %s, 1, g.relid, g.schema_name, g.table_name, true, true, true, g.mode, 1"
            " FROM sqlguard.guarded_table g ON CONFLICT DO NOTHING",
            [POLICY],
        )

    def act(self, agent: Agent, *statements: str, reason: str | None = None) -> int:
        """Journal one action, run *statements* in one transaction and return the action's id."""
        action = journal.record_intent(
            self.op, Intent(task=agent.task, role=agent.role, statement=";\n".join(statements), reason=reason)
        )
        with agent.conn.transaction():
            agent.conn.execute("SET TRANSACTION READ WRITE")
            agent.conn.execute("SELECT set_config('sqlguard.action', %s, true)", [str(action)])
            for statement in statements:
                agent.conn.execute(statement)
        return action

    def contents(self, *tables: str) -> dict[str, bytes]:
        """Return the bytes of each table as COPY writes them, in the order of all columns' text."""
        return {table: self.copy(table) for table in tables}

    def copy(self, table: str) -> bytes:
        with self.op.cursor().copy(
            f'COPY (SELECT * FROM {table} AS t ORDER BY t::text COLLATE "C") TO STDOUT'
        ) as c:
            return b"".join(bytes(block) for block in c)


@contextmanager
def world(database: Database) -> Iterator[World]:
    migrate(database.owner_dsn)
    op = database.connect(database.owner_dsn)
    op.execute(
        sql.SQL("CREATE ROLE {group} NOLOGIN IN ROLE sqlguard_agent").format(group=sql.Identifier(GROUP))
    )
    op.execute(
        "INSERT INTO sqlguard.policy (name, version, document, group_role) VALUES (%s, 1, '{}', %s)",
        [POLICY, GROUP],
    )
    yield World(database, op)


def rows(
    conn: psycopg.Connection[Any], text: str, values: Sequence[Any] | None = None
) -> list[tuple[Any, ...]]:
    return conn.execute(text, values).fetchall()
