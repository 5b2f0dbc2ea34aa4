"""The suites of Django and Alembic, and PostgreSQL's own programs."""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psycopg

from scripts.client_suites import fetch
from scripts.client_suites.suites import LIMIT, Place, Pytest, Results, Suite

_DJANGO = """
def _database(name):
    return {{
        "ENGINE": "django.db.backends.postgresql",
        "HOST": "127.0.0.1",
        "PORT": {port},
        "USER": {user!r},
        "PASSWORD": {password!r},
        "NAME": name,
        "TEST": {{"NAME": name}},
        "OPTIONS": {options!r},
    }}


DATABASES = {{"default": _database({dbname!r}), "other": _database("other")}}
SECRET_KEY = "of the tests"
USE_TZ = False
DEFAULT_AUTO_FIELD = "django.db.models.AutoField"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
"""


class Django(Suite):
    """Its own runner prints a line per test; the database is the one that is there, as it is the observed one."""

    name, version = "Django", fetch.DJANGO
    labels: tuple[str, ...] = (
        "backends", "transactions", "basic", "queries", "postgres_tests", "aggregation", "annotations", "bulk_create",
        "constraints", "db_functions", "delete", "expressions", "introspection", "lookup", "migrations", "ordering",
        "schema", "select_for_update", "transaction_hooks", "update",
    )  # fmt: skip

    #: Of its connections.
    options: Mapping[str, object] = {}

    def prepare(self) -> None:
        self.source = fetch.sdist("Django", self.version, self.folder)
        self.python = fetch.environment(
            self.folder / "django-venv",
            f"django=={self.version}",
            f"psycopg[binary,pool]=={fetch.PSYCOPG}",
            "jinja2",
            "tblib",
        )

    def database(self, conn: psycopg.Connection[object]) -> None:
        conn.execute("CREATE DATABASE other TEMPLATE template0")

    def run(self, place: Place, out: Path) -> Results:
        out.mkdir(parents=True, exist_ok=True)
        text = _DJANGO.format(
            port=place.port,
            user=place.user,
            password=place.password,
            dbname=place.dbname,
            options=self.options,
        )
        (out / "settings_of_run.py").write_text(text, encoding="utf-8")
        words = [str(self.python), "runtests.py", "--settings=settings_of_run", "--keepdb", "--noinput"]
        words += ["--parallel=1", "--verbosity=2", *self.labels]
        done = subprocess.run(
            words,
            cwd=self.source / "tests",
            env=place.variables | {"PYTHONPATH": str(out)},
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT,
        )
        (out / "log").write_text(done.stdout + done.stderr, encoding="utf-8")
        found = _unittest(done.stderr)
        if not found:
            raise fetch.Missing(f"no test has run, see {out}/log")
        return found


class DjangoPool(Django):
    """The same with connections from psycopg's pool."""

    name, labels, options = (
        "Django, pool",
        ("backends", "basic", "transactions", "transaction_hooks"),
        {"pool": True},
    )


class DjangoPart(Django):
    """What CI runs."""

    name, quick = "Django, a part", True
    labels = ("backends", "basic", "transactions")


_HEAD = re.compile(r"^(\w+) \(([\w.]+)\)")
_END = re.compile(r"\.\.\. (ok|FAIL|ERROR|skipped|expected failure|unexpected success)")
_OUTCOMES = {"ok": "passed", "expected failure": "passed", "skipped": "skipped"}


def _unittest(text: str) -> Results:
    """Read what unittest prints: a test's name, on the same or a later line how it ended."""
    found: Results = {}
    name = ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name = head[2]
        if name and (end := _END.search(line)):
            found[name] = _OUTCOMES.get(end[1], "failed")
            name = ""
    return found


