"""How long does a decision take, compared with PostgreSQL's own parser on the same text? Processor time, no server."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import files

import postgast

from benchmarks.measure import Goal, Label, Result, compare
from benchmarks.options import Options
from benchmarks.world import world
from sqlguard.embedded import EmbeddedServer
from sqlguard.gate import Gate
from sqlguard.policy import parse_policy
from sqlguard.policy.context import Context
from sqlguard.postgres.catalog_reader import read_catalog
from sqlguard.postgres.guard_table import guard_tables
from sqlguard.postgres.migrate import migrate
from sqlguard.statement.model import Session

POLICY = """
name = "support"
[tables."public.*"]
select = true
insert = true
delete = "soft"
[tables."public.orders"]
update = ["status", "note"]
"""
READ, WRITE, CACHED = Goal(8), Goal(30), Goal(0.25)
STATEMENTS = (
    ("point select", READ, "SELECT id, name, city FROM customers WHERE id = 42"),
    (
        "join with aggregate",
        READ,
        "SELECT c.name, count(*), sum(o.total) FROM customers c JOIN orders o ON o.customer_id = c.id"
        " WHERE o.status = 'paid' AND o.placed_on >= '2024-03-01' GROUP BY c.name ORDER BY 3 DESC LIMIT 10",
    ),
    (
        "scoped update",
        WRITE,
        "UPDATE orders SET status = 'shipped', note = 'sent today' WHERE id = 17 AND status = 'paid'",
    ),
    ("DELETE … RETURNING", WRITE, "DELETE FROM orders WHERE id = 17 RETURNING id, status, total"),
    (
        "CTE with writes",
        WRITE,
        "WITH gone AS (DELETE FROM items WHERE order_id = 17 RETURNING order_id, quantity, price),"
        " moved AS (UPDATE orders SET note = 'emptied' WHERE id IN (SELECT order_id FROM gone) RETURNING id)"
        " SELECT count(*), sum(quantity * price) FROM gone",
    ),
)


def run(server: EmbeddedServer, options: Options) -> Iterator[Result]:
    context = _context(server)
    for case, goal, text in STATEMENTS:
        parse = _slice(partial(postgast.parse, text), 60)
        for how, make in (("uncached", _uncached), ("cached", _cached)):
            label = Label(
                "decision", f"{case}, {how}", "postgast.parse", goal if how == "uncached" else CACHED
            )
            decide, times = make(context, text)
            yield compare(label, _slice(decide, times), parse, options.rounds(40))


def _context(server: EmbeddedServer) -> Context:
    with world(server) as made:
        made.owner.execute(files("sqlguard.demo").joinpath("shop.sql").read_text(encoding="utf-8"))
        migrate(made.dsn)
        guard_tables(made.owner, ["customers", "staff", "products", "orders", "items"], "soft")
        return Context(read_catalog(made.owner), parse_policy(POLICY, "support.toml"), None)


def _uncached(context: Context, text: str) -> tuple[Callable[[], object], int]:
    gate, session = Gate(context), Session()

    def decide() -> None:
        gate.forget()
        assert all(d.allowed for d in gate.decide(text, session))

    decide()
    return decide, 20


def _cached(context: Context, text: str) -> tuple[Callable[[], object], int]:
    gate, session = Gate(context), Session()
    gate.decide(text, session)
    return lambda: gate.decide(text, session), 2000


def _slice(work: Callable[[], object], times: int) -> Callable[[], float]:
    """Return a slice that measures the processor time of one call: other processes do not count."""

    def measured() -> float:
        started = time.process_time()
        for _ in range(times):
            work()
        return (time.process_time() - started) / times

    return measured
