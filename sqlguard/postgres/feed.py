"""
The journal for other systems: an export as JSON lines, and a feed that misses nothing and may repeat.

A feed is a row of `sqlguard.feed`: how far its reader has got. Numbers of entries rise along a task's chain, but
transactions commit in any order, so an entry may appear below one that was delivered. Numbers that were missed are
kept as gaps until no transaction is left that could still fill them. What was delivered is noted after the delivery,
so a reader that dies in between gets it again (at least once), and never too little.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from sqlguard.errors import NotConfigured
from sqlguard.postgres.connect import OWN_LOCKS
from sqlguard.postgres.journal import FILTER

CHANNEL = "sqlguard_journal"
#: Entries in one delivery, and actions read from the server at a time by an export.
_BATCH = 500
_EXPORT = sql.SQL("""
    SELECT to_jsonb(a) || jsonb_build_object(
               'hash', encode(a.hash, 'hex'), 'prev_hash', encode(a.prev_hash, 'hex'),
               'events', coalesce((
                   SELECT jsonb_agg(to_jsonb(e) || jsonb_build_object(
                              'hash', encode(e.hash, 'hex'), 'prev_hash', encode(e.prev_hash, 'hex')) ORDER BY e.id)
                   FROM sqlguard.event e WHERE e.action_id = a.id), '[]'),
               'changes', coalesce((
                   SELECT jsonb_agg(jsonb_build_object(
                              'id', c.id, 'table', c.schema_name || '.' || c.table_name, 'op', c.op, 'rows', c.rows,
                              'at', c.at, 'txid', c.txid::text, 'key_columns', c.key_columns) ORDER BY c.id)
                   FROM sqlguard.change_set c WHERE c.action_id = a.id), '[]')) AS document
    FROM sqlguard.action a
""")
_ROWS = """
    SELECT jsonb_build_object('change_set', c.id, 'action', c.action_id,
                              'table', c.schema_name || '.' || c.table_name, 'op', c.op, 'key_columns', c.key_columns,
                              'key', r.key, 'new_key', r.new_key, 'before', r.before,
                              'columns', (SELECT s.columns FROM sqlguard.shape s WHERE s.id = c.shape_id LIMIT 1)
           ) AS document
    FROM sqlguard.change_set c CROSS JOIN LATERAL sqlguard.row_changes(c.id) r
    WHERE c.action_id = ANY (%s) ORDER BY c.id, r.id
