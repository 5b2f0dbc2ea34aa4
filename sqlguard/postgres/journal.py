"""
The journal in the database: write intents and events, list and show actions, verify the chains.

An intent counts only when it is committed: call `record_intent` on a connection that is in no transaction
(autocommit), before the statement is sent, and run nothing when it raises.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import datetime
from itertools import groupby
from typing import Any

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from sqlguard import errors
from sqlguard.journal import Fault, Head, Intent, Link, faults

_ERRORS: dict[str, type[errors.SqlguardError]] = {
    e.sqlstate: e
    for e in (
        errors.ApprovalRequired,
        errors.Refused,
        errors.Drift,
        errors.TaskEnded,
        errors.Frozen,
        errors.CapExceeded,
        errors.NotUnderstood,
        errors.UndoConflict,
    )
}
#: Entries read from the server at a time while chains are verified.
_BATCH = 2000

# What an action came to: what the events say, and where they are silent, the row changes themselves.
_ACTIONS = sql.SQL("""
    SELECT a.id, a.task_id, a.role, a.at, a.agent, a.agent_version, a.policy, a.policy_version,
           a.idempotency_key, a.reason, a.confidence, a.step, a.kind, a.tier, a.verdict, a.sqlstate, a.rules,
           a.tables, a.statement, a.executed, a.params, a.compensation, a.via, a.backend_pid, a.client_addr,
           CASE WHEN e.kind = 'reconciled' THEN coalesce(e.detail ->> 'outcome', 'reconciled')
                WHEN e.kind = 'undone' AND e.detail ? 'redo' THEN 'committed'
                WHEN e.kind = 'undone' AND (e.detail ->> 'skipped')::bigint > 0 THEN 'partly_undone'
                WHEN e.kind = 'failed' AND NOT e.detail ? 'sqlstate' AND e.detail ->> 'reason' LIKE 'rolled back%%'
                    THEN 'rolled_back'
                WHEN e.kind IS NOT NULL AND e.kind <> 'started' THEN e.kind
                WHEN a.verdict NOT IN ('allow', 'rewrite') AND c.sets = 0 THEN 'refused'
                WHEN c.sets > 0 THEN 'committed'
                ELSE 'unsettled' END AS outcome,
           c.rows
    FROM sqlguard.action a
    LEFT JOIN LATERAL (
        SELECT e.kind, e.detail FROM sqlguard.event e WHERE e.action_id = a.id ORDER BY e.id DESC LIMIT 1
    ) e ON true
    CROSS JOIN LATERAL (
        SELECT count(*) AS sets, coalesce(sum(c.rows), 0)::bigint AS rows
        FROM sqlguard.change_set c WHERE c.action_id = a.id
    ) c
""")
#: What `list_actions` and an export choose by.
FILTER = sql.SQL("""
    WHERE (%(task)s::text IS NULL OR a.task_id = %(task)s)
      AND (%(agent)s::text IS NULL OR a.agent = %(agent)s)
      AND (%(since)s::timestamptz IS NULL OR a.at >= %(since)s)
      AND (%(until)s::timestamptz IS NULL OR a.at < %(until)s)
      AND (%(row)s::text[] IS NULL
           OR EXISTS (SELECT FROM sqlguard.change_set s CROSS JOIN LATERAL sqlguard.row_changes(s.id) r
                      WHERE s.action_id = a.id AND %(row)s::text[] IN (r.key, r.new_key)
                        AND %(table)s IN (s.table_name, s.schema_name || '.' || s.table_name)))
      AND (%(table)s::text IS NULL
           OR EXISTS (SELECT FROM unnest(a.tables) AS n (name)
                      WHERE n.name = %(table)s OR right(n.name, length(%(table)s) + 1) = '.' || %(table)s)
           OR EXISTS (SELECT FROM sqlguard.change_set s
                      WHERE s.action_id = a.id
                        AND %(table)s IN (s.table_name, s.schema_name || '.' || s.table_name)))
""")
_INTENT = "SELECT sqlguard.record_intent(%s)"
_LIGHT = "SELECT sqlguard.record_intent(%s), pg_catalog.set_config('synchronous_commit', 'off', true)"
_LIST = _ACTIONS + FILTER + sql.SQL(" ORDER BY a.id DESC LIMIT %(limit)s")
_CHANGES = """
    SELECT c.id, c.schema_name || '.' || c.table_name AS "table", c.op, c.rows, c.at, c.txid::text AS txid,
           n.rows = c.rows AS undone, n.rows AS undone_rows
    FROM sqlguard.change_set c
    LEFT JOIN LATERAL (
        SELECT max(u.undo_id) AS undo_id FROM sqlguard.undone u WHERE u.change_set_id = c.id
    ) u ON true
    CROSS JOIN LATERAL (
        SELECT CASE WHEN u.undo_id IS NULL THEN 0 ELSE c.rows - (
            SELECT count(*) FROM sqlguard.undo_skipped s WHERE s.change_set_id = c.id AND s.undo_id = u.undo_id)
        END AS rows
    ) n
    WHERE c.action_id = %s ORDER BY c.id
