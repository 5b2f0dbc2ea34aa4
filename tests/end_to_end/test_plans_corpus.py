"""
Every handed statement that may write: a preview's rows are those that the statement then changes.

Through the Python connection and the proxy, in both protocols, alone and in groups: as a block and as one message.
What the statement changes is told by the journal and, apart from us, by the tables before and after it.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import psycopg
import pytest
from end_to_end.guard_corpus import POLICY, ROLES, SEQUENCES, Corpus, cases, guarded, run
from servers import Database

import sqlguard
from sqlguard.errors import SqlguardError

#: Long: run on the newest server only (.ci/run).
pytestmark = pytest.mark.slow
WRITES = ("INSERT", "UPDATE", "DELETE", "MERGE")
#: So that as much as possible is previewed: what is refused outright has no rows to be compared.
LENIENT = (
    POLICY.replace("[defaults]", '[defaults]\nunscoped = "approve"').replace('"5s"', '"2s"')
    + """
[tables."app.docs*"]
delete = "journal"
[tables."app.events*"]
delete = "journal"
"""
)
#: Writes that fail, in a preview as when they are done.
FAILING = {
    "del-025": "23503",  # as a real DELETE of a row that others refer to
    "ind-004": "SG002",  # a column that the guard keeps
    "dos-009": "57014",  # 100 million rows
}
#: That many statements make a group.
GROUP = 4
Report = Mapping[str, Any]


def entries() -> list[Any]:
    """Whatever is not a mere read that is allowed, and what may change something is no read."""
    return [
        case
        for case in cases()
        if (entry := case.values[0]) is None
        or entry["expected"] in ("rewrite", "needs_approval")
        or (entry["expected"] == "allow" and is_write(entry))
    ]


def is_write(entry: dict[str, Any]) -> bool:
    return isinstance(entry["sql"], str) and (
        entry["truth"] in ("inserts", "updates", "deletes") or entry["sql"].upper().startswith(WRITES)
    )


def groups() -> list[Any]:
    """Some writes together, each group of different kinds: neighbours in the corpus are alike."""
    writes = [case for case in entries() if case.values[0] is None or is_write(case.values[0])]
    count = -(-len(writes) // GROUP)
    return [
        pytest.param(
            [w.values[0] for w in writes[n::count]], id="+".join(str(w.id) for w in writes[n::count])
        )
        for n in range(count)
        if writes[n].values[0] is not None
    ]


@pytest.fixture(scope="module")
def corpus(guard_schema_module: Database) -> Iterator[Corpus]:
    with guarded(guard_schema_module, LENIENT) as made:
        # A policy gives no writes through views; owners do.
        made.owner.execute("GRANT INSERT, UPDATE ON v_active_accounts TO sg_po_corpus_1")
        yield made


class Failed(Exception):
    """What a door answered; no fault of the test."""

    def __init__(self, sqlstate: str | None, text: str) -> None:
        super().__init__(f"{sqlstate}: {text}")
        self.sqlstate = sqlstate


class Door(Protocol):
    """A way to preview and to do one or more statements; raises Failed."""

    def preview(self) -> Report | None: ...
    def do(self) -> None: ...
    def do_approved(self, plan: int) -> None: ...


@dataclass
class Python:
    db: sqlguard.GuardedConnection
    entry: dict[str, Any]

    def _run(self, *, dry_run: bool) -> sqlguard.Outcome:
        text, params = self.entry["sql"], self.entry.get("params")
        if params is not None:
            text = text.replace("%", "%%").replace("$1", "%s")
        try:
            return self.db.execute(text, params, dry_run=dry_run)
        except (psycopg.Error, SqlguardError) as fault:
            raise Failed(fault.sqlstate, str(fault)) from fault

    def preview(self) -> Report | None:
        seen = self._run(dry_run=True)
        # A read is not run before it is approved.
        return None if seen.report is None or seen.tag is None else {**seen.report, "plan": seen.plan}

    def do(self) -> None:
        self._run(dry_run=False)

    def do_approved(self, plan: int) -> None:
        self.db.commit_plan(plan)


@dataclass
class Proxy:
    """Statements through the proxy, one after the other as they are, in a block, or in one message."""

    agent: psycopg.Connection[Any]
    entries: list[dict[str, Any]]
    extended: bool = False
    block: bool = False
    #: For what was previewed together: sent again, each statement would be asked for alone.
    by_number: Callable[[int], object] | None = None

    def _send(self) -> None:
        try:
            if self.block:
                self.agent.execute("BEGIN")
            for entry in self.entries:
                run(self.agent, entry["sql"], entry.get("params"), extended=self.extended)
            if self.block:
                self.agent.execute("COMMIT")
        except psycopg.Error as fault:
            raise Failed(fault.sqlstate, str(fault)) from fault
        finally:
            if not self.agent.closed:
                self.agent.rollback()

    def last_plan(self) -> dict[str, Any] | None:
        row = self.agent.execute("SHOW sqlguard.last_plan").fetchone()
        return None if row is None or row[0] is None else dict(json.loads(row[0]))

    def preview(self) -> Report | None:
        before = self.last_plan()
        self.agent.execute("SET sqlguard.dry_run = on")
        try:
            self._send()
        finally:
            if not self.agent.closed:
                self.agent.execute("SET sqlguard.dry_run = off")
        after = self.last_plan()
        return None if after == before else after

    def do(self) -> None:
        self._send()

    def do_approved(self, plan: int) -> None:
        if self.by_number is None:
            self._send()
        else:
            self.by_number(plan)


def rows_of(report: Report) -> Counter[tuple[str, str]]:
    return Counter({(a["table"], a["op"]): a["rows"] for a in report["affected"]})


def lasting(state: dict[str, str]) -> dict[str, str]:
    return {k: v for k, v in state.items() if k not in (SEQUENCES, ROLES)}


def moved(before: dict[str, str], after: dict[str, str]) -> set[str]:
    at_first = set(before[SEQUENCES].splitlines())
    return {line.split()[0] for line in after[SEQUENCES].splitlines() if line not in at_first}


def changed(before: dict[str, str], after: dict[str, str]) -> Counter[str]:
    """How many rows of each table are others than before; a partition's are its table's."""
    found: Counter[str] = Counter()
    for table in lasting(before):
        old, new = Counter(before[table].splitlines()), Counter(after[table].splitlines())
        if old != new:
            found[of(table)] += max((old - new).total(), (new - old).total())
    return found


def of(table: str) -> str:
    return "app.events" if table.startswith("app.events_") else table


def check(corpus: Corpus, task: str, door: Door, before: dict[str, str]) -> str | None:
    """Preview, do, compare; return None if there were rows to compare, else the SQLSTATE by which it fails."""
    try:
        seen = door.preview()
    except Failed as fault:
        assert lasting(corpus.state()) == lasting(before)
        with pytest.raises(Failed) as again:
            door.do()
        assert again.value.sqlstate == fault.sqlstate, (fault, again.value)
        assert lasting(corpus.state()) == lasting(before)
        return fault.sqlstate
    after = corpus.state()
    assert lasting(after) == lasting(before)
    assert moved(before, after) == (set(seen["sequences"]) if seen else set())
    try:
        door.do()
    except Failed as fault:
        assert fault.sqlstate == "SG001", fault
        if seen is None:
            return fault.sqlstate  # a read, which is not run before it is approved
        corpus.approve(seen["plan"])
        door.do_approved(seen["plan"])
    if seen is None:
        assert lasting(corpus.state()) == lasting(before)
        return ""
    compare(corpus, task, seen, changed(before, corpus.state()))
    return None


def compare(corpus: Corpus, task: str, seen: Report, differences: Counter[str]) -> None:
    announced = rows_of(seen)
    assert announced == corpus.journaled(task)
    unguarded = {u["table"]: u["inserted"] + u["updated"] + u["deleted"] for u in seen["unguarded"]}
    of_table: Counter[str] = Counter(unguarded)
    for (table, _), rows in announced.items():
        of_table[of(table)] += rows
    assert differences.keys() <= of_table.keys()
    for table, rows in of_table.items():
        kinds = {op for name, op in announced if of(name) == table}
        # An update may write what was there, and a row can be changed more than once.
        if kinds <= {"insert"} or kinds == {"soft_delete"}:
            assert differences[table] == rows, table
        assert differences[table] <= rows, table


@pytest.mark.parametrize("entry", entries())
@pytest.mark.parametrize("door", ["python", "simple", "extended"])
def test_announced_equals_done(corpus: Corpus, entry: dict[str, Any], door: str) -> None:
    before = corpus.state()
    with corpus.task("proxy") as (task, agent):
        try:
            if door == "python":
                with sqlguard.connect(corpus.database.dsn, task=task) as db:
                    failed = check(corpus, task, Python(db, entry), before)
            else:
                failed = check(corpus, task, Proxy(agent, [entry], extended=door == "extended"), before)
            # Reads that need an approval are not previewed, and what is no plain write is refused.
            assert failed is None or not is_write(entry) or FAILING[entry["id"]] == failed
        finally:
            corpus.take_back(task, before)


def working(
    agent: psycopg.Connection[Any], group: list[dict[str, Any]], *, message: bool
) -> list[dict[str, Any]]:
    """Those of *group* that don't fail by themselves, which a block or a message would not outlive."""
    found = []
    for entry in group:
        try:
            seen = Proxy(agent, [entry]).preview()
        except Failed:
            continue
        if seen is not None and not (message and "params" in entry):
            found.append(entry)
    return found


@pytest.mark.parametrize("group", groups())
@pytest.mark.parametrize("how", ["block", "extended block", "message"])
def test_announced_together_equals_done(corpus: Corpus, group: list[dict[str, Any]], how: str) -> None:
    before = corpus.state()
    with corpus.task("proxy") as (task, agent):
        try:
            sent = working(agent, group, message=how == "message")
            assert len(sent) > 1
            if how == "message":
                sent = [{"sql": ";\n".join(e["sql"].strip().rstrip(";") for e in sent)}]
            with sqlguard.connect(corpus.database.dsn, task=task) as db:
                door = Proxy(agent, sent, how.startswith("extended"), how != "message", db.commit_plan)
                # What was tried alone has moved sequences.
                assert check(corpus, task, door, corpus.state()) is None
        finally:
            corpus.take_back(task, before)
