"""
What a statement is at its top: libpg_query's node type -> Kind, subject, details and the statement inside.

What has no row here is Kind.DDL or Kind.OTHER, and no rule speaks for those.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from sqlguard.catalog import Catalog
from sqlguard.errors import NotUnderstood
from sqlguard.statement import casts, change, grammar
from sqlguard.statement.model import Kind, Relation, Scope, Session, Statement, Write
from sqlguard.statement.query import resolve
from sqlguard.statement.settings import assigned, modes, option_on
from sqlguard.statement.text import Parsed
from sqlguard.statement.walk import Body, Walk

_OTHER = frozenset(
    {"LockStmt", "NotifyStmt", "VacuumStmt", "ClusterStmt", "ReindexStmt", "CheckPointStmt", "LoadStmt"}
)
_TRANSACTIONS = {
    "TRANS_STMT_BEGIN": Kind.BEGIN,
    "TRANS_STMT_START": Kind.BEGIN,
    "TRANS_STMT_COMMIT": Kind.COMMIT,
    "TRANS_STMT_ROLLBACK": Kind.ROLLBACK,
    "TRANS_STMT_SAVEPOINT": Kind.SAVEPOINT,
    "TRANS_STMT_RELEASE": Kind.RELEASE,
    "TRANS_STMT_ROLLBACK_TO": Kind.ROLLBACK_TO,
}


def statement_of(parsed: Parsed, catalog: Catalog, session: Session) -> Statement:
    """Return what one parsed statement is."""
    ((name, body),) = parsed.tree.items()
    made = _READERS.get(name, _refused)(name, body, catalog, session)
    return replace(made, text=parsed.text, start=parsed.start, end=parsed.end, tree=parsed.tree)


def _walked(kind: Kind, tree: Body, catalog: Catalog, session: Session) -> Statement:
    walk = Walk(catalog, session)
    walk.node(tree)
    return _found(kind, walk, tree)


def _found(kind: Kind, walk: Walk, tree: Body) -> Statement:
    casts.note(walk)
    facts = walk.facts
    facts.pop("types", None)
    facts.pop("arrays", None)
    walk.writes += _called(walk)
    return Statement(
        kind,
        "",
        tree=tree,
        reads=walk.relations(),
        writes=tuple(walk.writes),
        calls=tuple(walk.calls),
        locks_rows="locks" in facts,
        details=facts,
    )


def _called(walk: Walk) -> list[Write]:
    """A function that may change data is a write, of what nobody knows; whether it passes is the policy's matter."""
    oids = dict.fromkeys(oid for call in walk.calls for oid in call.candidates)
    found = [walk.catalog.functions[oid] for oid in oids if oid in walk.catalog.functions]
    return [
        Write(Relation(f.schema, f.name), "call", scope=Scope.NARROWED)
        for f in found
        if f.kind in "fp" and f.volatility == "v" and f.extension is None
    ]


_QUERY_KINDS = {
    "SelectStmt": Kind.SELECT,
    "InsertStmt": Kind.INSERT,
    "UpdateStmt": Kind.UPDATE,
    "DeleteStmt": Kind.DELETE,
    "MergeStmt": Kind.MERGE,
}
_PLANNED = frozenset({*_QUERY_KINDS.values(), Kind.VALUES})
#: Among the details of a prepared statement: its parameters' types, as in `Session.parameters`.
PARAMETERS = "parameters"


def _query(name: str, body: Body, catalog: Catalog, session: Session) -> Statement:
    kind = Kind.VALUES if "valuesLists" in body else _QUERY_KINDS[name]
    return _walked(kind, {name: body}, catalog, session)


def _around(kind: Kind, inner: Statement, subject: str | None = None, **details: Any) -> Statement:
    """Return the statement that carries out *inner*: what it reads, writes and calls is the outer one's too."""
    return Statement(
        kind,
        "",
        reads=inner.reads,
        writes=inner.writes,
        calls=inner.calls,
        locks_rows=inner.locks_rows,
        subject=subject,
        details={**inner.details, **details},
        inner=inner,
    )


def _inner(tree: Body, catalog: Catalog, session: Session) -> Statement:
    ((name, body),) = tree.items()
    made = _READERS.get(name, _refused)(name, body, catalog, session)
    return replace(made, tree=tree)


def _explain(_: str, body: Body, catalog: Catalog, session: Session) -> Statement:
    inner = _inner(body["query"], catalog, session)
    analyse = option_on(body.get("options", ()), "analyze")
    made = _around(Kind.EXPLAIN, inner, analyze=analyse)
    # Without ANALYZE nothing is written; what it would write must be allowed all the same (`inner`).
    return made if analyse else replace(made, writes=(), locks_rows=False)


