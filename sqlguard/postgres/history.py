"""A row's life: every captured change with the agent, the reason and the values before and after."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from sqlguard.errors import NotConfigured
from sqlguard.postgres.images import Images, pin
from sqlguard.postgres.named import find_named
from sqlguard.postgres.undo_table import ROW, Target, read_target

#: One value, or all columns of the key in order, or by name.
Key = str | int | Sequence[Any] | Mapping[str, Any]

_TABLES = tuple(
    f"""
    SELECT g.relid::bigint, g.schema_name, g.table_name, g.key_columns FROM sqlguard.guarded_table g
    WHERE {which}
    """  # noqa: S608 (constants of this module)
    for which in ("g.schema_name || '.' || g.table_name = %s", "g.relid = to_regclass(%s)")
)
_CHANGES = """
    SELECT r.id AS row_change, c.id AS change_set, c.at, c.op, c.shape_id, r.key, r.new_key, r.before,
           c.action_id AS action, c.task_id AS task, coalesce(a.agent, t.agent) AS agent, a.reason,
           a.statement, c.undo_id AS undo, u.by,
           -- What the last undo of the set left alone is as the agent made it.
           (SELECT d.undo_id FROM sqlguard.undone d WHERE d.change_set_id = c.id
                AND NOT EXISTS (SELECT FROM sqlguard.undo_skipped s
                                WHERE s.change_set_id = c.id AND s.undo_id = d.undo_id AND s.row_change_id = r.id)
                AND d.undo_id = (SELECT max(l.undo_id) FROM sqlguard.undone l WHERE l.change_set_id = c.id))
               AS undone_by
    FROM sqlguard.change_set c
    CROSS JOIN LATERAL sqlguard.row_changes(c.id) r
    LEFT JOIN sqlguard.action a ON a.id = c.action_id
    LEFT JOIN sqlguard.task t ON t.id = c.task_id
    LEFT JOIN sqlguard.undo u ON u.id = c.undo_id
    WHERE c.relid = %(relid)s AND %(key)s::text[] IN (r.key, r.new_key)
