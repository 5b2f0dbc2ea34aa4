"""What each suite is: how it is prepared, how it is run against a place, and how its results are read."""

import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psycopg

from scripts.client_suites import fetch
from sqlguard.dsn import url

Results = dict[str, str]
#: Tests that must differ, and why.
REASONS = {
    "test_executemany_server_failure_during_writes": (
        "counts how much it could send before it heard of an error: on a busy machine that may be everything"
    ),
    "gh-issues/1105-tests": "gives 5,000 statements 5 s, too little on a busy machine",
    "connection-pool/error-tests": "gives a connection 100 ms to be there, too little on a busy machine",
    "pg-pool: connection timeout should ": "gives a connection 100 ms to be there, too little on a busy machine",
    "pg-pool: events emits acquire": "gives ten connections 100 ms to be there, too little on a busy machine",
    "pg-pool: idle timeout": "expects the first of two connections to be there first",
    "LogicalReplicationTest": (
        "streams every change of the database: what the observing proxy writes down in it is among them"
    ),
}
#: Seconds that one run may take.
LIMIT = 2400


@dataclass(frozen=True, slots=True)
class Place:
    """Where a suite connects to; everything but the port is the same directly and through the proxy."""

    port: int
    user: str
    password: str
    dbname: str
    bindir: Path

    @property
    def dsn(self) -> str:
        return url(
            host="127.0.0.1", port=self.port, user=self.user, password=self.password, dbname=self.dbname
        )

    @property
    def variables(self) -> dict[str, str]:
        return os.environ | {
            "PGHOST": "127.0.0.1",
            "PGPORT": str(self.port),
            "PGUSER": self.user,
            "PGPASSWORD": self.password,
            "PGDATABASE": self.dbname,
            "PATH": f"{self.bindir}:{os.environ['PATH']}",
        }


class Suite(ABC):
    """`name` and `version` for the report; `quick` ones run in CI."""

    name: str
    version: str
    quick = False
    #: The suite wants a server with TLS.
    tls = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def prepare(self) -> None:
        """Fetch and build what is needed. Raises Missing."""

    @abstractmethod
    def run(self, place: Place, out: Path) -> Results:
        """Run all of it; return an outcome per test, `passed` among others."""

    def again(self, place: Place, out: Path, tests: Sequence[str]) -> Results:  # noqa: ARG002 (most can't)
        """Run these tests once more; what is not in the answer stays as it was."""
        return {}

    def database(self, conn: psycopg.Connection[object]) -> None:  # noqa: B027 (most expect nothing)
        """Make what the suite expects in its database."""


class Pytest(Suite):
    """A suite that pytest runs."""

    @abstractmethod
    def words(self, place: Place) -> tuple[list[str], Path]:
        """Return the command, and the folder that it is run in."""

    def run(self, place: Place, out: Path) -> Results:
        words, cwd = self.words(place)
        return self.results(words, cwd, place.variables, out)

    def again(self, place: Place, out: Path, tests: Sequence[str]) -> Results:
        words, cwd = self.words(place)
        # The last -k counts; parameters of a test are not words to it.
        names = sorted({re.split(r"[\[-]", test.rpartition("::")[2])[0] for test in tests})
        found = self.results([*words, "-k", " or ".join(names)], cwd, place.variables, out.with_name("again"))
        return {test: found[test] for test in tests if test in found}

    def results(self, words: Sequence[str], cwd: Path, variables: dict[str, str], out: Path) -> Results:
        report = out.with_suffix(".xml")
        with out.with_suffix(".log").open("w") as log:
            subprocess.run(
                [*words, f"--junitxml={report}"],
                cwd=cwd,
                env=variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=LIMIT,
            )
        if not report.is_file():
            raise fetch.Missing(f"pytest did not get to its end, see {out}.log")
        return junit(report)


def junit(report: Path) -> Results:
    found: Results = {}
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 (our own pytest wrote it)
        outcome = "passed"
        for kind in ("failure", "error", "skipped"):
            if case.find(kind) is not None:
                outcome = "skipped" if kind == "skipped" else "failed"
        name = f"{case.get('classname')}::{case.get('name')}"
        if found.get(name) != "failed":
            found[name] = outcome
    return found


