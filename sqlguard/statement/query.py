"""
The walk through queries: FROM items, WITH, SELECT, INSERT, UPDATE, DELETE and MERGE.

Each query opens a level of names; each relation becomes an entry of it. What a write really covers is asked
of `predicate` when the whole statement has been walked, with the owners of its columns known.
"""

from typing import Any

from sqlguard.catalog import SYSTEM_SCHEMAS, Table
from sqlguard.errors import NotUnderstood
from sqlguard.functions import classify_sampling
from sqlguard.statement import expand, predicate
from sqlguard.statement.expressions import equality
from sqlguard.statement.model import Call, Relation, Scope, Write
from sqlguard.statement.names import Cte, Entry, Level, output_columns
from sqlguard.statement.walk import HANDLERS, Body, Walk, qualified

#: Names are looked for in every table of a level.
_TABLES = 100
_SELECT_DONE = frozenset({"withClause", "fromClause", "intoClause", "lockingClause"})


def resolve(walk: Walk, body: Body) -> tuple[Relation, Table | None]:
    """Return what a RangeVar means, WITH queries left aside; `oid` is 0 when nothing of that name is known."""
    if "catalogname" in body:
        raise NotUnderstood(f"`{body['catalogname']}` names a database", rules=("cross-database",))
    schema, name = body.get("schemaname"), body["relname"]
    only = not body.get("inh", False)
    session = walk.session
    if schema in (None, "pg_temp") and name in session.temporary:
        return Relation("pg_temp", name, only=only, temporary=True), None
    if schema in SYSTEM_SCHEMAS:
        return Relation(schema, name, only=only, system=True), None
    table = walk.catalog.table(schema, name, session.search_path)
    if table is None:
        system = schema is None and name.startswith("pg_")
        return Relation("pg_catalog" if system else schema, name, only=only, system=system), None
    return Relation(table.schema, table.name, table.oid, only=only), table


def entry_of(walk: Walk, body: Body) -> Entry:
    """Make the entry of a relation in FROM, or of a target; a WITH query hides a table."""
    alias = body.get("alias", {})
    name = alias.get("aliasname", body["relname"])
    renamed = _names(alias)
    if "schemaname" not in body:
        cte = walk.level.cte(body["relname"])
        if cte is not None:
            return Entry(name, renamed or cte.columns, query=cte.query)
    relation, table = resolve(walk, body)
    if table is not None:
        columns: frozenset[str] | None = walk.index.columns[table.oid]
    elif relation.temporary:
        columns = frozenset(walk.session.temporary[relation.name])
    else:
        columns = None
    if renamed:
        # `t(a, b)` renames the first columns: which is which is not followed up.
        columns = None
    entry = Entry(
        name, columns, table=table, relation=relation, schema=None if "alias" in body else relation.schema
    )
    entry.star = bool(renamed)
    return entry


def _names(alias: Body) -> frozenset[str] | None:
    columns = alias.get("colnames")
    return frozenset(c["String"]["sval"] for c in columns) if columns else None


def _relation(walk: Walk, body: Body) -> None:
    entry = entry_of(walk, body)
    walk.level.entries.append(entry)
    if entry.relation is not None:
        walk.entries.append(entry)
        if entry.table is not None and entry.table.kind == "v":
            expand.read_view(walk, entry.table)


def _join(walk: Walk, body: Body) -> None:
    walk.node(body["larg"])
    walk.node(body["rarg"])
    if "quals" in body:
        walk.node(body["quals"])
    if "usingClause" in body or body.get("isNatural"):
        equality(walk)
        for name in body.get("usingClause", ()):
            _used(walk, name["String"]["sval"])
        if body.get("isNatural"):
            for entry in walk.level.entries:
                entry.star = True
    if "alias" in body:
        walk.level.entries.append(Entry(body["alias"]["aliasname"], _names(body["alias"])))
    if "join_using_alias" in body:
        walk.level.entries.append(Entry(body["join_using_alias"]["aliasname"], None))


def _used(walk: Walk, column: str) -> None:
    for entry in walk.level.entries:
        if entry.columns is None or column in entry.columns:
            entry.used.add(column)


def _subselect(walk: Walk, body: Body) -> None:
    outer = walk.level
    walk.level = Level(outer, blind=not body.get("lateral", False))
    walk.node(body["subquery"])
    walk.level = outer
    alias = body.get("alias", {})
    query = body["subquery"].get("SelectStmt")
    columns = _names(alias) or (output_columns(query) if query else None)
    outer.entries.append(Entry(alias.get("aliasname", ""), columns, query=query))


def _range_function(walk: Walk, body: Body) -> None:
    for item in body["functions"]:
        walk.node(item)
    for column in body.get("coldeflist", ()):
        walk.node(column)
    alias = body.get("alias", {})
    walk.level.entries.append(Entry(alias.get("aliasname", ""), None))


def _table_function(kind: str) -> Any:
    def walk_it(walk: Walk, body: Body) -> None:
        walk.children(kind, body)
        walk.level.entries.append(Entry(body.get("alias", {}).get("aliasname", ""), None))

    return walk_it


