"""Says when a task, an agent, an action or an undo that somebody names does not exist: a typo is no empty answer."""

from typing import Any

import psycopg

from sqlguard.errors import Refused

# What a task did is told also when retention has taken the task itself.
_EXISTS = {
    "task": "SELECT EXISTS (SELECT FROM sqlguard.task WHERE id = %(name)s)"
    " OR EXISTS (SELECT FROM sqlguard.action WHERE task_id = %(name)s)",
    "agent": "SELECT EXISTS (SELECT FROM sqlguard.task WHERE agent = %(name)s)"
    " OR EXISTS (SELECT FROM sqlguard.action WHERE agent = %(name)s)",
    "action": "SELECT EXISTS (SELECT FROM sqlguard.action WHERE id = %(name)s)"
    " OR EXISTS (SELECT FROM sqlguard.change_set WHERE action_id = %(name)s)",
    "undo": "SELECT EXISTS (SELECT FROM sqlguard.undo WHERE id = %(name)s)",
}
_HINTS = {
    "task": "`sqlguard task list --all` lists them",
    "agent": "`sqlguard task list --all` lists them",
    "action": "`sqlguard journal list` lists them",
    "undo": "the undo itself has said its number, and `sqlguard journal show` says it too",
}


def require(conn: psycopg.Connection[Any], **named: str | int | None) -> None:
    """Raise Refused for the first of *named* (task, agent, action, undo) that is given and was never there."""
    for kind, name in named.items():
        if name is None:
            continue
        found = conn.execute(_EXISTS[kind].encode(), {"name": name}).fetchone()
        if found != (True,):
            raise Refused(f"there is no {kind} `{name}`", hint=_HINTS[kind])