class Asyncpg(Pytest):
    name, version = "asyncpg", fetch.ASYNCPG
    files: tuple[str, ...] = ("tests",)

    def prepare(self) -> None:
        self.source = fetch.sdist("asyncpg", self.version, self.folder)
        # Its own tests import `asyncpg`: the installed one, with the compiled parts, must come first.
        self.python = fetch.environment(
            self.folder / "asyncpg-venv", f"asyncpg=={self.version}", "pytest", "uvloop", "distro"
        )
        shutil.copytree(self.source / "tests", self.folder / "asyncpg-run" / "tests", dirs_exist_ok=True)

    def words(self, place: Place) -> tuple[list[str], Path]:  # noqa: ARG002 (the variables say where)
        # Its tests of connection attributes ask where the environment's variables lead; the rest of it is here.
        words = [str(self.python), "-m", "pytest", "-q", *self.files, "-p", "no:cacheprovider"]
        words += [
            "--deselect",
            "tests/test__sourcecode.py",
            "-k",
            "not TestConnectionAttributes and not flake8",
        ]
        return words, self.folder / "asyncpg-run"


class AsyncpgPart(Asyncpg):
    """What CI runs: pipelines, cursors, COPY both ways, notifications, cancelled and broken transactions."""

    name, quick = "asyncpg, a part", True
    files = tuple(
        f"tests/test_{name}.py"
        for name in ("prepare", "cursor", "copy", "listeners", "transaction", "timeout", "codecs")
    )


