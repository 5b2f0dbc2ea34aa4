"""Nobody waits for a guard: others read and write beside it. benchmarks/locks.py does the same with two million rows."""

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing

import psycopg
import pytest
from servers import Database

from sqlguard.postgres.guard_table import guard_tables, unguard_tables
from sqlguard.postgres.migrate import migrate

ROWS = 100_000
KEYS = "code text NOT NULL, CONSTRAINT big_code UNIQUE (code, id)"
PLAIN = (
    f"CREATE TABLE app.big (id int PRIMARY KEY, parent int REFERENCES app.parent ON DELETE CASCADE, {KEYS});"
)
PARTITIONED = (
    f"CREATE TABLE app.big (id int PRIMARY KEY, parent int REFERENCES app.parent ON DELETE CASCADE, {KEYS})"
    " PARTITION BY RANGE (id);"
    f"CREATE TABLE app.low PARTITION OF app.big FOR VALUES FROM (0) TO ({ROWS // 2});"
    f"CREATE TABLE app.high PARTITION OF app.big FOR VALUES FROM ({ROWS // 2}) TO ({ROWS * 2});"
)
#: A statement that has to wait for longer fails.
LONGEST = "900ms"
#: What an application does all the time.
WRITES = (
    "UPDATE app.big SET parent = parent WHERE id = 77",
    "INSERT INTO app.big VALUES (0, 1, 'new')",
    "DELETE FROM app.big WHERE id = 0",
    "UPDATE app.parent SET id = id WHERE id = 5",
)
READS = ("SELECT count(*) FROM app.big WHERE code = 'code 9'", "SELECT id FROM app.parent WHERE id = 5")


def beside(database: Database, work: Callable[[], object]) -> dict[str, int]:
    """Run *work* while others go on; return how often each of their statements got through."""
    stop = threading.Event()
    counts: dict[str, int] = {}
    faults: list[psycopg.Error] = []

    def others(statements: tuple[str, ...]) -> None:
        with closing(database.connect(prepare_threshold=None)) as conn:
            conn.execute(f"SET lock_timeout = '{LONGEST}'")
            while not stop.is_set() and not faults:
                for text in statements:
                    try:
                        conn.execute(text)
                    except psycopg.Error as fault:
                        faults.append(fault)
                        return
                    counts[text] = counts.get(text, 0) + 1

    threads = [threading.Thread(target=others, args=(s,)) for s in (WRITES, READS)]
    for thread in threads:
        thread.start()
    try:
        work()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert faults == []
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("table", [PLAIN, PARTITIONED], ids=["plain", "partitioned"])
def test_nobody_waits_for_a_guard(database: Database, table: str) -> None:
    migrate(database.dsn)
    op = database.connect()
    op.execute("CREATE SCHEMA app; CREATE TABLE app.parent (id int PRIMARY KEY);" + table)
    op.execute("INSERT INTO app.parent SELECT generate_series(1, 100)")
    op.execute(f"INSERT INTO app.big SELECT n, 1 + n % 100, 'code ' || n FROM generate_series(1, {ROWS}) n")
    tables = ["app.big", "app.parent"]
    counts: Counter[str] = Counter()
    for work in (
        lambda: guard_tables(op, tables, "soft"),
        lambda: guard_tables(op, tables, "journal"),
        lambda: guard_tables(op, tables, "soft"),
        lambda: unguard_tables(op, tables),
        lambda: guard_tables(op, tables, "journal"),
        lambda: unguard_tables(op, tables),
    ):
        counts.update(beside(database, work))
    assert min(counts[text] for text in (*WRITES, *READS)) > 0, counts
