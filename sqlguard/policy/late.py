"""
What the gates say once a statement is run: first what can be said before it runs, then what its rows say.

Pure: time, confidence and measured rows are arguments.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime

from sqlguard.policy.model import Gate
from sqlguard.policy.tiers import Facts, holds
from sqlguard.policy.verdict import Effect, Verdict

_HOW_SURE = "the agent is not sure enough"


@dataclass(frozen=True, slots=True)
class Measured:
    """
    What a statement changed before it was committed; `excess` are the caps that it went over.

    `classes` are those of all tables that it changed, by cascades, triggers and functions too.
    """

    rows: int
    share: float | None = None
    excess: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ruling:
    """`effect` is ALLOW, APPROVE or REFUSE; `reasons` are for people and for the agent."""

    effect: Effect
    reasons: tuple[str, ...] = ()
    approvals: int = 1


def rule(
    verdict: Verdict, *, confidence: float | None, now: datetime, measured: Measured | None = None
) -> Ruling | None:
    """
    Return what is to be done with a statement that *verdict* did not refuse; None: measure it first.

    An approval that is needed anyway is said at once, a refusal that only the rows can show later.
    """
    facts = Facts(now, confidence, classes=verdict.classes)
    if measured is not None:
        facts = replace(facts, rows=measured.rows, share=measured.share or 0.0, reached=measured.classes)
    gate, is_open = _first(verdict.gates, facts)
    if gate is not None and gate.then == "refuse":
        return Ruling(Effect.REFUSE, (_reason(gate, verdict, measured),))
    reasons: list[str] = []
    approvals = 1
    if verdict.effect is Effect.APPROVE:
        reasons += [f.message for f in verdict.findings if f.effect is Effect.APPROVE]
        approvals = verdict.approvals
    if gate is not None and gate.then == "approve":
        reasons.append(_reason(gate, verdict, measured))
        approvals = max(approvals, gate.approvals)
    if measured is not None:
        reasons += measured.excess
    if reasons:
        return Ruling(Effect.APPROVE, tuple(dict.fromkeys(reasons)), approvals)
    return None if is_open else Ruling(Effect.ALLOW)


def wants_share(gates: Iterable[Gate]) -> bool:
    """Whether the share of a table has to be known: counting its rows is not cheap."""
    return any(gate.when.share is not None for gate in gates)


def _first(gates: Iterable[Gate], facts: Facts) -> tuple[Gate | None, bool]:
    """Return the first gate that matches, and whether that only shows after the run."""
    for gate in gates:
        held = holds(gate.when, facts)
        if held is None:
            return None, True
        if held:
            return gate, False
    return None, False


def _reason(gate: Gate, verdict: Verdict, measured: Measured | None) -> str:
    when = gate.when
    if measured is not None and when.rows is not None:
        return f"it changes {measured.rows} rows"
    if measured is not None and when.share is not None:
        return f"it changes {(measured.share or 0):.0%} of a table"
    if when.class_ is not None and when.class_ not in verdict.classes:
        return f"it changes rows of a table with the class `{when.class_}`"
    if when.confidence is not None:
        return _HOW_SURE
    if when.days is not None or when.hours is not None:
        return "of the time of day"
    return "a statement of this kind needs an approval"