class Sqlalchemy(Pytest):
    driver: str

    def prepare(self) -> None:
        self.source = fetch.sdist("SQLAlchemy", self.version, self.folder)
        self.python = fetch.environment(
            self.folder / "sqlalchemy-venv",
            f"sqlalchemy[asyncio]=={self.version}",
            f"psycopg[binary]=={fetch.PSYCOPG}",
            f"asyncpg=={fetch.ASYNCPG}",
            "pytest",
            "pytest-xdist",
        )

    def database(self, conn: psycopg.Connection[object]) -> None:
        for extension in ("citext", "hstore"):
            conn.execute(f"CREATE EXTENSION IF NOT EXISTS {extension}".encode())
        for schema in ("test_schema", "test_schema_2"):
            conn.execute(f"CREATE SCHEMA {schema}".encode())
        conn.execute("SET default_text_search_config = 'pg_catalog.english'")

    def words(self, place: Place) -> tuple[list[str], Path]:
        uri = place.dsn.replace("postgresql://", f"postgresql+{self.driver}://").split("?")[0]
        words = [str(self.python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--dburi", uri]
        words += ["test/dialect/test_suite.py", "test/dialect/postgresql"]
        return words, self.source


class SqlalchemyPsycopg(Sqlalchemy):
    name, version, driver = "SQLAlchemy, psycopg", fetch.SQLALCHEMY, "psycopg"


class SqlalchemyAsyncpg(Sqlalchemy):
    name, version, driver = "SQLAlchemy, asyncpg", fetch.SQLALCHEMY, "asyncpg"


class Psycopg(Pytest):
    name, version = "psycopg", fetch.PSYCOPG

    def prepare(self) -> None:
        self.source = fetch.checkout("PSYCOPG_CLONE", fetch.PSYCOPG_TAG, self.folder)
        self.python = fetch.environment(
            self.folder / "psycopg-venv",
            f"psycopg[binary,pool]=={self.version}",
            "anyio>=4",
            "pproxy>=2.7",
            "pytest>=6.2.5",
            "pytest-cov",
            "pytest-randomly>=3.10",
            "typing-extensions",
        )

    def words(self, place: Place) -> tuple[list[str], Path]:
        words = [str(self.python), "-m", "pytest", "-q", "-p", "no:randomly"]
        words += ["tests", "-m", "not slow and not mypy and not crdb", f"--test-dsn={place.dsn}"]
        return words, self.source


class PgRegress(Suite):
    """PostgreSQL's own regression tests: the outcome of a test is what its output file holds."""

    name, program, schedule, tests = "pg_regress", "regress/pg_regress", "parallel_schedule", "regress"

    def __init__(self, folder: Path, version: str) -> None:
        super().__init__(folder)
        self.version = version

    def prepare(self) -> None:
        self.source = fetch.postgresql(self.version, self.folder) / "src/test" / self.tests
        major = self.version.split(".")[0]
        self.tool = Path(f"/usr/lib/postgresql/{major}/lib/pgxs/src/test/{self.program}")
        if not self.tool.is_file():
            raise fetch.Missing(
                f"{self.tool} is not there: it comes with Debian's postgresql-server-dev-{major}"
            )
        self.build(fetch.headers(major, self.folder) / f"usr/include/postgresql/{major}/server", major)

    def build(self, headers: Path, major: str) -> None:
        """Compile what the tests load into the server, where the server may read it."""
        self.libraries = self.folder / "regress-lib"
        self.libraries.mkdir(exist_ok=True)
        for library in ("autoinc", "refint"):
            shutil.copy(f"/usr/lib/postgresql/{major}/lib/{library}.so", self.libraries)
        # The very version's own headers first; the package's hold what a build generates.
        own = self.source.parent.parent / "include"
        words = ["gcc", "-O1", "-w", "-shared", "-fPIC", f"-I{own}", f"-I{headers}"]
        words += [str(self.source / "regress.c"), "-o", str(self.libraries / "regress.so")]
        fetch.run(words)

    def run(self, place: Place, out: Path) -> Results:
        out.mkdir(parents=True, exist_ok=True)
        for name in ("results", "testtablespace"):
            (out / name).mkdir(exist_ok=True)
            (out / name).chmod(0o777)  # the server, another user, writes there too
        words = [str(self.tool), f"--inputdir={self.source}", f"--outputdir={out}", "--use-existing"]
        words += [f"--bindir={place.bindir}", f"--dlpath={self.libraries}", f"--dbname={place.dbname}"]
        words += ["--host=127.0.0.1", f"--port={place.port}", f"--user={place.user}"]
        words += [f"--schedule={self.source / self.schedule}"]
        words += self.more()
        done = subprocess.run(
            words, env=place.variables, cwd=out, capture_output=True, text=True, check=False, timeout=LIMIT
        )
        (out / "log").write_text(done.stdout + done.stderr, encoding="utf-8")
        return _regress(done.stdout)

    def more(self) -> list[str]:
        return ["--max-concurrent-tests=20"]


class Isolation(PgRegress):
    name, program, schedule, tests = (
        "isolation",
        "isolation/pg_isolation_regress",
        "isolation_schedule",
        "isolation",
    )

    def build(self, headers: Path, major: str) -> None:  # noqa: ARG002 (nothing is compiled)
        self.libraries = Path(f"/usr/lib/postgresql/{major}/lib")

    def more(self) -> list[str]:
        return []


_LINE = re.compile(r"^(?:test| +)\s*(\S+)\s+\.\.\. (ok|FAILED|failed \(ignored\))", re.MULTILINE)


def _regress(text: str) -> Results:
    return {name: "passed" if said == "ok" else "failed" for name, said in _LINE.findall(text)}


class Pipeline(Suite):
    """libpq's own pipelines; each test is a run of one program."""

    name, quick = "libpq_pipeline", False

    def __init__(self, folder: Path, version: str) -> None:
        super().__init__(folder)
        self.version = version

    def prepare(self) -> None:
        source = fetch.postgresql(self.version, self.folder)
        development = fetch.headers(self.version.split(".")[0], self.folder) / "usr/include/postgresql"
        major = self.version.split(".")[0]
        self.program = self.folder / "libpq_pipeline"
        library = "/usr/lib/x86_64-linux-gnu/libpq.so.5"
        internal = [f"-I{development}", f"-I{development}/internal", f"-I{development}/{major}/server"]
        common = fetch.headers(major, self.folder) / f"usr/lib/postgresql/{major}/lib"
        words = ["gcc", "-O1", "-w", *internal, f"-I{source / 'src/interfaces/libpq'}"]
        words += [str(source / "src/test/modules/libpq_pipeline/libpq_pipeline.c"), "-o", str(self.program)]
        pg_lib = fetch.headers(major, self.folder) / "usr/lib/x86_64-linux-gnu"
        words += [
            library,
            str(common / "libpgcommon.a")
            if (common / "libpgcommon.a").is_file()
            else str(pg_lib / "libpgcommon.a"),
        ]
        words += [
            str(common / "libpgport.a") if (common / "libpgport.a").is_file() else str(pg_lib / "libpgport.a")
        ]
        words += ["-lm"]
        fetch.run(words)

    def run(self, place: Place, out: Path) -> Results:
        out.mkdir(parents=True, exist_ok=True)
        names = subprocess.run(
            [str(self.program), "tests"], capture_output=True, text=True, check=True
        ).stdout.split()
        found: Results = {}
        for name in names:
            done = subprocess.run(
                [str(self.program), name, place.dsn],
                env=place.variables,
                capture_output=True,
                text=True,
                check=False,
                timeout=120,
            )
            (out / name).write_text(done.stdout + done.stderr, encoding="utf-8")
            found[name] = "passed" if done.returncode == 0 else "failed"
        return found
