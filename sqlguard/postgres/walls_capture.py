"""
The capture function of one relation: PL/pgSQL made for its columns, because static SQL keeps its plans.

Theory of operation. Statement triggers with transition tables run it once per statement of a task's session.
PostgreSQL appends to the old and the new transition table in lockstep (AfterTriggerSaveEvent; MERGE and ON CONFLICT
have tables of their own for each kind of change), so row n of one is row n of the other. A trigger that stops a row
on its way to another partition would break that, so it is refused. Old-style inheritance runs the function per row:
there a parent's transition table has lost the columns of its children.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import sql

from sqlguard.postgres import walls_row, walls_unkept
from sqlguard.postgres.walls_facts import VERSION, Facts, Relation

#: How texts of keys and images are written, and have to be read. See sqlguard/postgres/images.py.
PINNED = (
    ("DateStyle", "ISO, YMD"),
    ("IntervalStyle", "postgres"),
    ("TimeZone", "UTC"),
    ("extra_float_digits", "1"),
    ("bytea_output", "hex"),
    ("lc_monetary", "C"),
    ("quote_all_identifiers", "off"),
)
#: Of so many rows the keys are compared in memory.
MANY = 100_000
#: Of so many rows the hashes are (eight bytes each); more are brought together by a join, which goes to disk.
HASHED = 1_000_000
#: More deleted rows that are their own images have their keys kept by the thousand.
SINGLE = 1000
# A table may have a column of any name, so the whole row is `("sg row".*)::text`, never `"sg row"::text`.
ROW = sql.SQL('"sg row"')

# Judges and keeps the change set in one statement, then its rows. (One plan with the rows in a CTE takes longer to
# start.) What the quick judgement leaves open is judged by `note_change`, which raises if it must not be. A statement
# that changed nothing keeps nothing, but has to be allowed to write.
_KEEP = sql.SQL("""
    IF total > 0 THEN
        INSERT INTO sqlguard.change_set (id, action_id, task_id, txid, relid, schema_name, table_name, op, rows,
                                         key_columns, shape_id, depth)
            OVERRIDING SYSTEM VALUE
            SELECT change, j.action_id, j.task_id, tx, TG_RELID, TG_TABLE_SCHEMA, TG_TABLE_NAME, {operation},
                   total, {columns}, shape, pg_trigger_depth() - 1
            FROM sqlguard.judge({root}, {operation}, tx, current_setting('sqlguard.action', true)) j
            WHERE total <= j.remaining AND shape = {shape};
        quick := FOUND;
    ELSE
        quick := shape = {shape} AND EXISTS (
            SELECT FROM sqlguard.judge({root}, {operation}, tx, NULL) j WHERE j.remaining IS NOT NULL);
    END IF;{rows}
    IF NOT quick THEN
        PERFORM sqlguard.note_change(change, TG_RELID, {root}, TG_TABLE_SCHEMA, TG_TABLE_NAME, {operation}, total,
                                     {columns}, shape, {nested});
    END IF;""")

# The rows of a set, with a hash of what the change made of each: so an undo sees who was at a row in between.
_ROWS = sql.SQL("""
    INSERT INTO sqlguard.row_change (change_set_id, key, before) SELECT change, {key}, {image} FROM {source} {row};""")
# A deleted row that is its own image needs its key alone: many of them are kept by the thousand, see 0001_tables.sql.
_ROWS_MARKED = sql.SQL("""
    IF total > {single} AND shape = {shape} AND NOT sqlguard.rows_may_change(TG_RELID) THEN
        INSERT INTO sqlguard.row_change (change_set_id, id, chunk)
            SELECT change, -k.n, array_agg(k.key)
            FROM (SELECT (row_number() OVER () - 1) / 1000 AS n, ({key})::text AS key FROM sg_old {row}) k
            GROUP BY k.n;
    ELSE
        INSERT INTO sqlguard.row_change (change_set_id, key, before) SELECT change, {key}, {image} FROM sg_old {row};
    END IF;""")
_ROWS_MADE = sql.SQL("""
    INSERT INTO sqlguard.row_change (change_set_id, key, after)
        SELECT change, {key}, hashtextextended({image}, 0) FROM sg_new {row};""")
# Old and new rows are brought together by their places: a join would need a plan of its own.
_ROWS_CHANGED = sql.SQL("""
    IF total <= {hashed} THEN
        DECLARE
            hashes bigint[] := (SELECT array_agg(hashtextextended({image}, 0)) FROM sg_new {row});
        BEGIN
            INSERT INTO sqlguard.row_change (change_set_id, key, before, after)
                SELECT change, {key}, {image}, hashes[row_number() OVER ()] FROM sg_old {row};
        END;
    ELSE
        EXECUTE {pair_same} USING change;
    END IF;""")

# What agents do most. Its two rows belong together, so the row that is kept tells whether the key has changed.
_ONE = sql.SQL("""
    IF total = 1 THEN
        INSERT INTO sqlguard.row_change (change_set_id, key, new_key, before, after)
            SELECT change, {old_key}, CASE WHEN {old} IS DISTINCT FROM {new} THEN {new_key} END,
                   ("sg old".*)::text, hashtextextended(("sg new".*)::text, 0)
            FROM sg_old "sg old", sg_new "sg new"
            RETURNING CASE WHEN new_key IS NULL THEN 'update' ELSE 'rekey' END INTO operation;{keep}
        RETURN NULL;
    END IF;""")

# A table may have columns called like the variables; its own are always qualified here, so bare names are variables.
_STATEMENT = sql.SQL("""
#variable_conflict use_variable
DECLARE  -- version {version}
    change bigint := nextval('sqlguard.change_set_id_seq');
    shape bigint := sqlguard.shape_key({oid}::regclass);
    tx xid8 := pg_current_xact_id();
    operation text;
    total bigint;
    marked bigint;
    quick boolean;
