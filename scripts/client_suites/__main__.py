"""
Run the suites directly and through the observing proxy, and say test by test where the two differ.

A test that differs is a fault of the proxy until a reason is known; the status is 1 then. What fails in both runs
is the suite's own (another locale, another version) and is listed by number only.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import trustme

from scripts.client_suites.fetch import Missing
from scripts.client_suites.frameworks import Alembic, Django, DjangoPart, DjangoPool, Programs
from scripts.client_suites.jdbc import Jdbc, JdbcProgram
from scripts.client_suites.node import NodePackages, NodePostgres
from scripts.client_suites.suites import (
    REASONS,
    Asyncpg,
    AsyncpgPart,
    Isolation,
    PgRegress,
    Pipeline,
    Place,
    Psycopg,
    Results,
    SqlalchemyAsyncpg,
    SqlalchemyPsycopg,
    Suite,
)
from sqlguard.embedded import EmbeddedServer
from sqlguard.embedded.binaries import find_bindir, require_bindir
from sqlguard.policy import parse_policy
from sqlguard.ports import free_port
from sqlguard.postgres.migrate import migrate
from sqlguard.postgres.observations import read_observations
from sqlguard.postgres.policy_apply import apply_policy

#: Where there are no tables yet, a policy can name none.
_POLICY = 'name = "watched"'
_DEBIAN = 15
#: Seconds.
_PATIENCE = 90
#: As the drivers' own CI has it, and room for the suites' parallel sessions.
_SETTINGS = {
    "fsync": "off",
    "max_connections": "200",
    "max_prepared_transactions": "10",
    "wal_level": "logical",
}


def main() -> int:
    options = _options()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="client-suites-"))
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    status = 0
    report = []
    bindir = (find_bindir(_DEBIAN) if options.pg is None else None) or require_bindir(options.pg)
    version = _version(bindir)
    for suite in _suites(folder, version):
        wanted = suite.quick if options.quick else _is_asked(suite, options.only)
        if not wanted:
            continue
        try:
            suite.prepare()
            found = _compare(suite, bindir, folder)
        except Missing as fault:
            print(f"{suite.name} {suite.version}: not run, {fault}")
            continue
        except subprocess.TimeoutExpired as fault:
            print(f"{suite.name} {suite.version}: not at its end after {fault.timeout:.0f} s")
            status = 1
            continue
        report.append(found)
        status = status or int(bool(found["unexplained"]))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2), encoding="utf-8")
    return status


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.client_suites", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="names of suites")
    parser.add_argument("--quick", action="store_true", help="the part that CI runs")
    parser.add_argument("--folder", type=Path, help="where sources and results stay")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument(
        "--pg", type=int, help="PostgreSQL's major version; default: Debian 12's, or what is found"
    )
    return parser.parse_args()


def _is_asked(suite: Suite, only: list[str]) -> bool:
    # A part of a suite is for CI; otherwise all of it runs.
    return suite.name in only if only else not suite.name.endswith(", a part")


def _suites(folder: Path, version: str) -> list[Suite]:
    return [
        PgRegress(folder, version),
        Isolation(folder, version),
        Pipeline(folder, version),
        Psycopg(folder),
        Asyncpg(folder),
        AsyncpgPart(folder),
        NodePostgres(folder),
        NodePackages(folder),
        SqlalchemyPsycopg(folder),
        SqlalchemyAsyncpg(folder),
        Django(folder),
        DjangoPart(folder),
        DjangoPool(folder),
        Alembic(folder),
        Jdbc(folder),
        JdbcProgram(folder),
        Programs(folder, version),
    ]


def _compare(suite: Suite, bindir: Path, folder: Path) -> dict[str, object]:
    runs: dict[str, Results] = {}
    counts: dict[str, int] = {}
    for name, observed in (("direct", False), ("proxy", True)):
        out = folder / "results" / suite.name.replace(", ", "-") / name
        out.parent.mkdir(parents=True, exist_ok=True)
        # A server each: what a suite leaves behind must not reach the other run.
        with _stage(suite, bindir, observed=observed) as (place, dsn):
            began = time.monotonic()
            runs[name] = suite.run(place, out)
            print(
                f"{suite.name} {suite.version}, {name}: {_line(runs[name])}, {time.monotonic() - began:.0f} s",
                flush=True,
            )
            if observed:
                runs[name] |= _once_more(suite, place, out, _different(runs["direct"], runs[name]))
                time.sleep(2)  # the last counts are being written
                with psycopg.connect(dsn) as conn:
                    for one in read_observations(conn):
                        counts[one.verdict] = counts.get(one.verdict, 0) + one.count
                        if one.verdict == "unknown":
                            print(f"  not followed: {one.sample}, {one.count} times")
    different = _different(runs["direct"], runs["proxy"])
    unexplained = []
    for test, (direct, proxied) in different.items():
        reason = next((why for name, why in REASONS.items() if name in test), None)
        if reason is None and (direct, proxied) != ("failed", "passed"):
            unexplained.append(test)
        print(
            f"  differs: {test}: {direct} directly, {proxied} through the proxy; {reason or 'no reason known'}"
        )
    print(f"  observed: {', '.join(f'{v} {c}' for v, c in sorted(counts.items())) or 'nothing'}", flush=True)
    return {
        "suite": suite.name,
        "version": suite.version,
        "direct": dict(Counter(runs["direct"].values())),
        "proxy": dict(Counter(runs["proxy"].values())),
        "failed": sorted(t for t, o in runs["direct"].items() if o == "failed"),
        "different": {t: list(o) for t, o in different.items()},
        "unexplained": unexplained,
        "observed": counts,
    }


def _once_more(suite: Suite, place: Place, out: Path, different: dict[str, tuple[str, str]]) -> Results:
    """Run what differs again, in the same place: what then passes was a matter of time."""
    tests = [test for test, pair in different.items() if pair == ("passed", "failed")]
    if not tests:
        return {}
    found = suite.again(place, out, tests)
    for test in tests:
        if found.get(test) == "passed":
            print(f"  at the second time: {test}")
    return found


def _different(direct: Results, proxied: Results) -> dict[str, tuple[str, str]]:
    tests = sorted(direct.keys() | proxied.keys())
    pairs = {test: (direct.get(test, "absent"), proxied.get(test, "absent")) for test in tests}
    return {test: pair for test, pair in pairs.items() if pair[0] != pair[1]}


def _line(results: Results) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(Counter(results.values()).items()))


@contextmanager
def _stage(suite: Suite, bindir: Path, *, observed: bool) -> Iterator[tuple[Place, str]]:
    """Yield where the suite connects to and the operator's DSN: a server of its own, with the schema in both runs."""
    # What the clients' expectations were written with.
    name = "regression"
    with (
        _papers(wanted=suite.tls) as papers,
        EmbeddedServer.start(bindir, ssl=papers, settings=_SETTINGS) as server,
    ):
        with psycopg.connect(server.dsn(), autocommit=True) as conn:
            conn.execute(
                b"CREATE DATABASE " + name.encode() + b" TEMPLATE template0 LOCALE 'C' ENCODING 'UTF8'"
            )
            for setting in ("lc_messages", "lc_monetary", "lc_numeric", "lc_time"):
                conn.execute(f"ALTER DATABASE {name} SET {setting} TO 'C'".encode())
            if isinstance(suite, PgRegress):
                # What pg_regress sets where it makes the database.
                conn.execute(f"ALTER DATABASE {name} SET timezone_abbreviations TO 'Default'".encode())
        dsn = server.dsn(name)
        migrate(dsn)
        with psycopg.connect(dsn, autocommit=True) as conn:
            apply_policy(conn, parse_policy(_POLICY, "watched.toml"))
            suite.database(conn)
        with _port(server, dsn, papers, observed=observed) as port:
            yield Place(port, "postgres", server.password, name, bindir), dsn


