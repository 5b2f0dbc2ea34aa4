"""What an agent with its own login gets to read that its policy does not grant."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from servers import Database

from sqlguard.policy import parse_policy
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.migrate import migrate
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.postgres.tasks import open_task

SCHEMA = """
CREATE TABLE people (id integer PRIMARY KEY, name text, email text UNIQUE);
CREATE TABLE letters (id integer PRIMARY KEY, recipient text REFERENCES people (email) ON DELETE RESTRICT);
CREATE TABLE files (code text PRIMARY KEY, person integer REFERENCES people ON DELETE CASCADE);
CREATE TABLE seals (id integer PRIMARY KEY, code text REFERENCES files ON DELETE RESTRICT);
INSERT INTO people VALUES (1, 'Ada', 'ada@shop.example'), (2, 'Ben', 'ben@shop.example');
INSERT INTO letters VALUES (1, 'ada@shop.example');
INSERT INTO files VALUES ('swordfish', 2);
INSERT INTO seals VALUES (1, 'swordfish');
"""
POLICY = """
name = "clerk"
[defaults]
max_rows = 100
max_share = 1.0
[tables."public.people"]
select = ["id", "name"]
delete = "soft"
"""
DELETE = (
    "UPDATE people SET deleted_at = statement_timestamp(), deleted_by_agent = 'mallory' WHERE {} RETURNING id"
)


@pytest.fixture
def agent(database: Database) -> Iterator[psycopg.Connection[Any]]:
    migrate(database.owner_dsn)
    owner = database.connect(database.owner_dsn)
    owner.execute(SCHEMA)
    guard_tables(owner, ["people", "letters", "files", "seals"], "soft")
    apply_policy(owner, parse_policy(POLICY, "policy"))
    task = open_task(owner, agent="mallory", policy="clerk")
    with database.connect(database.dsn_for(task.role, task.password)) as conn:
        conn.execute("SET default_transaction_read_only = off")
        yield conn


@pytest.mark.parametrize(("which", "secret"), [("id = 1", "ada@"), ("id = 2", "swordfish")])
def test_a_refused_delete_shows_no_key_that_the_agent_may_not_read(
    agent: psycopg.Connection[Any], which: str, secret: str
) -> None:
    """Of the row itself, and of one that the delete has reached in a table that the policy does not name."""
    with pytest.raises(psycopg.errors.ForeignKeyViolation) as caught:
        agent.execute(DELETE.format(which).encode())
    said = caught.value.diag
    assert said.message_detail
    assert "is still referenced" in said.message_detail
    assert not any(secret in str(part) for part in (said.message_detail, said.context, said.message_hint))