"""


@dataclass(frozen=True, slots=True)
class ActionRow:
    """One action: the table's fields, what it came to (`outcome`) and how many rows it changed."""

    id: int
    task_id: str
    role: str
    at: datetime
    agent: str
    agent_version: str | None
    policy: str
    policy_version: int
    idempotency_key: str | None
    reason: str | None
    confidence: float | None
    step: str | None
    kind: str | None
    tier: str | None
    verdict: str | None
    sqlstate: str | None
    rules: list[str]
    tables: list[str]
    statement: str | None
    executed: str | None
    #: A list for statements, a document for calls of tools.
    params: Any
    compensation: str | None
    via: str | None
    backend_pid: int | None
    client_addr: str | None
    outcome: str
    rows: int

    def as_dict(self) -> dict[str, Any]:
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        found["at"] = self.at.isoformat()
        return found


@dataclass(frozen=True, slots=True)
class ActionDetail:
    action: ActionRow
    events: tuple[dict[str, Any], ...]
    changes: tuple[dict[str, Any], ...]

    def as_dict(self) -> dict[str, Any]:
        return {**self.action.as_dict(), "events": list(self.events), "changes": list(self.changes)}


@dataclass(frozen=True, slots=True)
class VerifyReport:
    tasks: int
    entries: int
    faults: tuple[Fault, ...]

    @property
    def ok(self) -> bool:
        return not self.faults

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "tasks": self.tasks,
            "entries": self.entries,
            "faults": [f.as_dict() for f in self.faults],
        }


@contextmanager
def translated() -> Iterator[None]:
    """Turn what the functions of the schema `sqlguard` raise (SG…) into the errors of `sqlguard.errors`."""
    try:
        yield
    except psycopg.Error as fault:
        kind = _ERRORS.get(fault.sqlstate or "")
        if kind is None:
            raise
        raise kind(
            fault.diag.message_primary or str(fault),
            detail=fault.diag.message_detail,
            hint=fault.diag.message_hint,
        ) from None


def record_intent(conn: psycopg.Connection[Any], intent: Intent) -> int:
    """Commit *intent* and return the action's id; when it raises (TaskEnded, Frozen, …) nothing may run."""
    # What is rolled back anyway, and can do nothing but change rows, need not wait for the disk.
    is_idle = conn.autocommit and conn.info.transaction_status == TransactionStatus.IDLE
    text = _LIGHT if is_idle and intent.via == "preview" and intent.tier == "reversible" else _INTENT
    return int(_call(conn, text, [Jsonb(intent.as_record())]))


def record_group(
    conn: psycopg.Connection[Any],
    intents: Sequence[Intent],
    events: Sequence[tuple[int, str, Mapping[str, Any]]],
) -> list[int]:
    """
    Commit *events* (action, kind, detail) and *intents* together, all or none; return the intents' ids.

    Without intents the commit does not wait for the disk: what an event says can be told from the row changes.
    """
    records, ends = group_values(intents, events)
    return list(
        _call(conn, "SELECT sqlguard.record_group(%s::jsonb, %s::jsonb)", [records.decode(), ends.decode()])
    )


#: The same for who sends it himself, with `group_values`; `group_ids` reads what it answers.
GROUP = b"SELECT sqlguard.record_group($1::jsonb, $2::jsonb)"


def group_values(
    intents: Sequence[Intent], events: Sequence[tuple[int, str, Mapping[str, Any]]]
) -> tuple[bytes, bytes]:
    records = [i.as_record() for i in intents]
    ends = [{"action": action, "kind": kind, "detail": dict(detail)} for action, kind, detail in events]
    return json.dumps(records).encode("ascii"), json.dumps(ends).encode("ascii")


def group_ids(answer: bytes | None) -> list[int]:
    return [int(number) for number in (answer or b"{}")[1:-1].split(b",") if number]


def record_event(
    conn: psycopg.Connection[Any], action: int, kind: str, detail: Mapping[str, Any] | None = None
) -> int:
    """Write what became of *action*; *kind* as in `sqlguard.journal.EVENT_KINDS`."""
    return int(
        _call(conn, "SELECT sqlguard.record_event(%s, %s, %s)", [action, kind, Jsonb(dict(detail or {}))])
    )


def list_actions(  # noqa: PLR0913 (one argument per filter)
    conn: psycopg.Connection[Any],
    *,
    task: str | None = None,
    agent: str | None = None,
    table: str | None = None,
    row: Sequence[str] | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    limit: int = 100,
) -> list[ActionRow]:
    """
    Return the newest *limit* actions that fit, oldest first; *table* with or without its schema.

    *row* is a key of *table*, one text per column: the actions that changed that row.
    """
    wanted = filters(task=task, agent=agent, table=table, row=row, since=since, until=until)
    wanted["limit"] = limit
    with conn.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(_LIST, wanted).fetchall()
    return [ActionRow(**row) for row in reversed(rows)]


