"""
What is going to be run for one statement, and what came of it.

Only `sqlguard.gate` makes a Decision, so holding one proves that a verdict was given.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sqlguard.policy.verdict import Effect, Verdict
from sqlguard.statement.model import Kind, Statement
from sqlguard.steps import Answer


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
        }
