"""
The walk through queries: FROM items, WITH, SELECT, row locks.

Each query opens a level of names; each relation becomes an entry of it.
"""

from typing import Any

from sqlguard.catalog import SYSTEM_SCHEMAS, Table
from sqlguard.errors import NotUnderstood
from sqlguard.functions import classify_sampling
from sqlguard.statement import expand, predicate
from sqlguard.statement.expressions import equality
from sqlguard.statement.model import Call, Relation, Scope
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
    before = len(walk.level.entries)
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
    if "join_using_alias" in body:
        using = frozenset(name["String"]["sval"] for name in body["usingClause"])
        walk.level.entries.append(Entry(body["join_using_alias"]["aliasname"], using))
    if "alias" in body:
        for entry in walk.level.entries[before:]:
            # Which of its columns the alias is asked for, and by which names, is not followed up.
            entry.star = entry.hidden = True
        walk.level.entries.append(Entry(body["alias"]["aliasname"], None, sure=_names(body["alias"])))


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
    defined = frozenset(column["ColumnDef"]["colname"] for column in body.get("coldeflist", ()))
    walk.level.entries.append(Entry(alias.get("aliasname", ""), None, sure=_names(alias) or defined))


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


def with_queries(walk: Walk, body: Body) -> None:
    recursive = body.get("recursive", False)
    if recursive:
        # Each may name the ones behind it.
        for item in body["ctes"]:
            walk.level.ctes[item["CommonTableExpr"]["ctename"]] = Cte(None, None)
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


def _without_names_of_results(body: Body) -> Body:
    """Leave out of ORDER BY what names a column of the result: to PostgreSQL it comes before those of FROM."""
    if "sortClause" not in body:
        return body
    names = {t["ResTarget"]["name"] for t in body.get("targetList", ()) if "name" in t["ResTarget"]}
    if not names:
        return body
    return {**body, "sortClause": [s for s in body["sortClause"] if _sorted_by(s["SortBy"]) not in names]}


def _sorted_by(body: Body) -> str | None:
    fields = body["node"].get("ColumnRef", {}).get("fields", ())
    is_name = len(fields) == 1 and "useOp" not in body and "String" in fields[0]
    return fields[0]["String"].get("sval") if is_name else None


def _select(walk: Walk, body: Body) -> None:
    outer = walk.level
    level = walk.level = Level(outer)
    if "withClause" in body:
        with_queries(walk, body["withClause"])
    for item in body.get("fromClause", ()):
        walk.node(item)
    if len(level.entries) > _TABLES:
        raise NotUnderstood(
            f"a query joins more than {_TABLES} tables", hint="join fewer tables", rules=("text-limits",)
        )
    walk.children("SelectStmt", _without_names_of_results(body), _SELECT_DONE)
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


HANDLERS |= {
    "RangeVar": _relation,
    "JoinExpr": _join,
    "RangeSubselect": _subselect,
    "RangeFunction": _range_function,
    "RangeTableFunc": _table_function("RangeTableFunc"),
    "RangeTableSample": _sample,
    "WithClause": with_queries,
    "SelectStmt": _select,
}
_json_table = HANDLERS["JsonTable"]


def _walk_json_table(walk: Walk, body: Body) -> None:
    if _json_table is not None:
        _json_table(walk, body)
    walk.level.entries.append(Entry(body.get("alias", {}).get("aliasname", ""), None))


HANDLERS["JsonTable"] = _walk_json_table

# A LockingClause names relations of the level; they are entries already.
HANDLERS["LockingClause"] = None
