"""
What stands in the way of a restore, besides what the undo underneath finds.

Each check takes the rows that it finds out of the chosen ones and returns them; so what is chosen afterwards
can be restored.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from psycopg import sql

from sqlguard.postgres.restore_choice import Choice
from sqlguard.postgres.restore_report import CHANGED, MOVED, PARENT, RowLeft
from sqlguard.postgres.retention import tree_oids
from sqlguard.postgres.undo_plan import ChangeSet
from sqlguard.postgres.undo_table import ROW, Key

# The marks of the delete itself, and those of sqlguard's own undos: nobody else's change.
_OURS = sql.SQL(
    "{row}.xmin = ANY (ARRAY(SELECT c.xmin FROM sqlguard.change_set c"
    " WHERE c.id = {set} OR (c.relid = {relid} AND c.undo_id IS NOT NULL)))"
)

_CHOSEN = sql.SQL("pg_temp.sqlguard_chosen h JOIN sqlguard.row_changes({set}) r ON r.id = h.row_change_id")


def changed(choice: Choice, one: ChangeSet) -> Iterator[RowLeft]:
    """Deleted rows that somebody changed since; nothing tells what they were, so nobody may know it is wrong."""
    if one.op != "soft_delete" or not one.key_columns or one.id in choice.adopted:
        return
    condition = sql.SQL("{row}.deleted_at = {at} AND NOT {ours}").format(
        row=ROW, at=sql.Literal(one.statement_at), ours=_ours(one)
    )
    yield from _take_out(choice, one, condition, CHANGED, "the row was changed since it was deleted")


def moved_references(choice: Choice, one: ChangeSet, columns: Sequence[str]) -> Iterator[RowLeft]:
    """References that are no longer as the delete left them."""
    nulls = sql.SQL(" AND ").join(sql.SQL("{}.{} IS NULL").format(ROW, sql.Identifier(c)) for c in columns)
    condition = sql.SQL("NOT ({} OR ({}))").format(_ours(one), nulls)
    yield from _take_out(choice, one, condition, MOVED, "its reference was changed since, and stays so")
    yield from _take_out(choice, one, None, MOVED, "the row is gone")


def set_columns(choice: Choice, one: ChangeSet) -> list[str]:
    """Return the columns that a SET NULL or SET DEFAULT of the same statement wrote; none for other updates."""
    rows = choice.conn.execute(
        "SELECT DISTINCT a.attname::text FROM pg_catalog.pg_constraint k"
        " JOIN sqlguard.change_set base ON base.id = %(id)s"
        " CROSS JOIN LATERAL unnest(coalesce(k.confdelsetcols, k.conkey)) AS n (attnum)"
        " JOIN pg_catalog.pg_attribute a ON a.attrelid = k.conrelid AND a.attnum = n.attnum"
        " WHERE k.contype = 'f' AND k.confdeltype IN ('n', 'd') AND k.conrelid = ANY (%(tree)s::oid[])"
        " AND EXISTS (SELECT FROM sqlguard.change_set c WHERE c.txid = base.txid"
        "             AND c.statement_at = base.statement_at AND c.op IN ('delete', 'soft_delete')"
        "             AND c.id < base.id AND c.depth <= base.depth AND (c.relid = k.confrelid OR c.relid IN"
        "             (SELECT p.relid FROM pg_partition_tree(k.confrelid) p)))"
        " ORDER BY 1",
        {"id": one.id, "tree": _tree(choice, one.relid)},
    )
    return [r[0] for r in rows]


def under_deleted_parents(choice: Choice, one: ChangeSet, sets: Sequence[ChangeSet]) -> Iterator[RowLeft]:
    """Deleted rows whose parent would stay deleted."""
    if one.op != "soft_delete" or not one.key_columns:
        return
    for key in choice.target(one.relid).parents:
        parent = choice.facts.relations.get(key.parent)
        if parent is None or choice.facts.root(parent).oid not in choice.facts.guarded:
            continue
        if parent.column("deleted_at") is None:
            continue
        problem = f"the row of `{parent.label}` that it refers to is deleted"
        condition = _parent_stays(choice, key, sets)
        yield from _take_out(choice, one, condition, PARENT, problem)


def _parent_stays(choice: Choice, key: Key, sets: Sequence[ChangeSet]) -> sql.Composable:
    parent = choice.facts.relations[key.parent]
    root = choice.facts.root(parent)
    names = root.key_columns
    back: sql.Composable = sql.SQL("false")
    with_it = [s.id for s in sets if s.relid in tree_oids(choice.facts, root)]
    if names and with_it:
        # Not correlated, so that it is read once and hashed.
        back = sql.SQL(
            "{} IN (SELECT coalesce(p.new_key, p.key) FROM unnest({}::bigint[]) AS s (id)"
            " CROSS JOIN LATERAL sqlguard.row_changes(s.id) p JOIN pg_temp.sqlguard_chosen h"
            " ON p.change_set_id = h.change_set_id AND p.id = h.row_change_id WHERE p.key IS NOT NULL)"
        ).format(
            choice.target(root.oid).key_of(names, sql.Identifier("parent")),
            sql.Literal(with_it),
        )
    return sql.SQL(
        "EXISTS (SELECT FROM {parent} AS parent WHERE {joins} AND parent.deleted_at IS NOT NULL AND NOT {back})"
    ).format(
        parent=choice.target(key.parent).ident,
        joins=key.joins(ROW, sql.Identifier("parent")),
        back=back,
    )


def _take_out(
    choice: Choice, one: ChangeSet, condition: sql.Composable | None, reason: str, problem: str
) -> Iterator[RowLeft]:
    """Take rows out of the chosen ones whose row now fulfils *condition*; None: whose row is not there."""
    target = choice.target(one.relid)
    names = one.key_columns or []
    matches = target.matches(names, sql.SQL("coalesce(r.new_key, r.key)"))
    parts = {"row": ROW, "table": target.ident, "matches": matches}
    # Joins, not a look at each row: a condition may hold a subquery, which is then read once.
    if condition is None:
        rows = sql.SQL(
            "SELECT r.change_set_id, r.id, coalesce(r.new_key, r.key) AS key, NULL::jsonb AS there FROM {chosen}"
            " WHERE {mine} AND NOT EXISTS (SELECT FROM {table} AS {row} WHERE {matches})"
        )
    else:
        rows = sql.SQL(
            "SELECT r.change_set_id, r.id, coalesce(r.new_key, r.key) AS key, to_jsonb({row}.*) AS there"
            " FROM {chosen} JOIN {table} AS {row} ON {matches} WHERE {mine} AND {condition}"
        )
        parts["condition"] = condition
    query = sql.SQL(
        "WITH found AS MATERIALIZED ({rows}),"
        " out AS (DELETE FROM pg_temp.sqlguard_chosen h USING found f"
        "         WHERE h.change_set_id = f.change_set_id AND h.row_change_id = f.id RETURNING f.key, f.there)"
        " SELECT key, there FROM out ORDER BY key"
    ).format(
        rows=rows.format(
            **parts,
            chosen=_CHOSEN.format(set=sql.Literal(one.id)),
            mine=sql.SQL("h.change_set_id = {}").format(sql.Literal(one.id)),
        )
    )
    for key, row in choice.conn.execute(query).fetchall():
        yield RowLeft(one.table, _named(names, key), reason, problem, row)


def _named(names: Sequence[str], key: Sequence[str] | None) -> dict[str, Any]:
    return dict(zip(names, key or [], strict=False))


def _ours(one: ChangeSet) -> sql.Composable:
    return _OURS.format(row=ROW, set=sql.Literal(one.id), relid=sql.Literal(one.relid))


def _tree(choice: Choice, relid: int) -> list[int]:
    return tree_oids(choice.facts, choice.facts.root(choice.facts.relations[relid]))
