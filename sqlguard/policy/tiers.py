"""
Tier and compliance classes of a statement, and the policy's gates as far as they can be decided beforehand.

The tier belongs to the statement and the policy, never to the agent's claim (DESIGN 3.5). Gates that ask for the
time, the agent's confidence, or the rows or share that were measured are decided when those are known (`holds`); the
first gate that matches decides, whichever kind it is.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal, InvalidOperation
from zoneinfo import ZoneInfo

from sqlguard.catalog import Catalog, Table
from sqlguard.policy import calls
from sqlguard.policy.context import Context
from sqlguard.policy.guards import guard_of
from sqlguard.policy.model import Gate, When
from sqlguard.policy.verdict import Effect, Finding
from sqlguard.statement.model import Kind, Statement, Write

#: What a foreign key may do to the rows that refer to a changed one.
_MOVES = frozenset("cnd")

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


def candidates(statement: Statement, context: Context) -> tuple[Gate, ...]:
    """Return the gates that may match, in the policy's order, up to the first that is sure to."""
    if not context.policy.gates or not (
        statement.writes or any(calls.is_listed(call, context) for call in statement.calls)
    ):
        return ()
    tier, classes = of(statement, context)
    tables = [f"{w.table.schema}.{w.table.name}" for w in statement.writes]
    found: list[Gate] = []
    for gate in context.policy.gates:
        if not matches(gate.when, tier=tier, kind=_kind(statement), tables=tables):
            continue
        if gate.when.class_ is None or gate.when.class_ in classes or _reaches(statement, context):
            found.append(gate)
            if not is_late(gate.when, classes):
                break
    return tuple(found)


def _reaches(statement: Statement, context: Context) -> bool:
    """Whether it may change tables that it does not name: by foreign keys, triggers or functions."""
    if any(call.candidates for call in statement.calls):
        return True
    return any(
        any(not trigger.ours for trigger in table.triggers)
        or any({key.on_delete, key.on_update} & _MOVES for key in context.catalog.references_to(table.oid))
        for write in statement.writes
        for table in _family(write.table.oid, context.catalog)
    )


def _family(oid: int, catalog: Catalog) -> Iterator[Table]:
    """Yield a table with what its rows are stored in, and what it is a part of."""
    table = catalog.tables.get(oid)
    if table is None:
        return
    yield from (catalog.tables[parent] for parent in table.parents if parent in catalog.tables)
    yield table
    yield from catalog.descendants(oid)


def _kind(statement: Statement) -> str:
    """A COPY is a long INSERT: what holds for the one holds for the other."""
    kind: str = (Kind.INSERT if statement.kind is Kind.COPY_IN else statement.kind).value
    return kind


def is_late(when: When, classes: Iterable[str]) -> bool:
    """Whether it takes more than statement and policy to decide over *when*; *classes* are the statement's."""
    if when.class_ is not None and when.class_ not in classes:
        return True
    return any(v is not None for v in (when.rows, when.share, when.confidence, when.days, when.hours))


def finding(gate: Gate) -> Iterator[Finding]:
    """Yield what *gate* says of a statement that it matches, if it says anything."""
    if gate.then == "approve":
        yield Finding("gate", Effect.APPROVE, "a statement of this kind needs an approval")
    elif gate.then == "refuse":
        yield Finding(
            "gate",
            Effect.REFUSE,
            "a statement of this kind is not allowed for this task",
            "leave it out, or ask the operator whether the policy should allow it",
        )


def matches(when: When, *, tier: str, kind: str, tables: Iterable[str]) -> bool:
    """Whether every key that *when* names and that is known beforehand holds; a class may be reached later."""
    tiers = (when.tier,) if isinstance(when.tier, str) else when.tier
    return (
        (tiers is None or tier in tiers)
        and (when.kind is None or when.kind == kind)
        and (when.table is None or when.table in tables)
    )


@dataclass(frozen=True, slots=True)
class Facts:
    """
    What is known when a statement is run: `rows`, `share` and `reached` (classes) only once it has been.

    A confidence that was not said is none: leaving it out must not open a gate.
    """

    now: datetime
    confidence: float | None = None
    rows: int | None = None
    share: float | None = None
    #: Of the tables that the statement names.
    classes: tuple[str, ...] = ()
    #: Of all tables that it changed.
    reached: tuple[str, ...] | None = None


def holds(when: When, facts: Facts) -> bool | None:
    """Whether the late keys of *when* hold; None if that shows only after the run."""
    if when.confidence is not None and not compare(when.confidence, facts.confidence or 0.0):
        return False
    if not _in_time(when, facts.now):
        return False
    is_reached = _has_class(when, facts)
    if not is_reached:
        return is_reached
    for condition, value in ((when.rows, facts.rows), (when.share, facts.share)):
        if condition is not None and value is None:
            return None
        if condition is not None and value is not None and not compare(condition, value):
            return False
    return True


def _has_class(when: When, facts: Facts) -> bool | None:
    if when.class_ is None or when.class_ in facts.classes:
        return True
    return None if facts.reached is None else when.class_ in facts.reached


_WEEK = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


def _in_time(when: When, now: datetime) -> bool:
    if when.days is None and when.hours is None:
        return True
    local = now.astimezone(ZoneInfo(when.timezone))
    if when.days is not None and not any(_on(part, local.weekday()) for part in when.days.split(",")):
        return False
    if when.hours is None:
        return True
    begin, _, end = when.hours.partition("-")
    at = f"{local:%H:%M}"
    # One that ends before it begins goes over midnight.
    return begin <= at < end if begin < end else at >= begin or at < end


def _on(part: str, day: int) -> bool:
    first, _, last = part.partition("-")
    begin, end = _WEEK.index(first), _WEEK.index(last or first)
    return begin <= day <= end if begin <= end else day >= begin or day <= end


def compare(condition: str, value: float) -> bool:
    """Whether *value* meets `>10`, `<=0.5` or `3`."""
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
