"""
Values that deleted rows of a soft table hold: an INSERT of one is refused with that reason.

Where a unique index could not be made one of live rows (primary keys, targets of foreign keys, DEFERRABLE
ones), a deleted row keeps its values. PostgreSQL would speak of a duplicate that the agent can't see, and
ON CONFLICT DO NOTHING would skip the row without a word. A restrictive policy asks before that: policies
concern agents only, so the application's own INSERT and COPY pay nothing (a BEFORE trigger would take COPY
its batches).
"""

import hashlib

from psycopg import sql

from sqlguard.postgres.walls_facts import Index, Relation
from sqlguard.rewrite.source import quote

#: A plan that was made while the table had few rows is kept, and reads all of them for each row of a long INSERT.
BY_INDEX = (("enable_seqscan", "off"),)
_NAME_BYTES = 63
_BODY = """
BEGIN
{checks}
    RETURN true;
END
"""
_CHECK = """
    IF EXISTS (SELECT FROM {only} {table} x WHERE {same} AND x.deleted_at IS NOT NULL)
        -- An INSERT tells as much; who may not insert does not probe for values either.
        AND pg_catalog.has_any_column_privilege(session_user, {whole}, 'INSERT') THEN
        RAISE EXCEPTION {message}
            USING ERRCODE = 'SG002', SCHEMA = {schema}, TABLE = {name}, CONSTRAINT = {index},
                DETAIL = pg_catalog.format('Key (%s)=(%s) is kept for a restore.', {columns},
                                           pg_catalog.concat_ws(', ', {values})),
                HINT = 'use another value, or ask the operator to restore or purge that row';
    END IF;"""


def kept_uniques(relation: Relation) -> list[Index]:
    """Return the unique indexes of plain columns that hold deleted rows, too."""
    return [
        i
        for i in relation.indexes
        if i.valid and not i.exclusion and i.predicate is None and 0 < len(i.columns) == len(i.operators)
    ]


def held_columns(relation: Relation) -> list[str]:
    return list(dict.fromkeys(c for index in kept_uniques(relation) for c in index.columns))


def held_types(relation: Relation) -> tuple[str, ...]:
    types = {c.name: c.type for c in relation.columns}
    return tuple(types[name] for name in held_columns(relation))


def held_name(relation: Relation) -> str:
    """Return a name of at most 63 bytes that is the same for the same table and arguments."""
    told = f"{relation.label} {held_columns(relation)} {held_types(relation)}"
    digest = hashlib.sha256(told.encode()).hexdigest()[:8]
    body = f"{relation.schema}_{relation.name}".encode()[: _NAME_BYTES - 14].decode(errors="ignore")
    return f"held_{body}_{digest}"


def held_call(relation: Relation) -> str | None:
    """Return the policy's condition as PostgreSQL prints it."""
    columns = held_columns(relation)
    if not columns:
        return None
    return f"sqlguard.{quote(held_name(relation))}({', '.join(map(quote, columns))})"


def held_body(relation: Relation) -> sql.Composed:
    places = {name: sql.SQL(f"${n}") for n, name in enumerate(held_columns(relation), 1)}
    checks = [_check(relation, index, places) for index in kept_uniques(relation)]
    return sql.SQL(_BODY).format(checks=sql.SQL("").join(checks))


def _check(relation: Relation, index: Index, places: dict[str, sql.SQL]) -> sql.Composed:
    same = [
        sql.SQL("x.{} {} {}").format(sql.Identifier(column), sql.SQL(operator), places[column])
        for column, operator in zip(index.columns, index.operators, strict=True)
    ]
    what = "primary key" if index.is_primary else f"value in `{index.name}`"
    message = f"a deleted row of `{relation.name}` keeps its {what}".replace("%", "%%")
    return sql.SQL(_CHECK).format(
        only=sql.SQL("" if relation.kind == "p" else "ONLY"),
        table=sql.Identifier(relation.schema, relation.name),
        whole=sql.Literal(f"{quote(relation.schema)}.{quote(relation.name)}"),
        same=sql.SQL(" AND ").join(same),
        message=sql.Literal(message),
        schema=sql.Literal(relation.schema),
        name=sql.Literal(relation.name),
        index=sql.Literal(index.constraint_name or index.name),
        columns=sql.Literal(", ".join(index.columns)),
        values=sql.SQL(", ").join(places[c] for c in index.columns),
    )