"""
_ENTRIES = {
    "action": """
        SELECT a.id, a.task_id, a.at, to_jsonb(a) - 'hash' - 'prev_hash' AS data, 'action' AS kind,
               false AS is_for_approvers
        FROM sqlguard.action a WHERE a.id > %(after)s OR a.id = ANY (%(gaps)s) ORDER BY a.id LIMIT %(limit)s""",
    "event": """
        SELECT e.id, e.task_id, e.at, e.kind, p.reasons IS NOT NULL AND p.reasons <> '{}' AS is_for_approvers,
               to_jsonb(e) - 'hash' - 'prev_hash' || CASE WHEN p.id IS NULL THEN '{}' ELSE (
                   SELECT jsonb_build_object('plan', jsonb_object_agg(d.key, d.value))
                   FROM jsonb_each(sqlguard.plan_document(p)) d WHERE d.key IN (
                       'plan', 'state', 'agent', 'purpose', 'statements', 'reasons', 'affected', 'affected_rows',
                       'unguarded', 'tier', 'classes', 'approvals_needed', 'approved_by', 'rejected_because',
                       'drift_of', 'expires_at')) END AS data
        FROM sqlguard.event e LEFT JOIN sqlguard.plan p
            ON e.kind IN ('planned', 'approved', 'rejected', 'revoked') AND p.id = (e.detail ->> 'plan')::bigint
        WHERE e.id > %(after)s OR e.id = ANY (%(gaps)s) ORDER BY e.id LIMIT %(limit)s""",
}
# Where a feed that begins now stands; numbers of the last thousand that are not there yet may still come.
_NOW = {
    kind: f"""
        SELECT t.top, coalesce((
            SELECT jsonb_agg(jsonb_build_array(n, pg_snapshot_xmax(pg_current_snapshot())::text::bigint))
            FROM generate_series(greatest(t.top - 1000, 1), t.top) n
            WHERE NOT EXISTS (SELECT FROM sqlguard.{kind} x WHERE x.id = n)), '[]')
        FROM (SELECT coalesce(max(id), 0) AS top FROM sqlguard.{kind}) t"""  # noqa: S608 (two names of ours)
    for kind in ("action", "event")
}


def export(
    conn: psycopg.Connection[Any], wanted: dict[str, Any], *, rows: bool = False
) -> Iterator[dict[str, Any]]:
    """
    Yield a document per action, oldest first, with its events and changes; *wanted* is of `journal.filters`.

    With *rows* each action is followed by the rows that it changed, with their before images. One snapshot, in
    batches, so memory does not grow with the journal.
    """
    idle = conn.info.transaction_status == TransactionStatus.IDLE
    with conn.transaction():
        if idle:
            conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        with conn.cursor(name="sqlguard_export") as cursor:
            cursor.itersize = _BATCH
            cursor.execute(_EXPORT + FILTER + sql.SQL(" ORDER BY a.id"), wanted)
            for (document,) in cursor:
                yield {"type": "action", **document}
                if rows and document["changes"]:
                    yield from _images(conn, document["id"])


def _images(conn: psycopg.Connection[Any], action: int) -> Iterator[dict[str, Any]]:
    with conn.cursor(name="sqlguard_export_rows") as cursor:
        cursor.itersize = _BATCH
        cursor.execute(_ROWS, [[action]])
        for (document,) in cursor:
            yield {"type": "row", **document}


@dataclass
class _Place:
    """How far one kind of entries was delivered, and the numbers below that may still come."""

    position: int
    gaps: dict[int, int] = field(default_factory=dict)

    def passed(self, ids: list[int], horizon: int, oldest: int) -> None:
        """Note that *ids* were delivered; *horizon* and *oldest* are the snapshot's next and oldest transaction."""
        self.gaps = {n: x for n, x in self.gaps.items() if n not in ids and x > oldest}
        for number in sorted(ids):
            if number > self.position:
                self.gaps |= dict.fromkeys(range(self.position + 1, number), horizon)
                self.position = number


