"""Several workers, several proxies: bounds on clients hold over all workers together, cancel requests come anywhere."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
from end_to_end.balancer import balancer
from end_to_end.inprocess import proxy
from end_to_end.serving import Served, served
from end_to_end.wired import Agent, Wired, wired_shop
from servers import fresh_database

from sqlguard.app import check
from sqlguard.embedded import EmbeddedServer
from sqlguard.errors import NotConfigured
from sqlguard.settings import Settings

#: Enough for both workers to have some of them, but for a chance of 2 to the power of -15.
MOST, MORE = 16, 16


@pytest.fixture(scope="module")
def world(server: EmbeddedServer) -> Iterator[Wired]:
    with fresh_database(server) as database, wired_shop(database) as made:
        yield made


def workers_of(running: Served) -> list[int]:
    path = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children")
    if not path.exists():
        pytest.skip("workers are found in /proc")
    return [int(pid) for pid in path.read_text().split()]


def crowd(stack: ExitStack, agents: Sequence[Agent], most: int, said: str) -> list[psycopg.Connection[Any]]:
    """Connect as often as it goes; no more than *most* may get in, and the others are told why."""
    inside: list[psycopg.Connection[Any]] = []
    for attempt in range(most + MORE):
        try:
            inside.append(stack.enter_context(agents[attempt % len(agents)].connect()))
        except psycopg.OperationalError as fault:
            assert said in str(fault)
    return inside


@pytest.mark.parametrize(
    ("setting", "said"),
    [("max_clients_per_address", "as many clients from 127.0.0.1"), ("max_clients", "as many clients as it")],
)
def test_a_bound_on_clients_is_for_all_workers(world: Wired, tmp_path: Path, setting: str, said: str) -> None:
    with (
        served(world, tmp_path, "--workers", "2", **{setting: MOST}) as (running, agent),
        ExitStack() as stack,
    ):
        # A task's login has a bound of its own.
        agents = [agent, *(world.agent(port=running.port) for _ in range(2))]
        inside = crowd(stack, agents, MOST, said)
        assert len(inside) == MOST
        # Those of a worker that has died count no more once there is another in its place.
        old = workers_of(running)
        os.kill(old[0], signal.SIGKILL)
        until = time.monotonic() + 20
        while old[0] in workers_of(running) or len(workers_of(running)) < 2:
            assert time.monotonic() < until
            time.sleep(0.05)
        left = [conn for conn in inside if is_there(conn)]
        assert 0 < len(left) < MOST
        more: list[psycopg.Connection[Any]] = []
        while len(left) + len(more) < MOST:
            assert time.monotonic() < until
            more += crowd(stack, agents, MOST - len(left) - len(more), said)
        assert len(left) + len(more) == MOST
        assert crowd(stack, agents, 0, said) == []


def is_there(conn: "psycopg.Connection[Any]") -> bool:
    try:
        conn.execute("SELECT 1")
    except psycopg.OperationalError:
        return False
    return True


def test_connections_to_postgresql_are_divided_among_workers(world: Wired, tmp_path: Path) -> None:
    with (
        served(world, tmp_path, "--workers", "2", max_backends=4, idle_release=0) as (_, agent),
        ExitStack() as stack,
    ):
        clients = [stack.enter_context(agent.connect()) for _ in range(20)]
        for _ in range(2):
            for conn in clients:
                assert conn.execute("SELECT 1").fetchone() == (1,)
        there = f"SELECT count(*) FROM pg_stat_activity WHERE usename = '{agent.task.role}'"
        assert world.database.execute(there)[0][0] <= 4


def test_too_few_for_all_workers_is_told_at_the_start(world: Wired) -> None:
    with pytest.raises(NotConfigured, match="too few for 3 workers"):
        check(Settings(dsn=world.database.owner_dsn, workers=3, max_backends=2))


def test_a_cancel_that_comes_to_another_proxy(world: Wired) -> None:
    """A balancer in front of several: the keys are PostgreSQL's own, so any of them can pass the request on."""
    with (
        proxy(world.database.owner_dsn) as other,
        balancer((world.proxy.port, other.port)) as port,
        world.agent(port=port).connect() as conn,
    ):
        timer = threading.Timer(0.5, conn.cancel_safe)
        timer.start()
        with pytest.raises(psycopg.errors.QueryCanceled):
            conn.execute("SELECT count(*) FROM generate_series(1, 90000) a, generate_series(1, 90000) b")
        timer.join()
        assert conn.execute("SELECT 1").fetchone() == (1,)
