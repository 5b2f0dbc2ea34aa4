"""What the proxy adds around a write: the settings before it, and the report of a dry run after it."""

import json
from typing import Any

from sqlguard.proxy import packets

#: One JSON document per table and operation that the current transaction changed.
CHANGES = (
    "SELECT json_build_object('table', schema_name || '.' || table_name, 'op', op, 'rows', sum(rows)::bigint)"
    " FROM sqlguard.transaction_changes() GROUP BY schema_name, table_name, op ORDER BY min(id)"
)


def prologue(action: int, *, own: bool) -> list[str]:
    """
    Return the statements that go before a write: *own* when it is in no block of the client's.

    The session's default is read only; the first SET is possible because nothing has run yet.
    """
    before = [f"SET LOCAL sqlguard.action = '{action:d}'; "]
    return ["SET transaction_read_only = off; ", *before] if own else before


def affected(captured: list[bytes]) -> list[dict[str, Any]]:
    """Read the rows that `CHANGES` gave."""
    return [json.loads(column) for row in captured if (column := packets.row(row)[0]) is not None]


def dry_run_notice(captured: list[bytes], action: int, encoding: str) -> bytes:
    """Return the NOTICE that reports a dry run: a line for people, the same as JSON in its DETAIL."""
    changes = affected(captured)
    total = sum(change["rows"] for change in changes)
    told = ", ".join(f"{c['rows']} {c['op']} in {c['table']}" for c in changes) or "no rows"
    document = json.dumps({"action": action, "affected_rows": total, "affected": changes})
    return packets.notice(f"dry run, rolled back: {told}", detail=document, encoding=encoding)