def _copy(_: str, body: Body, catalog: Catalog, session: Session) -> Statement:
    outward = not body.get("is_from", False)
    details = {"program": body.get("is_program", False), "file": body.get("filename")}
    kind = Kind.COPY_OUT if outward else Kind.COPY_IN
    if "query" in body:
        return _around(kind, _inner(body["query"], catalog, session), **details)
    walk = Walk(catalog, session)
    if outward:
        walk.node({"RangeVar": body["relation"]})
        for entry in walk.entries:
            entry.used.update(n["String"]["sval"] for n in body.get("attlist", ()))
            entry.star = "attlist" not in body
    else:
        change.copy_in(walk, body)
    made = _found(kind, walk, {"CopyStmt": body})
    return replace(made, details={**made.details, **details})


def _set(_: str, body: Body, _catalog: Catalog, _session: Session) -> Statement:
    subject, details = assigned(body)
    kind = Kind.RESET if body["kind"] in ("VAR_RESET", "VAR_RESET_ALL", "VAR_SET_DEFAULT") else Kind.SET
    return Statement(kind, "", subject=subject or None, details=details)


def _show(_: str, body: Body, _catalog: Catalog, _session: Session) -> Statement:
    return Statement(Kind.SHOW, "", subject=str(body["name"]).lower())


def _transaction(_: str, body: Body, _catalog: Catalog, _session: Session) -> Statement:
    kind = _TRANSACTIONS.get(body["kind"], Kind.OTHER)
    given = modes(body.get("options", ()))
    details: dict[str, Any] = {"modes": given, "chain": body.get("chain", False), "what": body["kind"]}
    if "transaction_read_only" in given:
        details["read_only"] = given["transaction_read_only"] not in ("0", "off")
    return Statement(kind, "", subject=body.get("savepoint_name"), details=details)


def _prepare(_: str, body: Body, catalog: Catalog, session: Session) -> Statement:
    walk = Walk(catalog, session)
    for kind in body.get("argtypes", ()):
        walk.node(kind)
    casts.note(walk)
    declared = session.after(parameters=(*session.parameters, *casts.named(walk)))
    made = _around(Kind.PREPARE, _inner(body["query"], catalog, declared), body["name"])
    if made.inner is not None and declared.parameters:
        details = {**made.inner.details, PARAMETERS: declared.parameters}
        made = replace(made, inner=replace(made.inner, details=details))
    # Preparing runs nothing; executing does.
    return replace(made, writes=(), locks_rows=False, calls=(*made.calls, *walk.calls))


def _again(then: Statement, catalog: Catalog, session: Session) -> Statement:
    """
    Return what a prepared statement does by now: what it meant when it was prepared, and what it means today.

    PostgreSQL plans it anew when a view of it is replaced or the search_path changes, and else keeps the plan.
    """
    if then.kind not in _PLANNED or not then.tree:
        return then
    types = tuple(t for t in then.details.get(PARAMETERS, ()) if t in catalog.types)
    now = _inner(then.tree, catalog, session.after(parameters=types))
    return replace(
        then,
        reads=_joined(then.reads, now.reads),
        writes=_joined(then.writes, now.writes),
        calls=_joined(then.calls, now.calls),
        locks_rows=then.locks_rows or now.locks_rows,
        details={**then.details, **now.details},
    )


_T = TypeVar("_T")


def _joined(one: tuple[_T, ...], other: tuple[_T, ...]) -> tuple[_T, ...]:
    return one if one == other else tuple(dict.fromkeys((*one, *other)))


def _execute(_: str, body: Body, catalog: Catalog, session: Session) -> Statement:
    walk = Walk(catalog, session)
    for argument in body.get("params", ()):
        walk.node(argument)
    given = _found(Kind.EXECUTE, walk, {"ExecuteStmt": body})
    inner = session.prepared.get(body["name"])
    if inner is None:
        return replace(given, subject=body["name"])
    made = _around(Kind.EXECUTE, _again(inner, catalog, session), body["name"])
    return replace(made, reads=(*made.reads, *given.reads), calls=(*made.calls, *given.calls))


def _deallocate(_: str, body: Body, _catalog: Catalog, _session: Session) -> Statement:
    return Statement(Kind.DEALLOCATE, "", subject=body.get("name"))


#: CURSOR_OPT_HOLD of PostgreSQL's parsenodes.h
_HOLD = 0x0020


def _declare(_: str, body: Body, catalog: Catalog, session: Session) -> Statement:
    inner = _inner(body["query"], catalog, session)
    if "locks" in inner.details:
        # A cursor locks the rows that are fetched, not all that its query has.
        locks = [(r, Scope.MEASURED if scope is Scope.ALL else scope) for r, scope in inner.details["locks"]]
        inner = replace(inner, details={**inner.details, "locks": locks})
    return _around(Kind.DECLARE, inner, body["portalname"], hold=bool(body.get("options", 0) & _HOLD))


