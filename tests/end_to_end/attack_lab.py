"""A shop behind a proxy, and an agent with the JSON of `sqlguard task open` in its hands: where attacks are tried."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import psycopg
from end_to_end.inprocess import Proxy, proxy
from end_to_end.raw import Raw
from end_to_end.shop import SHOP, TABLES
from end_to_end.wired import Agent
from servers import Database, fresh_database

from sqlguard.embedded import EmbeddedServer
from sqlguard.policy import parse_policy
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.migrate import migrate
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.postgres.tasks import end_task, open_task
from sqlguard.postgres.undo import undo
from sqlguard.wire.messages import PROTOCOL_3_0

SCHEMA = """
CREATE TABLE ledger (id integer PRIMARY KEY, amount money, note text);
INSERT INTO ledger SELECT n, n::money, 'entry ' || n FROM generate_series(1, 60) AS n;
CREATE TABLE loose (id integer PRIMARY KEY, t text);
INSERT INTO loose VALUES (1, 'only the owner writes here');
CREATE SCHEMA workshop;
GRANT USAGE, CREATE ON SCHEMA workshop TO PUBLIC;
CREATE SEQUENCE coins;
GRANT USAGE ON SEQUENCE coins TO PUBLIC;
CREATE TYPE coin AS (v integer);
CREATE FUNCTION coin_plus(coin, integer) RETURNS integer LANGUAGE plpgsql
    AS 'BEGIN PERFORM nextval(''coins''); RETURN 1; END';
CREATE OPERATOR + (LEFTARG = coin, RIGHTARG = integer, FUNCTION = coin_plus);
"""
SUPPORT = """
name = "support"
[defaults]
on_excess = "refuse"
[tables."public.*"]
select = true
insert = true
update = true
delete = "soft"
[tables."public.ledger"]
delete = "journal"
"""
SCOPED = """
name = "scoped"
[defaults]
max_rows = 1000
max_share = 1.0
on_excess = "refuse"
[tables."public.staff"]
select = true
delete = "soft"
[tables."public.orders"]
select = true
update = ["note"]
rows = "customer_id = :customer_id"
"""


@dataclass
class Lab:
    database: Database
    proxy: Proxy
    owner: psycopg.Connection[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.owner = self.operator()

    def operator(self) -> psycopg.Connection[Any]:
        return self.database.connect(self.database.owner_dsn)

    def value(self, sql: str, *values: object) -> Any:
        row = self.owner.execute(sql.encode(), values or None).fetchone()
        return row[0] if row else None

    def agent(self, policy: str = "support", params: dict[str, str] | None = None) -> Agent:
        task = open_task(self.owner, agent="mallory", policy=policy, ttl=timedelta(minutes=10), params=params)
        direct = self.database.dsn_for(task.role, task.password)
        return Agent(task, "127.0.0.1", self.proxy.port, self.database.name, direct)

    @contextmanager
    def visit(self, policy: str = "support", **params: str) -> Iterator[Agent]:
        agent = self.agent(policy, params)
        try:
            yield agent
        finally:
            undo(self.owner, task=agent.task.task.id)
            end_task(self.owner, agent.task.task.id, "tested")


@contextmanager
def attacked(server: EmbeddedServer) -> Iterator[Lab]:
    with fresh_database(server) as database:
        migrate(database.owner_dsn)
        with psycopg.connect(database.owner_dsn, autocommit=True) as owner:
            owner.execute(SHOP)
            owner.execute(SCHEMA)
            guard_tables(owner, TABLES, "soft")
            guard_tables(owner, ["ledger"], "journal")
            for policy in (SUPPORT, SCOPED):
                apply_policy(owner, parse_policy(policy, "attacks.toml"))
        with proxy(database.owner_dsn) as running:
            yield Lab(database, running)


def straight(agent: Agent, **options: Any) -> psycopg.Connection[Any]:
    return psycopg.connect(agent.direct, **{"autocommit": True, **options})


def soon(work: Callable[[], Any], seconds: float = 5) -> bool:
    """Whether *work* comes to an end; what it raises counts as one."""

    def run() -> None:
        with suppress(psycopg.Error):
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def intents(lab: Lab, agent: Agent) -> int:
    return int(lab.value("SELECT count(*) FROM sqlguard.action WHERE task_id = %s", agent.task.task.id))


def raw(lab: Lab, agent: Agent, **parameters: str) -> Raw:
    client = Raw("127.0.0.1", lab.proxy.port)
    client.log_in(agent, PROTOCOL_3_0, **parameters)
    return client
