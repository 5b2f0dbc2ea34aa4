"""
Reads what exists in the database into a Catalog, with few queries over whole catalogs.

Everything is read in one REPEATABLE READ transaction with an empty search_path, so that PostgreSQL prints
definitions with every name qualified. It works for a task's own role: pg_catalog and the columns of the guard
register that are asked for here are readable by all.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from sqlguard.catalog import (
    Cast,
    Catalog,
    Column,
    ForeignKey,
    Function,
    Guard,
    Operator,
    Rule,
    Table,
    Trigger,
    Type,
    Unique,
)
from sqlguard.postgres import catalog_queries as queries

Row = Sequence[Any]
_TRIGGER_EVENTS = {4: "insert", 8: "delete", 16: "update", 32: "truncate"}
#: How often a catalog is read when something goes while it is read.
_ATTEMPTS = 3
#: What PostgreSQL says when something is printed that has gone meanwhile ("could not open relation with OID",
#: "cache lookup failed").
_GONE = (
    psycopg.errors.InternalError_,
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedObject,
    psycopg.errors.UndefinedColumn,
    psycopg.errors.UndefinedFunction,
)
_RULE_EVENTS = {"1": "select", "2": "update", "3": "insert", "4": "delete"}


def catalog_version(conn: psycopg.Connection[Any]) -> str:
    """Return a text that is another one as soon as anything that a decision depends on has changed."""
    with conn.cursor(row_factory=tuple_row) as cursor:
        version = str(_one(cursor.execute(queries.VERSION)))
        if _one(cursor.execute(queries.GUARDS_READABLE)):
            version += "/" + str(_one(cursor.execute(queries.GUARDS_VERSION)))
    return version


def read_catalog(conn: psycopg.Connection[Any]) -> Catalog:
    """
    Return what exists outside pg_catalog and information_schema, as one consistent snapshot.

    When other sessions drop things meanwhile it is read again as of a later moment, a few times; then what is gone is
    left without its definition, which no statement passes.
    """
    attempt = 1
    while True:
        is_last = attempt == _ATTEMPTS or conn.info.transaction_status != TransactionStatus.IDLE
        attempt += 1
        try:
            with _snapshot(conn), conn.cursor(row_factory=tuple_row) as cursor:
                reader = _Reader(cursor, conn.info.server_version)
                found = reader.catalog(catalog_version(conn))
                if is_last or not reader.gone:
                    return found
        except _GONE:
            if is_last:
                raise


@contextmanager
def _snapshot(conn: psycopg.Connection[Any]) -> Iterator[None]:
    """Read as of one moment with an empty search_path, and leave the session as it was."""
    own = conn.info.transaction_status == TransactionStatus.IDLE
    if own:
        # Where psycopg begins by itself, the modes are set; where it does not, they come with BEGIN.
        conn.execute(
            f"{'BEGIN' if conn.autocommit else 'SET TRANSACTION'} ISOLATION LEVEL REPEATABLE READ READ ONLY"
        )
    try:
        before = _one(conn.cursor(row_factory=tuple_row).execute("SELECT current_setting('search_path')"))
        conn.execute("SELECT pg_catalog.set_config('search_path', '', true)")
        try:
            yield
        finally:
            if not own and conn.info.transaction_status == TransactionStatus.INTRANS:
                conn.execute("SELECT pg_catalog.set_config('search_path', %s, true)", [before])
    finally:
        if own:
            conn.rollback()


def _one(cursor: psycopg.Cursor[Row]) -> Any:
    row = cursor.fetchone()
    return row[0] if row is not None else None


#: Places of the arrays in a row of `queries.FUNCTIONS`.
_LISTS = (3, 4, 15, 16, 17, 19, 20)


class _Reader:
    """One reading; the parts of a table are read for all tables at once and put together here."""

    def __init__(self, cursor: psycopg.Cursor[Row], server_version: int) -> None:
        self.cursor = cursor
        self.server_version = server_version
        #: Whether something had gone before it could be read.
        self.gone = False

    def catalog(self, version: str) -> Catalog:
        return Catalog(
            version=version,
            server_version=self.server_version,
            tables=self._tables(),
            functions={f.oid: f for f in map(_function, self._rows(queries.FUNCTIONS))},
            operators=tuple(Operator(*row) for row in self._rows(queries.OPERATORS)),
            casts=tuple(Cast(*row) for row in self._rows(queries.CASTS)),
            types={t.oid: t for t in map(_type, self._rows(queries.TYPES))},
            foreign_keys=tuple(_foreign_key(row) for row in self._rows(queries.FOREIGN_KEYS)),
            schemas=frozenset(row[0] for row in self._rows(queries.SCHEMAS)),
        )

    def _rows(self, query: str) -> list[Row]:
        return self.cursor.execute(query).fetchall()

    def _definitions(self, query: str, oids: Sequence[int]) -> dict[int, str]:
        """Return what can still be printed of *oids*: what has gone fails the query, the others are asked in halves."""
        if not oids:
            return {}
        try:
            with self.cursor.connection.transaction():
                return {row[0]: row[1] for row in self.cursor.execute(query, [list(oids)])}
        except _GONE:
            self.gone = True
            if len(oids) == 1:
                return {}
        half = len(oids) // 2
        return self._definitions(query, oids[:half]) | self._definitions(query, oids[half:])

    def _grouped(self, query: str) -> Mapping[int, list[Row]]:
        found: dict[int, list[Row]] = defaultdict(list)
        for row in self._rows(query):
            found[row[0]].append(row[1:])
        return found

    def _tables(self) -> dict[int, Table]:
        columns, rules, relations = (
            self._grouped(queries.COLUMNS),
            self._rules(),
            self._rows(queries.RELATIONS),
        )
        uniques = self._grouped(queries.UNIQUES.format(nulls="i.indnullsnotdistinct"))
        triggers = self._grouped(queries.TRIGGERS)
        parents, children = self._inheritance()
        guards = self._guards()
        views = self._definitions(queries.VIEW_DEFINITIONS, [row[0] for row in relations if row[3] == "v"])
        tables = {}
        for oid, schema, name, kind, partition, secured, estimate, invoker, extension in relations:
            tables[oid] = Table(
                oid,
                schema,
                name,
                kind,
                tuple(_column(row) for row in columns.get(oid, ())),
                tuple(_unique(row) for row in uniques.get(oid, ())),
                tuple(_trigger(row) for row in triggers.get(oid, ())),
                tuple(rules.get(oid, ())),
                tuple(parents.get(oid, ())),
                tuple(children.get(oid, ())),
                is_partition=partition,
                row_security=secured,
                definition=views.get(oid),
                security_invoker=invoker,
                row_estimate=estimate,
                guard=guards.get(oid),
                extension=extension,
            )
        return tables

    def _rules(self) -> Mapping[int, list[Rule]]:
        rows = self._rows(queries.RULES)
        texts = self._definitions(queries.RULE_DEFINITIONS, [row[4] for row in rows])
        found: dict[int, list[Rule]] = defaultdict(list)
        for table, name, event, instead, oid in rows:
            found[table].append(Rule(name, _RULE_EVENTS[event], instead, texts.get(oid)))
        return found

    def _inheritance(self) -> tuple[Mapping[int, list[int]], Mapping[int, list[int]]]:
        parents: dict[int, list[int]] = defaultdict(list)
        children: dict[int, list[int]] = defaultdict(list)
        for child, parent in self._rows(queries.INHERITS):
            parents[child].append(parent)
            children[parent].append(child)
        return parents, children

    def _guards(self) -> dict[int, Guard]:
        if not _one(self.cursor.execute(queries.GUARDS_READABLE)):
            return {}
        added = self._grouped(queries.BOOKKEEPING)
        return {
            oid: Guard(
                mode, version, tuple(r[0] for r in added.get(oid, ())) if mode == "soft" else (), accepted
            )
            for oid, mode, version, accepted in self._rows(queries.GUARDS)
        }


def _column(row: Row) -> Column:
    return Column(*row)


def _unique(row: Row) -> Unique:
    return Unique(row[0], tuple(row[1]), *row[2:])


def _trigger(row: Row) -> Trigger:
    name, kind, function, schema, _ = row
    timing = "INSTEAD OF" if kind & 64 else "BEFORE" if kind & 2 else "AFTER"
    events = frozenset(event for bit, event in _TRIGGER_EVENTS.items() if kind & bit)
    return Trigger(name, events, timing, bool(kind & 1), function, ours=schema == "sqlguard")


def _function(row: Row) -> Function:
    values = list(row)
    for place in _LISTS:
        values[place] = tuple(values[place])
    return Function(*values)


def _type(row: Row) -> Type:
    values = [*row[:-2], tuple(row[-2]), tuple(row[-1])]
    return Type(*values)


def _foreign_key(row: Row) -> ForeignKey:
    name, table, columns, references, ref_columns, on_delete, on_update, set_columns, deferrable, deferred = (
        row
    )
    return ForeignKey(
        name,
        table,
        tuple(columns),
        references,
        tuple(ref_columns),
        on_delete,
        on_update,
        tuple(set_columns),
        deferrable,
        deferred,
    )
