"""
kill -9 of clients, of the proxy, of PostgreSQL's processes and of its postmaster, at any moment, under load.

`SQLGUARD_KILLS` says how many (default 12). The clients send each write again, with its key, until it is answered. At
the end: each answered write is there once, each write that is there has its intent and its images, and there is no
image of a write that is not there. Where the kills struck is printed: the steps of a write are microseconds to
milliseconds long, and a moment chosen at random falls into each as often as it is long.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from end_to_end.crash_client import COUNTERS
from psycopg.conninfo import make_conninfo
from servers import in_memory

from sqlguard.dsn import url
from sqlguard.embedded import EmbeddedServer
from sqlguard.embedded.binaries import require_bindir
from sqlguard.policy import parse_policy
from sqlguard.ports import free_port
from sqlguard.postgres import journal, reconcile
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.migrate import migrate
from sqlguard.postgres.policy_apply import apply_policy
from sqlguard.postgres.tasks import open_task
from sqlguard.postgres.undo import undo

KILLS = int(os.environ.get("SQLGUARD_KILLS", "12"))
CLIENTS = 4
SEED = int(os.environ.get("SQLGUARD_SEED", "1"))
#: A kill of PostgreSQL loses what was not written to files, so its commits are: the machine itself stays up.
SETTINGS = {
    "fsync": "off",
    "synchronous_commit": "on",
    "max_connections": "60",
    "wal_level": "minimal",
    "max_wal_senders": "0",
}
POLICY = """
name = "crash"
[defaults]
max_rows = 100000
max_share = 1.0
max_ttl = "6h"
[tables."public.*"]
select = true
insert = true
update = true
delete = "journal"
"""
# What is wrong, by name; every query must give no row. An image's key is the row's, and the n-th change of a counter
# has the image of the (n-1)-th.
WRONG = {
    "rows without intent and image": """
        SELECT l.id FROM ledger l WHERE NOT EXISTS (
            SELECT FROM sqlguard.row_change r JOIN sqlguard.change_set c ON c.id = r.change_set_id
            JOIN sqlguard.action a ON a.id = c.action_id AND a.idempotency_key = l.key
            WHERE c.table_name = 'ledger' AND r.key = ARRAY[l.id::text])""",
    "images without a row": """
        SELECT r.id FROM sqlguard.row_change r JOIN sqlguard.change_set c ON c.id = r.change_set_id
        WHERE c.table_name = 'ledger' AND NOT EXISTS (SELECT FROM ledger l WHERE ARRAY[l.id::text] = r.key)""",
    "writes that ran twice": "SELECT key FROM ledger GROUP BY key HAVING count(*) > 1",
    "counters whose images are not exactly their history": """
        SELECT k.id FROM counter k WHERE (
            SELECT array_agg((r.before::counter).n ORDER BY (r.before::counter).n)
            FROM sqlguard.row_change r JOIN sqlguard.change_set c ON c.id = r.change_set_id
            WHERE c.table_name = 'counter' AND r.key = ARRAY[k.id::text])
            IS DISTINCT FROM (SELECT array_agg(g) FROM generate_series(0, k.n - 1) g)""",
    "keys of counters that ran twice": """
        SELECT a.idempotency_key FROM sqlguard.change_set c JOIN sqlguard.action a ON a.id = c.action_id
        WHERE c.table_name = 'counter' GROUP BY 1 HAVING count(*) > 1""",
    "changes without an action": "SELECT id FROM sqlguard.change_set WHERE action_id IS NULL",
    "ends that say committed of what is not": """
        SELECT e.action_id FROM sqlguard.event e WHERE e.kind = 'committed' AND NOT e.detail ? 'repeats'
            AND NOT EXISTS (SELECT FROM sqlguard.change_set c WHERE c.action_id = e.action_id)""",
}


@dataclass
class Battlefield:
    server: EmbeddedServer
    owner_dsn: str
    agent_dsn: str
    task: str
    folder: Path
    port: int
    proxy: "subprocess.Popen[bytes] | None" = None
    clients: "dict[int, subprocess.Popen[bytes]]" = field(default_factory=dict)
    struck: Counter[str] = field(default_factory=Counter)

    @property
    def owner(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.owner_dsn, autocommit=True)

    def start_proxy(self) -> None:
        log = self.folder / f"proxy-{time.monotonic_ns()}.log"
        with log.open("wb") as output:
            self.proxy = subprocess.Popen(
                [sys.executable, "-m", "sqlguard", "serve", "--listen", f"127.0.0.1:{self.port}"],
                env={**os.environ, "SQLGUARD_DSN": self.owner_dsn},
                cwd=self.folder,
                stdout=output,
                stderr=output,
            )
        deadline = time.monotonic() + 180
        while b"listening" not in log.read_bytes():
            assert self.proxy.poll() is None, log.read_text(errors="replace")
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def start_client(self, number: int) -> None:
        script = Path(__file__).with_name("crash_client.py")
        words = [str(script), self.agent_dsn, f"c{number}", str(self.log(number)), str(self.stop)]
        self.clients[number] = subprocess.Popen([sys.executable, *words], cwd=self.folder)

    def log(self, number: int) -> Path:
        return self.folder / f"client-{number}.log"

    @property
    def stop(self) -> Path:
        return self.folder / "stop"

    # --- kills; each puts back up what it has killed

    def kill_client(self, rng: random.Random) -> None:
        number = rng.randrange(CLIENTS)
        self.clients[number].kill()
        self.clients[number].wait()
        self.start_client(number)

    def kill_proxy(self, _: random.Random) -> None:
        assert self.proxy is not None
        self.proxy.kill()
        self.proxy.wait()
        self.start_proxy()

    def kill_backend(self, rng: random.Random) -> None:
        """One process of PostgreSQL: its postmaster then ends all others and recovers."""
        with self.owner as owner:
            rows = owner.execute(
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            ).fetchall()
        if rows:
            with suppress(ProcessLookupError):
                os.kill(rng.choice(rows)[0], signal.SIGKILL)
        self.wait_for_server()

    def kill_postmaster(self, _: random.Random) -> None:
        pid = int((self.server.data_dir / "postmaster.pid").read_text(encoding="ascii").split()[0])
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 180
        while True:
            # Its children end when they notice that it is gone; until then the data folder is theirs.
            with suppress(Exception):
                self.server._release()
            try:
                self.server._run_on_a_port(self.server.port)
                break
            except Exception:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        self.wait_for_server()

    def wait_for_server(self) -> None:
        deadline = time.monotonic() + 180
        while True:
            try:
                with self.owner as owner:
                    owner.execute("SELECT 1")
                return
            except psycopg.Error:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def settle(self) -> None:
        """Let every client have its last answer, then stop all but PostgreSQL."""
        self.stop.touch()
        for client in self.clients.values():
            client.wait(timeout=180)
        assert self.proxy is not None
        self.proxy.terminate()
        self.proxy.wait(timeout=30)


@pytest.fixture
def field_of_battle(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Battlefield]:
    version = int(request.config.getoption("--pg").split(",")[0])
    # A folder that its account can reach, and that is there again after a crash.
    with ExitStack() as stack:
        stack.enter_context(in_memory())
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sqlguard-crash-")))
        home.chmod(0o755)
        server = stack.enter_context(
            EmbeddedServer.start(require_bindir(version), data_dir=home / "pg", settings=SETTINGS)
        )
        with psycopg.connect(server.dsn(), autocommit=True) as root:
            root.execute("CREATE ROLE crash_owner LOGIN CREATEROLE PASSWORD 'x'")
            root.execute("CREATE DATABASE crash OWNER crash_owner")
        dsn = server.dsn("crash", "crash_owner", "x")
        migrate(dsn)
        with psycopg.connect(dsn, autocommit=True) as owner:
            owner.execute("CREATE TABLE ledger (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text)")
            owner.execute("CREATE TABLE counter (id int PRIMARY KEY, n int NOT NULL, key text)")
            owner.execute("INSERT INTO counter SELECT g, 0 FROM generate_series(1, %s) g", [COUNTERS])
            guard_tables(owner, ["public.ledger", "public.counter"], "journal")
            apply_policy(owner, parse_policy(POLICY, "crash.toml"))
            task = open_task(owner, agent="unlucky", policy="crash", ttl=timedelta(hours=6))
        port = free_port()
        agent = url(host="127.0.0.1", port=port, user=task.role, password=task.password, dbname="crash")
        yield Battlefield(server, make_conninfo(dsn, connect_timeout=10), agent, task.task.id, tmp_path, port)


@pytest.mark.slow
def test_nothing_is_lost_doubled_or_unrecorded(field_of_battle: Battlefield) -> None:
    battle = field_of_battle
    rng = random.Random(SEED)
    battle.start_proxy()
    for number in range(CLIENTS):
        battle.start_client(number)
    kills: list[tuple[str, Callable[[random.Random], None]]] = [
        ("client", battle.kill_client),
        ("proxy", battle.kill_proxy),
        ("backend", battle.kill_backend),
        ("postmaster", battle.kill_postmaster),
    ]
    try:
        for count in range(KILLS):
            time.sleep(rng.uniform(0.3, 0.8))
            name, kill = kills[count % len(kills)]
            kill(rng)
            battle.struck[name] += 1
        # All are up again: whoever waits for an answer gets it.
        time.sleep(3)
    finally:
        battle.settle()
    report(battle, check(battle))


def check(battle: Battlefield) -> dict[str, int]:
    """Compare what clients were answered, what the tables have and what the journal says; return figures."""
    answered: dict[str, str] = {}
    for number in range(CLIENTS):
        for line in battle.log(number).read_text(encoding="ascii").splitlines():
            assert not line.startswith("wrong"), line
            if line.endswith("."):
                key, answer, _ = line.split()
                answered[key] = answer
    with battle.owner as owner:
        reconcile.reconcile(owner, after=timedelta())
        for name, query in WRONG.items():
            assert owner.execute(query.encode()).fetchall() == [], name
        ledger = {k: str(i) for k, i in owner.execute("SELECT key, id FROM ledger")}
        counted = {
            k
            for (k,) in owner.execute(
                "SELECT a.idempotency_key FROM sqlguard.change_set c JOIN sqlguard.action a ON a.id = c.action_id"
                " WHERE c.table_name = 'counter'"
            )
        }
        lost = {k for k, i in answered.items() if ledger.get(k, i) != i or k not in ledger.keys() | counted}
        assert lost == set()
        total = owner.execute("SELECT sum(n) FROM counter").fetchone()
        assert total == (len(counted),)
        assert journal.verify(owner).ok
        outcomes = Counter(dict(owner.execute(OUTCOMES).fetchall()))
        assert undo(owner, task=battle.task).conflicts == ()
        assert owner.execute("SELECT count(*) FROM ledger").fetchone() == (0,)
        assert owner.execute("SELECT DISTINCT n FROM counter").fetchall() == [(0,)]
    unheard = len((ledger.keys() | counted) - answered.keys())
    ends = {f"actions {kind}": count for kind, count in outcomes.items()}
    return {"answered": len(answered), "there": len(ledger) + len(counted), "unheard": unheard, **ends}


#: Where kills struck: what became of the intents.
OUTCOMES = """
    SELECT CASE WHEN e.kind = 'committed' AND e.detail ? 'repeats' THEN 'answered from the key'
                WHEN e.kind = 'reconciled' AND e.detail ->> 'outcome' = 'committed' THEN 'committed, end not written'
                WHEN e.kind = 'reconciled' THEN 'intent only'
                ELSE e.kind END, count(*)
    FROM sqlguard.action a
    JOIN LATERAL (SELECT * FROM sqlguard.event e WHERE e.action_id = a.id ORDER BY e.id DESC LIMIT 1) e ON true
    GROUP BY 1
"""


def report(battle: Battlefield, found: dict[str, int]) -> None:
    """Print the figures of docs/journal.md."""
    print(f"crash matrix: {sum(battle.struck.values())} kills {dict(battle.struck)}: {found}")
