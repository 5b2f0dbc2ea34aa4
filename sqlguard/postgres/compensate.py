"""
Undo with steps that are not SQL: compensations and rows, last in, first out.

Theory of operation. Without steps in its scope an undo is what `undo.py` does. With steps it is a saga: the rows
changed after the newest step are taken back in one transaction, then that step is answered, then the rows before it,
and so on. A call to the outside can't be part of a transaction, and holding one open meanwhile would lock tables for
as long as the other side likes. What stops the saga leaves the older work as it is: never a hole in the middle.
A preview of all rows comes first, so that a conflict stops everything before anything was called.

Each answer is an event before it is called (`compensating`) and one after it (`compensated`, `mitigated`,
`uncompensated`). A crash between the two is seen at the next undo, which calls it again with the very same key; a
compensation that was answered is never called again. A function of the database is called in the transaction that
writes its event, so it needs no key.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import psycopg
from psycopg import sql

from sqlguard.errors import Refused
from sqlguard.postgres.compensate_plan import Step, answers_of, between, read_steps
from sqlguard.postgres.connect import OWN_LOCKS
from sqlguard.postgres.journal import record_event
from sqlguard.postgres.undo import ON_CONFLICT, Progress, Run
from sqlguard.postgres.undo_columns import by_columns
from sqlguard.postgres.undo_plan import Scope
from sqlguard.postgres.undo_report import TableCount, UndoReport
from sqlguard.steps import MITIGATION, Answer, Done, Tools, compensation_key, plain

#: What became of an answer: waits for what can't be called here; only the first two are ends.
DONE, MITIGATED, PENDING, FAILED, WOULD = "compensated", "mitigated", "pending", "failed", "would be called"


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer and what became of it; `attempts` counts from 1, `certain` as in `sqlguard.steps.Done`."""

    action: int
    step: str
    answer: str | None
    kind: str | None
    state: str
    certain: bool
    key: str
    problem: str | None = None
    result: Any = None

    @property
    def is_open(self) -> bool:
        return self.state in (PENDING, FAILED)

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True)
class SagaReport:
    """What an undo with steps did: `parts` are the undos of rows, newest first, `answers` the steps'."""

    rows: UndoReport
    parts: tuple[UndoReport, ...] = ()
    answers: tuple[Answered, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to be done: no conflict stopped it and no step waits."""
        return not self.rows.stopped and not any(a.is_open for a in self.answers)

    def as_dict(self) -> dict[str, Any]:
        return self.rows.as_dict() | {
            "undos": [p.undo for p in self.parts if p.undo is not None],
            "compensations": [a.as_dict() for a in self.answers],
            "complete": self.is_complete,
        }


def undo(  # noqa: PLR0913 (the arguments of an undo, and the registry)
    conn: psycopg.Connection[Any],
    scope: Scope,
    *,
    tools: Tools | None = None,
    preview: bool = False,
    on_conflict: str = "stop",
    columns: Sequence[str] = (),
    progress: Progress | None = None,
) -> SagaReport:
    """
    Undo *scope*, its steps that are not SQL included; *tools* knows their compensations.

    With *columns*, of rows that somebody changed since only these go back. Safe to repeat: what is done is not done
    again. A redo (`scope.undo`) is of rows alone.
    """
    if on_conflict not in ON_CONFLICT:
        raise ValueError(f"on_conflict is one of {', '.join(ON_CONFLICT)}")
    if scope == Scope():
        raise Refused("nothing was named to undo", hint="give a task, an action, a time or an earlier undo")
    saga = _Saga(conn, scope, tools or Tools(), preview, on_conflict, tuple(columns), progress)
    return saga.carry_out()


def resolve(conn: psycopg.Connection[Any], action: int, note: str) -> None:
    """
    Note that a person has answered the step *action*, so that undos of its task go on; raises Refused.

    For what no registry can do: a letter was written, the other side was called.
    """
    waits = [
        (number, answer)
        for step in read_steps(conn, Scope(action=action))
        for number, answer in answers_of(step)
        if step.answered.get(str(number)) not in (DONE, MITIGATED)
    ]
    if not waits:
        raise Refused(f"there is nothing to resolve at action {action}", hint="see `sqlguard undo --preview`")
    for number, answer in waits:
        kind = "compensated" if answer is not None and answer.kind != MITIGATION else "mitigated"
        record_event(conn, action, kind, {"number": number, "by_hand": True, "note": note})


@dataclass
class _Saga:
    conn: psycopg.Connection[Any]
    scope: Scope
    tools: Tools
    preview: bool
    on_conflict: str
    columns: tuple[str, ...]
    progress: Progress | None
    parts: list[UndoReport] = field(default_factory=list)
    answers: list[Answered] = field(default_factory=list)
    calls: int = 0

    def carry_out(self) -> SagaReport:
        steps = read_steps(self.conn, self.scope)
        if not steps:
            return SagaReport(self._rows())
        before = self._rows(preview=True)
        if self.preview:
            self.answers = [self._told(s, n, a) for s in steps for n, a in answers_of(s)]
            return SagaReport(before, (), tuple(self.answers))
        if before.stopped:
            return SagaReport(before)
        later: datetime | None = None
        for step in steps:
            if not self._part(step.at, later) or not self._answer(step):
                return self._report()
            later = step.at
        self._part(None, later)
        return self._report()

    def _rows(self, *, preview: bool = False) -> UndoReport:
        return self._run(preview=preview or self.preview).carry_out()

    def _run(self, *, preview: bool) -> Run:
        if not self.columns:
            return Run(self.conn, self.scope, preview, self.on_conflict, self.progress)
        take_back = by_columns(self.columns)
        return Run(self.conn, self.scope, preview, "skip", self.progress, take_back=take_back)

    def _part(self, after: datetime | None, before: datetime | None) -> bool:
        """Take back the rows that were changed between two steps; False when a conflict stops the undo."""
        report = replace(self._run(preview=False), read=between(after, before)).carry_out()
        self.parts.append(report)
        return not report.stopped

    def _answer(self, step: Step) -> bool:
        """Answer a step; False when it has to wait, and with it all that is older."""
        lock = [OWN_LOCKS, f"sqlguard compensation {step.id}"]
        # Of two undos of the same task the second waits here, and then finds it answered.
        self.conn.execute("SELECT pg_advisory_lock(%s, hashtext(%s))", lock)
        try:
            fresh = next((s for s in read_steps(self.conn, self.scope) if s.id == step.id), step)
            for number, answer in answers_of(fresh):
                self.answers.append(self._one(fresh, number, answer))
                if self.answers[-1].is_open:
                    return False
        finally:
            self.conn.execute("SELECT pg_advisory_unlock(%s, hashtext(%s))", lock)
        return True

    def _told(self, step: Step, number: int, answer: Answer | None) -> Answered:
        """Return what is known of an answer without calling anything."""
        made = Answered(
            step.id,
            step.statement,
            answer.name if answer else None,
            answer.kind if answer else None,
            WOULD,
            step.is_certain,
            compensation_key(step.id, step.key, number),
        )
        state = step.answered.get(str(number))
        if state in (DONE, MITIGATED):
            return replace(made, state=state)
        problem = self._obstacle(answer)
        return made if problem is None else replace(made, state=PENDING, problem=problem)

    def _obstacle(self, answer: Answer | None) -> str | None:
        if answer is None:
            return "nothing answers it: it can't be taken back"
        if answer.where == "sql":
            return (
                None if answer.arguments is not None else "the statement does not tell the call's arguments"
            )
        if answer.name not in self.tools.compensations:
            return f"no registry at hand has a compensation `{answer.name}`: give `--tools module:registry`"
        return None

    def _one(self, step: Step, number: int, answer: Answer | None) -> Answered:
        told = self._told(step, number, answer)
        if told.state != WOULD or answer is None:
            return told
        self.calls += 1
        end = "mitigated" if answer.kind == MITIGATION else "compensated"
        if answer.where == "sql":
            return self._in_database(told, number, answer, end)
        attempt = {"number": number, "answer": answer.name, "key": told.key}
        record_event(self.conn, step.id, "compensating", attempt)
        done = Done(
            step.id,
            step.statement,
            step.params or {},
            step.detail.get("result") if step.is_certain else None,
            step.is_certain,
            step.key,
            told.key,
        )
        try:
            result = plain(self.tools.compensations[answer.name](done))
        except Exception as fault:
            problem = f"{type(fault).__name__}: {fault}"[:500]
            record_event(self.conn, step.id, "uncompensated", attempt | {"error": type(fault).__name__})
            return replace(told, state=FAILED, problem=problem)
        record_event(self.conn, step.id, end, attempt | {"result": result})
        return replace(told, state=end, result=result)

    def _in_database(self, told: Answered, number: int, answer: Answer, end: str) -> Answered:
        """Call a function of the database and write its event in one transaction."""
        try:
            with self.conn.transaction():
                result = _call(self.conn, answer)
                record_event(
                    self.conn, told.action, end, {"number": number, "answer": answer.name, "result": result}
                )
        except (psycopg.Error, Refused) as fault:
            return replace(told, state=FAILED, problem=str(fault).splitlines()[0])
        return replace(told, state=end, result=result)

    def _report(self) -> SagaReport:
        rows = _together(self.scope, self.parts)
        nothing = rows.undo is None and not self.calls and not any(a.is_open for a in self.answers)
        rows = replace(
            rows,
            already_undone=nothing and not rows.stopped,
            notes=(
                *rows.notes,
                *(f"step {a.action} `{a.step}` waits: {a.problem}" for a in self.answers if a.is_open),
            ),
        )
        return SagaReport(rows, tuple(self.parts), tuple(self.answers))


def _call(conn: psycopg.Connection[Any], answer: Answer) -> Any:
    """Call a function of the database with *answer*'s arguments as texts of its own types."""
    row = conn.execute(
        "SELECT n.nspname, p.proname, ARRAY(SELECT format_type(t, NULL) FROM unnest(p.proargtypes::oid[])"
        " WITH ORDINALITY AS u (t, i) ORDER BY i) FROM pg_catalog.pg_proc p"
        " JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace WHERE p.oid = to_regprocedure(%s)",
        [answer.name],
    ).fetchone()
    given = answer.arguments or ()
    if row is None or len(row[2]) != len(given):
        raise Refused(f"there is no function `{answer.name}` with {len(given)} argument(s) now")
    values = sql.SQL(", ").join(
        sql.SQL("{}::text::{}").format(sql.Literal(_text(value, kind)), sql.SQL(kind))
        for value, kind in zip(given, row[2], strict=True)
    )
    found = conn.execute(
        sql.SQL("SELECT {}({})::text").format(sql.Identifier(row[0], row[1]), values)
    ).fetchone()
    return found[0] if found else None


def _text(value: str | None, kind: str) -> str | None:
    """Return an argument as text; a client may have sent it in binary, which the journal shows as hex."""
    if value is None or not value.startswith("\\x") or kind == "bytea":
        return value
    raw = bytes.fromhex(value[2:])
    if kind in ("smallint", "integer", "bigint"):
        return str(int.from_bytes(raw, signed=True))
    if kind == "uuid":
        return raw.hex()
    raise Refused(f"the journal has an argument of type {kind} in binary: `{value}`")


def _together(scope: Scope, parts: Sequence[UndoReport]) -> UndoReport:
    """Return the parts of a saga as one report; `undo` is the newest, all are in the report's `undos`."""
    counts: dict[tuple[str, str], int] = {}
    for part in parts:
        for one in part.tables:
            counts[one.table, one.op] = counts.get((one.table, one.op), 0) + one.rows
    done = [p for p in parts if p.undo is not None]
    return UndoReport(
        scope=scope.as_dict(),
        undo=done[0].undo if done else None,
        stopped=any(p.stopped for p in parts),
        tables=tuple(TableCount(t, op, n) for (t, op), n in sorted(counts.items())),
        conflicts=tuple(c for p in parts for c in p.conflicts),
        conflict_count=sum(p.conflict_count for p in parts),
        notes=tuple(dict.fromkeys(n for p in parts for n in p.notes)),
    )
