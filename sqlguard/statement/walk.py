"""
One pass over a statement's tree: relations, writes, calls, locks, and who each column belongs to.

Every node goes through `Walk.node`, which knows a handler for each node type of the grammar; a type without
one is not understood. The handlers of columns and calls are here, those of other expressions in
`expressions`, those of queries in `query`.
"""

from collections.abc import Callable
from typing import Any

from google.protobuf import json_format
from postgast import pg_query_pb2

from sqlguard import functions
from sqlguard.catalog import FIRST_NORMAL_OID, Catalog, Function, Operator
from sqlguard.errors import NotUnderstood
from sqlguard.functions import NOT_CONSTANT
from sqlguard.statement import grammar
from sqlguard.statement.index import index_of
from sqlguard.statement.model import Call, Relation, Session, Write
from sqlguard.statement.names import Entry, Level
from sqlguard.statement.terms import UNKNOWN, value_of

Body = dict[str, Any]
Handler = Callable[["Walk", Body], None]

#: Node type -> what is done with it; None: nothing in it can matter.
HANDLERS: dict[str, Handler | None] = {}
_TYPED = grammar.TYPED
_NONE: dict[str, str] = {}
#: The function that is SET: which setting it sets decides.
SETTER = "set_config"


class Walk:
    """The walk over one statement; what it finds is in its attributes afterwards."""

    __slots__ = (
        "calls", "catalog", "depth", "entries", "facts", "index", "level", "operators", "owners", "session", "views",
        "writes",
    )  # fmt: skip

    def __init__(self, catalog: Catalog, session: Session) -> None:
        self.catalog = catalog
        self.index = index_of(catalog)
        self.session = session
        self.level: Level = Level(None)
        #: Relations read, in the order of the text.
        self.entries: list[Entry] = []
        #: Relations that views lead to.
        self.views: dict[tuple[str | None, str, str | None], Relation] = {}
        self.writes: list[Write] = []
        self.calls: dict[Call, None] = {}
        #: Operators on users' types that may be meant where a built-in one has the same name.
        self.operators: dict[Operator, None] = {}
        #: ColumnRef body (by identity) -> the entry it belongs to.
        self.owners: dict[int, Entry] = {}
        #: What only some rules ask for: locks, INTO, recursion …
        self.facts: dict[str, Any] = {}
        self.depth = 0

    def node(self, wrapped: Body) -> None:
        """Walk a node that comes with its type's name; an empty one stands for NULL in a list."""
        for kind, body in wrapped.items():
            try:
                handler = HANDLERS[kind]
            except KeyError:
                raise NotUnderstood(f"`{kind}` is not understood here", rules=("unknown-node",)) from None
            if handler is not None:
                handler(self, body)

    def typed(self, kind: str, body: Body) -> None:
        """Walk a node whose type is known from the field it stands in."""
        self.node({kind: body})

    def children(self, kind: str, body: Body, skip: frozenset[str] = frozenset()) -> None:
        """Walk everything below a node but the fields in *skip*."""
        types = _TYPED.get(kind, _NONE)
        for name, value in body.items():
            if name in skip:
                continue
            shape = type(value)
            if shape is list:
                for item in value:
                    self.node(item)
            elif shape is dict:
                if name in types:
                    self.node({types[name]: value})
                else:
                    self.node(value)

    def call(self, call: Call) -> None:
        self.calls[call] = None

    def relations(self) -> tuple[Relation, ...]:
        """Return the relations that were read, with the columns that were."""
        found: dict[tuple[str | None, str, int], tuple[Relation, set[str], bool]] = {}
        for entry in self.entries:
            relation = entry.relation
            if relation is None:
                continue
            key = (relation.schema, relation.name, relation.oid)
            _, used, star = found.get(key, (relation, set(), False))
            found[key] = (relation, used | entry.used, star or entry.star)
        named = [_with_columns(r, used, star=star) for r, used, star in found.values()]
        return (*named, *self.views.values())


def _with_columns(relation: Relation, used: set[str], *, star: bool) -> Relation:
    if star:
        return relation
    return Relation(
        relation.schema,
        relation.name,
        relation.oid,
        only=relation.only,
        temporary=relation.temporary,
        system=relation.system,
        columns=tuple(sorted(used)),
    )


def generic(kind: str) -> Handler:
    types = _TYPED.get(kind, _NONE)

    def walk(walk: Walk, body: Body) -> None:
        for name, value in body.items():
            shape = type(value)
            if shape is list:
                for item in value:
                    walk.node(item)
            elif shape is dict:
                if name in types:
                    walk.node({types[name]: value})
                else:
                    walk.node(value)

    return walk


