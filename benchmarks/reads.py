"""Reads of a guarded table, half of whose rows are deleted, compared with a filter written by hand."""

from collections.abc import Iterator
from typing import Any

import psycopg

from benchmarks.measure import Goal, Label, Result, Slice, compare, timed
from benchmarks.options import Options
from benchmarks.world import twins
from sqlguard.embedded import EmbeddedServer

GOAL = Goal(1.1)
#: Case, times per slice, the agent's text, the filter that a person would have added.
CASES = (
    ("point look-up", 400, "SELECT note, price FROM t WHERE id = %s", "{} AND t.deleted_at IS NULL"),
    (
        "unique look-up",
        400,
        "SELECT note, price FROM t WHERE code = 'code ' || %s",
        "{} AND t.deleted_at IS NULL",
    ),
    ("range", 5, "SELECT id, price FROM t WHERE id BETWEEN %s AND 20000", "{} AND t.deleted_at IS NULL"),
    (
        "join",
        20,
        "SELECT sum(t.price) FROM t JOIN u ON u.id = t.customer WHERE u.region = %s",
        "{} AND t.deleted_at IS NULL AND u.deleted_at IS NULL",
    ),
    (
        # By the unique index that guarding made one of live rows.
        "join by unique",
        40,
        "SELECT sum(t.price) FROM u JOIN t ON t.code = u.code WHERE u.region = %s",
        "{} AND t.deleted_at IS NULL AND u.deleted_at IS NULL",
    ),
    (
        "in order of unique",
        100,
        "SELECT code FROM t WHERE code > 'code ' || %s ORDER BY code LIMIT 500",
        "SELECT code FROM t WHERE code > 'code ' || %s AND t.deleted_at IS NULL ORDER BY code LIMIT 500",
    ),
    (
        "aggregate",
        3,
        "SELECT status, count(*), sum(price) FROM t WHERE price > %s GROUP BY status",
        "SELECT status, count(*), sum(price) FROM t WHERE price > %s AND t.deleted_at IS NULL GROUP BY status",
    ),
)
OTHER = """
CREATE TABLE {schema}.u (id integer PRIMARY KEY, region integer NOT NULL, code text NOT NULL);
INSERT INTO {schema}.u SELECT n, n % 50, 'code ' || n FROM generate_series(0, 4999) n;
"""


def run(server: EmbeddedServer, options: Options) -> Iterator[Result]:
    with twins(server, 200_000, "soft") as world:
        for schema in ("guarded", "bare"):
            world.owner.execute(OTHER.format(schema=schema))
        world.guard(["guarded.u"], "soft")
        world.owner.execute("ALTER TABLE bare.u ADD deleted_at timestamptz, ADD deleted_by_agent text")
        for schema in ("guarded", "bare"):
            world.owner.execute(
                f"UPDATE {schema}.t SET deleted_at = '2025-01-01', deleted_by_agent = 'x' WHERE id % 2 = 0"
            )
            world.owner.execute(
                f"UPDATE {schema}.u SET deleted_at = '2025-01-01' WHERE id % 2 = 0 AND id > 99"
            )
            world.owner.execute(f"VACUUM FULL ANALYZE {schema}.t")
            world.owner.execute(f"VACUUM FULL ANALYZE {schema}.u")
        agent, owner = world.agent(prepare=True), world.connect(prepare=True)
        owner.execute("SET search_path = bare")
        for case, times, text, by_hand in CASES:
            ours, base = text, by_hand.format(text)
            assert sorted(agent.execute(ours, [7]).fetchall()) == sorted(owner.execute(base, [7]).fetchall())
            yield compare(
                Label("read", case, "filter by hand", GOAL),
                _slice(agent, ours, times),
                _slice(owner, base, times),
                options.rounds(11),
            )


def _slice(conn: psycopg.Connection[Any], text: str, times: int) -> Slice:
    def run() -> None:
        for number in range(times):
            conn.execute(text, [1 + number * 7 % 49]).fetchall()

    return lambda: timed(run) / times
