"""
COPY … FROM STDIN by a task: what the doors of both protocols have in common.

The data is PostgreSQL's to read and goes straight through (`session`). Around the statement stand, in its transaction,
what stands around every write, and for a table with row-level security what brings the rows there
(`rewrite.copy_in`). It can't be run twice, because the data is gone: so it takes no idempotency key, waits for no
approval, and what only a preview could let pass is refused.
"""

from collections.abc import Callable

from sqlguard.plan import Decision
from sqlguard.policy.late import Ruling
from sqlguard.policy.verdict import Effect
from sqlguard.rewrite.copy_in import NAME
from sqlguard.statement.model import Kind
from sqlguard.wire.reports import fields_of, with_fields

_HINT = b"copy fewer rows at a time"


def is_copy(decision: Decision) -> bool:
    return decision.kind is Kind.COPY_IN


def ruled(ruling: Ruling | None, key: str | None) -> Ruling | None:
    """Return what is to be done with a COPY, which can't be done again later."""
    if key:
        return Ruling(
            Effect.REFUSE, ("COPY takes no idempotency key, because its data is no part of the statement",)
        )
    if ruling is not None and ruling.effect is Effect.APPROVE:
        return Ruling(
            Effect.REFUSE, (*ruling.reasons, "and COPY can't wait for an approval: INSERT the rows")
        )
    return ruling


def error_of(decision: Decision) -> Callable[[bytes], bytes] | None:
    """Return how an error of the server's is told to the client, None: as it is."""
    if not is_copy(decision):
        return None
    table = decision.statement.writes[0].table.name.encode() if decision.statement.writes else b""

    def told(report: bytes) -> bytes:
        changes: dict[bytes, bytes | None] = {}
        fields = fields_of(report)
        ours = b"COPY " + NAME.encode()
        if fields.get(b"W", b"").startswith(ours):
            changes[b"W"] = b"COPY " + table + fields[b"W"][len(ours) :]
        if b"have a preview approved" in fields.get(b"H", b""):
            changes[b"H"] = _HINT
        return with_fields(report, changes) if changes else report

    return told
