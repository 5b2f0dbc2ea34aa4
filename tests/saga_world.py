"""A guarded table, a task and a bank that is outside the database: what the tests of sagas start from."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from journaled import PASSWORD, World, rows
from journaled import world as made_world
from servers import Database

from sqlguard.postgres import compensate, journal
from sqlguard.postgres.compensate import SagaReport
from sqlguard.postgres.steps import Steps
from sqlguard.postgres.undo_plan import Scope
from sqlguard.steps import Done, NotDone, Tools


@dataclass
class Bank:
    """The outside: does each key once, and remembers how often it was asked."""

    guard: Tools = field(default_factory=Tools)
    log: list[tuple[Any, ...]] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=dict)
    fails: int = 0
    dies: bool = False

    def __post_init__(self) -> None:
        self.guard.compensation(self.refund)
        self.guard.compensation(self.say_sorry)
        self.charge = self.guard.tool(tier="compensable", compensation="refund", name="charge")(self._charge)
        self.mail = self.guard.tool(tier="compensable", mitigation="say_sorry", name="mail")(self._mail)
        self.wipe = self.guard.tool(tier="irreversible", name="wipe")(self._wipe)

    def _charge(self, cents: int, *, idempotency_key: str = "") -> str:
        if cents == 0:
            raise NotDone
        self.log.append(("charge", cents, idempotency_key))
        if cents < 0:
            raise TimeoutError
        return f"receipt {cents}"

    def _mail(self, to: str, password: str = "") -> None:
        self.log.append(("mail", to, len(password)))

    def _wipe(self, disk: str) -> None:
        self.log.append(("wipe", disk))

    def refund(self, done: Done) -> str:
        self.log.append(("refund", done.result, done.certain, done.idempotency_key))
        if self.fails:
            self.fails -= 1
            raise TimeoutError("no answer")
        if self.dies:
            raise KeyboardInterrupt
        return "refunded"

    def say_sorry(self, done: Done) -> None:
        self.log.append(("sorry", done.arguments["to"]))


@contextmanager
def saga_world(database: Database) -> Iterator[World]:
    with made_world(database) as made:
        made.op.execute("""
            CREATE SCHEMA app;
            CREATE TABLE app.item (id int PRIMARY KEY, note text);
            INSERT INTO app.item SELECT n, 'n' || n FROM generate_series(1, 9) n;
            CREATE TABLE app.refunds (what text);
            CREATE FUNCTION app.back(number int, why text) RETURNS text LANGUAGE sql
                AS $$ INSERT INTO app.refunds VALUES (number || why) RETURNING what $$;
        """)
        made.grant()
        made.guard("app.item")
        made.task("t")
        yield made


def steps_of(world: World) -> Steps:
    return Steps.connect(world.database.dsn_for(world.agents[0].role, PASSWORD))


def write(world: World, note: str, ids: str = "id = 1") -> int:
    return world.act(world.agents[0], f"UPDATE app.item SET note = '{note}' WHERE {ids}")


def undo(world: World, bank: Bank | None, **options: Any) -> SagaReport:
    scope = options.pop("scope", Scope(task="t"))
    return compensate.undo(world.op, scope, tools=bank.guard if bank else None, **options)


def states(report: SagaReport) -> list[str]:
    return [f"{a.step}: {a.state}" for a in report.answers]


def outcomes(world: World) -> list[str]:
    return [a.outcome for a in journal.list_actions(world.op)]


def note(world: World, number: int = 1) -> Any:
    return rows(world.op, "SELECT note FROM app.item WHERE id = %s", [number])[0][0]
