"""A guarded shop with a proxy and a standby, and what tests of reads at the replica ask."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import Any

import psycopg
from end_to_end.raw import Raw, kinds
from end_to_end.standby import Standby, standby
from end_to_end.wired import POLICY, Agent, Wired, wired_shop
from servers import OWNER, OWNER_PASSWORD, Database, fresh_database

from sqlguard.embedded import EmbeddedServer
from sqlguard.policy import parse_policy
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.wire.messages import Query

MAY_READ_THERE = POLICY.replace(
    "[defaults]", "[defaults]\nreads = { replica = true, max_result_rows = 50000 }"
)
SERIES = "(1), (2), (3), (4), (5), (6), (7), (8), (9), (10)"
#: Takes hours, on any server.
ENDLESS = (
    f"SELECT count(*) FROM (VALUES {SERIES}) a (x), (VALUES {SERIES}) b (x), (VALUES {SERIES}) c (x),"
    f" (VALUES {SERIES}) d (x), (VALUES {SERIES}) e (x), (VALUES {SERIES}) f (x), (VALUES {SERIES}) g (x),"
    f" (VALUES {SERIES}) h (x), (VALUES {SERIES}) i (x), (VALUES {SERIES}) j (x)"
)


@dataclass
class World:
    wired: Wired
    standby: Standby

    @property
    def database(self) -> Database:
        return self.wired.database

    @property
    def reads(self) -> Counter[str]:
        """Where messages went since the proxy began."""

        async def look() -> Counter[str]:
            replica = self.wired.proxy.server._replica
            assert replica is not None
            return Counter(replica.reads)

        return self.wired.proxy.call(look)

    @contextmanager
    def went(self, way: str, at_least: int = 1) -> Iterator[None]:
        """Have the block's messages go *way*."""
        before = self.reads
        yield
        found = self.reads - before
        assert found[way] >= at_least, f"wanted {way}: {dict(found)}"

    def until(self, holds: Callable[[], bool], what: str) -> None:
        for _ in range(300):
            if holds():
                return
            time.sleep(0.05)
        raise AssertionError(what)

    def settle(self, conn: psycopg.Connection[Any], text: str = "SELECT 1") -> Any:
        """Read until the replica answers, and return the row that it has."""
        for number in range(300):
            before = self.reads["replica"]
            # Another text each time: one that the replay was in the way of is not tried there again for a minute.
            row = conn.execute(f"{text} /* {number} */".encode()).fetchone()
            if self.reads["replica"] > before:
                return row
            time.sleep(0.05)
        raise AssertionError(f"no read goes to the replica: {self.reads}")

    def goes(self, client: Raw, *messages: Any, answer: str = "2TDCZ") -> bool:
        """Send *messages*, which must be answered so; say whether that was done at the replica."""
        before = self.reads["replica"]
        client.send(*messages)
        found = kinds(client.until_ready())
        assert found.endswith(answer), found
        return self.reads["replica"] > before

    def settle_raw(self, client: Raw) -> None:
        """Read until the replica answers."""
        texts = (Query(b"SELECT 1 /* %d */" % number) for number in count())
        self.until(lambda: self.goes(client, next(texts), answer="TDCZ"), "nothing goes there")

    def backends(self, agent: Agent) -> int:
        """How many of the agent's sessions the standby has."""
        text = f"SELECT count(*) FROM pg_stat_activity WHERE usename = '{agent.task.role}'"
        return int(self.standby.execute(text)[0][0])

    def at_work(self, agent: Agent) -> int:
        text = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND usename = "
        return int(self.standby.execute(f"{text}'{agent.task.role}'")[0][0])


@contextmanager
def replica_world(
    server: EmbeddedServer, of_standby: Mapping[str, str] = MappingProxyType({}), **settings: Any
) -> Iterator[World]:
    with fresh_database(server) as database, standby(server, **of_standby) as made:
        dsn = made.server.dsn(database.name, OWNER, OWNER_PASSWORD)
        with wired_shop(database, replica=dsn, **settings) as wired:
            apply_policy(wired.owner, parse_policy(MAY_READ_THERE, "wired.toml"))
            yield World(wired, made)
