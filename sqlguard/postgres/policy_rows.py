"""
Row scopes: the policy's `rows` condition made into an expression for row-level security.

The one idea: PostgreSQL itself says which type a parameter has. The condition is prepared with `$1` in place
of `:customer_id`; what the server infers is what the task's parameter is cast to.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import postgast
import psycopg
from psycopg import sql

from sqlguard.catalog import Table
from sqlguard.errors import NotUnderstood, PolicyError
from sqlguard.statement.text import parse

_TOKEN = postgast.pg_query_pb2.Token
_COLON = _TOKEN.Value("ASCII_58")
_NAME = _TOKEN.Value("IDENT")
_PREPARED = "sqlguard_row_scope"
#: Qualified, so that they mean the same whatever the search_path is.
_TYPES = """
SELECT ARRAY(SELECT CASE n.nspname WHEN 'pg_catalog' THEN format_type(t.oid, NULL)
                    ELSE format('%%I.%%I', n.nspname, t.typname) END
             FROM unnest(p.parameter_types::oid[]) WITH ORDINALITY AS u (oid, place)
             JOIN pg_type t ON t.oid = u.oid JOIN pg_namespace n ON n.oid = t.typnamespace ORDER BY place)
FROM pg_prepared_statements p WHERE p.name = %s
"""


@dataclass(frozen=True, slots=True)
class Scope:
    """`expression` is SQL over the table's columns; `params` says which type each parameter has."""

    expression: str
    params: dict[str, str] = field(default_factory=dict)


def compile_scope(conn: psycopg.Connection[Any], table: Table, text: str) -> Scope:
    """
    Return the scope that *text* is on *table*; names are resolved with the session's search_path.

    Must be called within a transaction. Raises PolicyError.
    """
    pieces, names = _split(text)
    _refuse_other_than_a_condition(
        text, _joined(pieces, names, lambda name: f"${names.index(name) + 1}"), table
    )
    numbered = _joined(pieces, names, lambda name: f"${list(dict.fromkeys(names)).index(name) + 1}")
    types = _types(conn, table, text, numbered)
    params = dict(zip(dict.fromkeys(names), types, strict=True))
    # In a sub-select it is looked up once per statement, not once per row.
    expression = _joined(
        pieces, names, lambda name: f"(SELECT sqlguard.task_parameter('{name}'))::{params[name]}"
    )
    return Scope(f"({expression})", params)


def _split(text: str) -> tuple[list[str], list[str]]:
    """Cut *text* at its `:name` parameters; one piece more than names."""
    raw = text.encode()
    try:
        tokens = list(postgast.scan(text).tokens)
    except postgast.PgQueryError as fault:
        raise PolicyError(f"the row scope `{text}` is not SQL: {fault}", hint="correct `rows`") from None
    pieces, names, begin = [], [], 0
    for colon, name in pairwise(tokens):
        # Identifiers and words alike: `:user` is a parameter too.
        word = raw[name.start : name.end].decode()
        if colon.token == _COLON and colon.end == name.start and word.isidentifier():
            pieces.append(raw[begin : colon.start].decode())
            names.append(word)
            begin = name.end
    return [*pieces, raw[begin:].decode()], names


def _joined(pieces: list[str], names: list[str], shown: Any) -> str:
    return "".join(p + n for p, n in zip(pieces, [*(shown(name) for name in names), ""], strict=True))


def _refuse_other_than_a_condition(text: str, numbered: str, table: Table) -> None:
    """A condition is one expression and nothing after it: `true) OR (…` and `true; DROP …` are not."""
    wrong = PolicyError(
        f"the row scope `{text}` of `{table.qualified}` is not a condition",
        hint="write one SQL condition over the table's columns and :parameters",
    )
    try:
        inner = parse(f"SELECT {numbered}")
        outer = parse(f"SELECT FROM t WHERE ({numbered}\n)")
    except NotUnderstood:
        raise wrong from None
    for parsed, allowed in ((inner, {"targetList"}), (outer, {"fromClause", "whereClause"})):
        tree = parsed[0].tree.get("SelectStmt", {}) if len(parsed) == 1 else {}
        if not tree or set(tree) - {"limitOption", "op"} != allowed:
            raise wrong
    targets = inner[0].tree["SelectStmt"]["targetList"]
    if len(targets) != 1 or "name" in targets[0]["ResTarget"]:
        raise wrong


def _types(conn: psycopg.Connection[Any], table: Table, text: str, numbered: str) -> list[str]:
    statement = sql.SQL("PREPARE {} AS SELECT FROM {} WHERE ({}\n)").format(
        sql.Identifier(_PREPARED), sql.Identifier(table.schema, table.name), sql.SQL(numbered)
    )
    try:
        with conn.transaction():
            conn.execute(statement)
            row = conn.execute(
                _TYPES,
                [_PREPARED],
            ).fetchone()
            conn.execute(sql.SQL("DEALLOCATE {}").format(sql.Identifier(_PREPARED)))
    except psycopg.Error as fault:
        raise PolicyError(
            f"the row scope `{text}` of `{table.qualified}`: {fault.diag.message_primary}",
            hint="name its columns, and cast a parameter whose type can't be told: :name::integer",
        ) from None
    assert row is not None  # noqa: S101 (it was prepared in this session)
    found: list[str] = row[0]
    return found
