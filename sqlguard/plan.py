"""
What is going to be run for one statement, what came of it, and what a plan says of a run that was rolled back.

Only `sqlguard.gate` makes a Decision, so holding one proves that a verdict was given.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

from sqlguard.errors import CapExceeded, Refused
from sqlguard.plan_told import with_differences
from sqlguard.policy import Policy, late
from sqlguard.policy.late import Measured, Ruling
from sqlguard.policy.tiers import ORDER
from sqlguard.policy.verdict import Effect, Verdict
from sqlguard.rewrite.count import Count
from sqlguard.rewrite.steady import Told
from sqlguard.statement.model import Kind, Statement
from sqlguard.steps import Answer

#: Reads that can be approved: nothing is run of them before.
PLANNED_READS = frozenset({Kind.SELECT, Kind.VALUES, Kind.SHOW, Kind.EXPLAIN})


@dataclass(frozen=True)
class Decision:
    """`text` is what the server gets: the statement's own text, or the proved rewrite of it."""

    statement: Statement
    verdict: Verdict
    text: str
    #: The command tag's verb as the client must see it (`DELETE` for a soft delete), None: as it comes.
    tag: str | None = None
    rewritten: bool = False
    #: The same for a later EXECUTE of what this PREPAREs.
    execute_tag: str | None = None
    #: Maps a 1-based error position in `text` back to the client's text; None: they are the same.
    position: Callable[[int], int | None] | None = None
    #: What answers the functions it calls when it is undone (`policy.answers`), parameters still open.
    answers: tuple[Answer, ...] = ()
    #: Makes `count`, for which the tree is walked once more: most writes are run without.
    counting: Callable[[], Count | None] | None = None
    #: Makes `steady`, in the same way.
    steadying: Callable[[], Told] | None = None
    #: Statements of ours that belong to it, in its transaction (`rewrite.copy_in`).
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    @cached_property
    def count(self) -> Count | None:
        """How many rows it would change, to be asked before it is run; None: its run says so."""
        return None if self.counting is None else self.counting()

    @cached_property
    def steady(self) -> Told:
        """What its plan's digest is told of it (`rewrite.steady`)."""
        return {} if self.steadying is None else self.steadying()

    @property
    def is_write(self) -> bool:
        return self.statement.is_write

    @property
    def needs_read_write(self) -> bool:
        """Whether a READ ONLY transaction would stop it: row locks change nothing, and are no reads either."""
        return self.statement.is_write or self.statement.locks_rows

    @property
    def allowed(self) -> bool:
        return self.verdict.effect in (Effect.ALLOW, Effect.REWRITE)

    @property
    def is_settled(self) -> bool:
        """Whether it may run whatever is known only then: no gate waits for that, and nobody has to approve."""
        return self.allowed and not self.verdict.gates

    @property
    def may_take_approval(self) -> bool:
        """Whether it may have to write down, in its own transaction, that it has taken one."""
        return not (self.is_write or self.is_settled)

    @property
    def can_be_planned(self) -> bool:
        """Whether a person may let it pass after all."""
        if self.kind is Kind.COPY_IN:
            return False
        return self.verdict.effect is Effect.APPROVE and (self.is_write or self.kind in PLANNED_READS)

    @property
    def kind(self) -> Kind:
        return self.statement.kind


@dataclass(frozen=True)
class Affected:
    """Rows of one table that a statement changed or would change; `op` as in `sqlguard.change_set`."""

    table: str
    op: str
    rows: int

    def as_dict(self) -> dict[str, object]:
        return {"table": self.table, "op": self.op, "rows": self.rows}


