"""
Transactions that tasks have prepared: they keep their locks, and could be committed, when session and role have ended.

Only the role that prepared one, or a superuser, may roll it back, and only in its own database: so the operator takes
that role, and goes there, for the moment. ROLLBACK PREPARED runs no code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from sqlguard.postgres import leases

Connection = psycopg.Connection[Any]
#: Before PostgreSQL 16 a member may become its group, and what is prepared then is the group's.
_OWNING_GROUPS = """
SELECT DISTINCT x.owner::text FROM pg_catalog.pg_prepared_xacts x
WHERE x.owner = 'sqlguard_agent' OR EXISTS (SELECT FROM sqlguard.policy p WHERE p.group_role = x.owner)
"""


def roll_back(conn: Connection, role: str) -> list[str]:
    """Roll back what *role* has prepared, in whatever database; return what could not be. In autocommit."""
    found = conn.execute(
        "SELECT DISTINCT database::text FROM pg_catalog.pg_prepared_xacts WHERE owner = %s", [role]
    ).fetchall()
    if not found:
        return []
    problems = []
    try:
        leases.become_member(conn, role)
        for (database,) in found:
            with _session_in(conn, database) as there:
                _roll_back_here(there, role)
    except psycopg.Error as fault:
        if conn.closed:
            raise
        problems.append(leases.said(role, fault))
    return problems


def roll_back_of_groups(conn: Connection) -> list[str]:
    """Roll back what was prepared in the name of a policy's group; return what could not be. In autocommit."""
    problems = []
    for (group,) in conn.execute(_OWNING_GROUPS).fetchall():
        problems += roll_back(conn, group)
        # A member would be held by the policies for agents.
        conn.execute(sql.SQL("REVOKE {} FROM CURRENT_USER").format(sql.Identifier(group)))
    return problems


@contextmanager
def _session_in(conn: Connection, database: str) -> Iterator[Connection]:
    if database == conn.info.dbname:
        yield conn
        return
    parts = {**conn.info.get_parameters(), "dbname": database}
    with psycopg.connect(
        make_conninfo(**parts, password=conn.info.password or None), autocommit=True
    ) as there:
        # Whoever may create there is nobody we know.
        there.execute("SELECT pg_catalog.set_config('search_path', '', false)")
        yield there


def _roll_back_here(conn: Connection, role: str) -> None:
    found = conn.execute(
        "SELECT gid FROM pg_catalog.pg_prepared_xacts"
        " WHERE owner = %s AND database = pg_catalog.current_database()",
        [role],
    ).fetchall()
    row = conn.execute("SELECT pg_catalog.current_setting('role')").fetchone()
    try:
        conn.execute("SELECT pg_catalog.set_config('role', %s, false)", [role])
        for (gid,) in found:
            conn.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))
    finally:
        if not conn.closed:
            conn.execute("SELECT pg_catalog.set_config('role', %s, false)", [row[0] if row else "none"])
