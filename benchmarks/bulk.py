"""Writes of 50,000 of 200,000 rows by an agent, capture included, compared with the same by nobody in particular."""

from collections.abc import Iterator
from typing import Any

import psycopg

from benchmarks.measure import Goal, Label, Result, Slice, compare, timed
from benchmarks.options import Options
from benchmarks.world import POLICY, World, twins
from sqlguard.embedded import EmbeddedServer
from sqlguard.gate import Gate
from sqlguard.policy import parse_policy
from sqlguard.policy.context import Context
from sqlguard.statement.model import Session

ROWS = 200_000
#: Every fourth row.
DELETE = "DELETE FROM {table} WHERE id % 4 = 1"
UPDATE = "UPDATE {table} SET note = 'changed', price = price + 1 WHERE id % 4 = 1"
POINT = "UPDATE {table} SET note = 'changed', price = price + 1 WHERE id = %s"


def deletes(server: EmbeddedServer, options: Options) -> Iterator[Result]:
    for mode, goal in (("soft", Goal(6)), ("journal", Goal(8))):
        with twins(server, ROWS, mode) as world:
            text = _rewritten(world, DELETE.format(table="guarded.t"), mode)
            yield compare(
                Label("delete", f"{mode}, 50,000 rows", "bare DELETE", goal),
                _rolled_back(world, world.agent(), text, action=True),
                _rolled_back(world, world.connect(), DELETE.format(table="bare.t")),
                options.rounds(5),
            )
            if mode == "soft":
                # What the guard adds to the UPDATE that a soft delete is, in any product.
                by_hand = text.replace("guarded.", "bare.").replace("(SELECT sqlguard.agent())", "'bench'")
                yield compare(
                    Label("delete", f"{mode}, 50,000 rows", "the same UPDATE, unguarded"),
                    _rolled_back(world, world.agent(), text, action=True),
                    _rolled_back(world, world.connect(), by_hand),
                    options.rounds(5),
                )


def captures(server: EmbeddedServer, options: Options) -> Iterator[Result]:
    with twins(server, ROWS, "soft") as world:
        agent, owner = world.agent(), world.connect()
        ours, bare = UPDATE.format(table="guarded.t"), UPDATE.format(table="bare.t")
        base = _rolled_back(world, world.connect(), bare)
        yield compare(
            Label("capture", "bulk UPDATE by an agent", "bare UPDATE", Goal(2)),
            _rolled_back(world, agent, ours, action=True),
            base,
            options.rounds(5),
        )
        yield compare(
            Label("capture", "bulk UPDATE by the owner", "bare UPDATE", Goal(1.05)),
            _rolled_back(world, owner, ours),
            base,
            options.rounds(9),
        )
        world.owner.execute("VACUUM ANALYZE guarded.t, bare.t")
        point = _points(world.connect(prepare=True), POINT.format(table="bare.t"))
        yield compare(
            Label("capture", "one-row UPDATE by an agent", "bare UPDATE", Goal(1.6)),
            _points(world.agent(prepare=True), POINT.format(table="guarded.t")),
            point,
            options.rounds(15),
        )
        yield compare(
            Label("capture", "one-row UPDATE by the owner", "bare UPDATE", Goal(1.05)),
            _points(world.connect(prepare=True), POINT.format(table="guarded.t")),
            point,
            options.rounds(25),
        )


def _rewritten(world: World, text: str, mode: str) -> str:
    """Return what the gate makes of *text*."""
    policy = parse_policy(POLICY.replace("DELETE_MODE", mode), "bench.toml")
    (decision,) = Gate(Context(world.catalog(), policy, None)).decide(text, Session())
    assert decision.allowed, decision.verdict
    assert decision.rewritten == (mode == "soft")
    return decision.text


def _rolled_back(world: World, conn: psycopg.Connection[Any], text: str, *, action: bool = False) -> Slice:
    """Return a slice that runs *text*, deferred triggers included, and takes it back."""

    def measured() -> float:
        world.owner.execute("VACUUM guarded.t, bare.t")
        number = world.action(text) if action else 0
        conn.execute("BEGIN")
        if action:
            conn.execute("SELECT set_config('sqlguard.action', %s, true)", [str(number)])

        def run() -> None:
            cursor = conn.execute(text)
            assert cursor.rowcount == ROWS // 4, cursor.rowcount
            conn.execute("SET CONSTRAINTS ALL IMMEDIATE")

        seconds = timed(run)
        conn.execute("ROLLBACK")
        return seconds

    return measured


def _points(conn: psycopg.Connection[Any], text: str, times: int = 150) -> Slice:
    """Return a slice of one-row statements, each a transaction of its own that does not wait for the disk."""

    def measured() -> float:
        def run() -> None:
            for number in range(times):
                conn.execute(text, [1 + number * 611 % ROWS])

        return timed(run) / times

    return measured
