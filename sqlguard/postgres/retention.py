"""
What restore, purge, hold and erase share: which table and which rows they speak of, and what is on hold.

Rows are named by their keys, in PostgreSQL's own text, or by a condition. A condition is the operator's SQL:
it is parsed as exactly one expression before it becomes part of a statement, and it sees one row only.
"""

import csv
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from sqlguard.errors import NotUnderstood, Refused
from sqlguard.postgres.connect import OWN_LOCKS
from sqlguard.postgres.images import pin
from sqlguard.postgres.undo_table import Target, read_target
from sqlguard.postgres.walls_facts import Facts, Relation
from sqlguard.statement.text import parse

#: The two halves of the advisory lock under which holds and removals look at each other.
LOCK = (OWN_LOCKS, 5)
#: What a SELECT of nothing but a WHERE has; anything else came out of the condition.
_PLAIN = frozenset({"whereClause", "limitOption", "op"})


@dataclass(frozen=True, slots=True)
class Hold:
    """Rows of a table that must not be removed for good: all, the one with *key*, or those of *condition*."""

    id: int
    relid: int
    table: str
    key: list[str] | None
    condition: str | None
    reason: str
    held_at: datetime
    held_by: str

    def as_dict(self) -> dict[str, Any]:
        return {
            "hold": self.id,
            "table": self.table,
            "key": self.key,
            "where": self.condition,
            "reason": self.reason,
            "held_at": self.held_at.isoformat(),
            "held_by": self.held_by,
        }


def find_guarded(facts: Facts, table: str) -> Relation:
    """Return the guarded table that *table* (`name` or `schema.name`, `public` assumed) belongs to."""
    for relation in facts.relations.values():
        if table == relation.label or (relation.schema == "public" and table == relation.name):
            root = facts.root(relation)
            if root.oid not in facts.guarded:
                raise Refused(f"`{root.label}` is not guarded", hint=f"run `sqlguard guard {root.label}`")
            return root
    raise Refused(f"there is no table `{table}`", hint="name it as `schema.table`")


def tree_oids(facts: Facts, root: Relation) -> list[int]:
    return [r.oid for r in facts.tree(root)]


def name_of(relation: Relation) -> sql.Identifier:
    return sql.Identifier(relation.schema, relation.name)


def open_target(conn: psycopg.Connection[Any], root: Relation) -> Target:
    """Pin the settings until the transaction ends, and return *root* as the images and keys speak of it."""
    pin(conn)
    # Type names have to come out qualified; conditions are read with the operator's own path again.
    row = conn.execute(
        "SELECT current_setting('search_path'), set_config('search_path', 'pg_catalog', true)"
    ).fetchone()
    target = read_target(conn, root.oid, root.schema, root.name)
    assert row is not None and target is not None  # noqa: PT018, S101 (its facts were read just now)
    conn.execute("SELECT set_config('search_path', %s, true)", [row[0]])
    return target


@contextmanager
def every_row(conn: psycopg.Connection[Any], relations: Iterable[Relation]) -> Iterator[None]:
    """
    See the rows that forced row-level security hides from the owner itself, until the block ends.

    Must be inside a transaction, with `row_security = off`: whatever is still hidden is an error then, never
    a row that is silently missed.
    """
    forced = [r for r in relations if r.row_security_forced]
    row = conn.execute(
        "SELECT rolsuper OR rolbypassrls FROM pg_catalog.pg_roles WHERE rolname = current_user"
    ).fetchone()
    if row and row[0]:
        forced = []
    for relation in forced:
        conn.execute(sql.SQL("ALTER TABLE {} NO FORCE ROW LEVEL SECURITY").format(name_of(relation)))
    yield
    for relation in forced:
        conn.execute(sql.SQL("ALTER TABLE {} FORCE ROW LEVEL SECURITY").format(name_of(relation)))


def around(facts: Facts, root: Relation) -> list[Relation]:
    """Return the tree of *root* and the tables whose rows refer to it."""
    found = {r.oid: r for r in facts.tree(root)}
    for key in facts.keys_to(root):
        if child := facts.relations.get(key.child):
            found |= {r.oid: r for r in facts.tree(child)}
    return list(found.values())


