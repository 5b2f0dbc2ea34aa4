"""
The journal of steps that are not SQL: calls of an agent's tools, written down before they are made.

    from sqlguard.postgres.steps import Steps

    with Steps.connect(direct_dsn) as steps, guard.on(steps):       # the task's own login, or the operator's with task=
        charge(42, 999)

A call that can't be written down is not made. How it ended is written afterwards; when that fails too (the
connection is gone), the call counts as one whose end nobody saw, and its compensation is told so.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from sqlguard.errors import NotConfigured, Refused
from sqlguard.journal import REDACTED, SECRET_COLUMNS, Intent
from sqlguard.postgres import control, journal
from sqlguard.postgres.connect import connect
from sqlguard.steps import KIND, Begun, Call, answers_text

_WAITING = "SELECT * FROM sqlguard.waiting_steps()"


@dataclass(frozen=True, slots=True)
class Waiting:
    """A refused call of an irreversible tool; it may be made once when it is approved."""

    action: int
    task: str
    agent: str
    at: datetime
    tool: str
    arguments: dict[str, Any]
    reason: str | None
    confidence: float | None
    approvals_needed: int
    approved_by: list[str]
    #: `open` or `approved`.
    state: str

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {"at": self.at.isoformat()}


class Steps:
    """The steps of one task; not for several threads at once, like any database session."""

    def __init__(self, conn: psycopg.Connection[Any], task: str | None = None) -> None:
        self._conn = conn
        self._task = task

    @classmethod
    def connect(cls, dsn: str, *, task: str | None = None) -> "Steps":
        """
        Open a connection for the steps of a task: with the task's own direct DSN, or the operator's and *task*.

        Raises DatabaseUnavailable, NotConfigured.
        """
        conn = connect(dsn)
        try:
            row = conn.execute("SELECT (sqlguard.current_task()).id").fetchone()
        except (psycopg.errors.UndefinedFunction, psycopg.errors.InvalidSchemaName):
            conn.close()
            raise control.not_migrated() from None
        own = row[0] if row else None
        if own is None and task is None:
            conn.close()
            raise NotConfigured(
                "no task was named", hint="give `direct_dsn` of the task, or its id with the operator's DSN"
            )
        return cls(conn, own or task)

    def begin(self, call: Call) -> Begun:
        """Commit *call* and return its action; raises ApprovalRequired, Refused, TaskEnded, Frozen."""
        row = self._call("SELECT * FROM sqlguard.begin_step(%s)", [Jsonb(self._record(call, "allow"))])
        return Begun(*row)

    def refused(self, call: Call) -> int:
        """Write down that *call* waits for an approval; the same call again is the same wait."""
        return int(self._call("SELECT sqlguard.record_intent(%s)", [Jsonb(self._record(call, "approve"))])[0])

    def ended(self, action: int, kind: str, detail: Mapping[str, Any]) -> None:
        """Write down how a call ended. Its result is what it is, so a journal that is gone raises nothing here."""
        with suppress(psycopg.Error):
            journal.record_event(self._conn, action, kind, detail)

    def ticket(self, action: int) -> dict[str, Any]:
        """Say what has become of a refused call: `state` (open, approved, rejected, used), who approved, why not."""
        found = self._conn.execute("SELECT sqlguard.step_ticket(%s)", [action]).fetchone()
        if found is None or found[0] is None:
            raise Refused(
                f"action {action} is no refused call of this task", hint="it is in the error's detail"
            )
        told: dict[str, Any] = found[0]
        return told

    def close(self) -> None:
        self._conn.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _record(self, call: Call, verdict: str) -> dict[str, Any]:
        sqlstate = "SG001" if verdict == "approve" else None
        intent = Intent(
            task=self._task,
            idempotency_key=call.idempotency_key,
            reason=call.reason,
            confidence=call.confidence,
            step=call.step,
            kind=KIND,
            tier=call.tier,
            verdict=verdict,
            sqlstate=sqlstate,
            compensation=answers_text((call.answer,)) if call.answer else None,
            via="tool",
        )
        # The tool's name is no SQL, and its arguments are a document: nothing to be redacted as a statement.
        return intent.as_record() | {
            "statement": call.tool,
            "params": redacted(call.arguments),
            "statement_hash": None,
        }

    def _call(self, text: str, values: list[Any]) -> tuple[Any, ...]:
        with journal.translated(), self._conn.transaction():
            self._conn.execute("SET TRANSACTION READ WRITE")
            row = self._conn.execute(text.encode(), values).fetchone()
        assert row is not None  # noqa: S101 (the functions return one row or raise)
        return tuple(row)


def redacted(value: Any) -> Any:
    """Return a tool's arguments without what their names say is a secret."""
    if isinstance(value, Mapping):
        return {
            name: REDACTED if str(name).lower() in SECRET_COLUMNS and inner is not None else redacted(inner)
            for name, inner in value.items()
        }
    return [redacted(inner) for inner in value] if isinstance(value, list | tuple) else value


def waiting(conn: psycopg.Connection[Any]) -> list[Waiting]:
    """Return the calls that wait for an approval, or have one that was not used yet, to the operator or an approver."""
    with conn.cursor(row_factory=class_row(Waiting)) as cursor:
        return cursor.execute(_WAITING).fetchall()


def approve(conn: psycopg.Connection[Any], action: int, reason: str | None = None) -> str:
    """
    Let the refused call *action* be made once, within the hour; return its state, `open` if more have to approve.

    Like the other decisions it needs a member of `sqlguard_approver`, or the operator; raises Refused.
    """
    return _decide(conn, action, "approve", reason)


def reject(conn: psycopg.Connection[Any], action: int, reason: str) -> str:
    """Refuse *action* for good; the agent reads the reason when it makes the same call again."""
    return _decide(conn, action, "reject", reason)


def revoke(conn: psycopg.Connection[Any], action: int, reason: str | None = None) -> str:
    """Take the approvals of *action* back that were not used yet."""
    return _decide(conn, action, "revoke", reason)


def _decide(conn: psycopg.Connection[Any], action: int, decision: str, reason: str | None) -> str:
    with journal.translated():
        row = conn.execute("SELECT sqlguard.decide_step(%s, %s, %s)", [action, decision, reason]).fetchone()
    assert row is not None  # noqa: S101 (the function returns one row or raises)
    return str(row[0])