"""


@dataclass(frozen=True, slots=True)
class Change:
    """
    One change of the row; `before` and `after` are its values (None: there was no row).

    `after` is what the next change, or now the table, found: changes by sessions that are not captured (the
    application's own) show there. `undo` and `by` are set when an operator's undo made the change,
    `undone_by` when an undo took it back: an undo that left this row alone did not.
    """

    at: datetime
    op: str
    key: dict[str, str | None]
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    agent: str | None
    task: str | None
    action: int | None
    reason: str | None
    statement: str | None
    undo: int | None
    by: str | None
    undone_by: int | None
    change_set: int

    @property
    def changed(self) -> dict[str, tuple[Any, Any]]:
        """The columns whose values differ, with both values; empty when one side is not known."""
        if self.before is None or self.after is None:
            return {}
        return {
            name: (value, self.after.get(name))
            for name, value in self.before.items()
            if self.after.get(name) != value
        }

    def as_dict(self) -> dict[str, Any]:
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        found["at"] = self.at.isoformat()
        found["changed"] = {k: list(v) for k, v in self.changed.items()}
        return found


def history(conn: psycopg.Connection[Any], table: str, key: Key) -> list[Change]:
    """
    Return the captured changes of the row of *table* with *key*, oldest first, also from before a new key.

    Raises NotConfigured when there is no such table or it is not guarded.
    """
    with conn.transaction(force_rollback=True):
        pin(conn)
        target, names = _table(conn, table)
        return _Life(conn, target, names).read(_texts(conn, target, names, key))


def _table(conn: psycopg.Connection[Any], table: str) -> tuple[Target, list[str]]:
    row = find_named(conn, _TABLES, table)
    if row is None:
        raise NotConfigured(f"`{table}` is not a guarded table", hint="`sqlguard tables` lists them")
    # Type names must come out qualified.
    conn.execute("SELECT set_config('search_path', 'pg_catalog', true)")
    target = read_target(conn, row[0], row[1], row[2])
    if target is None or not row[3]:
        raise NotConfigured(
            f"`{table}` has no primary key, so its rows have no history of their own",
            hint="`sqlguard journal list --table` has what was done to it",
        )
    return target, row[3]


def _texts(conn: psycopg.Connection[Any], target: Target, names: Sequence[str], key: Key) -> list[str]:
    """Return *key* as the texts that the capture triggers write."""
    if isinstance(key, Mapping):
        values = [key.get(name) for name in names]
    else:
        values = [key] if isinstance(key, str | int) else list(key)
    if len(values) != len(names):
        raise NotConfigured(
            f"the key of `{target.label}` is ({', '.join(names)})",
            hint="give a value for each, in this order",
        )
    casts = [
        sql.SQL("({}::{})::text").format(sql.Literal(str(value)), sql.SQL(target.by_name[name].type))
        for name, value in zip(names, values, strict=True)
    ]
    try:
        row = conn.execute(sql.SQL("SELECT {}").format(sql.SQL(", ").join(casts))).fetchone()
    except psycopg.DataError as fault:
        raise NotConfigured(
            f"that is no key of `{target.label}`: {fault.diag.message_primary}",
            hint=f"give a value for each of ({', '.join(names)}), in this order",
        ) from None
    assert row is not None  # noqa: S101 (a SELECT without FROM has one row)
    return list(row)


class _Life:
    """Collects the changes of one row, following it over changes of its key."""

    def __init__(self, conn: psycopg.Connection[Any], target: Target, names: Sequence[str]) -> None:
        self._conn = conn
        self._target = target
        self._names = names
        self._images = Images(conn)

    def read(self, key: list[str]) -> list[Change]:
        rows = self._collect(key)
        if not rows:
            return []
        befores = [self._image(row) for row in rows]
        afters = [*befores[1:], self._now(rows[-1])]
        return [
            self._change(row, before, after) for row, before, after in zip(rows, befores, afters, strict=True)
        ]

    def _collect(self, key: list[str]) -> list[dict[str, Any]]:
        found: dict[tuple[int, int], dict[str, Any]] = {}
        asked: set[tuple[str, ...]] = set()
        keys = [tuple(key)]
        with self._conn.cursor(row_factory=dict_row) as cursor:
            while keys:
                one = keys.pop()
                asked.add(one)
                for row in cursor.execute(_CHANGES, {"relid": self._target.oid, "key": list(one)}).fetchall():
                    found[row["change_set"], row["row_change"]] = row
                    others = {tuple(k) for k in (row["key"], row["new_key"]) if k is not None}
                    keys += [k for k in others if k not in asked]
        return [found[at] for at in sorted(found)]

    def _image(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        if row["before"] is None:
            return None
        shape = self._images.shape(self._target, row["shape_id"])
        # No parameter, because a `%` in a name would be one as well.
        query = sql.SQL("SELECT to_jsonb({}::text::{})").format(sql.Literal(row["before"]), shape.row_type)
        found = self._conn.execute(query).fetchone()
        return found[0] if found else None

    def _now(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        key = sql.SQL("{}::text[]").format(sql.Literal(row["new_key"] or row["key"]))
        query = sql.SQL("SELECT to_jsonb({row}.*) FROM {table} AS {row} WHERE {matches}").format(
            row=ROW, table=self._target.ident, matches=self._target.matches(self._names, key)
        )
        found = self._conn.execute(query).fetchone()
        return found[0] if found else None

    def _change(
        self, row: Mapping[str, Any], before: dict[str, Any] | None, after: dict[str, Any] | None
    ) -> Change:
        return Change(
            at=row["at"],
            op=row["op"],
            key=dict(zip(self._names, row["new_key"] or row["key"], strict=True)),
            before=before,
            after=after,
            **{
                name: row[name]
                for name in (
                    "agent",
                    "task",
                    "action",
                    "reason",
                    "statement",
                    "undo",
                    "by",
                    "undone_by",
                    "change_set",
                )
            },
        )
