"""Agents at work while something around the proxy goes wrong, and what has to be true of it afterwards."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from end_to_end.wired import Agent, Wired

Connection = psycopg.Connection[Any]
#: What PostgreSQL says when it ends a session or is not there, and what we say when the journal is not; None: it
#: only closed the connection.
OF_THE_KIND = {None, "57P01", "57P02", "57P03", "58030", "08006", "08001", "08000"}
#: Numbers that one agent may use.
SPAN = 1_000_000


class Worker(threading.Thread):
    """Does one thing again and again, and comes back whenever it is thrown out."""

    def __init__(self, agent: Agent, first: int) -> None:
        super().__init__()
        self._agent = agent
        self.next = first
        self.rounds = 0
        self.acknowledged: list[int] = []
        #: Numbers of which either all or none may be there.
        self.together: list[list[int]] = []
        self.states: list[str | None] = []
        self.states_before = 0
        self.done = threading.Event()
        self.wrong: list[Exception] = []

    def run(self) -> None:
        while not self.done.is_set():
            try:
                with self._agent.connect(connect_timeout=20) as conn:
                    while not self.done.is_set():
                        self.work(conn)
                        self.rounds += 1
            except psycopg.OperationalError as fault:
                self.states.append(fault.sqlstate)
                time.sleep(0.05)
            except Exception as fault:
                self.wrong.append(fault)
                return

    def work(self, conn: Connection) -> None:
        raise NotImplementedError

    def numbers(self, count: int) -> list[int]:
        self.next += count
        self.together.append(list(range(self.next - count, self.next)))
        return self.together[-1]


class Writer(Worker):
    """Numbers of its own, one by one."""

    def work(self, conn: Connection) -> None:
        (number,) = self.numbers(1)
        conn.execute("INSERT INTO plain (id) VALUES (%s)", [number])
        self.acknowledged.append(number)


class KeyedWriter(Worker):
    """The same write with its key until it is answered: a second one would break the primary key."""

    def work(self, conn: Connection) -> None:
        number = self.next
        conn.execute(
            f"INSERT INTO plain (id) VALUES ({number}) /*idempotency_key='number-{number}'*/".encode()
        )
        self.acknowledged += self.numbers(1)


class Transactions(Worker):
    def work(self, conn: Connection) -> None:
        numbers = self.numbers(2)
        with conn.transaction():
            for number in numbers:
                conn.execute("INSERT INTO plain (id) VALUES (%s)", [number])
                conn.execute("SELECT count(*) FROM staff")
        self.acknowledged += numbers


class CopiesIn(Worker):
    def work(self, conn: Connection) -> None:
        numbers = self.numbers(50)
        with conn.cursor().copy("COPY plain (id) FROM STDIN") as copy:
            for number in numbers:
                copy.write_row([number])
        self.acknowledged += numbers


class CopiesOut(Worker):
    def work(self, conn: Connection) -> None:
        with conn.cursor().copy(
            "COPY (SELECT repeat('x', 100) FROM generate_series(1, 20000)) TO STDOUT"
        ) as copy:
            assert sum(len(part) for part in copy) == 20_000 * 101


class Reader(Worker):
    def work(self, conn: Connection) -> None:
        assert conn.execute("SELECT count(*) FROM staff").fetchone() == (8,)


@contextmanager
def loaded(world: Wired, kinds: Sequence[type[Worker]] = (Writer,) * 4) -> Iterator[list[Worker]]:
    """Agents at work; behind the block all of them have to be again, and nothing may be lost or half there."""
    first = int(str(value(world, "SELECT coalesce(max(id), 0) FROM plain"))) + SPAN
    workers = [kind(world.agent(), first + n * SPAN) for n, kind in enumerate(kinds)]
    for worker in workers:
        worker.start()
    try:
        waited(lambda: all(w.rounds or w.wrong for w in workers))
        yield workers
        before = [w.rounds for w in workers]
        waited(lambda: all(w.rounds > n + 3 or w.wrong for w, n in zip(workers, before, strict=True)))
    finally:
        for worker in workers:
            worker.done.set()
        for worker in workers:
            worker.join(60)
    assert [w.wrong for w in workers] == [[] for _ in workers]
    with psycopg.connect(world.database.dsn) as conn:
        there = {row[0] for row in conn.execute("SELECT id FROM plain")}
    assert {n for w in workers for n in w.acknowledged} <= there
    assert [
        group
        for w in workers
        for group in w.together
        if len(there.intersection(group)) not in (0, len(group))
    ] == []
    assert {state for w in workers for state in w.states} <= OF_THE_KIND


def waited(holds: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it did not come back"
        time.sleep(0.05)


def value(world: Wired, text: str) -> object:
    with psycopg.connect(world.database.dsn) as conn:
        row = conn.execute(text.encode()).fetchone()
    return row[0] if row else None
