"""
The journal's own arithmetic: what an entry holds, how entries are chained, what must never be written down.

The one idea: an entry is a list of texts, so its hash can be worked out anywhere. The hash of an entry is
sha256 over the previous entry's hash followed by the JSON array of the entry's fields, in the order of
`ACTION_FIELDS` or `EVENT_FIELDS`, each as text or null, encoded as UTF-8. `sqlguard.record_intent` makes
the same hash inside PostgreSQL; `sqlguard journal verify` makes it again here.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

#: The order in which an action's fields enter its hash. What is persisted stays: append, never reorder.
ACTION_FIELDS = (
    "id",
    "task_id",
    "role",
    "at",
    "agent",
    "agent_version",
    "policy",
    "policy_version",
    "idempotency_key",
    "reason",
    "confidence",
    "step",
    "kind",
    "tier",
    "verdict",
    "sqlstate",
    "rules",
    "tables",
    "statement",
    "executed",
    "params",
    "compensation",
    "via",
    "backend_pid",
)
EVENT_FIELDS = ("id", "action_id", "task_id", "at", "kind", "detail", "by")
EVENT_KINDS = frozenset({"previewed", "approved", "started", "committed", "failed", "undone", "reconciled"})
#: The previous hash of a chain's first entry.
GENESIS = b""


@dataclass(frozen=True, slots=True)
class Intent:
    """
    What is written down before a statement runs; the names are those of the table `sqlguard.action`.

    `task` may be None only on the task's own session; the task's agent, version and policy are always taken
    from the task itself, whatever is said here. `statement_hash` binds an idempotency key to one statement.
    """

    task: str | None = None
    role: str | None = None
    agent: str | None = None
    agent_version: str | None = None
    policy: str | None = None
    policy_version: int | None = None
    idempotency_key: str | None = None
    reason: str | None = None
    confidence: float | None = None
    step: str | None = None
    kind: str | None = None
    tier: str | None = None
    verdict: str = "allow"
    sqlstate: str | None = None
    rules: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    statement: str | None = None
    executed: str | None = None
    params: tuple[str | None, ...] | None = None
    compensation: str | None = None
    via: str | None = None
    backend_pid: int | None = None

    @property
    def statement_hash(self) -> str:
        """Tell whether a key is used for the very same thing again; taken before anything is redacted."""
        return statement_hash(self.statement or "", self.params)

    def as_record(self) -> dict[str, Any]:
        """Return the intent as the JSON that `sqlguard.record_intent` takes."""
        record: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        record["task_id"] = record.pop("task")
        record["statement_hash"] = self.statement_hash if self.idempotency_key else None
        return record


def statement_hash(statement: str, params: Sequence[str | None] | None) -> str:
    """Return a digest of a statement with its parameters (as text), for idempotency keys."""
    text = json.dumps([statement, None if params is None else list(params)], ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def chained(previous: bytes, values: Sequence[str | None]) -> bytes:
    """Return the hash of the entry with *values* (in the order of its FIELDS) that follows *previous*."""
    text = json.dumps(list(values), ensure_ascii=False, separators=(", ", ": "))
    return hashlib.sha256(previous + text.encode()).digest()


@dataclass(frozen=True, slots=True)
class Link:
    """One stored entry of a chain: its id, its values in the order of the FIELDS, and the stored hashes."""

    id: int
    values: tuple[str | None, ...]
    prev_hash: bytes | None
    hash: bytes | None


@dataclass(frozen=True, slots=True)
class Head:
    """How many entries a chain has, its last hash, and what its oldest kept entry follows."""

    entries: int
    last: bytes
    first: bytes = GENESIS


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a chain and where; `entry` is the id of the first entry that does not fit."""

    task: str
    chain: str
    entry: int | None
    problem: str

    def __str__(self) -> str:
        where = "its end" if self.entry is None else f"{self.chain} {self.entry}"
        return f"task `{self.task}` at {where}: {self.problem}"

    def as_dict(self) -> dict[str, object]:
        return {"task": self.task, "chain": self.chain, "entry": self.entry, "problem": self.problem}


def faults(task: str, chain: str, links: Iterable[Link], head: Head | None) -> list[Fault]:
    """
    Return every break of one chain, oldest first.

    An altered entry has a hash that is not its own; a removed, inserted or reordered one makes the entry
    after it point elsewhere; entries removed from the end are missed by the head.
    """
    found: list[Fault] = []
    previous = head.first if head else GENESIS
    count = 0
    for link in links:
        count += 1
        if link.prev_hash != previous:
            found.append(
                Fault(task, chain, link.id, "does not follow the entry before it: one was removed or moved")
            )
        if link.hash != chained(link.prev_hash or GENESIS, link.values):
            found.append(Fault(task, chain, link.id, "was changed after it was written"))
        previous = link.hash or GENESIS
    if head is None:
        if count:
            found.append(Fault(task, chain, None, "the record of the chain's end is missing"))
    elif (count, previous) != (head.entries, head.last):
        problem = f"has {count} entries where {head.entries} were written"
        if count == head.entries:
            problem = "does not end with the entry that was written last"
        found.append(Fault(task, chain, None, problem))
    return found
