"""
The rules by id, and which of them look at which kind of statement.

A rule is a function of (statement, session, context) that yields findings. It speaks for a statement by
allowing it or by objecting; a statement that no rule speaks for is refused. Its docstring is its page:
`## Why`, `## Finds`, `## Ignores`, `## Misses`; the statements there are tested.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sqlguard.policy.context import Context
from sqlguard.policy.verdict import Finding
from sqlguard.statement.model import Kind, Session, Statement

Check = Callable[[Statement, Session, Context], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class Rule:
    id: str
    check: Check
    kinds: frozenset[Kind]

    @property
    def page(self) -> str:
        return self.check.__doc__ or ""


RULES: dict[str, Rule] = {}
BY_KIND: dict[Kind, list[Rule]] = {kind: [] for kind in Kind}

#: Kinds that can read, write or call something.
QUERIES = frozenset(
    {
        Kind.SELECT,
        Kind.VALUES,
        Kind.INSERT,
        Kind.UPDATE,
        Kind.DELETE,
        Kind.MERGE,
        Kind.COPY_OUT,
        Kind.COPY_IN,
        Kind.EXPLAIN,
        Kind.PREPARE,
        Kind.EXECUTE,
        Kind.DECLARE,
        Kind.CREATE_TEMP,
        Kind.CALL,
    }
)


def rule(id: str, kinds: Iterable[Kind]) -> Callable[[Check], Check]:
    """Register a rule for statements of *kinds*."""

    def register(check: Check) -> Check:
        made = Rule(id, check, frozenset(kinds))
        RULES[id] = made
        for kind in made.kinds:
            BY_KIND[kind].append(made)
        return check

    return register
