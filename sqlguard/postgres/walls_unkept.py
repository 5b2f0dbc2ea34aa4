"""
Rows that a statement changes beside its own table, where nothing would keep them: the capture functions ask first.

They came after the guard: children by inheritance, and tables with a foreign key that deletes or empties. In journal
mode (and for changed keys in either) the referential actions are PostgreSQL's own. See `sqlguard.is_reaching`.
"""

from psycopg import sql

DELETE = sql.SQL("""
        IF sqlguard.is_reaching({oid}::regclass, 'delete') THEN
            PERFORM sqlguard.refuse_unkept(TG_RELID, 'delete', false);
        END IF;""")

# An update of other columns than those of such a key goes on. Rows are told apart by their keys.
_UPDATE = sql.SQL("""
    IF sqlguard.is_reaching({oid}::regclass, 'update') THEN
        DECLARE
            fixed text := (
                SELECT string_agg('{row}.' || quote_ident(c), ', ')
                FROM unnest(sqlguard.refuse_unkept(TG_RELID, 'update', false)) c);
            changes boolean;
        BEGIN
            IF fixed IS NOT NULL THEN
                EXECUTE {before} || fixed || {between} || fixed || {after} INTO changes;
                IF changes THEN
                    PERFORM sqlguard.refuse_reaching(TG_RELID, NULL);
                END IF;
            END IF;
        END;
    END IF;""")


def update_check(oid: sql.Composable, row: sql.Composable, which: sql.Composable) -> sql.Composed:
    """*which* tells the rows of the transition tables, which are called *row*, from one another."""
    select = sql.SQL("SELECT {}, ").format(which)
    return _UPDATE.format(
        oid=oid,
        row=row,
        before=sql.Literal(f"SELECT EXISTS ({select.as_string()}"),
        between=sql.Literal(sql.SQL(" FROM sg_old {} EXCEPT {}").format(row, select).as_string()),
        after=sql.Literal(sql.SQL(" FROM sg_new {})").format(row).as_string()),
    )
