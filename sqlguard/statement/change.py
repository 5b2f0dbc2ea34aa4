"""
The walk through writes: INSERT, UPDATE, DELETE and MERGE.

What a write really covers is asked of `predicate` once its conditions have been walked and the owners of
their columns are known.
"""

from typing import Any

from sqlguard.errors import NotUnderstood
from sqlguard.statement import expand, predicate
from sqlguard.statement.model import Scope, Write
from sqlguard.statement.names import Entry, Level
from sqlguard.statement.query import resolve, with_queries
from sqlguard.statement.walk import HANDLERS, Body, Walk


def _target(walk: Walk, body: Body) -> Entry:
    relation, table = resolve(walk, body)
    alias = body.get("alias", {}).get("aliasname", body["relname"])
    columns = walk.index.columns[table.oid] if table is not None else None
    if relation.temporary:
        columns = frozenset(walk.session.temporary[relation.name])
    return Entry(
        alias, columns, table=table, relation=relation, schema=None if "alias" in body else relation.schema
    )


def _opened(walk: Walk, body: Body) -> Level:
    outer = walk.level
    walk.level = Level(outer)
    if "withClause" in body:
        with_queries(walk, body["withClause"])
    return outer


def _chosen(walk: Walk, body: Body, others: str) -> tuple[Level, Entry, list[Body]]:
    """Walk what chooses the rows of an UPDATE or DELETE; return the level around it, the target and the *others*."""
    outer = _opened(walk, body)
    target = _target(walk, body["relation"])
    walk.level.entries.append(target)
    items = body.get(others, [])
    for item in items:
        walk.node(item)
    where = body.get("whereClause")
    if where is not None:
        walk.node(where)
    return outer, target, items


def _closed(walk: Walk, outer: Level, target: Entry) -> None:
    walk.level = outer
    if target.used or target.star:
        walk.entries.append(target)


def _returning(walk: Walk, body: Body, target: Entry) -> None:
    clause = body.get("returningClause")
    if clause is None:
        return
    names = dict(_VERSIONS)
    for item in clause.get("options", ()):
        names[item["ReturningOption"]["option"]] = item["ReturningOption"]["value"]
    versions = [
        Entry(n, target.columns, table=target.table, relation=target.relation) for n in names.values()
    ]
    walk.level.entries += versions
    walk.typed("ReturningClause", clause)
    # Both are the target's row: what is read of them is read of it.
    walk.entries += [version for version in versions if version.used or version.star]


#: How a row before and after the write is called, if the clause does not say otherwise.
_VERSIONS = {"RETURNING_OPTION_OLD": "old", "RETURNING_OPTION_NEW": "new"}


def _assigned(targets: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(t["ResTarget"]["name"] for t in targets))


def _insert(walk: Walk, body: Body) -> None:
    outer = _opened(walk, body)
    target = _target(walk, body["relation"])
    if "selectStmt" in body:
        walk.node(body["selectStmt"])
    for column in body.get("cols", ()):
        walk.node(column)
    select = body.get("selectStmt", {}).get("SelectStmt")
    values = select is None or "valuesLists" in select
    write(
        walk, target, "insert", _inserted(body, select, target), Scope.NARROWED if values else Scope.MEASURED
    )
    walk.level.entries.append(target)
    conflict = body.get("onConflictClause")
    if conflict is not None:
        walk.level.entries.append(Entry("excluded", target.columns))
        if "infer" in conflict:
            walk.children("InferClause", conflict["infer"])
        walk.children("OnConflictClause", conflict, frozenset({"infer"}))
        if conflict["action"] == "ONCONFLICT_UPDATE":
            scope = Scope.NARROWED if values else predicate.upsert_scope(walk, select, target)
            write(walk, target, "update", _assigned(conflict["targetList"]), scope)
    _returning(walk, body, target)
    _closed(walk, outer, target)


def _inserted(body: Body, select: Body | None, target: Entry) -> tuple[str, ...] | None:
    """Return the columns that an INSERT fills: those it lists, else the first ones by position."""
    if "cols" in body:
        return _assigned(body["cols"])
    if select is None:
        return ()
    if target.table is None:
        return None
    number = _width(select)
    names = tuple(c.name for c in target.table.columns)
    return names[:number] if number is not None else None