@dataclass(frozen=True)
class Outcome:
    """What running (or previewing) a statement gave; field names are the same in JSON and in the journal."""

    verdict: str
    tag: str | None = None
    rowcount: int = 0
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[Any, ...], ...] = ()
    affected: tuple[Affected, ...] = ()
    action: int | None = None
    tier: str = "reversible"
    committed: bool = False
    statement: str = ""
    executed: str = ""
    notices: tuple[str, ...] = field(default_factory=tuple)
    #: The plan that a preview has stored, or that this run has committed.
    plan: int | None = None
    #: What a preview found besides `affected`: samples, shares, locks, sequences …
    report: Mapping[str, Any] | None = None
    #: There are more rows than `rowcount` says: the counting was stopped.
    has_more: bool = False
    #: The action whose stored answer this is: nothing was done now.
    repeats: int | None = None

    def as_dict(self) -> dict[str, object]:
        return {
            "verdict": self.verdict,
            "tag": self.tag,
            "rowcount": self.rowcount,
            "columns": list(self.columns),
            "rows": [list(row) for row in self.rows],
            "affected": [a.as_dict() for a in self.affected],
            "affected_rows": sum(a.rows for a in self.affected),
            "action": self.action,
            "tier": self.tier,
            "committed": self.committed,
            "statement": self.statement,
            "executed": self.executed,
            "notices": list(self.notices),
            "plan": self.plan,
            "repeats": self.repeats,
            "report": None if self.report is None else with_differences(self.report),
        }


# --- plans


@dataclass(frozen=True)
class Step:
    """One statement of a plan as it was run: `values` are its parameters on the wire, to run it again."""

    statement: str
    executed: str
    action: int
    #: As the journal and people see them.
    params: tuple[str | None, ...] | None = None
    #: Type, format (0 text, 1 binary) and bytes in base64 (None: NULL) of each parameter.
    values: tuple[tuple[int, int, str | None], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "statement": self.statement,
            "executed": self.executed,
            "action": self.action,
            "params": None if self.params is None else list(self.params),
            "values": [list(value) for value in self.values],
        }


@dataclass(frozen=True)
class Draft:
    """What is stored of a run besides what the database says of it (its signed outcome)."""

    steps: tuple[Step, ...]
    role: str
    search_path: tuple[str, ...]
    tier: str = "reversible"
    classes: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    approvals: int = 1
    lifetime_seconds: float = 3600.0
    policy: Policy | None = None
    #: What `steady` makes of its statements.
    steady: str | None = None

    def classes_with(self, report: Mapping[str, Any]) -> list[str]:
        """Return the compliance classes of what the statements name and of all that they reached."""
        reached = classes_of(report["tables"], self.policy) if self.policy else ()
        return sorted({*self.classes, *reached})

    @property
    def statement_hash(self) -> str:
        return plan_hash([(step.statement, step.params) for step in self.steps])

    def document(self, report: Mapping[str, Any], drift_of: int | None = None) -> dict[str, Any]:
        """Return the JSON that `sqlguard.record_plan` takes; *report* is the run's."""
        return {
            "action_id": self.steps[0].action,
            "role": self.role,
            "search_path": list(self.search_path),
            "statements": [step.as_dict() for step in self.steps],
            "statement_hash": self.statement_hash,
            "tier": self.tier,
            "classes": self.classes_with(report),
            "reasons": list(self.reasons),
            "approvals": self.approvals,
            "lifetime": f"{self.lifetime_seconds} seconds",
            "drift_of": drift_of,
        }


@dataclass
class Stage:
    """What runs towards one plan, in order; a savepoint remembers how much that was."""

    steps: list[Step] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    rulings: list[Ruling] = field(default_factory=list)
    _savepoints: list[tuple[str, int]] = field(default_factory=list)

    def add(self, step: Step, decision: Decision, ruling: Ruling) -> None:
        self.steps.append(step)
        self.decisions.append(decision)
        self.rulings.append(ruling)

    def follow(self, decision: Decision) -> None:
        """Follow what SAVEPOINT and ROLLBACK TO mean for it."""
        name = decision.statement.subject or ""
        if decision.kind is Kind.SAVEPOINT:
            self._savepoints.append((name, len(self.steps)))
        elif decision.kind is Kind.ROLLBACK_TO:
            at = max((n for n, (other, _) in enumerate(self._savepoints) if other == name), default=None)
            if at is not None:
                done = self._savepoints[at][1]
                del self._savepoints[at + 1 :], self.steps[done:], self.decisions[done:], self.rulings[done:]

    def draft(self, role: str, policy: Policy, search_path: tuple[str, ...]) -> Draft:
        """Return what is to be stored of it."""
        verdicts = [decision.verdict for decision in self.decisions]
        return Draft(
            tuple(self.steps),
            role,
            search_path,
            max((verdict.tier for verdict in verdicts), key=ORDER.index, default="reversible"),
            tuple(sorted({name for verdict in verdicts for name in verdict.classes})),
            tuple(dict.fromkeys(reason for ruling in self.rulings for reason in ruling.reasons)),
            max((ruling.approvals for ruling in self.rulings), default=1),
            policy.defaults.plan_ttl.total_seconds(),
            policy,
            self.steady,
        )

    @property
    def steady(self) -> str | None:
        return steady(zip((step.action for step in self.steps), self.decisions, strict=True))


