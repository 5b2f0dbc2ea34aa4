"""The verdict on a statement: an effect with the findings that made it; the strongest finding wins."""

from dataclasses import dataclass
from enum import IntEnum

from sqlguard.policy.model import Gate


class Effect(IntEnum):
    """allow < rewrite < approve < refuse; the strongest wins (as Cedar's forbid overrides permit)."""

    ALLOW = 0
    REWRITE = 1
    APPROVE = 2
    REFUSE = 3

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """
    What one rule says about one statement.

    `message` says what is wrong with the statement and `hint` what would pass, for the agent; `rule` is for
    the journal and for people only. `sqlstate` is SG002 unless the rule says otherwise.
    """

    rule: str
    effect: Effect
    message: str
    hint: str | None = None
    detail: str | None = None
    sqlstate: str = "SG002"


@dataclass(frozen=True, slots=True)
class Verdict:
    effect: Effect
    findings: tuple[Finding, ...] = ()
    tier: str = "reversible"
    #: Compliance classes of the tables written.
    classes: tuple[str, ...] = ()
    #: Gates of which one may still match, in order: they ask for what is known when it is run (`policy.late`).
    gates: tuple[Gate, ...] = ()
    #: How many people have to approve, where one has to.
    approvals: int = 1

    @property
    def decisive(self) -> Finding | None:
        """The finding that determined the effect."""
        return next((f for f in self.findings if f.effect is self.effect), None)

    @property
    def rules(self) -> tuple[str, ...]:
        return tuple(f.rule for f in self.findings)