def _sample(walk: Walk, body: Body) -> None:
    schema, method = qualified(body["method"])
    if schema not in (None, "pg_catalog") or classify_sampling(method).effect.rank:
        walk.call(Call(schema, method, len(body.get("args", ())), "sampling"))
    walk.children("RangeTableSample", body, frozenset({"method"}))


def _with(walk: Walk, body: Body) -> None:
    recursive = body.get("recursive", False)
    for item in body["ctes"]:
        cte = item["CommonTableExpr"]
        name, query = cte["ctename"], cte["ctequery"]
        select = query.get("SelectStmt")
        columns = frozenset(c["String"]["sval"] for c in cte.get("aliascolnames", ())) or None
        if recursive:
            walk.level.ctes[name] = Cte(columns or (output_columns(select) if select else None), None)
            if select is not None and _endless(select, name) and "cycle_clause" not in cte:
                walk.facts["endless"] = name
        outer = walk.level
        walk.level = Level(outer)
        walk.node(query)
        walk.level = outer
        if "cycle_clause" in cte:
            walk.children("CTECycleClause", cte["cycle_clause"])
        if columns is None and select is not None:
            columns = output_columns(select)
        walk.level.ctes[name] = Cte(columns, select)


def _endless(select: Body, name: str) -> bool:
    """Whether a recursive term has nothing that could end it: it reads only itself, without a condition."""
    step = select.get("rarg")
    if step is None or "limitCount" in select:
        return False
    sources = step.get("fromClause", ())
    return (
        len(sources) == 1
        and sources[0].get("RangeVar", {}).get("relname") == name
        and "whereClause" not in step
    )


def _select(walk: Walk, body: Body) -> None:
    outer = walk.level
    level = walk.level = Level(outer)
    if "withClause" in body:
        _with(walk, body["withClause"])
    for item in body.get("fromClause", ()):
        walk.node(item)
    if len(level.entries) > _TABLES:
        raise NotUnderstood(
            f"a query joins more than {_TABLES} tables", hint="join fewer tables", rules=("text-limits",)
        )
    walk.children("SelectStmt", body, _SELECT_DONE)
    if "intoClause" in body:
        walk.facts["into"] = body["intoClause"]["rel"]["relname"]
    if "lockingClause" in body:
        _lock(walk, body, level)
    walk.level = outer


#: Of more tables no predicate is folded: a statement that locks so many asks.
_LOCKED = 16


def _lock(walk: Walk, body: Body, level: Level) -> None:
    named = {
        r["RangeVar"]["relname"]
        for c in body["lockingClause"]
        for r in c["LockingClause"].get("lockedRels", ())
    }
    locked = walk.facts.setdefault("locks", [])
    for entry in level.entries:
        if named and entry.alias not in named:
            continue
        if entry.relation is None:
            continue
        many = len(locked) >= _LOCKED
        scope = Scope.ALL if many else predicate.scope(walk, body.get("whereClause"), entry)
        if scope is Scope.ALL and "limitCount" in body:
            scope = Scope.MEASURED
        locked.append((entry.relation, scope))


# --- writes ------------------------------------------------------------------------------------------------


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
        _with(walk, body["withClause"])
    return outer


def _closed(walk: Walk, outer: Level, target: Entry) -> None:
    walk.level = outer
    if target.used or target.star:
        walk.entries.append(target)


def _returning(walk: Walk, body: Body, target: Entry) -> None:
    if "returningClause" in body:
        for alias in ("old", "new"):
            walk.level.entries.append(Entry(alias, target.columns))
        walk.typed("ReturningClause", body["returningClause"])


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
    outer = _opened(walk, body)
    target = _target(walk, body["relation"])
    walk.level.entries.append(target)
    for item in body.get("fromClause", ()):
        walk.node(item)
    where = body.get("whereClause")
    if where is not None:
        walk.node(where)
    for assignment in body["targetList"]:
        walk.node(assignment)
    write(walk, target, "update", _assigned(body["targetList"]), predicate.scope(walk, where, target))
    _returning(walk, body, target)
    _closed(walk, outer, target)


def _delete(walk: Walk, body: Body) -> None:
    outer = _opened(walk, body)
    target = _target(walk, body["relation"])
    walk.level.entries.append(target)
    for item in body.get("usingClause", ()):
        walk.node(item)
    where = body.get("whereClause")
    if where is not None:
        walk.node(where)
    write(walk, target, "delete", None, predicate.scope(walk, where, target))
    _returning(walk, body, target)
    _closed(walk, outer, target)


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
    "RangeVar": _relation,
    "JoinExpr": _join,
    "RangeSubselect": _subselect,
    "RangeFunction": _range_function,
    "RangeTableFunc": _table_function("RangeTableFunc"),
    "RangeTableSample": _sample,
    "WithClause": _with,
    "SelectStmt": _select,
    "InsertStmt": _insert,
    "UpdateStmt": _update,
    "DeleteStmt": _delete,
    "MergeStmt": _merge,
}
_json_table = HANDLERS["JsonTable"]


def _walk_json_table(walk: Walk, body: Body) -> None:
    if _json_table is not None:
        _json_table(walk, body)
    walk.level.entries.append(Entry(body.get("alias", {}).get("aliasname", ""), None))


HANDLERS["JsonTable"] = _walk_json_table

# A LockingClause names relations of the level; they are entries already.
HANDLERS["LockingClause"] = None
