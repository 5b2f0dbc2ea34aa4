"""What the Python door knows of names and types: the catalog as it is now, and the types that psycopg sends."""

from collections.abc import Iterator
from enum import Enum

import psycopg
import pytest
from psycopg.types.enum import EnumInfo, register_enum
from servers import Database
from task_world import World, shop

from sqlguard.connection import GuardedConnection, connect
from sqlguard.errors import Refused

Mood = Enum("Mood", "glad sad")


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    with shop(database) as made:
        made.apply()
        yield made


@pytest.fixture
def agent(world: World) -> Iterator[GuardedConnection]:
    opened = world.task()
    with connect(world.database.dsn_for(opened.role, opened.password)) as made:
        yield made


def test_what_is_made_a_moment_ago_is_known(world: World, agent: GuardedConnection) -> None:
    with pytest.raises(Refused, match='"fresh" does not exist'):
        agent.execute("SELECT * FROM fresh")
    world.op.execute("CREATE TABLE fresh (id integer PRIMARY KEY)")
    with pytest.raises((Refused, psycopg.errors.InsufficientPrivilege)) as caught:
        agent.execute("SELECT * FROM fresh")
    assert "does not exist" not in str(caught.value)


def test_an_operator_of_a_parameters_own_type_is_judged(world: World, agent: GuardedConnection) -> None:
    world.op.execute(
        "CREATE TYPE mood AS ENUM ('glad', 'sad');"
        "CREATE FUNCTION write_it_down(integer, mood) RETURNS boolean LANGUAGE plpgsql AS"
        " 'BEGIN RAISE NOTICE ''run''; RETURN true; END';"
        "CREATE OPERATOR = (LEFTARG = integer, RIGHTARG = mood, FUNCTION = write_it_down)"
    )
    info = EnumInfo.fetch(world.op, "mood")
    assert info is not None
    register_enum(info, agent._work, Mood)
    text = "SELECT id FROM customers WHERE id = %s"
    assert agent.execute(text, [42]).rows == ((42,),)
    with pytest.raises(Refused, match="write_it_down"):
        agent.execute(text, [Mood.sad])
