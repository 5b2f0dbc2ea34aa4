"""Writes of 50,000 of 200,000 rows by an agent, capture included, compared with the same by nobody in particular."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

from benchmarks.measure import Goal, Label, Result, Slice, cycles, processor_time, result, timed
from benchmarks.options import Options
from benchmarks.world import POLICY, World, twins
from sqlguard.embedded import EmbeddedServer
from sqlguard.gate import Gate
from sqlguard.policy import parse_policy
from sqlguard.policy.context import Context
from sqlguard.statement.model import Session

ROWS = 200_000
#: Floors. `audited.t` has the least trigger that keeps old rows, with all that it keeps in one column and for everyone;
#: `aside.t` one with the transition tables that a capture needs, which is for nobody.
FLOORS = """
CREATE SCHEMA audited; CREATE SCHEMA aside;
CREATE TABLE audited.t (LIKE bare.t INCLUDING ALL); INSERT INTO audited.t SELECT * FROM bare.t;
CREATE TABLE aside.t (LIKE bare.t INCLUDING ALL); INSERT INTO aside.t SELECT * FROM bare.t;
CREATE TABLE audited.log (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, image text);
CREATE FUNCTION audited.keep() RETURNS trigger LANGUAGE plpgsql
    AS 'BEGIN INSERT INTO audited.log (image) SELECT o::text FROM old_rows o; RETURN NULL; END';
CREATE TRIGGER keep_updated AFTER UPDATE ON audited.t REFERENCING OLD TABLE AS old_rows
    FOR EACH STATEMENT EXECUTE FUNCTION audited.keep();
CREATE TRIGGER keep_deleted AFTER DELETE ON audited.t REFERENCING OLD TABLE AS old_rows
    FOR EACH STATEMENT EXECUTE FUNCTION audited.keep();
CREATE TRIGGER keep_nothing AFTER UPDATE ON aside.t REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
    FOR EACH STATEMENT WHEN (session_user = 'nobody') EXECUTE FUNCTION audited.keep();
