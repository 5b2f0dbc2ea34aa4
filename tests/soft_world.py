"""
Two worlds side by side for the tests of the rewriter: a schema `hard`, as the application had it, where a DELETE is a
DELETE, and a schema `soft` with the same tables, guarded as the guard does it: two columns, row-level security for
the agents' role, partial unique indexes.

Whatever is sent to `hard` is sent to `soft` rewritten; both have to answer the same.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import postgast
import psycopg
from psycopg import sql
from psycopg.types.string import TextLoader
from servers import Database

from sqlguard.catalog import Catalog, Column, Function, Guard, Table, Type, Unique
from sqlguard.errors import SqlguardError
from sqlguard.rewrite import rewrite
from sqlguard.statement.model import Session

AGENT = "sg_agent"
BOOKKEEPING = ("deleted_at", "deleted_by_agent")
SETUP = """
DO $$ BEGIN
    IF to_regrole('sg_agent') IS NULL THEN CREATE ROLE sg_agent LOGIN PASSWORD 'x'; END IF;
END $$;
CREATE SCHEMA sqlguard;
CREATE FUNCTION sqlguard.agent() RETURNS text LANGUAGE sql STABLE AS $$ SELECT 'agent-1' $$;
GRANT USAGE ON SCHEMA sqlguard TO sg_agent;
CREATE SCHEMA hard;
CREATE SCHEMA soft;
GRANT USAGE ON SCHEMA hard, soft TO sg_agent;
"""


@dataclass(frozen=True)
class Answer:
    """What a client sees of one statement; of an error, its SQLSTATE only."""

    tag: str | None
    columns: tuple[str, ...]
    rows: tuple[Any, ...]
    error: str | None = None
    message: str = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answer) and self._shown() == other._shown()

    def __hash__(self) -> int:
        return hash(self.tag)

    def _shown(self) -> tuple[Any, ...]:
        return self.tag, self.columns, sorted(map(repr, self.rows)), self.error


class Worlds:
    """The two schemas in one database, with a connection of the agent's role to each."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.admin = database.connect()
        self.admin.execute(SETUP)
        self.session = Session(search_path=("soft",))
        self.catalog = Catalog()
        self.hard, self.soft = (self._connect(name) for name in ("hard", "soft"))

    def _connect(self, schema: str) -> psycopg.Connection[Any]:
        # The parser of parameters is not wanted: `%` in the agent's text is an operator.
        conn = self.database.connect(
            self.database.dsn_for(AGENT, "x"), options=f"-csearch_path={schema} -ctimezone=UTC"
        )
        conn.prepare_threshold = None
        # A whole row of a soft table is a `record`; the text is the same, the type is not.
        for name in ("record", "record[]"):
            conn.adapters.register_loader(name, TextLoader)
        return conn

    def build(self, setup: str, soft_tables: Iterable[str], extra: str = "") -> None:
        """Make the tables in both schemas and guard *soft_tables* in one of them; *extra* is its migration."""
        for schema in ("hard", "soft"):
            self.admin.execute(f"SET search_path = {schema}; SET timezone = 'UTC'")
            self.admin.execute(setup)
        for table in soft_tables:
            self.admin.execute(
                f'ALTER TABLE "{table}" ADD COLUMN deleted_at timestamptz, ADD COLUMN deleted_by_agent text'
            )
        if extra:
            self.admin.execute(extra)
        for (name,) in self.admin.execute(
            "SELECT DISTINCT c.relname FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid"
            " WHERE relnamespace = 'soft'::regnamespace AND relkind IN ('r', 'p') AND attname = 'deleted_by_agent'"
        ).fetchall():
            self.admin.execute(policies(name))
        self.admin.execute(
            "GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA soft TO sg_agent;"
            "GRANT ALL ON ALL TABLES IN SCHEMA hard TO sg_agent;"
            "GRANT USAGE ON ALL SEQUENCES IN SCHEMA hard, soft TO sg_agent"
        )
        self.catalog = read_catalog(self.admin, "soft", set(soft_tables))

    def rewritten(self, text: str) -> str:
        return rewrite(text, postgast.parse(text).stmts[0].stmt, self.catalog, self.session).text

    def ask_hard(self, text: str) -> Answer:
        return ask(self.hard, text)

    def ask_soft(self, text: str) -> Answer:
        """Send *text* rewritten and answer with the tag that the client would see."""
        tree = postgast.parse(text).stmts[0].stmt
        done = rewrite(text, tree, self.catalog, self.session)
        if tree.HasField("create_table_as_stmt") or tree.HasField("create_stmt"):
            self._remember(tree)
        answer = ask(self.soft, done.text)
        if done.tag is not None and answer.tag is not None:
            tag = f"{done.tag} {answer.tag.split()[-1]}"
            return Answer(tag, answer.columns, answer.rows)
        return answer

    def _remember(self, tree: Any) -> None:
        made = tree.create_stmt
        columns = tuple(c.column_def.colname for c in made.table_elts)
        self.session = self.session.after(temporary={made.relation.relname: columns})

    def visible(self, table: str) -> tuple[list[Any], list[Any]]:
        """Return the rows that the agent sees of *table* in both worlds."""
        found = next(t for t in self.catalog.tables.values() if t.name == table)
        hidden = BOOKKEEPING if found.oid in self.catalog.soft else ()
        columns = sql.SQL(", ").join(sql.Identifier(c.name) for c in found.columns if c.name not in hidden)
        query = sql.SQL("SELECT {} FROM {} ORDER BY 1, 2").format(columns, sql.Identifier(table))
        return self.hard.execute(query).fetchall(), self.soft.execute(query).fetchall()