class Feed:
    """
    One reader's place in the journal; two readers of one name wait for each other.

    With *approvals* it is told only of plans that need one, and of what people decided.
    """

    def __init__(
        self,
        conn: psycopg.Connection[Any],
        name: str,
        *,
        source: str | None = None,
        approvals: bool = False,
    ) -> None:
        self._conn = conn
        self._name = name
        self._approvals = approvals
        self._source = source or f"sqlguard/{conn.info.dbname}"

    def create(self, *, from_start: bool = False) -> bool:
        """Make the feed unless it is there; it begins now, or with the journal's oldest entry."""
        now = (
            {} if from_start else {kind: self._conn.execute(_NOW[kind].encode()).fetchone() for kind in _NOW}
        )
        places: list[Any] = [now.get(kind) or (0, []) for kind in ("action", "event")]
        made = self._conn.execute(
            "INSERT INTO sqlguard.feed (name, action_position, action_gaps, event_position, event_gaps)"
            " VALUES (%s, %s, %s, %s, %s) ON CONFLICT DO NOTHING",
            [self._name, places[0][0], Jsonb(places[0][1]), places[1][0], Jsonb(places[1][1])],
        )
        return made.rowcount == 1

    def drop(self) -> bool:
        return self._conn.execute("DELETE FROM sqlguard.feed WHERE name = %s", [self._name]).rowcount == 1

    def deliver(self, to: Callable[[list[dict[str, Any]]], None]) -> int:
        """
        Hand what is new to *to* as CloudEvents, and note that it was; return how many entries there were.

        What *to* raises leaves the place as it was. Raises NotConfigured when there is no such feed.
        """
        lock = [OWN_LOCKS, f"sqlguard feed {self._name}"]
        self._conn.execute("SELECT pg_advisory_lock(%s, hashtext(%s))", lock)
        try:
            found, places, row, number = self._read()
            if found:
                # Outside of any transaction: a receiver may take its time.
                to(sorted(found, key=lambda e: e["time"]))
            self._save(places, row)
        finally:
            self._conn.execute("SELECT pg_advisory_unlock(%s, hashtext(%s))", lock)
        return number

    def _read(self) -> tuple[list[dict[str, Any]], dict[str, _Place], dict[str, Any], int]:
        found: list[dict[str, Any]] = []
        number = 0
        places: dict[str, _Place] = {}
        with self._conn.transaction(), self._conn.cursor(row_factory=dict_row) as cursor:
            row = cursor.execute("SELECT * FROM sqlguard.feed WHERE name = %s", [self._name]).fetchone()
            if row is None:
                raise NotConfigured(
                    f"there is no feed `{self._name}`", hint=f"make it with `journal follow {self._name}`"
                )
            for kind, query in _ENTRIES.items():
                gaps = {int(n): int(x) for n, x in row[f"{kind}_gaps"]}
                place = places[kind] = _Place(row[f"{kind}_position"], gaps)
                # Whoever ended before the entries are read is seen; whoever takes a number while they are read
                # has begun before the last look.
                oldest = self._number("pg_snapshot_xmin")
                given = {"after": place.position, "gaps": list(gaps), "limit": _BATCH}
                entries = cursor.execute(query.encode(), given).fetchall()
                place.passed([e["id"] for e in entries], self._number("pg_snapshot_xmax"), oldest)
                number += len(entries)
                found += [
                    self._cloud_event(kind, e)
                    for e in entries
                    if e["is_for_approvers"] or not self._approvals
                ]
        return found, places, row, number

    def _number(self, function: str) -> int:
        row = self._conn.execute(
            sql.SQL("SELECT {}(pg_current_snapshot())::text").format(sql.Identifier(function))
        ).fetchone()
        assert row is not None  # noqa: S101 (a SELECT without FROM has one row)
        return int(row[0])

    def _save(self, places: dict[str, _Place], row: dict[str, Any]) -> None:
        action, event = places["action"], places["event"]
        values = [
            action.position,
            [[n, x] for n, x in action.gaps.items()],
            event.position,
            [[n, x] for n, x in event.gaps.items()],
        ]
        before = [row[f"{k}_{w}"] for k in ("action", "event") for w in ("position", "gaps")]
        if values != before:
            self._conn.execute(
                "UPDATE sqlguard.feed SET action_position = %s, action_gaps = %s, event_position = %s,"
                " event_gaps = %s, delivered_at = clock_timestamp() WHERE name = %s",
                [values[0], Jsonb(values[1]), values[2], Jsonb(values[3]), self._name],
            )

    def _cloud_event(self, kind: str, entry: dict[str, Any]) -> dict[str, Any]:
        """https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/formats/json-format.md"""
        name = "action" if kind == "action" else f"event.{entry['kind']}"
        return {
            "specversion": "1.0",
            "id": f"{kind}-{entry['id']}",
            "source": self._source,
            "type": f"dev.sqlguard.{name}",
            "subject": entry["task_id"],
            "time": entry["at"].isoformat(),
            "datacontenttype": "application/json",
            "data": entry["data"],
        }


def feeds(conn: psycopg.Connection[Any]) -> list[dict[str, Any]]:
    """Return every feed with how far it is behind."""
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(
            "SELECT f.name, f.created_at, f.delivered_at, f.action_position, f.event_position,"
            " (SELECT count(*) FROM sqlguard.action a WHERE a.id > f.action_position)"
            " + (SELECT count(*) FROM sqlguard.event e WHERE e.id > f.event_position) AS behind"
            " FROM sqlguard.feed f ORDER BY 1"
        ).fetchall()
