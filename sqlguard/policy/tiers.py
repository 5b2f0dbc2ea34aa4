"""
Tier and compliance classes of a statement, and the policy's gates as far as they can be decided beforehand.

The tier belongs to the statement and the policy, never to the agent's claim (DESIGN 3.5). Gates that ask for
measured rows, a share or the agent's confidence are decided when those are known: `matching` takes them.
"""

from collections.abc import Iterable, Iterator
from decimal import Decimal, InvalidOperation

from sqlguard.catalog import Table
from sqlguard.policy import calls
from sqlguard.policy.context import Context
from sqlguard.policy.guards import guard_of
from sqlguard.policy.model import Gate, When
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.statement.model import Statement, Write

ORDER = ("reversible", "costly", "compensable", "irreversible")


def of(statement: Statement, context: Context) -> tuple[str, tuple[str, ...]]:
    """Return the tier and the compliance classes of the tables written."""
    tiers = ["reversible"]
    classes: dict[str, None] = {}
    for write in statement.writes:
        if write.op == "call" or write.table.temporary:
            continue
        rule = context.policy.table_rule(write.table.schema or "", write.table.name)
        classes.update(dict.fromkeys(rule.class_ if rule else ()))
        table = context.catalog.tables.get(write.table.oid)
        if table is not None:
            tiers.append(_tier(write, table, context))
    tiers += [calls.tier(call, context) for call in statement.calls if call.candidates]
    return max(tiers, key=ORDER.index), tuple(classes)


def _tier(write: Write, table: Table, context: Context) -> str:
    if guard_of(table, context.catalog) is None:
        # Nothing keeps the rows as they were; what was inserted can at least be deleted.
        return "compensable" if write.op == "insert" else "irreversible"
    # Undo brings the rows back, not what the application's triggers did elsewhere.
    return "reversible" if all(t.ours for t in table.triggers) else "costly"


def gates(statement: Statement, context: Context) -> Iterator[Finding]:
    """Yield the finding of the first gate that matches, as far as that is known before the statement runs."""
    if not context.policy.gates or not (statement.writes or statement.calls):
        return
    tier, classes = of(statement, context)
    tables = [f"{w.table.schema}.{w.table.name}" for w in statement.writes]
    for gate in context.policy.gates:
        when = gate.when
        if when.rows is not None or when.share is not None or when.confidence is not None:
            continue
        if matches(when, tier=tier, classes=classes, kind=statement.kind.value, tables=tables):
            yield from _finding(gate)
            return


def _finding(gate: Gate) -> Iterator[Finding]:
    if gate.then == "approve":
        yield Finding("gate", Effect.APPROVE, "a statement of this kind needs an approval")
    elif gate.then == "refuse":
        yield Finding("gate", Effect.REFUSE, "a statement of this kind is not allowed for this task")


def matching(  # noqa: PLR0913  one argument per key of `when`
    found: Iterable[Gate],
    *,
    tier: str,
    classes: Iterable[str],
    kind: str,
    tables: Iterable[str],
    rows: int | None = None,
    share: float | None = None,
    confidence: float | None = None,
) -> Gate | None:
    """Return the first gate that matches what is known now; one that asks for something unknown does not."""
    tables, classes = list(tables), list(classes)
    for gate in found:
        if matches(
            gate.when,
            tier=tier,
            classes=classes,
            kind=kind,
            tables=tables,
            rows=rows,
            share=share,
            confidence=confidence,
        ):
            return gate
    return None


def matches(  # noqa: PLR0913  one argument per key of `when`
    when: When,
    *,
    tier: str,
    classes: Iterable[str],
    kind: str,
    tables: Iterable[str],
    rows: float | None = None,
    share: float | None = None,
    confidence: float | None = None,
) -> bool:
    """Whether every key that *when* names holds."""
    tiers = (when.tier,) if isinstance(when.tier, str) else when.tier
    return (
        (tiers is None or tier in tiers)
        and (when.class_ is None or when.class_ in classes)
        and (when.kind is None or when.kind == kind)
        and (when.table is None or when.table in tables)
        and (when.rows is None or _compare(when.rows, rows))
        and (when.share is None or _compare(when.share, share))
        and (when.confidence is None or _compare(when.confidence, confidence))
    )


def _compare(condition: str, value: float | None) -> bool:
    """Whether *value* meets `>10`, `<=0.5` or `3`."""
    if value is None:
        return False
    text = condition.strip()
    operator = text[: len(text) - len(text.lstrip("<>=!"))]
    try:
        bound, given = Decimal(text[len(operator) :].strip()), Decimal(str(value))
    except InvalidOperation:
        return False
    return {
        ">": given > bound,
        ">=": given >= bound,
        "<": given < bound,
        "<=": given <= bound,
        "": given == bound,
        "=": given == bound,
        "==": given == bound,
        "!=": given != bound,
        "<>": given != bound,
    }.get(operator, False)