"""
TABLES = ("guarded.t", "bare.t", "audited.t", "aside.t")
AUDIT = "the least audit trigger"
#: Every fourth row.
DELETE = "DELETE FROM {table} WHERE id % 4 = 1"
UPDATE = "UPDATE {table} SET note = 'changed', price = price + 1 WHERE id % 4 = 1"
INSERT = (
    "INSERT INTO {table} (id, customer, status, code, price)"
    " SELECT 1000000 + n, n % 5000, 'new', 'c ' || n, n FROM generate_series(1, 50000) n"
)
POINT = "UPDATE {table} SET note = 'changed', price = price + 1 WHERE id = %s"


def deletes(server: EmbeddedServer, options: Options) -> Iterator[Result]:
    for mode, goal in (("soft", Goal(6)), ("journal", Goal(8))):
        with _floors(server, mode) as world:
            bench = _Bench(world, options)
            text = _rewritten(world, DELETE.format(table="guarded.t"), mode)
            sides = {
                "ours": bench.rolled_back(world.agent(), text, action=True),
                "audit": bench.rolled_back(world.connect(), DELETE.format(table="audited.t")),
                "base": bench.rolled_back(world.connect(), DELETE.format(table="bare.t")),
            }
            if mode == "soft":
                # What a soft delete is in any product.
                by_hand = text.replace("guarded.", "bare.").replace("(SELECT sqlguard.agent())", "'bench'")
                sides["update"] = bench.rolled_back(world.connect(), by_hand)
            found = cycles(sides, options.rounds(5))
            case = f"{mode}, 50,000 rows"
            yield result(Label("delete", case, "bare DELETE", goal), found, "ours", "base")
            if mode == "soft":
                yield result(
                    Label("delete", "floor: its UPDATE, unguarded", "bare DELETE"), found, "update", "base"
                )
                yield result(Label("delete", case, "its UPDATE, unguarded"), found, "ours", "update")
            else:
                yield result(Label("delete", f"floor: {AUDIT}", "bare DELETE"), found, "audit", "base")


def captures(server: EmbeddedServer, options: Options) -> Iterator[Result]:
    with _floors(server, "soft") as world:
        bench = _Bench(world, options)
        found = cycles(
            {
                "agent": bench.rolled_back(world.agent(), UPDATE.format(table="guarded.t"), action=True),
                "owner": bench.rolled_back(world.connect(), UPDATE.format(table="guarded.t")),
                "audit": bench.rolled_back(world.connect(), UPDATE.format(table="audited.t")),
                "aside": bench.rolled_back(world.connect(), UPDATE.format(table="aside.t")),
                "base": bench.rolled_back(world.connect(), UPDATE.format(table="bare.t")),
            },
            options.rounds(7),
        )
        yield from _compared("bulk UPDATE", "bare UPDATE", Goal(2), found)
        world.owner.execute(f"VACUUM ANALYZE {', '.join(TABLES)}")
        found = cycles(
            {
                "agent": bench.points(world.agent(prepare=True), POINT.format(table="guarded.t")),
                "owner": bench.points(world.connect(prepare=True), POINT.format(table="guarded.t")),
                "audit": bench.points(world.connect(prepare=True), POINT.format(table="audited.t")),
                "aside": bench.points(world.connect(prepare=True), POINT.format(table="aside.t")),
                "base": bench.points(world.connect(prepare=True), POINT.format(table="bare.t")),
            },
            options.rounds(40),
        )
        yield from _compared("one-row UPDATE", "bare UPDATE", Goal(1.6), found)
        yield from _committed(world, bench)
        found = cycles(
            {
                "agent": bench.rolled_back(world.agent(), INSERT.format(table="guarded.t"), action=True),
                "base": bench.rolled_back(world.connect(), INSERT.format(table="bare.t")),
            },
            options.rounds(5),
        )
        yield result(Label("capture", "bulk INSERT by an agent", "bare INSERT"), found, "agent", "base")


def _committed(world: World, bench: "_Bench") -> Iterator[Result]:
    """The same as a server does it by default: time on the wall, and each commit waits for the disk."""

    def side(conn: psycopg.Connection[Any], table: str) -> Slice:
        return bench.points(conn, POINT.format(table=table), times=20, wall=True)

    found = cycles(
        {
            "agent": side(world.agent(prepare=True, durable=True), "guarded.t"),
            "owner": side(world.connect(prepare=True, durable=True), "guarded.t"),
            "base": side(world.connect(prepare=True, durable=True), "bare.t"),
        },
        bench.options.rounds(40),
    )
    what, against = "one-row UPDATE, its commit's wait included,", "the same"
    yield result(Label("capture", f"{what} by an agent", against, Goal(1.6)), found, "agent", "base")
    yield result(Label("capture", f"{what} by the owner", against, Goal(1.05)), found, "owner", "base")


def _compared(what: str, against: str, goal: Goal, found: list[dict[str, float]]) -> Iterator[Result]:
    yield result(Label("capture", f"{what} by an agent", against, goal), found, "agent", "base")
    yield result(Label("capture", f"floor: {AUDIT}", against), found, "audit", "base")
    yield result(Label("capture", f"{what} by the owner", against, Goal(1.05)), found, "owner", "base")
    yield result(Label("capture", "floor: a trigger for nobody", against), found, "aside", "base")


@contextmanager
def _floors(server: EmbeddedServer, mode: str) -> Iterator[World]:
    with twins(server, ROWS, mode) as world:
        world.owner.execute(FLOORS)
        world.owner.execute(f"VACUUM ANALYZE {', '.join(TABLES)}")
        yield world


def _rewritten(world: World, text: str, mode: str) -> str:
    """Return what the gate makes of *text*."""
    policy = parse_policy(POLICY.replace("DELETE_MODE", mode), "bench.toml")
    (decision,) = Gate(Context(world.catalog(), policy, None)).decide(text, Session())
    assert decision.allowed, decision.verdict
    assert decision.rewritten == (mode == "soft")
    return decision.text


@dataclass(frozen=True, slots=True)
class _Bench:
    """Makes slices."""

    world: World
    options: Options

    def rolled_back(self, conn: psycopg.Connection[Any], text: str, *, action: bool = False) -> Slice:
        """Return a slice that runs *text*, deferred triggers included, and takes it back."""

        def measured() -> float:
            self.world.owner.execute(f"VACUUM {', '.join(TABLES)}")
            number = self.world.action(text) if action else 0
            conn.execute("BEGIN")
            if action:
                conn.execute("SELECT set_config('sqlguard.action', %s, true)", [str(number)])

            def run() -> None:
                cursor = conn.execute(text)
                assert cursor.rowcount == ROWS // 4, cursor.rowcount
                conn.execute("SET CONSTRAINTS ALL IMMEDIATE")

            seconds = self._cost(conn, run)
            conn.execute("ROLLBACK")
            return seconds

        return measured

    def points(
        self, conn: psycopg.Connection[Any], text: str, times: int = 100, *, wall: bool = False
    ) -> Slice:
        """Return a slice of one-row statements, each a transaction of its own."""

        def measured() -> float:
            def run() -> None:
                for number in range(times):
                    conn.execute(text, [1 + number * 611 % ROWS])

            return (timed(run) if wall else self._cost(conn, run)) / times

        return measured

    def _cost(self, conn: psycopg.Connection[Any], run: Callable[[], None]) -> float:
        if not self.options.processor:
            return timed(run)
        before = processor_time(conn.info.backend_pid)
        run()
        return processor_time(conn.info.backend_pid) - before
