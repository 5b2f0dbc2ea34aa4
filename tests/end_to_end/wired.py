"""A guarded shop behind a proxy in the test process, and agents that connect to it with real drivers."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import psycopg
from end_to_end.inprocess import Proxy, proxy
from end_to_end.shop import SHOP, TABLES
from servers import Database

from sqlguard.dsn import url
from sqlguard.policy import parse_policy
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.journal import list_actions
from sqlguard.postgres.migrate import migrate
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.postgres.tasks import OpenedTask, end_task, open_task
from sqlguard.postgres.undo import undo

PLAIN_TABLE = "CREATE TABLE plain (id integer PRIMARY KEY, t text, b bytea, n numeric, a integer[])"
POLICY = """
name = "wired"

[defaults]
max_rows = 5000
max_share = 1.0
on_excess = "refuse"
statement_timeout = "60s"
max_ttl = "2h"

[tables."public.*"]
select = true
insert = true
update = true
delete = "soft"
"""


@dataclass
class Agent:
    """A task's login, through the proxy (`dsn`) and straight to PostgreSQL (`direct`)."""

    task: OpenedTask
    host: str
    port: int
    database: str
    direct: str

    @property
    def dsn(self) -> str:
        return url(
            host=self.host,
            port=self.port,
            user=self.task.role,
            password=self.task.password,
            dbname=self.database,
        )

    @property
    def keywords(self) -> dict[str, Any]:
        """For drivers that take the parts."""
        return {
            "host": self.host,
            "port": self.port,
            "user": self.task.role,
            "password": self.task.password,
            "database": self.database,
        }

    def connect(self, **options: Any) -> psycopg.Connection[Any]:
        return psycopg.connect(self.dsn, **{"autocommit": True, **options})


@dataclass
class Wired:
    database: Database
    proxy: Proxy
    owner: psycopg.Connection[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.owner = self.database.connect(self.database.owner_dsn)

    def value(self, sql: str) -> Any:
        row = self.owner.execute(sql.encode()).fetchone()
        return row[0] if row else None

    def dump(self) -> dict[str, list[Any]]:
        return {t: self.owner.execute(f"SELECT * FROM {t} t ORDER BY t::text").fetchall() for t in TABLES}

    def agent(self, ttl: timedelta = timedelta(minutes=20), port: int | None = None) -> Agent:
        task = open_task(self.owner, agent="tester", policy="wired", ttl=ttl)
        direct = self.database.dsn_for(task.role, task.password)
        return Agent(task, "127.0.0.1", port or self.proxy.port, self.database.name, direct)

    def actions(self, agent: Agent) -> list[dict[str, Any]]:
        """What the journal says of the agent's task, oldest first; how an action ended is written a bit later."""
        for _ in range(100):
            found = [a.as_dict() for a in list_actions(self.owner, task=agent.task.task.id, limit=10_000)]
            if all(a["outcome"] != "unsettled" for a in found):
                break
            time.sleep(0.05)
        return sorted(found, key=lambda a: a["id"])

    def outcomes(self, agent: Agent) -> list[str]:
        """What the journal says came of the agent's actions, once it says the same for a while."""
        found: list[str] = []
        for _ in range(30):
            # Refusals and ends are written behind the client's back.
            time.sleep(0.1)
            now = [a["outcome"] for a in self.actions(agent)]
            if now and now == found:
                break
            found = now
        return found

    @contextmanager
    def visiting(self, **options: Any) -> Iterator[Agent]:
        """An agent whose work is undone behind the block."""
        agent = self.agent(**options)
        try:
            yield agent
        finally:
            undo(self.owner, task=agent.task.task.id)
            end_task(self.owner, agent.task.task.id, "tested")


@contextmanager
def wired_shop(database: Database, **settings: Any) -> Iterator[Wired]:
    migrate(database.owner_dsn)
    with psycopg.connect(database.owner_dsn, autocommit=True) as owner:
        owner.execute(SHOP)
        owner.execute(PLAIN_TABLE)
        guard_tables(owner, [*TABLES, "plain"], "soft")
        apply_policy(owner, parse_policy(POLICY, "wired.toml"))
    with proxy(database.owner_dsn, **settings) as running:
        yield Wired(database, running)
