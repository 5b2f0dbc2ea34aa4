"""Says when a task, agent, action, undo or table that somebody names does not exist: a typo is no empty answer."""

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
    # The journal goes on telling of tables that are gone, and of those that somebody only tried to write to.
    "table": "SELECT EXISTS (SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
    " WHERE %(name)s::text IN (c.relname, n.nspname || '.' || c.relname))"
    " OR EXISTS (SELECT FROM sqlguard.change_set s"
    " WHERE %(name)s::text IN (s.table_name, s.schema_name || '.' || s.table_name))"
    " OR EXISTS (SELECT FROM sqlguard.action a CROSS JOIN unnest(a.tables) AS t (name)"
    " WHERE t.name = %(name)s::text OR right(t.name, length(%(name)s::text) + 1) = '.' || %(name)s::text)",
}
_HINTS = {
    "task": "`sqlguard task list --all` lists them",
    "agent": "`sqlguard task list --all` lists them",
    "action": "`sqlguard journal list` lists them",
    "table": "name it as `schema.table`; `sqlguard tables --all` lists them",
    "undo": "the undo itself has said its number, and `sqlguard journal show` says it too",
}


def require(conn: psycopg.Connection[Any], **named: str | int | None) -> None:
    """Raise Refused for the first of *named* (task, agent, action, undo, table) that is given and was never there."""
    for kind, name in named.items():
        if name is None:
            continue
        found = conn.execute(_EXISTS[kind].encode(), {"name": name}).fetchone()
        if found != (True,):
            raise Refused(f"there is no {kind} `{name}`", hint=_HINTS[kind])
