"""
No child refers to a deleted parent, whoever writes it: the function that a soft table's children ask.

It says in PostgreSQL's own words what the foreign key itself would say after a real DELETE, and nothing where the
key has been dropped since and the trigger was left behind.
"""

from psycopg import sql

from sqlguard.postgres.walls_facts import Key, Relation

_LIVE_PARENT = sql.SQL("""
BEGIN
    PERFORM 1 FROM {only} {parent} p WHERE {match} AND p.deleted_at IS NULL FOR KEY SHARE;
    IF NOT FOUND{still} AND EXISTS (
        SELECT FROM pg_constraint k
        WHERE k.contype = 'f' AND k.confrelid = {parent_regclass}::regclass
            AND (k.conrelid = TG_RELID OR k.conrelid IN (SELECT pg_partition_ancestors(TG_RELID)))
    ) THEN
        RAISE EXCEPTION 'insert or update on table "%" violates foreign key constraint "%"', {child_name}, {key}
            USING ERRCODE = '23503', SCHEMA = {child_schema}, TABLE = {child_name}, CONSTRAINT = {key},
                DETAIL = 'Key (' || {columns} || ')=(' || concat_ws(', ', {values})
                    || ') is not present in table "' || {parent_name} || '".';
    END IF;
    RETURN NULL;
END
""")


def live_parent_body(key: Key, child: Relation, parent: Relation, *, soft: bool) -> sql.Composed:
    pairs = list(zip(key.ref_columns, key.operators, key.columns, strict=True))
    match = sql.SQL(" AND ").join(
        sql.SQL("p.{} {} NEW.{}").format(sql.Identifier(ref), _operator(op), sql.Identifier(column))
        for ref, op, column in pairs
    )
    still: sql.Composable = sql.SQL("")
    if key.deferrable:
        # At commit the row may have been changed again: then it is judged by its own, later event.
        same = sql.SQL(" AND ").join(
            sql.SQL("c.{0} = NEW.{0}").format(sql.Identifier(c)) for c in key.columns
        )
        live = sql.SQL(" AND c.deleted_at IS NULL") if soft else sql.SQL("")
        still = sql.SQL(" AND EXISTS (SELECT FROM {} c WHERE {}{})").format(_name(child), same, live)
    return _LIVE_PARENT.format(
        only=sql.SQL("" if parent.kind == "p" else "ONLY"),
        parent=_name(parent),
        match=match,
        still=still,
        child_schema=sql.Literal(child.schema),
        child_name=sql.Literal(child.name),
        parent_name=sql.Literal(parent.name),
        parent_regclass=sql.Literal(_name(parent).as_string()),
        key=sql.Literal(key.name),
        columns=sql.Literal(", ".join(key.columns)),
        values=sql.SQL(", ").join(sql.SQL("NEW.{}").format(sql.Identifier(c)) for c in key.columns),
    )


def _operator(text: str) -> sql.SQL:
    return sql.SQL(text)  # written by PostgreSQL's own format(), from its catalog


def _name(relation: Relation) -> sql.Identifier:
    return sql.Identifier(relation.schema, relation.name)
