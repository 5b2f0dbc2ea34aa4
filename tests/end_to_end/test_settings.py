"""
What the proxy believes of a session's settings is what PostgreSQL says they are, whatever was rolled back.

The reason that the journal gets is the proxy's own belief; `current_setting` is the server's. Random sequences of
SET, SET LOCAL, RESET, savepoints and transactions, by every protocol, must never take the two apart.
"""

import random
from typing import Any

import psycopg
import pytest
from end_to_end.wired import Agent, Wired
from psycopg import pq

IDLE, IN_BLOCK, FAILED = pq.TransactionStatus.IDLE, pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR


def step(chance: random.Random, number: int, status: pq.TransactionStatus) -> str:
    value = f"r{number}"
    anywhere = [
        f"SET sqlguard.reason = '{value}'",
        f"SELECT set_config('sqlguard.reason', '{value}', false)",
        "RESET sqlguard.reason",
        "SET sqlguard.reason TO DEFAULT",
        "SELECT 1",
        f"SET sqlguard.reason = '{value}'; SELECT 1",
        f"SET sqlguard.reason = '{value}'; SELECT 1/0",
    ]
    inside = [
        f"SET LOCAL sqlguard.reason = '{value}'",
        f"SELECT set_config('sqlguard.reason', '{value}', true)",
        "SAVEPOINT a",
        "SAVEPOINT b",
        "ROLLBACK TO a",
        "ROLLBACK TO b",
        "RELEASE a",
        "RELEASE b",
        "COMMIT",
        "ROLLBACK",
        "SELECT 1/0",
    ]
    outside = ["BEGIN", f"BEGIN; SET LOCAL sqlguard.reason = '{value}'", "DISCARD ALL", "RESET ALL"]
    if status == FAILED:
        return chance.choice(["ROLLBACK", "COMMIT", "ROLLBACK TO a", "ROLLBACK TO b", "SELECT 1"])
    return chance.choice(anywhere + (inside * 2 if status == IN_BLOCK else outside * 2))


def execute(conn: psycopg.Connection[Any], chance: random.Random, text: str) -> None:
    try:
        if ";" in text or chance.random() < 0.5:
            conn.execute(text.encode())
        else:
            # The same by the extended protocol.
            conn.execute(text.encode(), binary=True)
    except psycopg.Error as fault:
        assert (fault.sqlstate or "")[:2] != "SG", text


@pytest.mark.parametrize("seed", range(12))
def test_the_reason_is_the_servers(wired_world: Wired, agent: Agent, seed: int) -> None:
    chance = random.Random(seed)
    expected: list[str | None] = []
    with agent.connect(prepare_threshold=None) as conn:  # DISCARD ALL would take them away
        for number in range(60):
            execute(conn, chance, step(chance, number, conn.info.transaction_status))
            if conn.info.transaction_status == FAILED or chance.random() < 0.6:
                continue
            row = conn.execute("SELECT current_setting('sqlguard.reason', true)").fetchone()
            assert row is not None
            expected.append(row[0] or None)
            conn.execute("UPDATE orders SET note = 'x' WHERE id = 130")
        conn.execute("ROLLBACK")
    assert [a["reason"] for a in wired_world.actions(agent)] == expected


def test_a_pipeline_that_fails_takes_its_settings_back(wired_world: Wired, agent: Agent) -> None:
    with agent.connect() as conn:
        with pytest.raises(psycopg.errors.DivisionByZero), conn.pipeline():
            conn.execute("SET sqlguard.reason = 'lost'")
            conn.execute("SELECT 1/0")
        with conn.pipeline():
            conn.execute("UPDATE orders SET note = 'x' WHERE id = 131")
            conn.execute("SET sqlguard.reason = 'kept'")
        conn.execute("UPDATE orders SET note = 'x' WHERE id = 131")
    assert [a["reason"] for a in wired_world.actions(agent)] == [None, "kept"]