def split_key(text: str, names: Sequence[str]) -> list[str]:
    """Return the values of one key as written after `--key`: `7`, or `7,3` where the key has two columns."""
    values = [text] if len(names) == 1 else next(csv.reader([text]), [])
    if len(values) != len(names) or not names:
        wanted = ",".join(names) if names else "none: name its rows by a condition"
        raise Refused("the key does not fit the table", hint=f"its key is {wanted}")
    return values


def key_texts(
    conn: psycopg.Connection[Any], target: Target, names: Sequence[str], keys: Iterable[str]
) -> list[list[str]]:
    """Return *keys* as the texts that the capture triggers write; the settings must be pinned."""
    found = []
    for text in keys:
        casts = [
            sql.SQL("({}::{})::text").format(sql.Literal(value), sql.SQL(target.by_name[name].type))
            for name, value in zip(names, split_key(text, names), strict=True)
        ]
        row = conn.execute(sql.SQL("SELECT {}").format(sql.SQL(", ").join(casts))).fetchone()
        assert row is not None  # noqa: S101 (a SELECT without FROM has one row)
        found.append([str(value) for value in row])
    return found


def one_expression(text: str) -> sql.Composable:
    """Return the condition *text* in parentheses; refuse what is more, or less, than one expression."""
    try:
        statements = parse(f"SELECT WHERE {text}")
    except NotUnderstood as fault:
        raise NotUnderstood("the condition can't be read", hint=fault.message) from None
    body = statements[0].tree.get("SelectStmt", {}) if len(statements) == 1 else {}
    if not body.get("whereClause") or set(body) - _PLAIN:
        raise NotUnderstood("the condition has to be one expression", hint="write what follows WHERE")
    # The line break ends a comment that the text may end with.
    return sql.SQL("({}\n)").format(sql.SQL(text))


def fulfils(condition: sql.Composable, row: sql.Composable, name: str) -> sql.Composable:
    """Return *condition* over *row* alone: inside it, names are those of its columns or *name*."""
    return sql.SQL("EXISTS (SELECT FROM (SELECT {}.*) AS {} WHERE {})").format(
        row, sql.Identifier(name), condition
    )


def is_one_of(
    target: Target, names: Sequence[str], row: sql.Composable, keys: list[list[str]]
) -> sql.Composable:
    """Return the condition that *row* has one of *keys* (texts)."""
    if not keys:
        return sql.SQL("false")
    literals = sql.SQL(", ").join(sql.SQL("{}::text[]").format(sql.Literal(key)) for key in keys)
    return sql.SQL("{} IN ({})").format(target.key_of(names, row), literals)


def read_holds(conn: psycopg.Connection[Any], relids: Sequence[int] | None = None) -> list[Hold]:
    """Return the holds that are on, of the tables *relids* or of all."""
    with conn.cursor(row_factory=class_row(Hold)) as cursor:
        return cursor.execute(
            "SELECT h.id, h.relid::bigint AS relid, h.schema_name || '.' || h.table_name AS table, h.key,"
            " h.condition, h.reason, h.held_at, h.held_by FROM sqlguard.hold h"
            " WHERE h.released_at IS NULL AND (%(all)s OR h.relid = ANY (%(oids)s::oid[])) ORDER BY h.id",
            {"all": relids is None, "oids": list(relids or ())},
        ).fetchall()


def is_held(
    holds: Sequence[Hold], target: Target, names: Sequence[str], row: sql.Composable
) -> sql.Composable:
    """Return the condition that one of *holds* is on *row*; the settings must be pinned."""
    parts: list[sql.Composable] = []
    if any(h.key is None and h.condition is None for h in holds):
        return sql.SQL("true")
    if keys := [h.key for h in holds if h.key is not None]:
        parts.append(is_one_of(target, names, row, keys))
    parts += [
        fulfils(one_expression(h.condition), row, target.name) for h in holds if h.condition is not None
    ]
    return sql.SQL("({})").format(sql.SQL(" OR ").join(parts)) if parts else sql.SQL("false")
