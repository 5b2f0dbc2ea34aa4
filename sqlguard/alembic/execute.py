"""
What the operations do: `sqlguard.postgres.guard_table` on the migration's connection, outside its transaction.

Whatever the revision did before is committed first (Alembic's `autocommit_block`), because an index can't be
built CONCURRENTLY in a transaction and no lock may be held for longer than one short step.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from alembic.util import CommandError
from sqlalchemy import text

from sqlguard.alembic import loosening, offline, tombstones
from sqlguard.alembic.operations import GuardOp, LoosenOp, UnguardOp
from sqlguard.alembic.session import psycopg_connection
from sqlguard.alembic.state import is_migrated
from sqlguard.errors import GuardError, NotConfigured, SqlguardError
from sqlguard.postgres.guard_table import GuardReport, guard_tables, unguard_tables
from sqlguard.postgres.policy_apply import refresh_policies

log = logging.getLogger(__name__)

#: What a bare name means in this session, as a regclass would read it, but without its quoting.
_VISIBLE = """
    SELECT n.nspname::text, c.relname::text
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p') AND c.relname = %s AND pg_catalog.pg_table_is_visible(c.oid)"""


def guard(operations: Operations, op: GuardOp) -> None:
    """Carry out `op.guard_table`. Raises CommandError when a table can't be guarded that way."""
    context = operations.migration_context
    if context.as_sql:
        offline.require_guard(context, op)
        return
    with _session(context) as conn:
        mode = None if op.mode == "auto" else op.mode
        reports = guard_tables(
            conn, labels(conn, op), mode, unique=op.unique, accept=op.accept, fix_views=op.fix_views
        )
        loosening.thaw(conn, [report.table for report in reports])
        # What policies grant depends on how a table is guarded.
        refresh_policies(conn)
        _tell(reports)


def unguard(operations: Operations, op: UnguardOp) -> None:
    """Carry out `op.unguard_table`. Raises CommandError while deleted rows are in a table."""
    context = operations.migration_context
    if context.as_sql:
        offline.require_no_guard(context, op)
        return
    with _session(context) as conn:
        tables = labels(conn, op)
        if op.purge:
            tombstones.purge(conn, tables)
        elif op.restore:
            tombstones.restore(conn, tables)
        else:
            tombstones.refuse(conn, tables)
        _tell(unguard_tables(conn, tables))
        refresh_policies(conn)


def loosen(operations: Operations, op: LoosenOp) -> None:
    """Carry out `op.loosen_guard`, in the transaction of the migration."""
    statement = loosening.statement(offline.parts(op))
    operations.execute(text(statement.replace(":", "\\:")))


def labels(conn: psycopg.Connection[Any], op: GuardOp | UnguardOp) -> list[str]:
    """Return the tables of *op* as `schema.name`; without a schema, the search_path says which is meant."""
    found = []
    for name in op.tables:
        if op.schema is not None:
            found.append(f"{op.schema}.{name}")
            continue
        row = conn.execute(_VISIBLE, [name]).fetchone()
        found.append(name if row is None else f"{row[0]}.{row[1]}")
    return found


@contextmanager
def _session(context: MigrationContext) -> Iterator[psycopg.Connection[Any]]:
    """Yield the connection to guard with; what goes wrong becomes an error that Alembic prints without a trace."""
    if getattr(context, "_in_external_transaction", False):
        raise CommandError(
            "guarding commits as it goes, but these migrations run inside a transaction of their caller; "
            "hand `context.configure` a connection that is in no transaction"
        )
    try:
        with context.autocommit_block():
            connection = context.connection
            if connection is None:
                raise GuardError("there is no connection to guard with")
            with psycopg_connection(connection, context.opts.get("sqlguard_dsn")) as conn:
                if not is_migrated(conn):
                    raise NotConfigured(
                        "the database has no schema `sqlguard`", hint="run `sqlguard migrate` first"
                    )
                yield conn
    except SqlguardError as fault:
        lines = (fault.message, fault.detail, f"hint: {fault.hint}" if fault.hint else None)
        raise CommandError("\n".join(line for line in lines if line)) from fault


def _tell(reports: list[GuardReport]) -> None:
    for report in reports:
        log.info("%s: %s%s", report.table, report.mode, "" if report.changed else " (nothing to do)")
        for note in report.notes:
            log.info("%s: %s", report.table, note)
