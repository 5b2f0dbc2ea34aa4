"""
What PostgreSQL calls a column of a select list that has no label (FigureColname in parse_target.c).
"""

from collections.abc import Callable
from typing import Any

from postgast import pg_query_pb2 as pg

UNNAMED = "?column?"
_FIXED = {
    "coalesce_expr": "coalesce",
    "row_expr": "row",
    "a_array_expr": "array",
    "grouping_func": "grouping",
    "xml_serialize": "xmlserialize",
    "merge_support_func": "merge_action",
    "json_object_constructor": "json_object",
    "json_array_constructor": "json_array",
    "json_array_query_constructor": "json_array",
    "json_parse_expr": "json",
    "json_scalar_expr": "json_scalar",
    "json_serialize_expr": "json_serialize",
}


def label(target: Any) -> str:
    """Return the column name of a ResTarget that is not a `*`."""
    return target.name or _figure(target.val)[1] or UNNAMED


def _figure(node: Any) -> tuple[int, str]:
    """Return how good a name *node* has (2 a real one, 1 a type's, 0 none) and the name."""
    kind = node.WhichOneof("node")
    if kind in _FIXED:
        return 2, _FIXED[kind]
    figure = _FIGURES.get(kind)
    return figure(getattr(node, kind)) if figure else (0, "")


def _last(names: Any) -> tuple[int, str]:
    strings = [n.string.sval for n in names if n.WhichOneof("node") == "string"]
    return (2, strings[-1]) if strings else (0, "")


def _indirection(value: Any) -> tuple[int, str]:
    return max(_last(value.indirection), _figure(value.arg), key=lambda f: f[0])


def _cast(value: Any) -> tuple[int, str]:
    return max(_figure(value.arg), (1, value.type_name.names[-1].string.sval), key=lambda f: f[0])


def _case(value: Any) -> tuple[int, str]:
    return max(_figure(value.defresult), (1, "case"), key=lambda f: f[0])


def _sub_link(value: Any) -> tuple[int, str]:
    if value.sub_link_type == pg.EXISTS_SUBLINK:
        return 2, "exists"
    if value.sub_link_type == pg.ARRAY_SUBLINK:
        return 2, "array"
    select = value.subselect.select_stmt
    while select.HasField("larg"):
        select = select.larg
    if value.sub_link_type != pg.EXPR_SUBLINK or not select.target_list:
        return 0, ""
    target = select.target_list[0].res_target
    return (2, target.name) if target.name else _figure(target.val)


_FIGURES: dict[str | None, Callable[[Any], tuple[int, str]]] = {
    "column_ref": lambda value: _last(value.fields),
    "a_indirection": _indirection,
    "func_call": lambda value: _last(value.funcname),
    "type_cast": _cast,
    "collate_clause": lambda value: _figure(value.arg),
    "case_expr": _case,
    "sub_link": _sub_link,
}
