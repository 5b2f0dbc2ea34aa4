"""
What becomes of deleted rows when a guard is lifted: refused, purged or restored, all tables of a revision at once.

Without the guard a deleted row would be a row like any other. Purging refuses where anything but the rows that
go with it still refers to a deleted row, because ON DELETE CASCADE would take live rows along.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import psycopg
from psycopg import sql

from sqlguard.catalog import DELETED_AT
from sqlguard.errors import GuardError
from sqlguard.postgres.walls_facts import Facts, Key, Relation, read_facts

_REFERS = sql.SQL("""
    SELECT count(*) FROM {child} c JOIN {parent} p ON {match}
    WHERE p.deleted_at IS NOT NULL AND {live}""")


def refuse(conn: psycopg.Connection[Any], tables: Sequence[str]) -> None:
    """Raise GuardError when any of *tables* holds deleted rows; before the first of them is touched."""
    held = []
    for root in _roots(read_facts(conn), tables):
        count = _count(
            conn, sql.SQL("SELECT count(*) FROM {} WHERE deleted_at IS NOT NULL").format(_name(root))
        )
        if count:
            held.append(f"`{root.label}` ({count})")
    if held:
        raise GuardError(
            f"deleted rows would come back to life in {', '.join(held)}",
            hint="say what shall become of them: `op.unguard_table(…, purge=True)` or `restore=True`",
        )


def purge(conn: psycopg.Connection[Any], tables: Sequence[str]) -> None:
    """Remove the deleted rows of *tables* for good. Raises GuardError where other rows refer to them."""
    facts = read_facts(conn)
    roots = _roots(facts, tables)
    inside = {relation.oid for root in roots for relation in facts.tree(root)}
    with conn.transaction():
        for root in roots:
            for key in facts.keys_to(root):
                _refuse_references(conn, facts, key, inside)
        for root in _children_first(facts, roots):
            conn.execute(sql.SQL("DELETE FROM {} WHERE deleted_at IS NOT NULL").format(_name(root)))


def restore(conn: psycopg.Connection[Any], tables: Sequence[str]) -> None:
    """
    Make the deleted rows of *tables* live again.

    Raises GuardError when one has a unique value that is in use, or a parent that stays deleted.
    """
    facts = read_facts(conn)
    roots = _roots(facts, tables)
    try:
        with conn.transaction():
            for root in reversed(_children_first(facts, roots)):
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


def _refuse_references(conn: psycopg.Connection[Any], facts: Facts, key: Key, inside: set[int]) -> None:
    child = facts.relations.get(key.child)
    parent = facts.relations.get(key.parent)
    if child is None or parent is None or parent.column(DELETED_AT) is None:
        return
    goes = key.child in inside and child.column(DELETED_AT) is not None
    live = sql.SQL("c.deleted_at IS NULL" if goes else "true")
    count = _count(conn, _refers(child, parent, key, live))
    if count:
        raise GuardError(
            f"{count} rows of `{child.label}` refer to deleted rows of `{parent.label}` (`{key.name}`)",
            hint="restore the deleted rows, or purge the rows that refer to them in the same operation",
        )


def _refuse_deleted_parent(conn: psycopg.Connection[Any], facts: Facts, key: Key) -> None:
    child = facts.relations.get(key.child)
    parent = facts.relations.get(key.parent)
    if child is None or parent is None:
        return
    guarded = facts.guarded.get(facts.root(parent).oid)
    if guarded is None or guarded.mode != "soft" or parent.column(DELETED_AT) is None:
        return
    if _count(conn, _refers(child, parent, key, sql.SQL("true"))):
        raise GuardError(
            f"rows of `{child.label}` would be restored whose parents in `{parent.label}` stay deleted",
            hint="restore both tables in one operation",
        )


def _refers(child: Relation, parent: Relation, key: Key, live: sql.SQL) -> sql.Composed:
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
        live=live,
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


def _children_first(facts: Facts, roots: list[Relation]) -> list[Relation]:
    """Order *roots* so that what refers comes before what it refers to; cycles are cut where they are met."""
    wanted = {root.oid: root for root in roots}
    done: list[Relation] = []
    met: set[int] = set()

    def visit(root: Relation) -> None:
        if root.oid in met:
            return
        met.add(root.oid)
        for key in facts.keys_to(root):
            child = facts.relations.get(key.child)
            if child is not None and facts.root(child).oid in wanted:
                visit(facts.root(child))
        done.append(root)

    for root in roots:
        visit(root)
    return done


def _name(relation: Relation) -> sql.Identifier:
    return sql.Identifier(relation.schema, relation.name)


def _count(conn: psycopg.Connection[Any], query: sql.Composed) -> int:
    row = conn.execute(query).fetchone()
    return int(row[0]) if row else 0
