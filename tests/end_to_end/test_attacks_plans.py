"""
What an agent might try in order to have something else committed than what a person has seen, through the proxy.

Each test is one attack that once worked, or that would if its wall were taken away; confirmed in the database as its
owner sees it.
"""

from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any

import psycopg
import pytest
from end_to_end.inprocess import proxy
from plan_world import World, plan_shop

from sqlguard.dsn import url
from sqlguard.embedded import EmbeddedServer

#: A setting, what it is when a person looks and later, and a value that depends on it.
DATE = "'01/02/2024'::date::text"
MEANINGS = [
    ("DateStyle", "ISO, MDY", "ISO, DMY", DATE),
    ("DateStyle", "ISO, MDY", "ISO, DMY", f"CASE WHEN random() < 0 THEN '' ELSE {DATE} END"),
    ("TimeZone", "UTC", "Asia/Tokyo", "('2024-05-05 12:00'::timestamptz AT TIME ZONE 'UTC')::text"),
    ("IntervalStyle", "postgres", "sql_standard", "'-1 2:03:04'::interval::text"),
    ("bytea_output", "hex", "escape", r"'\x4142'::bytea::text"),
    ("extra_float_digits", "1", "-15", "(0.1::float8 + 0.2::float8)::text"),
    ("application_name", "seen", "unseen", "current_setting('application_name')"),
]
CITY = "SELECT city FROM customers WHERE id = 1"


@pytest.fixture
def world(server: EmbeddedServer) -> Iterator[World]:
    with plan_shop(server) as (database, owner):
        yield World(database, owner)


@pytest.fixture
def agent(world: World, request: pytest.FixtureRequest) -> Iterator[psycopg.Connection[Any]]:
    task = world.task(plan_only=getattr(request, "param", False))
    with proxy(world.database.owner_dsn) as running:
        name = world.database.name
        dsn = url(host="127.0.0.1", port=running.port, user=task.role, password=task.password, dbname=name)
        with world.database.connect(dsn) as conn:
            yield conn


def planned(agent: psycopg.Connection[Any], text: str) -> int:
    with pytest.raises(psycopg.DatabaseError) as caught:
        agent.execute(text.encode())
    assert caught.value.sqlstate == "SG001", caught.value
    return int((caught.value.diag.message_detail or "").split(":")[0].removeprefix("plan "))


@pytest.mark.parametrize(("setting", "seen", "later", "value"), MEANINGS)
def test_the_same_words_under_other_settings(
    *, world: World, agent: psycopg.Connection[Any], setting: str, seen: str, later: str, value: str
) -> None:
    """A value's text depends on settings that any session may set: approved is what was shown, not the words."""
    change = f"UPDATE customers SET city = {value} WHERE id = 1"
    agent.execute(f"SET {setting} = '{seen}'".encode())
    world.approve(planned(agent, change))
    agent.execute(f"SET {setting} = '{later}'".encode())
    with pytest.raises(psycopg.DatabaseError) as caught:
        agent.execute(change.encode())
    assert caught.value.sqlstate == "SG003"
    assert setting == "application_name" or f"{setting} was `{seen}`, is `{later}`" in str(caught.value)
    assert world.value(CITY) == "Rome"
    agent.execute(f"SET {setting} = '{seen}'".encode())
    agent.execute(change.encode())
    assert world.value(CITY) != "Rome"


@pytest.mark.parametrize("agent", [True], indirect=True)
@pytest.mark.parametrize("key", ["", "/*idempotency_key='once'*/"])
@pytest.mark.parametrize("prepare", [None, True])
def test_settings_that_change_within_a_block(
    *, world: World, agent: psycopg.Connection[Any], key: str, prepare: bool | None
) -> None:
    """At its end they are as they were when the person looked; each statement counts as it ran."""

    def block(style: str) -> None:
        agent.execute("BEGIN")
        agent.execute(f"SET LOCAL DateStyle = '{style}'".encode())
        agent.execute(f"UPDATE customers SET city = {DATE} WHERE id = 1 {key}".encode(), prepare=prepare)
        agent.execute("SET LOCAL DateStyle = 'ISO, YMD'")
        agent.execute("COMMIT")

    for style, sqlstate in (("ISO, MDY", "SG001"), ("ISO, DMY", "SG003")):
        with pytest.raises(psycopg.DatabaseError) as caught:
            block(style)
        assert caught.value.sqlstate == sqlstate
        if sqlstate == "SG001":
            world.approve(int((caught.value.diag.message_detail or "").split(":")[0].removeprefix("plan ")))
    assert world.value(CITY) == "Rome"
    # What was prepared under other settings may go on meaning what it meant then: it must not be committed.
    with suppress(psycopg.DatabaseError) if prepare else nullcontext():
        block("ISO, MDY")
    assert world.value(CITY) in {"2024-01-02", "Rome" if prepare else "2024-01-02"}
