"""What the observing proxy has seen, as the database keeps it: written in groups, read for the report."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg.rows import class_row

from sqlguard.errors import DatabaseUnavailable
from sqlguard.policy import Policy
from sqlguard.postgres.connect import connect
from sqlguard.postgres.policy_store import stored_versions

_ADD = """
INSERT INTO sqlguard.observation AS o
    (agent, role, policy, policy_version, fingerprint, verdict, kind, rules, message, hint, tables, sample, executed,
     count, first_at, last_at)
VALUES (%(agent)s, %(role)s, %(policy)s, %(policy_version)s, %(fingerprint)s, %(verdict)s, %(kind)s, %(rules)s,
        %(message)s, %(hint)s, %(tables)s, %(sample)s, %(executed)s, %(count)s, %(first_at)s, %(last_at)s)
ON CONFLICT (agent, role, policy, policy_version, fingerprint, verdict)
DO UPDATE SET count = o.count + excluded.count, last_at = greatest(o.last_at, excluded.last_at)
"""
_READ = """
SELECT agent, role, policy, policy_version, fingerprint, verdict, kind, rules, message, hint, tables, sample, executed,
       count, first_at, last_at
FROM sqlguard.observation
WHERE (%(agent)s::text IS NULL OR agent = %(agent)s)
  AND (%(verdicts)s::text[] IS NULL OR verdict = ANY (%(verdicts)s))
ORDER BY array_position(ARRAY['refuse', 'approve', 'unknown', 'rewrite', 'allow'], verdict), count DESC, agent, sample
"""


@dataclass(frozen=True, slots=True)
class Observation:
    """One shape of statement of one login, and what the guard says of it. No value of a statement is in here."""

    agent: str
    role: str
    policy: str
    policy_version: int
    fingerprint: str
    #: As a verdict, or `unknown` for what could not be followed.
    verdict: str
    kind: str
    rules: list[str]
    message: str | None
    hint: str | None
    tables: list[str]
    sample: str
    #: What would have been sent in place of it, None: it would have gone as it came.
    executed: str | None
    count: int
    first_at: datetime
    last_at: datetime

    @property
    def key(self) -> tuple[object, ...]:
        return (self.agent, self.role, self.policy, self.policy_version, self.fingerprint, self.verdict)

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in Observation.__slots__}


def add_observations(conn: psycopg.Connection[Any], seen: Iterable[Observation]) -> None:
    """Add to the counts, in one transaction; several proxies may do so at once."""
    # In one order, so that two proxies never wait for each other.
    rows = sorted(
        (o.as_dict() for o in seen), key=lambda row: (row["agent"], row["role"], row["fingerprint"])
    )
    with conn.transaction(), conn.cursor() as cursor:
        for row in rows:
            cursor.execute(_ADD, row)


def exchange(dsn: str, seen: Collection[Observation]) -> dict[str, Policy]:
    """
    Add to the counts and return the newest version of every policy, for the observing proxy.

    Raises DatabaseUnavailable; then nothing was added.
    """
    try:
        with connect(dsn) as conn:
            if seen:
                add_observations(conn, seen)
            return {p.policy.name: p.policy for p in stored_versions(conn) if p.latest}
    except psycopg.Error as fault:
        raise DatabaseUnavailable(f"observations can't be written: {str(fault).strip()}") from None


def read_observations(
    conn: psycopg.Connection[Any], *, agent: str | None = None, verdicts: Iterable[str] | None = None
) -> list[Observation]:
    """Return what was seen: refusals first, the most frequent first."""
    wanted = None if verdicts is None else list(verdicts)
    with conn.cursor(row_factory=class_row(Observation)) as cursor:
        return cursor.execute(_READ, {"agent": agent, "verdicts": wanted}).fetchall()


def forget_observations(conn: psycopg.Connection[Any]) -> int:
    """Delete what was seen; return how many shapes those were."""
    return conn.execute("DELETE FROM sqlguard.observation").rowcount
