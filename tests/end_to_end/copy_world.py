"""Tables that rows are copied into: `ledger` is guarded as `journal`, `plain` as `soft`, `odd` has columns of every kind."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg.sql
from end_to_end.raw import Raw
from end_to_end.wired import POLICY, Wired, wired_shop
from servers import OWNER, fresh_database

from sqlguard.embedded import EmbeddedServer
from sqlguard.policy import parse_policy
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.policy_apply import apply_policy

TABLES = ["ledger", "plain"]
GATED = (
    POLICY.replace('name = "wired"', 'name = "gated"')
    + """
[tables."public.staff"]
insert = ["id"]

[[gates]]
when = { kind = "insert", table = "public.orders" }
then = "approve"

[[gates]]
when = { rows = ">10" }
then = "approve"
"""
)
PLAN_ONLY = POLICY.replace('name = "wired"', 'name = "planonly"').replace(
    "[defaults]", "[defaults]\nplan_only = true"
)


@contextmanager
def copy_world(server: EmbeddedServer) -> Iterator[Wired]:
    with fresh_database(server) as database, wired_shop(database) as made:
        # As a careful operator has it: tasks make no temporary tables.
        name = psycopg.sql.Identifier(database.name)
        revoke = psycopg.sql.SQL(
            "GRANT TEMPORARY ON DATABASE {0} TO {1}; REVOKE TEMPORARY ON DATABASE {0} FROM PUBLIC"
        )
        database.execute(revoke.format(name, psycopg.sql.Identifier(OWNER)))
        made.owner.execute(
            "CREATE TABLE ledger (id integer PRIMARY KEY, t text, b bytea, n numeric, a integer[])"
        )
        made.owner.execute(
            "CREATE TABLE odd (id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY, \"of\" text DEFAULT 'x',"
            ' twice integer GENERATED ALWAYS AS (k * 2) STORED, k integer NOT NULL, "Ünïcode" text)'
        )
        guard_tables(made.owner, ["ledger"], "journal")
        guard_tables(made.owner, ["odd"], "soft")
        for text in (POLICY, GATED, PLAN_ONLY):
            apply_policy(made.owner, parse_policy(text, "t.toml"))
        yield made


def count(world: Wired, table: str) -> int:
    return int(world.value(f"SELECT count(*) FROM {table}"))


def until(client: Raw, kind: str) -> str:
    """The kinds of the messages up to the first of *kind*, or to an error before it."""
    found = ""
    while not found.endswith(kind):
        try:
            message = client.message()
        except TimeoutError:
            raise AssertionError(found) from None
        assert message is not None, found
        found += chr(message.kind)
    return found
