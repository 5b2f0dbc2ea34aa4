"""
Settle actions that have an intent and no end, after a crash of the door or of its connection.

The evidence is the database's own: row changes are written in the transaction of the change, so an action
with visible change sets was committed, and one without has changed no guarded row for good. Nothing is
guessed: what a tool did outside is `unknown` when nobody saw it end. An action whose session may still be at work
is left for the next time.

A proxy does it at its start and its janitor from then on (`Reconciler`), so that an end that was lost with a client or
a connection is known without a restart.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg
from psycopg.rows import class_row, scalar_row

from sqlguard.postgres.connect import OWN_LOCKS
from sqlguard.postgres.journal import record_event

# A session that is still in a transaction may yet commit, and so may a prepared transaction of its role.
# That one is in a transaction everybody can see in pg_locks; pg_stat_activity hides it from other roles.
_UNSETTLED = """
    SELECT a.id AS action, a.task_id AS task,
           CASE WHEN a.kind = 'tool' THEN 'unknown' WHEN c.sets > 0 THEN 'committed' ELSE 'no changes' END AS outcome,
           c.sets, c.rows, c.txids, c.statuses
    FROM sqlguard.action a
    CROSS JOIN LATERAL (
        SELECT count(*) AS sets, coalesce(sum(s.rows), 0)::bigint AS rows,
               coalesce(array_agg(DISTINCT s.txid::text), '{}') AS txids,
               coalesce(array_agg(DISTINCT coalesce(pg_xact_status(s.txid), 'too old to tell')), '{}') AS statuses
        FROM sqlguard.change_set s WHERE s.action_id = a.id
    ) c
    WHERE a.id >= %(since)s AND a.verdict IN ('allow', 'rewrite')
      AND a.at < clock_timestamp() - %(after)s::interval
      AND NOT EXISTS (SELECT FROM sqlguard.event e WHERE e.action_id = a.id AND e.kind <> 'started')
      AND NOT EXISTS (SELECT FROM pg_catalog.pg_stat_activity b JOIN pg_catalog.pg_locks l USING (pid)
                      WHERE b.pid = a.backend_pid AND b.usename = a.role AND l.locktype = 'virtualxid')
      -- A tool is called between transactions: as long as its session is there, the call may be under way.
      AND NOT (a.kind IS NOT DISTINCT FROM 'tool' AND EXISTS (
          SELECT FROM pg_catalog.pg_stat_activity b WHERE b.pid = a.backend_pid AND b.backend_start <= a.at))
      AND NOT EXISTS (SELECT FROM pg_catalog.pg_prepared_xacts p WHERE p.owner = a.role)
    ORDER BY a.id
"""
# Entries get their numbers before they are committed, so those of the last minutes are looked at again.
_FIRST_OPEN = """
    SELECT min(a.id) FROM sqlguard.action a
    WHERE a.id >= %(since)s AND (a.at > clock_timestamp() - interval '5 minutes' OR (a.verdict IN ('allow', 'rewrite')
      AND NOT EXISTS (SELECT FROM sqlguard.event e WHERE e.action_id = a.id AND e.kind <> 'started')))
"""
_NEWEST = "SELECT coalesce(max(id), 0) FROM sqlguard.action"
#: One at a time, wherever it runs.
LOCK = (OWN_LOCKS, 7)
#: An end is written by its door within milliseconds; what is this old has none.
AFTER = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class Settled:
    """What was found of one action: `outcome` is `committed`, `no changes` or `unknown`, the rest is evidence."""

    action: int
    task: str
    outcome: str
    sets: int
    rows: int
    txids: list[str]
    statuses: list[str]

    def as_dict(self) -> dict[str, Any]:
        return {
            "action": self.action,
            "task": self.task,
            "outcome": self.outcome,
            "change_sets": self.sets,
            "rows": self.rows,
            "txids": self.txids,
            "statuses": self.statuses,
        }


class Reconciler:
    """Settles again and again; the whole journal is looked at the first time only."""

    def __init__(self, after: timedelta = AFTER) -> None:
        self._after = after
        self._since = 0

    def run(self, conn: psycopg.Connection[Any]) -> list[Settled]:
        """Settle what can be settled now. Must run as the operator, in autocommit; waits for nobody."""
        newest = _number(conn, _NEWEST)
        settled = reconcile(conn, after=self._after, since=self._since, wait=False)
        first = _number(conn, _FIRST_OPEN, since=self._since)
        self._since = newest or 0 if first is None else first
        return settled


def _number(conn: psycopg.Connection[Any], query: str, **values: int) -> int | None:
    with conn.cursor(row_factory=scalar_row) as cursor:
        return cursor.execute(query, values).fetchone()


def reconcile(
    conn: psycopg.Connection[Any], *, after: timedelta = AFTER, since: int = 0, wait: bool = True
) -> list[Settled]:
    """
    Write a `reconciled` event for every unsettled action older than *after*; return what was settled.

    Must run as the operator. Safe to repeat and to run from several places: a lock lets one work at a time; without
    *wait* nothing is done while it is another.
    """
    settled = []
    with conn.transaction():
        if wait:
            conn.execute("SELECT pg_advisory_xact_lock(%s, %s)", LOCK)
        elif conn.execute("SELECT pg_try_advisory_xact_lock(%s, %s)", LOCK).fetchone() == (False,):
            return []
        with conn.cursor(row_factory=class_row(Settled)) as cursor:
            found = cursor.execute(_UNSETTLED, {"after": after, "since": since}).fetchall()
        for one in found:
            try:
                with conn.transaction():
                    record_event(conn, one.action, "reconciled", one.as_dict())
            except psycopg.errors.LockNotAvailable:
                # A session of that task keeps its chain locked; the others' actions don't wait for it.
                continue
            settled.append(one)
    return settled
