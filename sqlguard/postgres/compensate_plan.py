"""
What an undo has to answer: steps that are not SQL, and calls of functions that the policy lists an answer for.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from sqlguard.postgres.undo_plan import ChangeSet, Scope, read_sets
from sqlguard.steps import Answer, read_answers

_STEPS = sql.SQL("""
    SELECT a.id, a.at, a.task_id AS task, a.statement, a.params, a.kind, a.tier, a.compensation,
           coalesce(a.idempotency_key, a.task_id || ':' || a.id) AS key,
           e.kind AS ended, coalesce(e.detail, '{{}}') AS detail,
           coalesce((SELECT jsonb_object_agg(x.number, x.kind) FROM (
               SELECT DISTINCT ON (1) coalesce((c.detail ->> 'number')::int, 0) AS number, c.kind
               FROM sqlguard.event c WHERE c.action_id = a.id
                   AND c.kind IN ('compensating', 'compensated', 'mitigated', 'uncompensated')
               ORDER BY 1, c.id DESC) x), '{{}}') AS answered
    FROM sqlguard.action a
    LEFT JOIN LATERAL (
        SELECT e.kind, e.detail FROM sqlguard.event e
        WHERE e.action_id = a.id AND e.kind IN ('committed', 'failed', 'previewed', 'reconciled')
        ORDER BY e.id DESC LIMIT 1
    ) e ON true
    WHERE a.verdict IN ('allow', 'rewrite') AND (a.kind = 'tool' OR a.compensation IS NOT NULL)
        AND a.via IS DISTINCT FROM 'preview' AND a.via IS DISTINCT FROM 'dry run' AND {scope}
    ORDER BY a.at DESC, a.id DESC
""")


@dataclass(frozen=True, slots=True)
class Step:
    """An action with answers; `answered` says by number how far each is."""

    id: int
    at: datetime
    task: str
    statement: str
    params: Any
    kind: str
    tier: str | None
    compensation: str | None
    key: str
    ended: str | None
    detail: dict[str, Any]
    answered: dict[str, str]

    @property
    def in_effect(self) -> bool:
        """Whether there is, or may be, an effect to answer. What failed in the database was rolled back."""
        if "repeats" in self.detail or self.ended == "previewed":
            return False
        if self.kind != "tool":
            return self.ended == "committed" or (
                self.ended == "reconciled" and self.detail.get("outcome") == "committed"
            )
        return not (self.ended == "failed" and self.detail.get("effect") == "none")

    @property
    def is_certain(self) -> bool:
        return self.ended == "committed" or self.kind != "tool"


def read_steps(conn: psycopg.Connection[Any], scope: Scope) -> list[Step]:
    """Return the steps of *scope* that have, or may have, an effect, newest first; a redo has none."""
    if scope.undo is not None:
        return []
    with conn.cursor(row_factory=class_row(Step)) as cursor:
        found = cursor.execute(_STEPS.format(scope=_condition(scope))).fetchall()
    return [s for s in found if s.in_effect]


def answers_of(step: Step) -> Iterator[tuple[int, Answer | None]]:
    """Yield the answers of a step with their numbers, last first: calls of one statement are LIFO too."""
    found = read_answers(step.compensation)
    if not found and step.kind == "tool":
        yield 0, None
    yield from reversed(list(enumerate(found)))


def _condition(scope: Scope) -> sql.Composable:
    parts: list[sql.Composable] = [sql.SQL("true")]
    parts += scope.where(
        task=sql.SQL("a.task_id = {}"),
        action=sql.SQL("a.id = {}"),
        since=sql.SQL("a.at >= {}"),
        agent=sql.SQL("a.agent = {}"),
    )
    return sql.SQL(" AND ").join(parts)


def between(
    after: datetime | None, before: datetime | None
) -> Callable[[psycopg.Connection[Any], Scope], tuple[list[ChangeSet], bool]]:
    """Return how an undo reads the change sets of its scope between two times."""

    def read(conn: psycopg.Connection[Any], scope: Scope) -> tuple[list[ChangeSet], bool]:
        sets, any_at_all = read_sets(conn, scope)
        rows = conn.execute(
            # A redo's set stands for the set of the agent's that it is a repetition of, at that one's time.
            "WITH RECURSIVE up (id, at, reverts, own) AS ("
            " SELECT c.id, c.at, c.reverts, c.id FROM sqlguard.change_set c WHERE c.id = ANY (%(sets)s)"
            " UNION SELECT c.id, c.at, c.reverts, up.own FROM up JOIN sqlguard.change_set c ON c.id = up.reverts)"
            " SELECT own FROM up WHERE reverts IS NULL"
            " AND (%(after)s::timestamptz IS NULL OR at > %(after)s)"
            " AND (%(before)s::timestamptz IS NULL OR at <= %(before)s)",
            {"sets": [s.id for s in sets], "after": after, "before": before},
        )
        wanted = {r[0] for r in rows}
        return [s for s in sets if s.id in wanted], any_at_all

    return read