def _fetch(_: str, body: Body, _catalog: Catalog, session: Session) -> Statement:
    inner = session.cursors.get(body["portalname"])
    # The declaration was decided; fetching reads what it reads.
    return Statement(Kind.FETCH, "", subject=body["portalname"], inner=inner)


def _close(_: str, body: Body, _catalog: Catalog, _session: Session) -> Statement:
    return Statement(Kind.CLOSE, "", subject=body.get("portalname"))


def _named(kind: Kind, field: str) -> "Reader":
    def read(_: str, body: Body, _catalog: Catalog, _session: Session) -> Statement:
        return Statement(kind, "", subject=body.get(field), details={"target": body.get("target")})

    return read


def _constraints(_: str, body: Body, _catalog: Catalog, _session: Session) -> Statement:
    return Statement(Kind.CONSTRAINTS, "", details={"deferred": body.get("deferred", False)})


def _create_as(_: str, body: Body, catalog: Catalog, session: Session) -> Statement:
    inner = _inner(body["query"], catalog, session)
    rel = body["into"]["rel"]
    temporary = rel.get("relpersistence") == "t" or rel.get("schemaname") == "pg_temp"
    made = _around(Kind.CREATE_TEMP if temporary else Kind.DDL, inner, rel["relname"])
    return replace(made, details={**made.details, "verb": "CREATE TABLE AS"})


def _create(_: str, body: Body, _catalog: Catalog, _session: Session) -> Statement:
    rel = body["relation"]
    temporary = rel.get("relpersistence") == "t" or rel.get("schemaname") == "pg_temp"
    columns = tuple(e["ColumnDef"]["colname"] for e in body.get("tableElts", ()) if "ColumnDef" in e)
    kind = Kind.CREATE_TEMP if temporary else Kind.DDL
    return Statement(kind, "", subject=rel["relname"], details={"columns": columns, "verb": "CREATE TABLE"})


def _drop(_: str, body: Body, _catalog: Catalog, session: Session) -> Statement:
    names = [n["List"]["items"] for n in body.get("objects", ()) if "List" in n]
    parts = [[i["String"].get("sval", "") for i in items if "String" in i] for items in names]
    own = body["removeType"] == "OBJECT_TABLE" and all(
        p and p[-1] in session.temporary and (len(p) == 1 or p[0] == "pg_temp") for p in parts
    )
    if own and len(parts) == 1 and body.get("behavior") != "DROP_CASCADE":
        return Statement(Kind.DROP_TEMP, "", subject=parts[0][-1])
    return Statement(Kind.DDL, "", details={"verb": "DROP"})


def _truncate(_: str, body: Body, catalog: Catalog, session: Session) -> Statement:
    walk = Walk(catalog, session)
    tables = tuple(resolve(walk, r["RangeVar"])[0] for r in body["relations"])
    return Statement(Kind.TRUNCATE, "", details={"tables": tables, "verb": "TRUNCATE"})


def _refused(name: str, _body: Body, _catalog: Catalog, _session: Session) -> Statement:
    if name not in grammar.STATEMENTS:
        raise NotUnderstood(f"`{name}` is not understood", rules=("unknown-node",))
    kind = Kind.OTHER if name in _OTHER else Kind.DDL
    return Statement(kind, "", details={"node": name, "verb": _verb(name)})


def _verb(name: str) -> str:
    """`AlterTableStmt` -> `ALTER TABLE`: how a message calls it."""
    word = name.removesuffix("Stmt")
    return "".join(
        f" {c}" if c.isupper() and i and not word[i - 1].isupper() else c for i, c in enumerate(word)
    ).upper()


Reader = Callable[[str, Body, Catalog, Session], Statement]
_READERS: dict[str, Reader] = {
    **dict.fromkeys(_QUERY_KINDS, _query),
    "ExplainStmt": _explain,
    "CopyStmt": _copy,
    "VariableSetStmt": _set,
    "VariableShowStmt": _show,
    "TransactionStmt": _transaction,
    "PrepareStmt": _prepare,
    "ExecuteStmt": _execute,
    "DeallocateStmt": _deallocate,
    "DeclareCursorStmt": _declare,
    "FetchStmt": _fetch,
    "ClosePortalStmt": _close,
    "DiscardStmt": _named(Kind.DISCARD, "target"),
    "ListenStmt": _named(Kind.LISTEN, "conditionname"),
    "UnlistenStmt": _named(Kind.UNLISTEN, "conditionname"),
    "ConstraintsSetStmt": _constraints,
    "CreateTableAsStmt": _create_as,
    "CreateStmt": _create,
    "DropStmt": _drop,
    "TruncateStmt": _truncate,
    "CallStmt": lambda _n, body, c, s: _walked(Kind.CALL, {"FuncCall": body["funccall"]}, c, s),
    "DoStmt": lambda _n, _b, _c, _s: Statement(Kind.DO, "", details={"verb": "DO"}),
}
