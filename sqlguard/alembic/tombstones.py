"""
What becomes of deleted rows when a guard is lifted: refused, purged or restored, all tables of an operation at
once. Without the guard a deleted row would be a row like any other.
"""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import psycopg
from psycopg import sql

from sqlguard.catalog import DELETED_AT
from sqlguard.errors import GuardError
from sqlguard.postgres.purge import purge as remove
from sqlguard.postgres.walls_facts import Facts, Key, Relation, read_facts

_REFERS = sql.SQL("""
    SELECT count(*) FROM {child} c JOIN {parent} p ON {match}
    WHERE p.deleted_at IS NOT NULL""")

_CHOICE = "say what shall become of them: `op.unguard_table(…, purge=True)` or `restore=True`"


def refuse(conn: psycopg.Connection[Any], tables: Sequence[str], hint: str = _CHOICE) -> None:
    """Raise GuardError when any of *tables* holds deleted rows; before the first of them is touched."""
    held = []
    for root in _roots(read_facts(conn), tables):
        count = _count(
            conn, sql.SQL("SELECT count(*) FROM {} WHERE deleted_at IS NOT NULL").format(_name(root))
        )
        if count:
            held.append(f"`{root.label}` ({count})")
    if held:
        raise GuardError(f"deleted rows would come back to life in {', '.join(held)}", hint=hint)


def purge(conn: psycopg.Connection[Any], tables: Sequence[str]) -> None:
    """
    Remove the deleted rows of *tables* for good, as `sqlguard purge` does.

    Raises GuardError where rows stay, because they are on hold or other rows refer to them.
    """
    roots = [root.label for root in _roots(read_facts(conn), tables)]
    if roots:
        remove(conn, roots, older_than=timedelta(0), reason="the guard is lifted by a migration")
    refuse(conn, tables, "they are on hold, or other rows refer to them: see `sqlguard purge --dry-run`")


def restore(conn: psycopg.Connection[Any], tables: Sequence[str]) -> None:
    """
    Make the deleted rows of *tables* live again.

    Raises GuardError when one has a unique value that is in use, or a parent that stays deleted.
    """
    facts = read_facts(conn)
    roots = _roots(facts, tables)
    try:
        with conn.transaction():
            for root in roots:
                conn.execute(
                    sql.SQL(
                        "UPDATE {} SET deleted_at = NULL, deleted_by_agent = NULL WHERE deleted_at IS NOT NULL"
                    ).format(_name(root))
                )
            for root in roots:
                for key in facts.keys_of(root):
                    _refuse_deleted_parent(conn, facts, key)
    except psycopg.errors.UniqueViolation as fault:
        raise GuardError(
            f"a deleted row of `{fault.diag.schema_name}.{fault.diag.table_name}` can't be restored: "
            f"its value in `{fault.diag.constraint_name}` is in use",
            hint="change the live row's value, or purge the deleted rows",
        ) from None


def _refuse_deleted_parent(conn: psycopg.Connection[Any], facts: Facts, key: Key) -> None:
    child = facts.relations.get(key.child)
    parent = facts.relations.get(key.parent)
    if child is None or parent is None:
        return
    guarded = facts.guarded.get(facts.root(parent).oid)
    if guarded is None or guarded.mode != "soft" or parent.column(DELETED_AT) is None:
        return
    if _count(conn, _refers(child, parent, key)):
        raise GuardError(
            f"rows of `{child.label}` would be restored whose parents in `{parent.label}` stay deleted",
            hint="restore both tables in one operation",
        )


def _refers(child: Relation, parent: Relation, key: Key) -> sql.Composed:
    pairs = zip(key.ref_columns, key.operators, key.columns, strict=True)
    return _REFERS.format(
        child=_name(child),
        parent=_name(parent),
        match=sql.SQL(" AND ").join(
            sql.SQL("p.{} {} c.{}").format(
                sql.Identifier(ref),
                sql.SQL(operator),  # PostgreSQL's own, from its catalog
                sql.Identifier(column),
            )
            for ref, operator, column in pairs
        ),
    )


def _roots(facts: Facts, tables: Iterable[str]) -> list[Relation]:
    """Return the roots of *tables* that are guarded as soft; the others have no deleted rows."""
    found: dict[int, Relation] = {}
    for relation in facts.relations.values():
        root = facts.root(relation)
        guarded = facts.guarded.get(root.oid)
        if relation.label in tables and guarded is not None and guarded.mode == "soft":
            found[root.oid] = root
    return list(found.values())


def _name(relation: Relation) -> sql.Identifier:
    return sql.Identifier(relation.schema, relation.name)


def _count(conn: psycopg.Connection[Any], query: sql.Composed) -> int:
    row = conn.execute(query).fetchone()
    return int(row[0]) if row else 0
