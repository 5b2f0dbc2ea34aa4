"""
The optional event trigger that refuses DDL by tasks, whatever rights they have got hold of.

Only a superuser may put one up, so it stands beside the revisions; without it wall 2 alone keeps DDL away.
"""

from typing import Any

import psycopg

from sqlguard.errors import NotConfigured
from sqlguard.postgres.control import not_migrated
from sqlguard.postgres.migrate import migrations_directory

Connection = psycopg.Connection[Any]


def put_up(conn: Connection) -> None:
    """Put the event trigger up, or up to date. Raises NotConfigured for anyone but a superuser."""
    _superuser(conn)
    if conn.execute("SELECT to_regclass('sqlguard.task')").fetchone() == (None,):
        raise not_migrated()
    script = (migrations_directory() / "sql" / "event_trigger.sql").read_text(encoding="utf-8")
    owner = conn.execute(
        "SELECT r.rolsuper FROM pg_proc p JOIN pg_roles r ON r.oid = p.proowner"
        " WHERE p.oid = to_regprocedure('sqlguard.refuse_ddl()')"
    ).fetchone()
    with conn.transaction():
        if owner == (False,):
            # Somebody else's function would then run with the rights of every superuser.
            conn.execute("DROP FUNCTION sqlguard.refuse_ddl() CASCADE")
        conn.execute(script.encode())


def take_down(conn: Connection) -> None:
    """Take it down again; nothing happens when there is none. Raises NotConfigured for anyone but a superuser."""
    _superuser(conn)
    conn.execute("DROP FUNCTION IF EXISTS sqlguard.refuse_ddl() CASCADE")


def _superuser(conn: Connection) -> None:
    if conn.execute("SELECT rolsuper FROM pg_roles WHERE rolname = current_user").fetchone() != (True,):
        raise NotConfigured(
            "only a superuser may put up an event trigger",
            hint="run it once with a superuser's --dsn; without it the tasks' roles still may not run DDL",
        )