def _width(select: Body) -> int | None:
    while "larg" in select:
        select = select["larg"]
    if "valuesLists" in select:
        return len(select["valuesLists"][0]["List"]["items"])
    targets = select.get("targetList", ())
    if any("A_Star" in str(t["ResTarget"].get("val", "")) for t in targets):
        return None
    return len(targets)


def _update(walk: Walk, body: Body) -> None:
    outer, target, items = _chosen(walk, body, "fromClause")
    for assignment in body["targetList"]:
        walk.node(assignment)
    scope = predicate.scope(walk, body.get("whereClause"), target, items)
    write(walk, target, "update", _assigned(body["targetList"]), scope)
    _returning(walk, body, target)
    _closed(walk, outer, target)


def _delete(walk: Walk, body: Body) -> None:
    outer, target, items = _chosen(walk, body, "usingClause")
    scope = predicate.scope(walk, body.get("whereClause"), target, items)
    write(walk, target, "delete", None, scope)
    _returning(walk, body, target)
    _closed(walk, outer, target)


def copy_in(walk: Walk, body: Body) -> None:
    """Walk COPY … FROM: it inserts into the columns that it lists, or into all that a row of data has."""
    outer = _opened(walk, body)
    target = _target(walk, body["relation"])
    listed = tuple(n["String"]["sval"] for n in body.get("attlist", ()))
    write(walk, target, "insert", listed or _filled(walk, target), Scope.MEASURED)
    walk.level.entries.append(target)
    if "whereClause" in body:
        walk.node(body["whereClause"])
    _closed(walk, outer, target)


def _filled(walk: Walk, target: Entry) -> tuple[str, ...] | None:
    if target.table is None:
        return None
    soft = walk.catalog.soft.get(target.table.oid)
    hidden = soft.guard.bookkeeping if soft is not None and soft.guard is not None else ()
    return tuple(c.name for c in target.table.columns if not c.generated and c.name not in hidden)


_COMMANDS = {"CMD_UPDATE": "update", "CMD_DELETE": "delete", "CMD_INSERT": "insert"}
_BY_SOURCE = "MERGE_WHEN_NOT_MATCHED_BY_SOURCE"


def _merge(walk: Walk, body: Body) -> None:
    outer = _opened(walk, body)
    target = _target(walk, body["relation"])
    walk.level.entries.append(target)
    walk.node(body["sourceRelation"])
    walk.node(body["joinCondition"])
    changes: dict[bool, list[Body]] = {True: [], False: []}
    for item in body["mergeWhenClauses"]:
        clause = item["MergeWhenClause"]
        walk.children("MergeWhenClause", clause)
        op = _COMMANDS.get(clause["commandType"])
        if op == "insert":
            columns = _assigned(clause["targetList"]) if "targetList" in clause else None
            write(walk, target, op, columns, Scope.MEASURED)
        elif op is not None:
            changes[clause.get("matchKind") == _BY_SOURCE].append(clause)
    for by_source, clauses in changes.items():
        join = None if by_source else body["joinCondition"]
        scopes = predicate.merge_scope(walk, join, [c.get("condition") for c in clauses], target)
        for clause, scope in zip(clauses, scopes, strict=True):
            op = _COMMANDS[clause["commandType"]]
            write(walk, target, op, _assigned(clause["targetList"]) if op == "update" else None, scope)
    _returning(walk, body, target)
    _closed(walk, outer, target)


def write(walk: Walk, target: Entry, op: str, columns: tuple[str, ...] | None, scope: Scope) -> None:
    """Note a write; through a view it is one of the table below, and rules add theirs."""
    relation, table = target.relation, target.table
    if relation is None:
        raise NotUnderstood("the target of a write is not a table", rules=("write-target",))
    if table is None or table.kind != "v":
        walk.writes.append(Write(relation, op, columns, scope))
        if table is not None and table.rules:
            expand.rules(walk, table, op)
        return
    expand.write_view(walk, table, Write(relation, op, columns, scope))


HANDLERS |= {
    "InsertStmt": _insert,
    "UpdateStmt": _update,
    "DeleteStmt": _delete,
    "MergeStmt": _merge,
}