def _strings(nodes: list[Body]) -> list[str]:
    return [n["String"].get("sval", "") for n in nodes]


def qualified(nodes: list[Body]) -> tuple[str | None, str]:
    """Split a possibly qualified name; a database in front of the schema is not understood."""
    names = _strings(nodes)
    if len(names) > 2:  # noqa: PLR2004  schema and name
        raise NotUnderstood(f"`{'.'.join(names)}` names a database", rules=("cross-database",))
    return (names[0], names[1]) if len(names) == 2 else (None, names[0])  # noqa: PLR2004


# --- columns -----------------------------------------------------------------------------------------------


def _column(walk: Walk, body: Body) -> None:
    fields = body["fields"]
    last = fields[-1].get("String")
    if len(fields) == 1:
        if last is None:
            for entry in walk.level.entries:
                entry.star = True
            return
        _unqualified(walk, body, last.get("sval", ""))
        return
    schema = fields[-3]["String"]["sval"] if len(fields) > 2 else None  # noqa: PLR2004  schema.table.column
    owner = walk.level.named(fields[-2]["String"].get("sval", ""), schema)
    if last is None:
        if owner is not None:
            owner.star = True
            walk.owners[id(body)] = owner
        return
    name = last.get("sval", "")
    if owner is not None:
        walk.owners[id(body)] = owner
        if owner.columns is not None and name in owner.columns:
            owner.used.add(name)
            return
        owner.used.add(name)
    # A function of the whole row sees all of its columns.
    if column_call(walk, name, sure=owner is not None and owner.columns is not None) and owner is not None:
        owner.star = True


def _unqualified(walk: Walk, body: Body, name: str) -> None:
    found, row = walk.level.meant(name)
    for entry in found:
        entry.used.add(name)
    if row is not None:
        row.star = True
        found.append(row)
    if found:
        walk.owners[id(body)] = found[0]


def column_call(walk: Walk, name: str, *, sure: bool) -> bool:
    """
    `a.name` calls name(a) when `a` has no such column: note the call if there is such a function at all.

    *sure*: it is known that there is no such column; else it is a `field`, which may be one.
    """
    if name not in walk.index.functions and not functions.known(name):
        return False
    _note(walk, None, name, (NOT_CONSTANT,), "column" if sure else "field")
    return True


def _indirection(walk: Walk, body: Body) -> None:
    argument = body["arg"]
    walk.node(argument)
    for number, step in enumerate(body["indirection"]):
        if "String" in step:
            name = step["String"]["sval"]
            if number or not _is_field(walk, argument, name):
                column_call(walk, name, sure=False)
        else:
            walk.node(step)


def _is_field(walk: Walk, argument: Body, name: str) -> bool:
    """Whether `(argument).name` selects a field for sure."""
    if "RowExpr" in argument:
        number = name[1:] if name[:1] == "f" else ""
        # It has as many fields as values: any other name is a function's.
        return number.isdecimal() and 1 <= int(number[:9]) <= len(argument["RowExpr"].get("args", ()))
    if "ColumnRef" in argument:
        owner = walk.owners.get(id(argument["ColumnRef"]))
        fields = argument["ColumnRef"]["fields"]
        whole = (
            owner is not None and len(fields) == 1 and fields[0].get("String", {}).get("sval") == owner.alias
        )
        return whole and owner is not None and owner.columns is not None and name in owner.columns
    return False


# --- calls -------------------------------------------------------------------------------------------------


def _function(walk: Walk, body: Body) -> None:
    schema, name = qualified(body["funcname"])
    arguments = body.get("args", ())
    # Of an aggregate WITHIN GROUP what it is ordered by are arguments as well.
    ordered = body.get("agg_order", ()) if body.get("agg_within_group") else ()
    given = [*arguments, *(NOT_CONSTANT for _ in ordered)] if ordered else arguments
    _note(walk, schema, name, given, "function", star=body.get("agg_star", False))
    for argument in arguments:
        walk.node(argument)
    if len(body) > 3 or "args" not in body:  # noqa: PLR2004  more than name, arguments, format
        walk.children("FuncCall", body, _CALL_DONE)


_CALL_DONE = frozenset({"funcname", "args"})


