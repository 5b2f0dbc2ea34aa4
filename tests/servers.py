"""
Real servers and fresh databases for the tests.

The one idea: a server per version and test process, started at the first use and kept; a database per test,
copied from a template in a few milliseconds. Roles belong to the whole server, so they are cleaned up too.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from sqlguard.embedded import EmbeddedServer
from sqlguard.embedded.binaries import require_bindir

OWNER = "app_owner"
OWNER_PASSWORD = "owner of the application's tables"
SETTINGS = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "shared_buffers": "32MB",
    # Two test processes with servers of their own; CREATE DATABASE should not wait for checkpoints.
    "max_wal_size": "4GB",
    "checkpoint_timeout": "1h",
    "wal_level": "logical",
    "max_connections": "200",
    "max_prepared_transactions": "10",
}
#: Whole-word prefixes of the roles that sqlguard and its test data make.
ROLES = r"^(sg|sqlguard)_"

_numbers = count(1)
MEMORY = Path("/dev/shm")  # noqa: S108 (a file system in memory; folders in it are private)
#: Bytes that the servers of all test processes may need there.
ROOM = 4 << 30


@contextmanager
def in_memory() -> Iterator[None]:
    """Make temporary folders in memory, if there is room: a database per test is a lot of small files."""
    roomy = MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM
    before = tempfile.tempdir
    tempfile.tempdir = str(MEMORY) if roomy else before
    try:
        yield
    finally:
        tempfile.tempdir = before


class Servers:
    """The running servers of this test process, by version."""

    def __init__(self) -> None:
        self._running: dict[int, EmbeddedServer] = {}
        #: Databases with data in them that tests copy, as (version, name).
        self.templates: set[tuple[int, str]] = set()

    def get(self, version: int) -> EmbeddedServer:
        if version not in self._running:
            with in_memory():
                server = EmbeddedServer.start(require_bindir(version), settings=SETTINGS)
            self._running[version] = server
            make_owner(server)
        return self._running[version]

    def stop(self) -> None:
        while self._running:
            self._running.popitem()[1].stop()


def make_owner(server: EmbeddedServer) -> None:
    """Make the owner of test databases, who is no superuser."""
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        conn.execute(
            sql.SQL("CREATE ROLE {} LOGIN CREATEROLE PASSWORD {}").format(
                sql.Identifier(OWNER), OWNER_PASSWORD
            )
        )


@dataclass
class Database:
    """A database that belongs to one test."""

    server: EmbeddedServer
    name: str
    _connections: list[psycopg.Connection[Any]] = field(default_factory=list, repr=False)

    @property
    def dsn(self) -> str:
        """The URL for the superuser."""
        return self.server.dsn(self.name)

    @property
    def owner_dsn(self) -> str:
        """The URL for the database's owner, who is no superuser and may create roles."""
        return self.server.dsn(self.name, OWNER, OWNER_PASSWORD)

    def dsn_for(self, user: str, password: str | None = None) -> str:
        return self.server.dsn(self.name, user, password)

    def connect(self, dsn: str | None = None, **options: Any) -> psycopg.Connection[Any]:
        """Connect (as the superuser, autocommit); closed after the test if it is still open."""
        conn = psycopg.connect(dsn or self.dsn, **{"autocommit": True, **options})
        self._connections.append(conn)
        return conn

    def execute(self, text: str, params: Any = None) -> list[tuple[Any, ...]]:
        """Run one statement as the superuser in a connection of its own; return its rows, if any."""
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            cursor = conn.execute(text, params)
            return cursor.fetchall() if cursor.description else []

    def psql(self, text: str, dsn: str | None = None) -> str:
        """Run *text* in psql (unaligned, tuples only, stops at an error); return what it prints."""
        done = subprocess.run(
            [self.server.bindir / "psql", "-XAtq", "-v", "ON_ERROR_STOP=1", "-d", dsn or self.dsn],
            input=text,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.rstrip("\n")

    def load(self, text: str, dsn: str | None = None) -> None:
        """Run a script of many statements."""
        with psycopg.connect(dsn or self.dsn, autocommit=True) as conn:
            conn.execute(text)

    def close(self) -> None:
        for conn in self._connections:
            conn.close()


@contextmanager
def fresh_database(server: EmbeddedServer, template: str = "template1") -> Iterator[Database]:
    """Give a new copy of *template*, and remove it with the roles that were made for it."""
    database = Database(server, f"test_{next(_numbers)}")
    create(server, database.name, template)
    try:
        yield database
    finally:
        database.close()
        drop(server, database.name)
        drop_roles(server)


def create(server: EmbeddedServer, name: str, template: str = "template1") -> None:
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        conn.execute(
            # Copying files is ten times faster than logging them where they are in memory.
            sql.SQL("CREATE DATABASE {} TEMPLATE {} OWNER {} STRATEGY file_copy").format(
                sql.Identifier(name), sql.Identifier(template), sql.Identifier(OWNER)
            )
        )


def drop(server: EmbeddedServer, name: str) -> None:
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        conn.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


def drop_roles(server: EmbeddedServer) -> None:
    """Drop the roles of sqlguard and its test data that no database holds on to."""
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        found = conn.execute(
            """
            SELECT rolname FROM pg_roles r
             WHERE rolname ~ %s
               AND NOT EXISTS (SELECT FROM pg_shdepend d
                                WHERE d.refclassid = 'pg_authid'::regclass AND d.refobjid = r.oid
                                  AND d.dbid <> 0)
            """,
            [ROLES],
        ).fetchall()
        roles = [sql.Identifier(row[0]) for row in found]
        if not roles:
            return
        conn.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = ANY(%s)",
            [[row[0] for row in found]],
        )
        names = sql.SQL(", ").join(roles)
        # Rights on shared objects and memberships that a role has granted would hold it.
        conn.execute(sql.SQL("DROP OWNED BY {}").format(names))
        conn.execute(sql.SQL("DROP ROLE {}").format(names))


def fit_to_server(text: str, conn: psycopg.Connection[Any]) -> tuple[str, set[str]]:
    """
    Return *text*, written for PostgreSQL 15, so that the server of *conn* takes it.

    Extensions that the server does not have are left out and named; `json_value` is a word of the grammar
    since 17, so its function needs quotes there.
    """
    had = {row[0] for row in conn.execute("SELECT name FROM pg_available_extensions").fetchall()}
    missing: set[str] = set()

    def keep(match: re.Match[str]) -> str:
        if match[1] in had:
            return match[0]
        missing.add(match[1])
        return ""

    text = text.replace("CREATE FUNCTION json_value(", 'CREATE FUNCTION "json_value"(')
    return re.sub(r"CREATE EXTENSION IF NOT EXISTS (\w+);", keep, text), missing


def shared_folder(root: Path) -> Path:
    """Return the folder of the given data beside the project."""
    return root.parent / "shared"