def filters(  # noqa: PLR0913 (one argument per filter)
    *,
    task: str | None = None,
    agent: str | None = None,
    table: str | None = None,
    row: Sequence[str] | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> dict[str, Any]:
    """Return the values of FILTER; raises Refused for a row of no table."""
    if row and table is None:
        raise errors.Refused("a row is one of a table", hint="name the table as well")
    key = list(row) if row else None
    return {"task": task, "agent": agent, "table": table, "row": key, "since": since, "until": until}


def show_action(conn: psycopg.Connection[Any], action: int) -> ActionDetail:
    """Return *action* with its events and the rows it changed per table; raises Refused if there is none."""
    with conn.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute(_ACTIONS + sql.SQL(" WHERE a.id = %s"), [action]).fetchone()
        if row is None:
            raise errors.Refused(f"there is no action {action}", hint="see `sqlguard journal list`")
        events = cursor.execute(
            "SELECT id, at, kind, detail, by FROM sqlguard.event WHERE action_id = %s ORDER BY id", [action]
        ).fetchall()
        changes = cursor.execute(_CHANGES, [action]).fetchall()
    return ActionDetail(ActionRow(**row), tuple(map(_jsonable, events)), tuple(map(_jsonable, changes)))


def verify(conn: psycopg.Connection[Any], task: str | None = None) -> VerifyReport:
    """
    Work out every hash of the chains again, of all tasks or of *task*, and report each break with its place.

    Reads in one snapshot and in batches, so the memory does not grow with the journal.
    """
    idle = conn.info.transaction_status == TransactionStatus.IDLE
    found: list[Fault] = []
    entries = 0
    with conn.transaction():
        if idle:
            conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        # The text of a float8 enters the hash.
        conn.execute("SET LOCAL extra_float_digits = 1")
        heads = _heads(conn, task)
        for chain in ("action", "event"):
            unseen = set(heads)
            for name, links in groupby(_links(conn, chain, task), key=lambda pair: pair[0]):
                unseen.discard(name)
                counter = _Counter(link for _, link in links)
                head = heads.get(name)
                found += faults(name, chain, counter, head[chain] if head else None)
                entries += counter.count
            for name in sorted(unseen):
                found += faults(name, chain, (), heads[name][chain])
    return VerifyReport(len(heads), entries, tuple(found))


class _Counter:
    """Counts what passes through, so that a chain is read only once."""

    def __init__(self, links: Iterator[Link]) -> None:
        self._links = links
        self.count = 0

    def __iter__(self) -> Iterator[Link]:
        for link in self._links:
            self.count += 1
            yield link


def _heads(conn: psycopg.Connection[Any], task: str | None) -> dict[str, dict[str, Head]]:
    rows = conn.execute(
        "SELECT task_id, actions, action_hash, action_first, events, event_hash, event_first"
        " FROM sqlguard.chain WHERE %(task)s::text IS NULL OR task_id = %(task)s",
        {"task": task},
    )
    return {r[0]: {"action": Head(r[1], r[2], r[3]), "event": Head(r[4], r[5], r[6])} for r in rows}


# One chain's entries. The last column is what is left of one after an erasure, as the task's events say; they are a
# chain of their own.
_LINKS = sql.SQL("""
    SELECT c.task_id, c.id, {values}(c), c.prev_hash, c.hash,
           (SELECT decode(x.detail ->> 'now', 'hex') FROM sqlguard.event x
            WHERE x.kind = 'erased' AND x.detail ->> 'chain' = {name}
                AND (x.detail ->> 'entry')::bigint = c.id AND x.task_id = c.task_id
                AND x.detail ->> 'was' = encode(c.hash, 'hex')
            ORDER BY x.id DESC LIMIT 1)
    FROM {chain} c
    WHERE %(task)s::text IS NULL OR c.task_id = %(task)s ORDER BY c.task_id, c.id
""")


def _links(conn: psycopg.Connection[Any], chain: str, task: str | None) -> Iterator[tuple[str, Link]]:
    with conn.cursor(name="sqlguard_verify") as cursor:
        cursor.itersize = _BATCH
        values = sql.Identifier("sqlguard", f"{chain}_values")
        query = _LINKS.format(values=values, name=chain, chain=sql.Identifier("sqlguard", chain))
        cursor.execute(query, {"task": task})
        for owner, number, values, previous, own, erased in cursor:
            yield owner, Link(number, tuple(values), previous, own, erased)


def _call(conn: psycopg.Connection[Any], text: str, values: list[Any]) -> Any:
    with translated():
        # A task's own session is read only by default, which its journal entries can't be.
        read_only = conn.info.parameter_status("default_transaction_read_only") == "on"
        if read_only and conn.info.transaction_status == TransactionStatus.IDLE:
            with conn.transaction():
                conn.execute("SET TRANSACTION READ WRITE")
                row = conn.execute(text, values).fetchone()
        else:
            row = conn.execute(text, values).fetchone()
    assert row is not None  # noqa: S101 (a SELECT without FROM has one row)
    return row[0]


def _jsonable(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.isoformat() if isinstance(v, datetime) else v for k, v in row.items()}
