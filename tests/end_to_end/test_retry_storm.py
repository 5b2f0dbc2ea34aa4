"""
Impatient clients: keyed writes that are sent again, many of them while the first is still under way.

`SQLGUARD_STORM` says how many writes (default 500); 15 to 30 % of them are sent again one to three times, half of
these at the same time as the first.
"""

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from end_to_end.wired import Agent, Wired

from sqlguard.postgres import journal

WRITES = int(os.environ.get("SQLGUARD_STORM", "500"))
SESSIONS = 8
Write = tuple[int, int, bool]


def plan(seed: int) -> list[Write]:
    """Number, how often it is sent, and whether all at once."""
    rng = random.Random(seed)
    share = rng.uniform(0.15, 0.30)
    return [
        (n, 1 + (rng.randint(1, 3) if rng.random() < share else 0), rng.random() < 0.5) for n in range(WRITES)
    ]


class Client:
    """Sends one write, in one of the three ways; a session per thread."""

    def __init__(self, agent: Agent, customers: list[int]) -> None:
        self._agent = agent
        self.customers = customers
        self._local = threading.local()
        self._all: list[psycopg.Connection[Any]] = []

    def send(self, number: int) -> tuple[str | None, Any]:
        conn = getattr(self._local, "conn", None)
        if conn is None:
            conn = self._local.conn = self._agent.connect()
            self._all.append(conn)
        note = f"/*idempotency_key='storm:{number}'*/"
        match number % 3:
            case 0:
                text, values = (
                    f"INSERT INTO plain (id, t) VALUES ({number + 1000000}, 'x') RETURNING id {note}",
                    None,
                )
            case 1:
                text, values = (
                    f"UPDATE customers SET city = coalesce(city, '') || '.' WHERE id = %s RETURNING city {note}",
                    [self.customers[number % 20]],
                )
            case _:
                text, values = (
                    f"UPDATE plain SET n = n + 1 WHERE id = %s RETURNING n {note}",
                    [1 + number % 5],
                )
        cursor = conn.execute(text.encode(), values)
        return cursor.statusmessage, cursor.fetchall()

    def close(self) -> None:
        for conn in self._all:
            conn.close()


@pytest.mark.slow
def test_every_write_has_its_effect_exactly_once(wired_world: Wired, agent: Agent) -> None:
    writes = plan(seed=20)
    wired_world.owner.execute("INSERT INTO plain (id, n) SELECT g, 0 FROM generate_series(1, 5) g")
    found = wired_world.owner.execute("SELECT id FROM customers WHERE deleted_at IS NULL ORDER BY 1 LIMIT 20")
    customers = [row[0] for row in found]
    dots = "SELECT sum(length(city) - length(replace(city, '.', ''))) FROM customers"
    before = wired_world.value(dots)
    client = Client(agent, customers)
    answers: dict[int, list[Any]] = {n: [] for n, _, _ in writes}

    def carry_out(write: Write) -> None:
        number, times, at_once = write
        if not at_once:
            for _ in range(times):
                answers[number].append(client.send(number))

    with ThreadPoolExecutor(SESSIONS) as pool:
        # Those that are sent at once go in as separate jobs, next to one another.
        jobs = []
        for write in writes:
            number, times, at_once = write
            if at_once and times > 1:
                jobs += [
                    pool.submit(lambda n=number: answers[n].append(client.send(n))) for _ in range(times)
                ]
            else:
                jobs.append(pool.submit(carry_out, (number, times, False)))
        for job in jobs:
            job.result()
    client.close()

    again = [w for w in writes if w[1] > 1]
    assert all(len(answers[n]) == times for n, times, _ in writes)
    assert all(len({repr(a) for a in given}) == 1 for given in answers.values())
    kinds = [sum(1 for n, _, _ in writes if n % 3 == kind) for kind in range(3)]
    assert wired_world.value("SELECT count(*) FROM plain WHERE id >= 1000000") == kinds[0]
    assert wired_world.value(dots) - before == kinds[1]
    assert wired_world.value("SELECT sum(n) FROM plain WHERE id <= 5") == kinds[2]
    sets = wired_world.owner.execute(
        "SELECT count(*), sum(rows) FROM sqlguard.change_set WHERE task_id = %s", [agent.task.task.id]
    ).fetchone()
    assert sets == (WRITES, WRITES)
    assert journal.verify(wired_world.owner, agent.task.task.id).ok
    sent = sum(times for _, times, _ in writes)
    print(  # the figures of docs/journal.md
        f"retry storm: {WRITES} writes, {len(again)} ({len(again) / WRITES:.0%}) sent again,"
        f" {sent} sent in all, {sum(1 for _, t, o in again if o)} at the same time: {WRITES} effects"
    )