BEGIN
    IF TG_OP = 'INSERT' THEN{insert_check}
        SELECT count(*) INTO total FROM sg_new;{keep_insert}
        RETURN NULL;
    ELSIF TG_OP = 'DELETE' THEN{delete_check}
        SELECT count(*) INTO total FROM sg_old;{keep_delete}
        RETURN NULL;
    END IF;{update_check}{soft}{one}{pairs}{keep_update}
    RETURN NULL;
END
""")

_INSERT_CHECK = sql.SQL("""
        IF EXISTS (SELECT FROM sg_new n WHERE n.deleted_at IS NOT NULL OR n.deleted_by_agent IS NOT NULL) THEN
            RAISE EXCEPTION 'deleted_at and deleted_by_agent of `%.%` are set by the database alone',
                TG_TABLE_SCHEMA, TG_TABLE_NAME USING ERRCODE = 'SG002', HINT = 'leave them out of the INSERT';
        END IF;""")

_COUNT = sql.SQL("""
    SELECT count(*) INTO total FROM sg_new;""")
# Rows without a key are undone by what became of each.
_COUNT_OLD = sql.SQL("""
    SELECT count(*) INTO total FROM sg_old;{none_lost}""")
_NONE_LOST = sql.SQL("""
    IF (SELECT count(*) FROM sg_old) <> (SELECT count(*) FROM sg_new) THEN
        RAISE EXCEPTION 'rows of `%.%` got lost on their way to another partition', TG_TABLE_SCHEMA,
            TG_TABLE_NAME USING ERRCODE = 'SG002', HINT = 'change the rows one partition at a time';
    END IF;""")
_SOFT = sql.SQL("""
    SELECT count(*), count(*) FILTER (WHERE n.deleted_at = statement_timestamp()) INTO total, marked FROM sg_new n;
    IF marked > 0 THEN
    DECLARE
        nested boolean;
    BEGIN
        IF EXISTS (SELECT FROM sg_new n WHERE n.deleted_at = statement_timestamp()
                       AND n.deleted_by_agent IS DISTINCT FROM (SELECT sqlguard.agent())) THEN
            RAISE EXCEPTION 'deleted_at and deleted_by_agent of `%.%` are set by the database alone',
                TG_TABLE_SCHEMA, TG_TABLE_NAME USING ERRCODE = 'SG002', HINT = 'use DELETE to delete rows';
        END IF;
        IF EXISTS (SELECT FROM sg_old o WHERE o.deleted_at IS NOT NULL) THEN
            marked := NULL;  -- among the rows are some that were deleted before
        END IF;
        IF marked = total THEN
            nested := EXISTS (SELECT FROM sqlguard.cascade_run c WHERE c.txid = tx);{keep_soft}
            IF NOT nested AND sqlguard.is_referenced(TG_RELID) THEN
                PERFORM sqlguard.cascade(change);
            END IF;
            RETURN NULL;
        ELSE
            EXECUTE {pair_soft} USING change;
            GET DIAGNOSTICS marked = ROW_COUNT;
            IF marked > 0 THEN
                nested := EXISTS (SELECT FROM sqlguard.cascade_run c WHERE c.txid = tx);
                PERFORM sqlguard.note_change(change, TG_RELID, {root}, TG_TABLE_SCHEMA, TG_TABLE_NAME,
                                             'soft_delete', marked, {columns}, shape, nested);
                IF NOT nested AND sqlguard.is_referenced(TG_RELID) THEN
                    PERFORM sqlguard.cascade(change);
                END IF;
                change := nextval('sqlguard.change_set_id_seq');
            END IF;
            EXECUTE {pair_rest} USING change;
            GET DIAGNOSTICS total = ROW_COUNT;
            PERFORM sqlguard.note_change(change, TG_RELID, {root}, TG_TABLE_SCHEMA, TG_TABLE_NAME,
                CASE WHEN EXISTS (SELECT FROM sqlguard.row_change r
                                  WHERE r.change_set_id = change AND r.new_key IS NOT NULL)
                     THEN 'rekey' ELSE 'update' END, total, {columns}, shape, false);
            RETURN NULL;
        END IF;
    END;
    END IF;""")

# Nearly always the keys are the same in the same places, which two arrays tell for a fifth of what EXCEPT costs.
_PAIRS = sql.SQL("""
    IF (total > {many} OR (SELECT array_agg({whole_key}) FROM sg_old {row})
            IS DISTINCT FROM (SELECT array_agg({whole_key}) FROM sg_new {row}))
        AND EXISTS (SELECT {plain} FROM sg_old {row} EXCEPT SELECT {plain} FROM sg_new {row}) THEN{none_lost}
        EXECUTE {pair_all} USING change;
        GET DIAGNOSTICS total = ROW_COUNT;
        PERFORM sqlguard.note_change(change, TG_RELID, {root}, TG_TABLE_SCHEMA, TG_TABLE_NAME, 'rekey', total,
                                     {columns}, shape, false);
        RETURN NULL;
    END IF;""")

_PAIR = sql.SQL("""INSERT INTO sqlguard.row_change (change_set_id, key, new_key, before, after)
    SELECT $1, o.key, {new_key}, {before}, {after}
    FROM (SELECT row_number() OVER () AS i, {key} AS key, ({row}.*)::text AS image, {mark} AS at FROM sg_old {row}) o
    JOIN (SELECT row_number() OVER () AS i, {key} AS key, {mark} AS at, hashtextextended(({row}.*)::text, 0) AS hash
          FROM sg_new {row}) n USING (i)
    WHERE {which}""")


def function_name(relation: Relation, prefix: str = "capture") -> str:
    """Return a name of at most 63 bytes that is the same every time."""
    digest = hashlib.sha256(relation.label.encode()).hexdigest()[:8]
    body = f"{relation.schema}_{relation.name}".encode()[: 63 - len(prefix) - 10].decode(errors="ignore")
    return f"{prefix}_{body}_{digest}"


def capture_body(
    conn: psycopg.Connection[Any], facts: Facts, relation: Relation, *, mode: str, shape: int
) -> str:
    """Return the source of the capture function of *relation*; *shape* is its shape key now."""
    root = facts.root(relation)
    keys = relation.key_columns
    parts: dict[str, sql.Composable] = {
        "version": sql.Literal(VERSION),
        "oid": sql.Literal(str(relation.oid)),
        "root": sql.SQL("{}::oid").format(sql.Literal(root.oid)),
        "columns": sql.SQL("{}::text[]").format(sql.Literal(keys or None)),
    }
    if facts.inherits(root):
        return _row_body(conn, parts, keys, soft=mode == "soft", shape=shape)
    partitioned = relation.kind == "p"
    return _statement_body(conn, parts, keys, soft=mode == "soft", shape=shape, partitioned=partitioned)


def _statement_body(  # noqa: PLR0913 (what a relation is)
    conn: psycopg.Connection[Any],
    parts: dict[str, sql.Composable],
    keys: Sequence[str],
    *,
    soft: bool,
    shape: int,
    partitioned: bool,
) -> str:
    key, nothing = _key(keys, ROW), sql.SQL("")
    parts = parts | {
        "row": ROW,
        "key": key,
        "shape": sql.Literal(shape),
        "plain": sql.SQL(", ").join(_columns(keys, ROW)),
        "whole_key": _whole(keys, ROW),
        "many": sql.Literal(MANY),
        "hashed": sql.Literal(HASHED),
        "single": sql.Literal(SINGLE),
        "none_lost": _NONE_LOST if keys or partitioned else nothing,
    }
    for which in ("soft", "rest", "all", "same"):
        parts[f"pair_{which}"] = _pair(conn, key, which, soft=soft, keyed=bool(keys))
    # In parentheses and with a star, because a column may be called `text`.
    image = sql.SQL("({}.*)::text").format(ROW)
    keep_soft = _keep(parts, "soft_delete", _image(keys, image, shape), keyed=bool(keys))
    return _STATEMENT.format(
        **parts,
        keep_insert=_keep(parts, "insert", image),
        keep_delete=_keep(parts, "delete", image),
        keep_update=_keep(parts, "update", image),
        insert_check=_INSERT_CHECK if soft else nothing,
        delete_check=walls_unkept.DELETE.format(oid=parts["oid"]),
        update_check=walls_unkept.update_check(parts["oid"], ROW, parts["key"] if keys else image),
        soft=_SOFT.format(**parts, keep_soft=keep_soft) if soft else _COUNT,
        one=_one(parts, keys) if keys and not partitioned else nothing,
        # A row that went to another partition may be missing among the new ones.
        pairs=(_PAIRS if keys else _COUNT_OLD).format(**parts),
    ).as_string(conn)


def _keep(
    parts: dict[str, sql.Composable], operation: str, image: sql.Composable, *, keyed: bool = True
) -> sql.Composed:
    kinds = {"insert": _ROWS_MADE, "update": _ROWS_CHANGED, "soft_delete": _ROWS_MARKED if keyed else _ROWS}
    rows = kinds.get(operation, _ROWS).format(
        **parts,
        source=sql.SQL("sg_old"),
        image=image,
    )
    return _judged(parts, sql.Literal(operation), rows, nested=operation == "soft_delete")


def _one(parts: dict[str, sql.Composable], keys: Sequence[str]) -> sql.Composed:
    old, new = sql.SQL('"sg old"'), sql.SQL('"sg new"')
    return _ONE.format(
        old_key=_key(keys, old),
        new_key=_key(keys, new),
        old=_whole(keys, old),
        new=_whole(keys, new),
        keep=_judged(parts, sql.SQL("operation"), sql.SQL(""), nested=False),
    )


def _judged(
    parts: dict[str, sql.Composable], operation: sql.Composable, rows: sql.Composable, *, nested: bool
) -> sql.Composed:
    return _KEEP.format(
        **parts,
        operation=operation,
        rows=rows,
        # A soft delete may be part of another one's cascade.
        nested=sql.SQL("nested" if nested else "false"),
    )


def _row_body(
    conn: psycopg.Connection[Any],
    parts: dict[str, sql.Composable],
    keys: Sequence[str],
    *,
    soft: bool,
    shape: int,
) -> str:
    image = sql.SQL("before := {};").format(_image(keys, sql.SQL("before"), shape))
    return walls_row.BODY.format(
        **parts,
        old_key=_key(keys, sql.SQL("OLD")),
        new_key=_key(keys, sql.SQL("NEW")),
        soft=walls_row.SOFT.format(image=image) if soft else sql.SQL(""),
    ).as_string(conn)


def _key(keys: Sequence[str], row: sql.Composable) -> sql.Composable:
    if not keys:
        return sql.SQL("NULL::text[]")
    items = (sql.SQL("{}.{}::text").format(row, sql.Identifier(k)) for k in keys)
    return sql.SQL("ARRAY[{}]").format(sql.SQL(", ").join(items))


def _columns(keys: Sequence[str], row: sql.Composable) -> list[sql.Composed]:
    return [sql.SQL("{}.{}").format(row, sql.Identifier(k)) for k in keys]


def _whole(keys: Sequence[str], row: sql.Composable) -> sql.Composable:
    """Return the key as one value."""
    columns = _columns(keys, row)
    return columns[0] if len(columns) == 1 else sql.SQL("ROW({})").format(sql.SQL(", ").join(columns))


def _image(keys: Sequence[str], row: sql.Composable, shape: int) -> sql.Composable:
    """
    Return the before image of a soft delete: none, because the deleted row is its own, unless the row could
    not be found again (no key) or may have been changed as well: the table has columns that the bookkeeping
    trigger does not know yet, or triggers of others that change rows.
    """
    if not keys:
        return row
    return sql.SQL("CASE WHEN shape <> {} OR (SELECT sqlguard.rows_may_change(TG_RELID)) THEN {} END").format(
        sql.Literal(shape), row
    )


def _pair(
    conn: psycopg.Connection[Any], key: sql.Composable, which: str, *, soft: bool, keyed: bool
) -> sql.Composable:
    """
    Return, as a literal, the statement that keeps pairs of old and new rows: `soft` deletes, the `rest`; or all,
    where some keys change (`all`) and where none does (`same`).
    """
    deleted = sql.SQL("o.at IS NULL AND n.at IS NOT DISTINCT FROM statement_timestamp()")
    changed = sql.SQL("CASE WHEN n.key IS DISTINCT FROM o.key THEN n.key END")
    statement = _PAIR.format(
        key=key,
        row=ROW,
        mark=sql.SQL("deleted_at") if soft else sql.SQL("NULL::timestamptz"),
        new_key={"all": sql.SQL("n.key"), "rest": changed}.get(which, sql.SQL("NULL")),
        before=sql.SQL("NULL") if which == "soft" and keyed else sql.SQL("o.image"),
        after=sql.SQL("NULL::bigint" if which == "soft" else "n.hash"),
        which={"soft": deleted, "rest": sql.SQL("NOT ({})").format(deleted)}.get(which, sql.SQL("true")),
    )
    return sql.Literal(statement.as_string(conn))