@contextmanager
def _papers(*, wanted: bool) -> Iterator[tuple[Path, Path] | None]:
    """Yield a certificate and its key, for the server and for the proxy, if they are wanted."""
    if not wanted:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        issued = trustme.CA().issue_cert("127.0.0.1", "localhost")
        cert, key = Path(folder) / "cert.pem", Path(folder) / "key.pem"
        cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        key.write_bytes(issued.private_key_pem.bytes())
        yield cert, key


@contextmanager
def _port(
    server: EmbeddedServer, dsn: str, papers: tuple[Path, Path] | None, *, observed: bool
) -> Iterator[int]:
    if not observed:
        yield server.port
        return
    port = free_port()
    words = [
        sys.executable,
        "-m",
        "sqlguard",
        "serve",
        "--observe",
        "--listen",
        f"127.0.0.1:{port}",
        "--dsn",
        dsn,
    ]
    if papers is not None:
        words += ["--tls-cert", str(papers[0]), "--tls-key", str(papers[1])]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*words, "--log-level", "warning"], stderr=log)
        try:
            _wait(port, server.password, process)
            yield port
        finally:
            process.terminate()
            process.wait(timeout=30)
            log.seek(0)
            sys.stderr.write(log.read().decode("utf-8", "replace")[-4000:])


def _wait(port: int, password: str, process: "subprocess.Popen[bytes]") -> None:
    for _ in range(_PATIENCE * 10):
        if process.poll() is not None:
            raise RuntimeError("the proxy did not start")
        with suppress(psycopg.OperationalError):
            psycopg.connect(
                host="127.0.0.1", port=port, user="postgres", password=password, dbname="postgres"
            ).close()
            return
        time.sleep(0.1)
    raise RuntimeError("the proxy did not start")


def _version(bindir: Path) -> str:
    said = subprocess.run(
        [bindir / "postgres", "--version"], capture_output=True, text=True, check=True
    ).stdout
    return said.split()[2]


if __name__ == "__main__":
    sys.exit(main())
