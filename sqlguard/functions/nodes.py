"""
Expression nodes that the grammar makes of SQL's own syntax: what runs, and since which release.

EXTRACT, OVERLAY, POSITION, TRIM, SUBSTRING, NORMALIZE, COLLATION FOR, AT TIME ZONE, OVERLAPS, SIMILAR TO,
XMLEXISTS and SYSTEM_USER need no entry: libpg_query makes function calls of them (`pg_catalog.extract`, …).
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SqlNode:
    """
    `since` is the first major release in which the syntax means this; before it the same text may call a
    user's function (`json_value(…)`), so on an older server the node is not understood.
    """

    what: str
    since: int = 15


#: By the field's name in libpg_query's Node. All are harmless; their arguments are judged on their own.
SQL_NODES: Mapping[str, SqlNode] = {
    "sqlvalue_function": SqlNode("CURRENT_DATE, CURRENT_USER and their kin"),
    "coalesce_expr": SqlNode("COALESCE"),
    "min_max_expr": SqlNode("GREATEST, LEAST"),
    "grouping_func": SqlNode("GROUPING"),
    "xml_expr": SqlNode("XMLELEMENT, XMLFOREST, XMLCONCAT, XMLPARSE, XMLPI, XMLROOT, IS DOCUMENT"),
    "xml_serialize": SqlNode("XMLSERIALIZE"),
    "range_table_func": SqlNode("XMLTABLE"),
    "json_is_predicate": SqlNode("IS JSON", 16),
    "json_object_constructor": SqlNode("JSON_OBJECT", 16),
    "json_array_constructor": SqlNode("JSON_ARRAY", 16),
    "json_array_query_constructor": SqlNode("JSON_ARRAY(SELECT …)", 16),
    "json_object_agg": SqlNode("JSON_OBJECTAGG", 16),
    "json_array_agg": SqlNode("JSON_ARRAYAGG", 16),
    "json_func_expr": SqlNode("JSON_VALUE, JSON_QUERY, JSON_EXISTS", 17),
    "json_parse_expr": SqlNode("JSON(…)", 17),
    "json_scalar_expr": SqlNode("JSON_SCALAR", 17),
    "json_serialize_expr": SqlNode("JSON_SERIALIZE", 17),
    "json_table": SqlNode("JSON_TABLE", 17),
    "merge_support_func": SqlNode("merge_action()", 17),
}