def steady(run: Iterable[tuple[int, Decision]]) -> str | None:
    """Return as JSON what a digest is told of actions: action -> what `rewrite.steady` finds."""
    found = {action: decision.steady for action, decision in run if decision.steady}
    return json.dumps(found) if found else None


def refused(ruling: Ruling) -> Refused:
    """Return the error for what a gate refuses."""
    return Refused(
        f"a gate of the policy refuses this: {'; '.join(ruling.reasons)}",
        hint="narrow it down, or ask the operator whether the policy should allow it",
        rules=("gate",),
    )


def needs_no_approval() -> Refused:
    """Return the error for a COPY that would have to wait: what it copies is gone by then."""
    return Refused(
        "COPY … FROM STDIN can't wait for an approval, which this would need",
        hint="INSERT the rows: a plan keeps them until a person has approved it",
        rules=("gate",),
    )


def over_the_cap(count: Count, rows: int) -> CapExceeded | None:
    """Return the error for a write that would change *rows* rows, if that is too many. It is the wall's."""
    if rows <= count.most:
        return None
    return CapExceeded(
        f"the statement changes {rows} rows with `{count.table}`, more than the {count.most} that the task may change"
        " at once; they were counted, nothing was run",
        hint="narrow the WHERE to fewer rows",
    )


#: Why everything that a task writes waits, where the policy or the task says so.
EVERYTHING = "everything that this task writes needs an approval"


def ruling_of(
    decision: Decision,
    *,
    confidence: float | None,
    now: datetime,
    measured: Measured | None = None,
    plan_only: bool = False,
) -> Ruling | None:
    """Return what is to be done with *decision*; None: run it and see. The rows of a read are known: none."""
    if measured is None and not decision.is_write:
        measured = Measured(0)
    found = late.rule(decision.verdict, confidence=confidence, now=now, measured=measured)
    if found is not None and found.effect is Effect.ALLOW and plan_only and decision.is_write:
        return Ruling(Effect.APPROVE, (EVERYTHING,))
    return found


def classes_of(tables: Iterable[str], policy: Policy) -> tuple[str, ...]:
    """Return the compliance classes of *tables*, named with their schemas."""
    rules = [policy.table_rule(*name.split(".", 1)) for name in tables]
    return tuple(sorted({name for rule in rules if rule for name in rule.class_}))


def changed_rows(report: Mapping[str, Any]) -> int:
    """Return how many rows a run changed, guarded or not."""
    rows = sum(change["rows"] for change in report.get("affected", ()))
    return int(rows + sum(c["inserted"] + c["updated"] + c["deleted"] for c in report.get("unguarded", ())))


def measured_of(report: Mapping[str, Any], policy: Policy) -> Measured:
    """Return what the gates ask of the report of a whole run."""
    share = max((change["share"] for change in report.get("shares", ())), default=None)
    classes = classes_of(report["tables"], policy)
    return Measured(changed_rows(report), share, tuple(report.get("excess", ())), classes)


def affected_of(report: Mapping[str, Any]) -> tuple[Affected, ...]:
    """Return the rows of the guarded tables, by the names of the tables."""
    return tuple(
        sorted(
            (Affected(c["table"], c["op"], c["rows"]) for c in report["affected"]),
            key=lambda a: (a.table, a.op),
        )
    )


def may_go_over(decision: Decision, policy: Policy) -> bool:
    """Say whether a cap may turn out to ask for an approval of *decision*."""
    return any(
        policy.on_excess(write.table.schema or "", write.table.name) == "approve"
        for write in decision.statement.writes
        if not write.table.temporary
    )


def plan_hash(statements: Sequence[tuple[str, Sequence[str | None] | None]]) -> str:
    """Return what tells whether the very same statements are sent again."""
    text = json.dumps([[text.strip(), None if p is None else list(p)] for text, p in statements])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
