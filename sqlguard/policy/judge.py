"""
Statement + Session + Context -> Verdict: every rule for the kind is asked, the strongest finding wins.

Fail closed: no rule speaking is a refusal, a rule that raises is a refusal. The rules are those of the registry;
`sqlguard.policy` sees to it that they are there.
"""

from sqlguard.errors import SqlguardError
from sqlguard.policy import tiers
from sqlguard.policy.context import Context
from sqlguard.policy.model import Gate
from sqlguard.policy.registry import BY_KIND, Rule
from sqlguard.policy.verdict import Effect, Finding, Verdict
from sqlguard.statement.model import Kind, Session, Statement

#: These carry another statement out, now or later: what is inside is decided too.
_CARRIERS = frozenset(
    {Kind.EXPLAIN, Kind.PREPARE, Kind.EXECUTE, Kind.DECLARE, Kind.COPY_OUT, Kind.CREATE_TEMP}
)


def decide(statement: Statement, session: Session, context: Context) -> Verdict:
    """Return the verdict on *statement*; never raises."""
    findings: list[Finding] = []
    for rule in BY_KIND[statement.kind]:
        findings.extend(_ask(rule, statement, session, context))
    if statement.inner is not None and statement.kind in _CARRIERS:
        findings.extend(_inside(statement, decide(statement.inner, session, context)))
    if not findings:
        findings.append(
            Finding(
                "unknown-kind",
                Effect.REFUSE,
                "this kind of statement is not allowed here",
                "send a SELECT, INSERT, UPDATE or DELETE",
            )
        )
    tier, classes = (
        tiers.of(statement, context) if statement.writes or statement.calls else ("reversible", ())
    )
    effect = max(f.effect for f in findings)
    gates: tuple[Gate, ...] = ()
    if effect < Effect.REFUSE:
        try:
            gates = tiers.candidates(statement, context)
        except Exception as fault:
            findings.append(_failed("gates", fault))
    approvals = 1
    if gates and not tiers.is_late(gates[0].when, classes):
        findings.extend(tiers.finding(gates[0]))
        approvals, gates = gates[0].approvals, ()
    effect = max(f.effect for f in findings)
    return Verdict(effect, tuple(findings), tier, classes, gates, approvals)


def _inside(statement: Statement, inner: Verdict) -> list[Finding]:
    """Return the objections to the statement inside; an EXPLAIN that doesn't run it rewrites nothing."""
    least = (
        Effect.APPROVE
        if statement.kind is Kind.EXPLAIN and not statement.details.get("analyze")
        else Effect.REWRITE
    )
    return [f for f in inner.findings if f.effect >= least]


def _ask(rule: Rule, statement: Statement, session: Session, context: Context) -> list[Finding]:
    try:
        return list(rule.check(statement, session, context))
    except SqlguardError as fault:
        return [Finding(rule.id, Effect.REFUSE, fault.message, fault.hint, fault.detail, fault.sqlstate)]
    except Exception as fault:
        return [_failed(rule.id, fault)]


def _failed(rule: str, fault: Exception) -> Finding:
    return Finding(
        rule,
        Effect.REFUSE,
        "the statement could not be judged",
        "send a simpler statement",
        sqlstate="SG007",
        detail=None if isinstance(fault, RecursionError) else type(fault).__name__,
    )
