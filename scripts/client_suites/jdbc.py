"""pgjdbc: its own suite, compiled against Debian's driver and JUnit, and a program of ours."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import psycopg

from scripts.client_suites import fetch
from scripts.client_suites.suites import LIMIT, Place, Results, Suite, junit

_DRIVER = ("libpostgresql-jdbc-java", "libscram-java", "libstringprep-java")
_JUNIT = (
    "junit5", "junit4", "libhamcrest-java", "libopentest4j-java", "libapiguardian-java", "libpicocli-java",
    "libunivocity-parsers-java",
)  # fmt: skip
#: What Debian has no packages of: tests that use it are left out.
_NOT_THERE = re.compile(r"systemstubs|se\.jiderhamn|org\.osgi")
#: The one annotation of the Checker Framework that the tests have.
_NULLABLE = """package org.checkerframework.checker.nullness.qual;
@java.lang.annotation.Target(java.lang.annotation.ElementType.TYPE_USE)
public @interface Nullable {}
"""


class _Java(Suite):
    version = fetch.PGJDBC
    packages: tuple[str, ...] = _DRIVER

    def driver(self, folder: str) -> list[Path]:
        """Return the jars, Debian's driver among them. Raises Missing."""
        if shutil.which("java") is None or shutil.which("javac") is None:
            raise fetch.Missing("there is no JDK")
        place = fetch.debian(self.packages, self.folder / folder)
        jars = sorted((place / "usr/share/java").glob("*.jar"))
        if not any(jar.name == f"postgresql-{self.version}.jar" for jar in jars):
            raise fetch.Missing(f"Debian's driver is not {self.version}")
        return [jar for jar in jars if "standalone" not in jar.name]

    def compile(self, sources: Sequence[Path], jars: Sequence[Path], classes: Path) -> str:
        """Compile *sources* and return the path to run them with."""
        path = ":".join(map(str, [classes, *jars]))
        if not classes.is_dir():
            classes.mkdir()
            listed = classes.with_suffix(".files")
            listed.write_text("\n".join(map(str, sources)), encoding="utf-8")
            fetch.run(["javac", "-nowarn", "-d", str(classes), "-cp", path, f"@{listed}"])
        return path


class Jdbc(_Java):
    """Its tests need a clone; what a test is called is the class and the method."""

    name, packages = "pgjdbc", (*_DRIVER, *_JUNIT)

    def prepare(self) -> None:
        self.source = fetch.checkout("PGJDBC_CLONE", f"REL{self.version}", self.folder) / "pgjdbc"
        jars = self.driver("junit")
        stub = self.folder / "Nullable.java"
        stub.write_text(_NULLABLE, encoding="utf-8")
        tests = [
            path
            for path in sorted((self.source / "src/test/java").rglob("*.java"))
            if not path.stem.endswith("TestSuite") and not _NOT_THERE.search(path.read_text(encoding="utf-8"))
        ]
        self.classes = self.folder / "pgjdbc-classes"
        self.path = self.compile([stub, *tests], jars, self.classes)

    def database(self, conn: psycopg.Connection[object]) -> None:
        # As its TESTING.md has it.
        conn.execute("CREATE ROLE test LOGIN REPLICATION PASSWORD 'test'")
        conn.execute("ALTER DATABASE regression OWNER TO test")
        for extension in ("hstore", "lo"):
            conn.execute(f"CREATE EXTENSION {extension}".encode())

    def run(self, place: Place, out: Path) -> Results:
        found = self._console(place, out, f"--scan-classpath={self.classes}")
        if not found:
            raise fetch.Missing(f"no test has run, see {out}.log")
        return found

    def again(self, place: Place, out: Path, tests: Sequence[str]) -> Results:
        classes = sorted({test.partition("::")[0] for test in tests})
        found = self._console(place, out.with_name("again"), *(f"--select-class={name}" for name in classes))
        return {test: found[test] for test in tests if test in found}

    def _console(self, place: Place, out: Path, *what: str) -> Results:
        told = {
            "server": "localhost",
            "port": place.port,
            "database": place.dbname,
            "username": "test",
            "password": "test",
            "privilegedUser": place.user,
            "privilegedPassword": place.password,
        }
        words = ["java", "-Xmx1500m", *(f"-D{name}={value}" for name, value in told.items())]
        words += ["-cp", f"{self.path}:{self.source / 'src/test/resources'}"]
        words += ["org.junit.platform.console.ConsoleLauncher", *what]
        words += ["--details=none", "--disable-banner", f"--reports-dir={out}"]
        with out.with_suffix(".log").open("w") as log:
            subprocess.run(
                words, cwd=self.source, stdout=log, stderr=subprocess.STDOUT, check=False, timeout=LIMIT
            )
        found: Results = {}
        for report in sorted(out.glob("TEST-*.xml")):
            found |= junit(report)
        return found


class JdbcProgram(_Java):
    """What applications do, in `Day.java`; needs no clone."""

    name = "pgjdbc, a program"

    def prepare(self) -> None:
        source = self.folder / "Day.java"
        source.write_bytes(files("scripts.client_suites").joinpath("Day.java").read_bytes())
        self.path = self.compile([source], self.driver("jdbc"), self.folder / "jdbc-classes")

    def run(self, place: Place, out: Path) -> Results:
        url = f"jdbc:postgresql://127.0.0.1:{place.port}/{place.dbname}"
        words = ["java", "-cp", self.path, "Day", url, place.user, place.password]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=LIMIT)
        out.with_suffix(".log").write_text(done.stdout + done.stderr, encoding="utf-8")
        told = [line.partition("\t") for line in done.stdout.splitlines() if "\t" in line]
        if not told:
            raise fetch.Missing(f"no test has run, see {out}.log")
        return {name: outcome.partition("\t")[0] for name, _, outcome in told}