def _note(  # noqa: PLR0913  the parts of one call
    walk: Walk, schema: str | None, name: str, arguments: Any, what: str, *, star: bool = False
) -> None:
    index = walk.index
    number = 0 if star else len(arguments)
    candidates: tuple[int, ...] = ()
    if name in index.functions:
        candidates = tuple(_candidates(walk, schema, name, number))
    if name.startswith("array_") or name in _OFFSETS or _is_polymorphic(walk.catalog, candidates):
        walk.facts["arrays"] = True
    if number == 1 and not candidates and what == "function" and _is_type(walk, schema, name):
        return
    builtin = schema in (None, "pg_catalog", "information_schema") and functions.known(
        name, schema=schema or "pg_catalog"
    )
    values: tuple[object, ...] = ()
    if builtin and number and (name == SETTER or _bounded(name, number)):
        values = tuple(constant(a) for a in arguments)
    elif candidates and number:
        values = tuple(constant(a) for a in arguments) if what == "function" else ()
    walk.call(Call(schema, name, number, what, candidates, builtin, values))


#: They have a default for where there is no row, and make it of their first argument's type.
_OFFSETS = frozenset({"lag", "lead"})


def _is_polymorphic(catalog: Catalog, candidates: tuple[int, ...]) -> bool:
    """Whether a constant may become of the type of another argument."""
    return any(t.startswith("any") for oid in candidates for t in catalog.functions[oid].arg_type_names)


def _is_type(walk: Walk, schema: str | None, name: str) -> bool:
    """`name(x)` is a cast to the type `name` where there is no such function; note a user's type."""
    if schema in (None, "pg_catalog") and not functions.known(name) and name in functions.data.types():
        return True
    if schema in functions.data.SYSTEM_SCHEMAS or not walk.index.type_named(schema, name):
        return False
    walk.facts.setdefault("types", set()).add((schema, name))
    return schema is not None or not functions.known(name)


def _bounded(name: str, number: int) -> bool:
    return functions.classify(name, None, arguments=number).bounded_argument is not None


def _candidates(walk: Walk, schema: str | None, name: str, number: int) -> list[int]:
    """Functions that did not come with the server and that a call may mean: all that take so many arguments."""
    path = walk.session.search_path
    found: dict[tuple[str | None, tuple[str, ...]], Function] = {}
    for function in walk.catalog.functions_named(schema, name):
        added = function.schema == "pg_catalog"
        if added and function.oid < FIRST_NORMAL_OID:
            continue
        if schema is None and function.schema not in path and not added:
            continue
        most = len(function.arg_types)
        if not function.variadic and not most - function.defaults <= number <= most:
            continue
        if schema is None and "pg_catalog" not in path and not added and _hidden(walk.catalog, function):
            continue
        # Of two with the same arguments the one is meant whose schema comes first; one in pg_catalog stays besides.
        key = (function.schema if added else None, function.arg_type_names)
        known = found.get(key)
        if known is None or (schema is None and not added and _earlier(path, function, known)):
            found[key] = function
    return [function.oid for function in found.values()]


def _earlier(path: tuple[str, ...], one: Function, other: Function) -> bool:
    return path.index(one.schema) < path.index(other.schema)


def _hidden(catalog: Catalog, function: Function) -> bool:
    """Whether pg_catalog, which is searched first, has a function of that very signature on this server."""
    entries = functions.data.builtins().get(("pg_catalog", function.name), ())
    return any(e.args == function.arg_type_names and e.is_in(catalog.server_version) for e in entries)


def constant(node: Any) -> object:
    """Return the value of a constant argument, else NOT_CONSTANT."""
    if node is NOT_CONSTANT or not node:
        return NOT_CONSTANT
    if "A_Const" in node:
        value = value_of(node)
        return NOT_CONSTANT if value is UNKNOWN else value
    if node.keys() & {"ColumnRef", "SubLink", "ParamRef"}:
        return NOT_CONSTANT
    try:
        message = json_format.ParseDict(node, pg_query_pb2.Node())
        value = functions.fold(message)
    except (json_format.ParseError, RecursionError, ValueError, TypeError):
        return NOT_CONSTANT
    return tuple(value) if isinstance(value, list) else value


# --- the table ---------------------------------------------------------------------------------------------

_LEAVES = [
    "Alias",
    "A_Const",
    "A_Star",
    "BitString",
    "Boolean",
    "CurrentOfExpr",
    "Float",
    "Integer",
    "JsonFormat",
    "ParamRef",
    "ReturningOption",
    "SQLValueFunction",
    "SetToDefault",
    "String",
    "CTESearchClause",
]

for _kind in grammar.PARTS:
    HANDLERS[_kind] = generic(_kind)
for _kind in _LEAVES:
    HANDLERS[_kind] = None
HANDLERS |= {
    "ColumnRef": _column,
    "A_Indirection": _indirection,
    "FuncCall": _function,
}
