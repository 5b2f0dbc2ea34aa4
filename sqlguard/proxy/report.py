"""What the proxy adds around a write: the settings before it, and the report of a dry run after it."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlguard.plan import Decision, changed_rows
from sqlguard.plan_told import told, with_differences
from sqlguard.proxy import copies
from sqlguard.wire.messages import DataRow
from sqlguard.wire.replies import Expect, Part, Reply
from sqlguard.wire.reports import fields_of, notice_response

#: The first SET is possible because nothing has run yet: the session's default is read only.
WRITABLE = "SET transaction_read_only = off"
_HEADER_BYTES = 5


def claim(action: int) -> str:
    """Return what tells the capture triggers which action the next changes belong to."""
    return f"SET LOCAL sqlguard.action = '{action:d}'"


_CHANGES = (
    "SELECT pg_catalog.json_build_object('table', c.schema_name || '.' || c.table_name, 'op', c.op,"
    " 'rows', pg_catalog.sum(c.rows)::bigint)"
    " FROM sqlguard.transaction_changes() WITH ORDINALITY"
    " AS c (action_id, schema_name, table_name, op, rows, n) WHERE {only}"
    " GROUP BY c.schema_name, c.table_name, c.op ORDER BY pg_catalog.min(c.n)"
)


def changes(action: int | None = None) -> str:
    """Return the query for what the transaction (or one action of it) changed: one JSON document per line."""
    return _CHANGES.format(only="true" if action is None else f"c.action_id = {action:d}")


def first_columns(captured: list[bytes]) -> list[bytes | None]:
    """Return the first column of each DataRow message."""
    return [DataRow.decode(row[_HEADER_BYTES:]).values[0] for row in captured]


def affected(captured: list[bytes], encoding: str) -> list[dict[str, Any]]:
    """Read the rows that `changes` gave."""
    return [json.loads(column.decode(encoding)) for column in first_columns(captured) if column is not None]


def dry_run_notice(captured: list[bytes], action: int | None, encoding: str) -> bytes:
    """Return the NOTICE that reports a dry run: a line for people, the same as JSON in its DETAIL."""
    found = affected(captured, encoding)
    total = sum(change["rows"] for change in found)
    told = ", ".join(f"{c['rows']} {c['op']} in {c['table']}" for c in found) or "no rows"
    document = json.dumps({"action": action, "affected_rows": total, "affected": found})
    return notice_response(
        "NOTICE", "00000", f"dry run, rolled back: {told}", detail=document, encoding=encoding
    )


def plan_notice(report: Mapping[str, Any], action: int | None, plan: int | None, encoding: str) -> bytes:
    """Return the NOTICE that reports a dry run whose plan was kept."""
    kept = "" if plan is None else f"; plan {plan}"
    found = {"action": action, "plan": plan, "affected_rows": changed_rows(report)}
    document = json.dumps({**found, **with_differences(report)})
    text = f"dry run, rolled back: {told(report)}{kept}"
    return notice_response("NOTICE", "00000", text, detail=document, encoding=encoding)


def behind(before: list[str], decision: Decision) -> Callable[[int], int | None]:
    """Map an error position in the message that was sent to the client's own text."""
    shift = sum(len(text) + len("; ") for text in before)

    def position(place: int) -> int | None:
        own = place - shift
        if own < 1:
            return None
        return decision.position(own) if decision.position else own

    return position


def around(  # noqa: PLR0913 (a statement, what stands around it, and what becomes of its answers)
    decision: Decision,
    before: Sequence[str],
    part: Part,
    after: Sequence[tuple[str, Part]] = (),
    *,
    keep_ready: bool = True,
    position: Callable[[int], int | None] | None = None,
    error: Callable[[bytes], bytes] | None = None,
) -> tuple[str, Expect]:
    """
    Return one message of *decision*'s statement among statements of ours, and what is expected of it.

    What belongs to the statement itself stands next to it; its CommandComplete waits for that.
    """
    first = [*before, *decision.before]
    last = [*((text, Part.SWALLOW) for text in decision.after), *after]
    expect = Expect(
        Reply.QUERY,
        parts=(
            *(Part.SWALLOW for _ in first),
            Part.HOLD if decision.after and part is Part.PASS else part,
            *(p for _, p in last),
        ),
        tags=(*(None for _ in first), decision.tag),
        position=position or behind(first, decision),
        keep_ready=keep_ready,
        error=error or copies.error_of(decision),
    )
    text = "; ".join([*first, decision.text])
    return text + ("\n;" + "; ".join(text for text, _ in last) if last else ""), expect


def nowhere(_: int) -> None:
    """Drop the position of an error: it would point into a text that the client has not sent."""


def sqlstate(failed: bytes) -> str:
    """Return the code of an ErrorResponse; that of a statement that was skipped is empty."""
    return fields_of(failed).get(b"C", b"").decode("ascii", "replace") if failed else ""


def can_be_approved(failed: bytes) -> bool:
    """Say whether an ErrorResponse is that of a cap which the policy lets approved plans go over."""
    fields = fields_of(failed) if failed else {}
    return fields.get(b"C") == b"SG006" and b"have a preview approved" in fields.get(b"H", b"")
