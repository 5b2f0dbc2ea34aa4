"""
INSERT, UPDATE, DELETE, MERGE and COPY: what they write, and what they return.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from postgast import pg_query_pb2 as pg

from sqlguard.catalog import Table, Trigger
from sqlguard.errors import NotUnderstood, Refused
from sqlguard.rewrite import conflict, merge, ranges, walk
from sqlguard.rewrite.delete import soft_delete
from sqlguard.rewrite.scope import Columns, Item, Scope
from sqlguard.rewrite.source import DOT, Source, parts, quote
from sqlguard.rewrite.targets import refuse_unless_deletable
from sqlguard.rewrite.work import Ctes, Work, reads, writes

#: From this version on RETURNING knows OLD and NEW.
_RETURNING_OLD_NEW = 180000


def target(work: Work, relation: Any) -> tuple[Table | None, Item]:
    """Return the table that a statement writes, which is never a CTE, and its item."""
    table = work.tables.resolve(relation)
    return table, ranges.table_item(work, relation, table)


def delete(work: Work, node: Any, ctes: Ctes) -> Columns:
    table, item = target(work, node.relation)
    refuse_unless_deletable(work.tables, table, node.relation)
    ctes = walk.with_clause(work, node.with_clause, ctes, None)
    using = Scope()
    ranges.from_clause(work, node.using_clause, ctes, using)
    walk.expression(work, node.where_clause, Scope([item, *using.elements]), ctes)
    marking = table is not None and work.tables.is_soft(table)
    if marking:
        item = replace(item, role="deleted")
    gives = returning(work, node, Scope([item, *using.elements]), item, ctes)
    if table is not None and marking:
        soft_delete(work.source, work.edits, node, table)
        work.marked.append(table)
        if gives.names or not gives.complete:
            _same_values(table)
    return gives


def update(work: Work, node: Any, ctes: Ctes) -> Columns:
    table, item = target(work, node.relation)
    ctes = walk.with_clause(work, node.with_clause, ctes, None)
    source = Scope()
    ranges.from_clause(work, node.from_clause, ctes, source)
    scope = Scope([item, *source.elements])
    assigned(work, table, node.target_list)
    for part in (*node.target_list, node.where_clause):
        walk.expression(work, part, scope, ctes)
    return returning(work, node, scope, item, ctes)


def insert(work: Work, node: Any, ctes: Ctes) -> Columns:
    table, item = target(work, node.relation)
    ctes = walk.with_clause(work, node.with_clause, ctes, None)
    gives = None
    if node.HasField("select_stmt"):
        gives = walk.query(work, node.select_stmt, ctes, None)
    if table is not None and work.tables.is_soft(table):
        assigned(work, table, node.cols)
        given = [c.res_target.name for c in node.cols]
        if not given and gives is not None:
            given = _positions(work, node, table, item, gives)
        if set(given) & set(table.primary_key):
            work.keyed.append(table)
    clause = node.on_conflict_clause
    if node.HasField("on_conflict_clause"):
        excluded = replace(item, name="excluded", table=None, bare=False)
        scope = Scope([item, excluded])
        assigned(work, table, clause.target_list)
        if table is not None and clause.HasField("infer") and work.tables.is_soft(table):
            conflict.infer(work, clause.infer, table)
        walk.expression(work, clause.infer.where_clause, Scope([item]), ctes)
        for part in (*clause.infer.index_elems, *clause.target_list, clause.where_clause):
            walk.expression(work, part, scope, ctes)
    return returning(work, node, Scope([item]), item, ctes)


def merge_rows(work: Work, node: Any, ctes: Ctes) -> Columns:
    table, item = target(work, node.relation)
    ctes = walk.with_clause(work, node.with_clause, ctes, None)
    source = Scope()
    ranges.from_clause(work, [node.source_relation], ctes, source)
    scope = Scope([*source.elements, item])
    walk.expression(work, node.join_condition, scope, ctes)
    deletes = False
    for clause in (n.merge_when_clause for n in node.merge_when_clauses):
        deletes = deletes or clause.command_type == pg.CMD_DELETE
        assigned(work, table, clause.target_list)
        if clause.command_type == pg.CMD_INSERT and table is not None and not clause.target_list:
            _fits(table, item, len(clause.values))
        for part in (clause.condition, *clause.target_list, *clause.values):
            walk.expression(work, part, scope, ctes)
    marking = table is not None and deletes and work.tables.is_soft(table)
    if deletes:
        refuse_unless_deletable(work.tables, table, node.relation)
    if table is not None and marking:
        merge.mark(work.source, work.edits, node)
        work.marked.append(table)
    return returning(work, node, scope, item, ctes)


def copy(work: Work, node: Any) -> None:
    """COPY of a table takes or gives the columns that an agent knows; COPY of a query is that query."""
    if node.HasField("query"):
        walk.statement(work, node.query)
        return
    table, item = target(work, node.relation)
    if table is None or not item.hides:
        return
    hidden = work.tables.hidden(table)
    for name in (n.string.sval for n in node.attlist):
        if name in hidden:
            raise writes(name, table.name) if node.is_from else reads(name, table.name)
    if not node.attlist:
        names = copied(table, item.visible, inward=node.is_from)
        work.edits.insert(behind_name(work.source, node.relation), f" ({', '.join(map(quote, names))})")
    walk.expression(work, node.where_clause, Scope([item]), {})


def copied(table: Table, visible: Iterable[str], *, inward: bool) -> list[str]:
    """Return the columns of a COPY that lists none: generated ones are given, and not taken."""
    generated = {c.name for c in table.columns if c.generated}
    return [name for name in visible if not (inward and name in generated)]


def returning(work: Work, node: Any, scope: Scope, item: Item, ctes: Ctes) -> Columns:
    """Visit RETURNING, where OLD and NEW, or what they are renamed to, are in sight too."""
    clause = node.returning_clause
    if work.only_deletes or not clause.exprs:
        return Columns(complete=not clause.exprs)
    if work.tables.catalog.server_version >= _RETURNING_OLD_NEW:
        names = {"old": pg.RETURNING_OPTION_OLD, "new": pg.RETURNING_OPTION_NEW}
        for option in (o.returning_option for o in clause.options):
            names = {n: o for n, o in names.items() if o != option.option} | {option.value: option.option}
        for name, which in names.items():
            if not work.source.may_name(name):
                continue
            role = "new" if which == pg.RETURNING_OPTION_NEW and item.role == "deleted" else ""
            if scope.named(name) is None:
                scope.elements.append(replace(item, name=name, table=None, bare=False, role=role))
    return walk.targets(work, clause.exprs, scope, ctes)


def assigned(work: Work, table: Table | None, nodes: Iterable[Any]) -> None:
    """Refuse to write bookkeeping columns."""
    hidden = work.tables.hidden(table)
    for name in (n.res_target.name for n in nodes):
        if name in hidden and table is not None:
            raise writes(name, table.name)


def nothing_deleted(work: Work, node: Any) -> None:
    """Refuse a utility statement with a DELETE on a soft table somewhere in it."""
    kind = node.DESCRIPTOR.name
    if kind in ("DeleteStmt", "MergeStmt") and work.tables.is_soft(work.tables.resolve(node.relation)):
        raise Refused(
            f"a DELETE on `{node.relation.relname}` can't be kept for later here",
            hint="send the DELETE itself",
            rules=("ddl_on_managed_table",),
        )
    for part in parts(node):
        nothing_deleted(work, part)


def _positions(work: Work, node: Any, table: Table, item: Item, gives: Columns) -> list[str]:
    """Return the columns that an INSERT without a list fills, and write the list where it has to be."""
    if not gives.complete:
        raise Refused(
            f"how many columns of `{table.name}` this fills can't be told",
            hint="name the columns: INSERT INTO t (a, b) …",
            rules=("bookkeeping_column_write",),
        )
    count = len(gives.names)
    _fits(table, item, count)
    filled = list(item.visible[:count])
    if any(c.hidden for c in item.columns[:count]):
        work.edits.insert(behind_name(work.source, node.relation), f" ({', '.join(map(quote, filled))})")
    return filled


def _fits(table: Table, item: Item, count: int) -> None:
    if item.hides and count > len(item.visible):
        raise Refused(
            f"there are more values than `{table.name}` has columns",
            hint=f"give {len(item.visible)} values at most, or name the columns",
            rules=("bookkeeping_column_write",),
        )


def _same_values(table: Table) -> None:
    """Refuse RETURNING where a trigger of the application may change the row while it is marked."""
    before = [t for t in table.triggers if t.for_each_row and _is_before_update(t)]
    # Triggers fire by name; the guard's own puts back what those before it did to a row that is marked.
    last = max((t.name for t in before if t.ours), default="")
    if any(not t.ours and t.name > last for t in before):
        raise Refused(
            f"the rows that a DELETE on `{table.name}` returns may be changed by a trigger",
            hint="select the rows first, then delete them without RETURNING",
            rules=("update_trigger_blocks_soft_delete",),
        )


def _is_before_update(trigger: Trigger) -> bool:
    return trigger.timing.lower() == "before" and any(e.lower() == "update" for e in trigger.events)


def behind_name(source: Source, relation: Any) -> int:
    """Return the byte behind the name of *relation* and its alias."""
    last = source.at(relation.location)
    while source.kind(last + 1) == DOT:
        last += 2
    if relation.HasField("alias"):
        if source.kind(last + 1) != pg.AS:
            raise NotUnderstood("a table's alias was not found", rules=("rewrite-not-placed",))
        last += 2
    return source[last].end


VISITS: dict[str, Callable[[Work, Any, Ctes], Columns]] = {
    "delete_stmt": delete,
    "update_stmt": update,
    "insert_stmt": insert,
    "merge_stmt": merge_rows,
}
