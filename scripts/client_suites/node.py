"""node-postgres: the integration tests of `pg`, and the tests of the packages beside it."""

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from scripts.client_suites import fetch
from scripts.client_suites.suites import Place, Results, Suite

#: What each package's tests are run with.
_PACKAGES = {
    "pg-cursor": ("test/*.js",),
    "pg-pool": ("test/*.js",),
    "pg-query-stream": ("-r", "ts-node/register", "test/**/*.ts"),
}


class _Node(Suite):
    version, tls = fetch.NODE_POSTGRES_TAG, True

    def prepare(self) -> None:
        self.source = fetch.checkout("NODE_POSTGRES_CLONE", self.version, self.folder)
        if not (self.source / "node_modules").is_dir():
            fetch.run(["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts"], self.source)
            fetch.run(["npx", "tsc", "--build"], self.source)

    def package(self, name: str) -> Path:
        return self.source / "packages" / name


class NodePostgres(_Node):
    """Each file of its integration tests is a program."""

    name = "node-postgres"

    def run(self, place: Place, out: Path) -> Results:
        tests = self.package("pg") / "test"
        paths = sorted((tests / "integration").rglob("*-tests.js"))
        return self.again(place, out, [str(path.relative_to(tests)) for path in paths])

    def again(self, place: Place, out: Path, tests: Sequence[str]) -> Results:
        out.mkdir(parents=True, exist_ok=True)
        package = self.package("pg")
        found: Results = {}
        for name in tests:
            try:
                done = subprocess.run(
                    ["node", f"test/{name}"],
                    cwd=package,
                    env=place.variables,
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=60,
                )
                said, failed = done.stdout + done.stderr, done.returncode != 0
            except subprocess.TimeoutExpired:
                said, failed = "no end after 60 s", True
            (out / name.replace("/", "-")).write_text(said, encoding="utf-8")
            found[name] = "failed" if failed else "passed"
        return found


class NodePackages(_Node):
    """Cursors, streams of rows and the pool, by mocha."""

    name = "node-postgres, packages"

    def run(self, place: Place, out: Path) -> Results:
        return self._mocha(place, out)

    def again(self, place: Place, out: Path, tests: Sequence[str]) -> Results:
        titles = (re.escape(test.partition(": ")[2]) for test in tests)
        found = self._mocha(place, out.with_name("again"), "--grep", f"^({'|'.join(titles)})$")
        return {test: found[test] for test in tests if test in found}

    def _mocha(self, place: Place, out: Path, *more: str) -> Results:
        out.mkdir(parents=True, exist_ok=True)
        found: Results = {}
        for name, words in _PACKAGES.items():
            report = out / f"{name}.json"
            # Their own limit of two seconds is one for machines that do nothing else.
            options = ["--no-config", "--exit", "--timeout", "20000", "--reporter", "json", *more]
            done = subprocess.run(
                ["npx", "mocha", *options, "--reporter-option", f"output={report}", *words],
                cwd=self.package(name),
                env=place.variables,
                capture_output=True,
                text=True,
                check=False,
                timeout=300,
            )
            (out / f"{name}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
            if not report.is_file():
                raise fetch.Missing(f"mocha did not get to its end, see {out}/{name}.log")
            told = json.loads(report.read_text(encoding="utf-8"))
            for kind, outcome in (("passes", "passed"), ("pending", "skipped"), ("failures", "failed")):
                found |= {f"{name}: {test['fullTitle']}": outcome for test in told[kind]}
        return found
