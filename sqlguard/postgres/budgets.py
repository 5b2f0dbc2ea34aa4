"""A door's share of the statements that a task may send in a minute, of those that the database has left to give."""

from typing import Any

import psycopg

from sqlguard.budget import Grant
from sqlguard.errors import DatabaseUnavailable, TaskEnded

_LEASED = "SELECT granted, budget, lasts, room_at, wait FROM "
_OF_TASK = _LEASED + "sqlguard.lease_statements(%(task)s, %(wanted)s::integer, %(most)s::integer)"
_OWN = _LEASED + "sqlguard.lease_own_statements(%(wanted)s::integer, %(most)s::integer)"


def lease_statements(conn: psycopg.Connection[Any], task: str | None, wanted: int, most: int) -> Grant:
    """
    Ask for *wanted* to *most* statements of *task*; None is the task whose own session *conn* is.

    Must be given a connection in autocommit: what is not committed is not counted.
    Raises DatabaseUnavailable and TaskEnded, and then nothing may be sent.
    """
    asked = {"task": task, "wanted": wanted, "most": most}
    try:
        row = conn.execute(_OWN if task is None else _OF_TASK, asked).fetchone()
    except psycopg.errors.LockNotAvailable:
        raise DatabaseUnavailable(
            "the task's statements could not be counted: a transaction keeps the count locked",
            hint="send it again; a session of this task may have to be ended first",
        ) from None
    if row is None:
        raise TaskEnded("the task has ended")
    granted, budget, lasts, room_at, wait = row
    return Grant(granted, budget, lasts, room_at, wait or 0.0)
