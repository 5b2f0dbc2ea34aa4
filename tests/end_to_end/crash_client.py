"""
A client of the crash matrix: sends keyed writes until told to stop, each again until it has its answer.

Run as a script, to be killed at any moment. What it was answered is in its log before it goes on, so the next one
with the same log takes up the write that has no answer yet. `crash_client.py DSN NAME LOG STOP`.
"""

import os
import sys
import time
from pathlib import Path

import psycopg

COUNTERS = 16


def main() -> None:
    dsn, name, log, stop = sys.argv[1:]
    done = Path(log).read_text(encoding="ascii").splitlines() if Path(log).exists() else []
    # A line that was cut off by the kill was not acknowledged to anybody.
    number = sum(1 for line in done if line.endswith("."))
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    if done and not done[-1].endswith("."):
        os.write(out, b"\n")
    conn: psycopg.Connection[tuple[object, ...]] | None = None
    while not Path(stop).exists():
        key = f"{name}:{number}"
        try:
            if conn is None or conn.closed:
                conn = psycopg.connect(dsn, autocommit=True, connect_timeout=5)
            answer = send(conn, key, number)
        except psycopg.Error as fault:
            if fault.sqlstate and fault.sqlstate[:2] in ("23", "22", "42", "SG"):
                os.write(out, f"wrong {key} {fault.sqlstate} {fault}\n".encode())
                return
            time.sleep(0.05)
            continue
        os.write(out, f"{key} {answer} .\n".encode("ascii"))
        number += 1


def send(conn: psycopg.Connection[tuple[object, ...]], key: str, number: int) -> object:
    note = f"/*idempotency_key='{key}'*/"
    if number % 4 == 1:
        done = conn.execute(f"INSERT INTO ledger (key) VALUES ('{key}') {note}".encode())
        assert done.statusmessage == "INSERT 0 1"
        row = conn.execute(f"SELECT id FROM ledger WHERE key = '{key}'".encode()).fetchone()
    elif number % 2:
        text = f"INSERT INTO ledger (key) VALUES ('{key}') RETURNING id {note}"
        row = conn.execute(text.encode()).fetchone()
    else:
        text = f"UPDATE counter SET n = n + 1, key = %s WHERE id = %s RETURNING n {note}"
        row = conn.execute(text.encode(), [key, 1 + hash_of(key) % COUNTERS]).fetchone()
    assert row is not None
    return row[0]


def hash_of(key: str) -> int:
    return sum(key.encode())


if __name__ == "__main__":
    main()