def ask(conn: psycopg.Connection[Any], text: str) -> Answer:
    try:
        with conn.cursor() as cursor:
            if text.lower().startswith("copy"):
                with cursor.copy(text.encode()) as copy:
                    rows = tuple(bytes(part) for part in copy)
                return Answer(cursor.statusmessage, (), rows)
            cursor.execute(text.encode())
            if cursor.description is None:
                return Answer(cursor.statusmessage, (), ())
            names = tuple(c.name for c in cursor.description)
            return Answer(cursor.statusmessage, names, tuple(cursor.fetchall()))
    except psycopg.Error as error:
        return Answer(None, (), (), error.sqlstate, str(error))


def outcome(worlds: Worlds, text: str) -> tuple[Answer, Answer | SqlguardError]:
    """Send *text* to both worlds; a refusal stands for the soft one's answer."""
    hard = worlds.ask_hard(text)
    try:
        return hard, worlds.ask_soft(text)
    except SqlguardError as refusal:
        return hard, refusal


def policies(table: str) -> sql.Composed:
    """Return the row-level security of a soft table, as the guard makes it."""
    return sql.SQL(
        """
        ALTER TABLE {table} ENABLE ROW LEVEL SECURITY;
        CREATE POLICY everybody ON {table} USING (true) WITH CHECK (true);
        CREATE POLICY live ON {table} AS RESTRICTIVE TO {agent}
            USING (deleted_at IS NULL OR deleted_at = statement_timestamp());
        """
    ).format(table=sql.Identifier(table), agent=sql.Identifier(AGENT))


def read_catalog(conn: psycopg.Connection[Any], schema: str, soft: set[str]) -> Catalog:
    """Read as much of a catalog as the rewriter asks for."""
    (version,) = conn.execute("SELECT current_setting('server_version_num')::int").fetchone() or (0,)
    tables = {}
    for oid, name, kind, definition in conn.execute(
        "SELECT oid, relname, relkind::text, CASE WHEN relkind IN ('v', 'm') THEN pg_get_viewdef(oid) END"
        " FROM pg_class WHERE relnamespace = %s::regnamespace AND relkind IN ('r', 'p', 'v', 'm')",
        [schema],
    ).fetchall():
        tables[oid] = Table(
            oid,
            schema,
            name,
            kind,
            columns=_columns(conn, oid),
            uniques=_uniques(conn, oid),
            parents=_oids(conn, "SELECT inhparent FROM pg_inherits WHERE inhrelid = %s", oid),
            children=_oids(conn, "SELECT inhrelid FROM pg_inherits WHERE inhparent = %s", oid),
            definition=definition,
            guard=Guard("soft", 1, BOOKKEEPING) if name in soft else None,
        )
    types = {
        oid: Type(oid, schema, name, "c", relation)
        for oid, name, relation in conn.execute(
            "SELECT oid, typname, typrelid FROM pg_type"
            " WHERE typnamespace = %s::regnamespace AND typtype = 'c'",
            [schema],
        ).fetchall()
    }
    functions = {
        oid: Function(oid, schema, name, tuple(types_of), ())
        for oid, name, types_of in conn.execute(
            "SELECT oid, proname, proargtypes::oid[] FROM pg_proc WHERE pronamespace = %s::regnamespace",
            [schema],
        ).fetchall()
    }
    return Catalog("1", version, tables, functions, types=types, schemas=frozenset({schema}))


def _columns(conn: psycopg.Connection[Any], oid: int) -> tuple[Column, ...]:
    return tuple(
        Column(name, number, type_oid, type_name, not_null)
        for name, number, type_oid, type_name, not_null in conn.execute(
            "SELECT attname, attnum, atttypid, format_type(atttypid, atttypmod), attnotnull FROM pg_attribute"
            " WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
            [oid],
        ).fetchall()
    )


def _uniques(conn: psycopg.Connection[Any], oid: int) -> tuple[Unique, ...]:
    return tuple(
        Unique(name, tuple(columns), primary, constraint, predicate=predicate)
        for name, columns, primary, constraint, predicate in conn.execute(
            "SELECT c.relname, ARRAY(SELECT a.attname::text FROM unnest(i.indkey) WITH ORDINALITY k(n, at)"
            " LEFT JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.n ORDER BY k.at),"
            " i.indisprimary, EXISTS (SELECT FROM pg_constraint WHERE conindid = i.indexrelid),"
            " pg_get_expr(i.indpred, i.indrelid)"
            " FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid WHERE i.indrelid = %s AND i.indisunique",
            [oid],
        ).fetchall()
    )


def _oids(conn: psycopg.Connection[Any], query: str, oid: int) -> tuple[int, ...]:
    rows: Sequence[tuple[int]] = conn.execute(query, [oid]).fetchall()
    return tuple(row[0] for row in rows)