class Alembic(Pytest):
    name, version = "Alembic", fetch.ALEMBIC

    def prepare(self) -> None:
        self.source = fetch.sdist("alembic", self.version, self.folder)
        self.python = fetch.environment(
            self.folder / "alembic-venv",
            f"alembic=={self.version}",
            f"sqlalchemy=={fetch.SQLALCHEMY}",
            f"psycopg[binary]=={fetch.PSYCOPG}",
            "pytest",
            "tzdata",
            "black",
        )

    def database(self, conn: psycopg.Connection[object]) -> None:
        for schema in ("test_schema", "test_schema_2"):
            conn.execute(f"CREATE SCHEMA {schema}".encode())

    def words(self, place: Place) -> tuple[list[str], Path]:
        uri = place.dsn.replace("postgresql://", "postgresql+psycopg://").split("?")[0]
        words = [str(self.python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--dburi", uri, "tests"]
        return [*words, "--backend-only"], self.source


_SHOP = """
CREATE TABLE customers (id integer PRIMARY KEY, name text NOT NULL, email text UNIQUE, born date);
CREATE TABLE orders (id serial PRIMARY KEY, customer integer REFERENCES customers ON DELETE CASCADE,
                     total numeric(10, 2) CHECK (total >= 0), placed timestamptz DEFAULT '2024-05-05');
CREATE INDEX ON orders (customer) WHERE total > 10;
CREATE VIEW big AS SELECT * FROM orders WHERE total > 100;
CREATE FUNCTION twice(integer) RETURNS integer LANGUAGE sql AS 'SELECT 2 * $1';
CREATE TYPE mood AS ENUM ('good', 'bad');
CREATE ROLE reader;
GRANT SELECT ON customers, orders TO reader;
GRANT UPDATE (total) ON orders TO reader;
INSERT INTO customers SELECT n, 'Customer ' || n, n || '@shop.example', '2000-01-01' FROM generate_series(1, 500) n;
INSERT INTO orders (customer, total) SELECT 1 + n % 500, n FROM generate_series(1, 3000) n;
"""
_COMMANDS = (
    "\\d", "\\d+", "\\d customers", "\\d+ orders", "\\d+ big", "\\dt+", "\\di+", "\\dv+", "\\ds+", "\\df+", "\\dn+",
    "\\dp", "\\ddp", "\\du+", "\\dT+", "\\dx+", "\\dD", "\\dc", "\\dC", "\\do+", "\\da", "\\dA+", "\\dL", "\\dP",
    "\\dRp", "\\dRs", "\\dS pg_class", "\\l", "\\sf twice", "\\sv big", "\\z", "\\encoding", "\\dconfig work_mem",
    "\\copy customers TO STDOUT (FORMAT csv, HEADER)",
    "\\copy (SELECT * FROM orders ORDER BY id LIMIT 100) TO STDOUT (FORMAT binary)",
)  # fmt: skip
_LOADS = (
    "CREATE TEMP TABLE t (LIKE customers); \\copy t FROM PROGRAM 'seq 1 2000 | sed s/$/,n,e,2000-01-01/' CSV",
    "\\set FETCH_COUNT 10 \\\\ SELECT * FROM orders ORDER BY id",
    "BEGIN; \\copy customers FROM PROGRAM 'echo x' CSV",
)


class Programs(Suite):
    """psql's own commands, pg_dump and pg_restore: each is to print the same, byte for byte."""

    name, quick = "psql and pg_dump", True

    def __init__(self, folder: Path, version: str) -> None:
        super().__init__(folder)
        self.version = version

    def prepare(self) -> None:
        """Nothing: the programs come with the server."""

    def database(self, conn: psycopg.Connection[object]) -> None:
        conn.execute(_SHOP.encode())

    def run(self, place: Place, out: Path) -> Results:
        if not (place.bindir / "pg_dump").is_file():
            raise fetch.Missing("these binaries come without pg_dump")
        out.mkdir(parents=True, exist_ok=True)
        dump = out / "dump"
        tasks = {command: ["psql", "-X", "-c", command] for command in _COMMANDS}
        tasks |= {text: ["psql", "-XAt", "-f", str(_script(out, n, text))] for n, text in enumerate(_LOADS)}
        tasks |= {
            "pg_dump": ["pg_dump", "--schema=public"],
            "pg_dump, rows as INSERT": ["pg_dump", "--schema=public", "--rows-per-insert=100"],
            "pg_dump, schema only": ["pg_dump", "-s"],
            "pg_dump, archive": ["pg_dump", "-Fd", "-j2", "-f", str(dump), "--schema=public"],
            "pg_restore, list": ["pg_restore", "-f", "-", str(dump)],
            "pg_restore": ["pg_restore", "--clean", "-d", place.dbname, str(dump)],
            "pg_dumpall": ["pg_dumpall", "-g", "--no-role-passwords"],
            "vacuumdb": ["vacuumdb", "-z", "-t", "customers", place.dbname],
            "pgbench": ["pgbench", "-i", "-q", place.dbname],
        }
        shutil.rmtree(dump, ignore_errors=True)
        return {
            name: self._one(place, words, out, number) for number, (name, words) in enumerate(tasks.items())
        }

    def _one(self, place: Place, words: Sequence[str], out: Path, number: int) -> str:
        done = subprocess.run(
            [str(place.bindir / words[0]), *words[1:]],
            env=place.variables,
            cwd=out,
            capture_output=True,
            check=False,
            timeout=120,
        )
        # Where pg_dump says when, and newer ones a key of their own; and how long pgbench took.
        said = re.sub(rb"(?m)^\\(un)?restrict .*$|^;.*$|done in .*$", b"", done.stdout)
        file = f"{number}.out"
        (out / file).write_bytes(b"%d\n" % done.returncode + said)
        (out / f"{number}.err").write_bytes(done.stderr)
        direct = out.with_name("direct") / file
        return "passed" if direct.read_bytes() == (out / file).read_bytes() else "failed"


def _script(out: Path, number: int, text: str) -> Path:
    path = out / f"{number}.sql"
    path.write_text(text.replace("; \\", ";\n\\").replace(" \\\\ ", "\n") + ";\n", encoding="utf-8")
    return path
