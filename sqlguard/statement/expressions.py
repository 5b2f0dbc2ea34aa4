"""
The handlers of expressions that call something without a function's name: operators, casts, types, CASE,
sub-selects, arrays, and keywords that an older server takes for functions.
"""

from typing import Any

from sqlguard import functions
from sqlguard.errors import NotUnderstood
from sqlguard.functions import SQL_NODES
from sqlguard.statement.index import plain_operators
from sqlguard.statement.model import Call
from sqlguard.statement.walk import HANDLERS, Body, Handler, Walk, constant, generic, qualified

#: PostgreSQL refuses an array of more dimensions; other parsers need exponential time for them.
MAX_DIMENSIONS = 6

_BETWEEN = {
    "AEXPR_BETWEEN": (">=", "<="),
    "AEXPR_NOT_BETWEEN": ("<", ">"),
    "AEXPR_BETWEEN_SYM": (">=", "<="),
    "AEXPR_NOT_BETWEEN_SYM": ("<", ">"),
}


def _expression(walk: Walk, body: Body) -> None:
    names = body["name"]
    name = names[-1]["String"]["sval"]
    if name not in walk.index.plain or len(names) > 1:
        if body["kind"] in _BETWEEN:
            for each in _BETWEEN[body["kind"]]:
                operator(walk, None, each)
        else:
            operator(walk, qualified(names)[0], name, body.get("lexpr"), body.get("rexpr"))
    left = body.get("lexpr")
    if left is not None:
        walk.node(left)
    right = body.get("rexpr")
    if right is not None:
        walk.node(right)


def operator(walk: Walk, schema: str | None, name: str, left: Any = None, right: Any = None) -> None:
    """Note an operator that needs a second look."""
    index = walk.index
    if name in index.plain and schema in (None, "pg_catalog"):
        return
    path = walk.session.search_path
    found = [
        o
        for o in index.operators.get(name, ())
        if (o.schema in path or o.schema == "pg_catalog" if schema is None else o.schema == schema)
    ]
    builtin = schema in (None, "pg_catalog") and name in functions.data.operators()
    if builtin and not (_is_parameter(left) and _is_parameter(right)):
        # Of operands of built-in types the built-in operator is meant: `casts` looks when all types are known.
        later = [o for o in found if o.left in walk.catalog.types or o.right in walk.catalog.types]
        walk.operators.update(dict.fromkeys(later))
        found = [o for o in found if o not in later]
    candidates = tuple(o.function for o in found)
    if builtin and not candidates and name in plain_operators():
        return
    if (
        not candidates
        and not builtin
        and any(o.name == name and (schema is None or o.schema == schema) for o in walk.catalog.operators)
    ):
        return
    values = (constant(left), constant(right)) if builtin else ()
    walk.call(Call(schema, name, 2, "operator", candidates, builtin, values))


def _is_parameter(node: Any) -> bool:
    return node is not None and "ParamRef" in node


def equality(walk: Walk) -> None:
    """JOIN USING, NATURAL, CASE x WHEN and IN (SELECT …) look for `=` by its name."""
    if "=" not in walk.index.plain:
        operator(walk, None, "=")


def _type(walk: Walk, body: Body) -> None:
    names = body.get("names")
    if names:
        name = names[-1]["String"]["sval"]
        if len(names) > 1 and names[0]["String"]["sval"] == "pg_catalog":
            pass
        elif name in walk.index.types or name.lstrip("_") in walk.index.types or len(names) > 1:
            walk.facts.setdefault("types", set()).add(qualified(names))
        # `%TYPE` and typmods may hold expressions, though only constants are legal there.
    if "typmods" in body or "arrayBounds" in body:
        walk.children("TypeName", body, _NAMES)


_NAMES = frozenset({"names"})


def _cast(walk: Walk, body: Body) -> None:
    walk.node(body["arg"])
    _type(walk, body["typeName"])


def _case(walk: Walk, body: Body) -> None:
    if "arg" in body:
        equality(walk)
    walk.children("CaseExpr", body)


def _sublink(walk: Walk, body: Body) -> None:
    if body.get("subLinkType") == "ARRAY_SUBLINK":
        walk.facts["arrays"] = True
    if "testexpr" in body:
        walk.node(body["testexpr"])
        names = body.get("operName")
        if names:
            operator(walk, *qualified(names))
        else:
            equality(walk)
    walk.node(body["subselect"])


def _sort(walk: Walk, body: Body) -> None:
    names = body.get("useOp")
    if names:
        operator(walk, *qualified(names))
    walk.node(body["node"])


def _array(walk: Walk, body: Body) -> None:
    walk.facts["arrays"] = True
    walk.depth += 1
    if walk.depth > MAX_DIMENSIONS:
        raise NotUnderstood(
            f"an array has more than {MAX_DIMENSIONS} dimensions",
            hint="nest fewer arrays",
            rules=("text-limits",),
        )
    for element in body.get("elements", ()):
        if "A_ArrayExpr" in element:
            _array(walk, element["A_ArrayExpr"])
        else:
            outer, walk.depth = walk.depth, 0
            walk.node(element)
            walk.depth = outer
    walk.depth -= 1


# --- words that are newer than some servers -----------------------------------------------------------------

_WORDS = {
    "JsonParseExpr": ("json_parse_expr", "json"),
    "JsonScalarExpr": ("json_scalar_expr", "json_scalar"),
    "JsonSerializeExpr": ("json_serialize_expr", "json_serialize"),
    "JsonObjectConstructor": ("json_object_constructor", "json_object"),
    "JsonArrayConstructor": ("json_array_constructor", "json_array"),
    "JsonArrayQueryConstructor": ("json_array_query_constructor", "json_array"),
    "JsonObjectAgg": ("json_object_agg", "json_objectagg"),
    "JsonArrayAgg": ("json_array_agg", "json_arrayagg"),
    "JsonTable": ("json_table", "json_table"),
    "MergeSupportFunc": ("merge_support_func", "merge_action"),
}
_JSON_FUNCTIONS = {
    "JSON_EXISTS_OP": "json_exists",
    "JSON_QUERY_OP": "json_query",
    "JSON_VALUE_OP": "json_value",
}


def _newer(kind: str) -> Handler:
    """Make the handler of a keyword that is an ordinary function's name on a server older than its grammar."""
    below = generic(kind)
    field, word = _WORDS[kind]
    since = SQL_NODES[field].since * 10_000

    def walk(walk: Walk, body: Body) -> None:
        if walk.catalog.server_version < since:
            _older(walk, word)
        below(walk, body)

    return walk


def _json_function(walk: Walk, body: Body) -> None:
    if walk.catalog.server_version < SQL_NODES["json_func_expr"].since * 10_000:
        _older(walk, _JSON_FUNCTIONS[body["op"]])
    walk.children("JsonFuncExpr", body)


def _older(walk: Walk, word: str) -> None:
    """On such a server the text is a call of a function of that name, if there is one, else a syntax error."""
    found = tuple(f.oid for f in walk.catalog.functions_named(None, word))
    if found:
        walk.call(Call(None, word, 0, "function", found, builtin=False))


HANDLERS |= {kind: _newer(kind) for kind in _WORDS}
HANDLERS |= {
    "A_Expr": _expression,
    "TypeName": _type,
    "TypeCast": _cast,
    "CaseExpr": _case,
    "SubLink": _sublink,
    "SortBy": _sort,
    "A_ArrayExpr": _array,
    "JsonFuncExpr": _json_function,
}
