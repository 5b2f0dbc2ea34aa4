"""Read functions out of SQL with PostgreSQL's own grammar: scripts of extensions, definitions of views."""

from collections.abc import Iterable, Iterator
from typing import Any

import postgast

ALIASES = {
    "bool": "boolean",
    "bpchar": "character",
    "float4": "real",
    "float8": "double precision",
    "int": "integer",
    "int2": "smallint",
    "int4": "integer",
    "int8": "bigint",
    "timestamp": "timestamp without time zone",
    "timestamptz": "timestamp with time zone",
    "varchar": "character varying",
}


def functions_of(script: str) -> Iterator[dict[str, Any]]:
    """Yield the fields of each CREATE FUNCTION and CREATE AGGREGATE in the text of *script*."""
    # psql's own commands: \\echo, \\quit
    lines = (line for line in script.splitlines() if not line.startswith("\\"))
    for statement in postgast.parse("\n".join(lines).replace("@extschema@", "public")).stmts:
        node = statement.stmt
        if node.WhichOneof("node") == "create_function_stmt":
            yield _from_create_function(node.create_function_stmt)
        elif node.define_stmt.kind == postgast.pg_query_pb2.OBJECT_AGGREGATE:
            yield _from_aggregate(node.define_stmt)


def _parameters(nodes: Iterable[Any]) -> Iterator[tuple[str, bool, bool]]:
    """Yield type, has a default, variadic, of each input parameter."""
    modes = postgast.pg_query_pb2
    for wrapped in nodes:
        parameter = wrapped.function_parameter
        if parameter.mode not in (modes.FUNC_PARAM_OUT, modes.FUNC_PARAM_TABLE):
            yield (
                _type_name(parameter.arg_type),
                parameter.HasField("defexpr"),
                parameter.mode == modes.FUNC_PARAM_VARIADIC,
            )


def _type_name(node: Any) -> str:
    name = node.names[-1].string.sval
    array = "[]" if len(node.array_bounds) else ""
    return ALIASES.get(name, name) + array


def _from_create_function(node: Any) -> dict[str, Any]:
    parameters = list(_parameters(node.parameters))
    options = {o.def_elem.defname: o.def_elem.arg for o in node.options}
    volatility = options["volatility"].string.sval[0] if "volatility" in options else "v"
    return {
        "name": node.funcname[-1].string.sval,
        "args": ",".join(p[0] for p in parameters),
        "volatility": volatility,
        "strict": "strict" in options and options["strict"].boolean.boolval,
        "returns": ("setof " if node.return_type.setof else "") + _type_name(node.return_type)
        if node.HasField("return_type")
        else "record",
        "language": options["language"].string.sval if "language" in options else "sql",
        "defaults": sum(p[1] for p in parameters),
        "variadic": any(p[2] for p in parameters),
    }


def _from_aggregate(node: Any) -> dict[str, Any]:
    # args is (list of parameters, number of direct arguments).
    parameters = list(_parameters(node.args[0].list.items)) if node.args else []
    return {
        "name": node.defnames[-1].string.sval,
        "args": ",".join(p[0] for p in parameters),
        "kind": "a",
        "volatility": "i",
        "language": "internal",
    }


def mentioned_in(query: str) -> frozenset[str]:
    """Return the names of every function called and, as `schema.name`, every relation read in *query*."""
    names: set[str] = set()
    for _, node in postgast.walk(postgast.parse(query)):
        if isinstance(node, postgast.pg_query_pb2.FuncCall):
            names.add(node.funcname[-1].string.sval)
        elif isinstance(node, postgast.pg_query_pb2.RangeVar):
            names.add(f"{node.schemaname or 'pg_catalog'}.{node.relname}")
    return frozenset(names)
