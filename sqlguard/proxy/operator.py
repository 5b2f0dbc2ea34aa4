"""
What the proxy asks of PostgreSQL as the operator: logins, the catalog, the journal.

psycopg is synchronous here on purpose: these calls run in threads of their own, so that a slow catalog query
never holds up the event loop. What is written is the journal's writer's (`writer`), which has its own way.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import monotonic
from typing import Any, TypeVar

import psycopg
import structlog

from sqlguard.budget import Grant
from sqlguard.catalog import Catalog
from sqlguard.errors import DatabaseUnavailable, NotConfigured, SqlguardError
from sqlguard.gate import Gate
from sqlguard.journal import Intent
from sqlguard.plan import Draft
from sqlguard.policy.context import Context
from sqlguard.postgres import plans
from sqlguard.postgres.budgets import lease_statements
from sqlguard.postgres.catalog_reader import catalog_version, read_catalog
from sqlguard.postgres.connect import connect
from sqlguard.postgres.control import Login, count_leases, door_joined, read_login
from sqlguard.proxy.metrics import Metrics, TimedGate
from sqlguard.proxy.passing import Passing as Passing
from sqlguard.proxy.rates import Rates
from sqlguard.proxy.tracing import NoTracing, Tracing
from sqlguard.proxy.writer import Writer

log = structlog.get_logger()
T = TypeVar("T")
#: A name that is not known has the catalog read once in so many seconds.
_LOOK_SECONDS = 1.0


#: Seconds that somebody who asks for metrics waits for PostgreSQL.
_PATIENCE = 5.0
#: A connection is opened again at most once per question: whoever asks can't wait for long.
_ATTEMPTS = 2


class Operator:
    """One per proxy process. `start` must have returned before the proxy accepts clients."""

    def __init__(
        self, dsn: str, *, catalog_check_seconds: float = 1.0, tracing: Tracing | None = None
    ) -> None:
        self._dsn = dsn
        self._check_seconds = catalog_check_seconds
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="sqlguard-operator")
        self._local = threading.local()
        self._connections: list[psycopg.Connection[Any]] = []
        self.metrics = Metrics()
        self.writer = Writer(dsn, self.metrics)
        self._tracing = tracing or NoTracing()
        self._watcher = threading.Thread(target=self._watch, name="sqlguard-catalog", daemon=True)
        self._stopped = threading.Event()
        self._again = threading.Event()
        #: What gates of older catalogs had counted: found remembered, decided anew.
        self._past: Counter[str] = Counter()
        self._gates: dict[tuple[str, int], tuple[Gate, Passing]] = {}
        self.rates = Rates(self._lease)
        self._looking: asyncio.Future[None] | None = None
        self._looked_at = -_LOOK_SECONDS
        self.catalog = Catalog()
        self.database = ""

    def start(self) -> None:
        """Connect and read the catalog; raises DatabaseUnavailable or NotConfigured."""
        with connect(self._dsn, alone=True) as conn:
            if conn.execute("SELECT to_regclass('sqlguard.task')").fetchone() == (None,):
                raise NotConfigured(
                    "the database has no schema `sqlguard` yet", hint="run `sqlguard migrate` as the operator"
                )
            self.catalog = read_catalog(conn)
            self.database = conn.info.dbname
        self._watcher.start()

    def stop(self) -> None:
        """Write what is queued, then close everything. Safe to repeat."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self.writer.stop()
        self._threads.shutdown(wait=True)
        if self._watcher.is_alive():
            self._watcher.join(timeout=10)
        for conn in self._connections:
            conn.close()

    async def login(self, role: str) -> Login | None:
        """Return what is known of *role*; raises DatabaseUnavailable when PostgreSQL can't be asked."""
        return await self._ask(lambda conn: read_login(conn, role))

    def gate(self, login: Login) -> tuple[Gate, Passing]:
        """
        Return the gate for a login's policy version on the newest catalog, and what is known to pass it.

        Sessions share both.
        """
        key = (login.policy.name, login.task.policy_version)
        found = self._gates.get(key)
        if found is None or found[0].context.catalog is not self.catalog:
            if found is not None:
                self._past += _counts(*found)
            context = Context(self.catalog, login.policy, None)
            gate = TimedGate(context, metrics=self.metrics)
            found = gate, Passing(gate)
            self._gates[key] = found
        return found

    def lookups(self) -> Counter[str]:
        """Return how often a decision was found remembered, and how often it had to be made."""
        return self._past + sum((_counts(*pair) for pair in list(self._gates.values())), Counter())

    async def intent(self, intent: Intent) -> int:
        """Commit one intent, in a group with those of other sessions, and return its action id."""
        self.metrics.verdicts[intent.verdict] += 1
        action = await self.writer.intent(intent)
        self._tracing.begins(action, intent)
        return action

    def note(self, intent: Intent) -> None:
        """Have a refusal written soon; nothing waits for it, because nothing runs."""
        self.metrics.verdicts[intent.verdict] += 1
        self._tracing.refused(intent)
        self.writer.intent(intent).add_done_callback(lambda w: w.exception())

    def event(self, action: int, kind: str, detail: Mapping[str, Any]) -> None:
        """Have an event written soon; the row changes are the evidence if it is lost (reconciliation)."""
        self._tracing.ends(action, kind, detail)
        self.writer.event(action, kind, detail)

    async def plan(self, draft: Draft, found: plans.RunOutcome, drift_of: int | None) -> int:
        """Store what a run would have done and return the plan's id; raises DatabaseUnavailable."""
        return await self._ask(lambda conn: plans.record(conn, draft, found, drift_of))

    async def _lease(self, task: str, wanted: int, most: int) -> Grant:
        return await self._ask(lambda conn: lease_statements(conn, task, wanted, most))

    async def joined(self, role: str, pid: int) -> None:
        """Write down for `doctor` that a session came through here; nobody waits for it."""
        with suppress(DatabaseUnavailable):
            await self._ask(lambda conn: door_joined(conn, role, pid))

    def look_again(self) -> None:
        """Read the catalog now, whether it has changed or not."""
        self._again.set()

    @property
    def may_look_now(self) -> bool:
        """Whether `look_now` would read the catalog: names that are nowhere must not cost a reading each."""
        return self._looking is not None or monotonic() - self._looked_at >= _LOOK_SECONDS

    async def look_now(self) -> None:
        """Wait for the catalog as it is now; whoever asks meanwhile waits for the same reading."""
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._ask(self._newest))
        try:
            with suppress(DatabaseUnavailable):  # the watcher says so
                await asyncio.shield(self._looking)
        finally:
            self._looking, self._looked_at = None, monotonic()

    def _newest(self, conn: psycopg.Connection[Any]) -> None:
        if catalog_version(conn) != self.catalog.version:
            self.catalog = read_catalog(conn)

    def leases(self) -> dict[str, float]:
        """Return the number of leases by state; blocks, so not for the event loop. Raises DatabaseUnavailable."""
        return self._threads.submit(self._answer, count_leases).result(_PATIENCE)

    async def _ask(self, question: Callable[[psycopg.Connection[Any]], T]) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._answer, question)

    def _answer(self, question: Callable[[psycopg.Connection[Any]], T]) -> T:
        fault: psycopg.Error | None = None
        for _ in range(_ATTEMPTS):
            conn = getattr(self._local, "connection", None)
            if conn is None or conn.closed:
                conn = connect(self._dsn, alone=True)
                self._local.connection = conn
                self._connections.append(conn)
            try:
                return question(conn)
            except (psycopg.OperationalError, psycopg.InterfaceError) as broken:
                fault = broken
                conn.close()
                self._connections.remove(conn)
            except psycopg.Error as refused:
                fault = refused
                break
        raise DatabaseUnavailable(f"PostgreSQL does not answer: {fault}")

    def _watch(self) -> None:
        """Notice changes of the catalog; an unreachable server is asked again until it answers."""
        conn: psycopg.Connection[Any] | None = None
        while not self._stopped.wait(self._check_seconds):
            try:
                if conn is None or conn.closed:
                    conn = connect(self._dsn, alone=True)
                again = self._again.is_set()
                self._again.clear()
                if again or catalog_version(conn) != self.catalog.version:
                    self.catalog = read_catalog(conn)
                    log.info("catalog read", version=self.catalog.version, tables=len(self.catalog.tables))
            except (psycopg.Error, SqlguardError) as fault:
                log.warning("catalog not read", error=str(fault))
                if conn is not None:
                    conn.close()
                    conn = None
        if conn is not None:
            conn.close()


def _counts(gate: Gate, passing: Passing) -> Counter[str]:
    return Counter(hit=gate.hits + passing.hits, miss=gate.misses)
