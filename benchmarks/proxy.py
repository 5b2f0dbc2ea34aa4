"""
The proxy, compared with PostgreSQL itself and, where it is installed, with PgBouncer in session mode.

pgbench where it is installed, psycopg otherwise. All of them log in as the task's own role.
"""

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from threading import Thread

import psycopg
from psycopg.conninfo import conninfo_to_dict

from benchmarks.measure import Goal, Label, Result, Slice, compare, cycles, result, timed
from benchmarks.options import Options
from benchmarks.world import World, twins
from sqlguard.demo.stage import proxy as serve_proxy
from sqlguard.embedded import EmbeddedServer
from sqlguard.ports import free_port

ROWS = 100_000
SELECT = "SELECT price FROM t WHERE id = {};"
#: Case, protocol, clients, how many different texts, and the goal against PgBouncer.
SELECTS = (
    ("simple, 1 client", "simple", 1, 100, Goal(0.90, at_least=True)),
    ("simple, 8 clients", "simple", 8, 100, Goal(0.72, at_least=True)),
    ("prepared, 1 client", "prepared", 1, ROWS, Goal(0.90, at_least=True)),
    ("prepared, 8 clients", "prepared", 8, ROWS, Goal(0.72, at_least=True)),
    ("simple, 8 clients, new texts", "simple", 8, ROWS, Goal(0.65, at_least=True)),
)
#: 50,000 rows of 4,000 bytes: 200 MB.
BIG = """
CREATE TABLE guarded.big (id integer PRIMARY KEY, body text NOT NULL);
INSERT INTO guarded.big SELECT n, repeat('sqlguard', 500) FROM generate_series(1, 50000) n;
ANALYZE guarded.big;
CREATE TABLE guarded.taken (id integer PRIMARY KEY, body text NOT NULL);
"""
_TPS = re.compile(r"^tps = ([0-9.]+)", re.MULTILINE)
#: Seconds.
_SLICE = 0.4
_CONNECTIONS = 25


def run(server: EmbeddedServer, options: Options) -> Iterator[Result]:
    with ExitStack() as stack:
        world = stack.enter_context(twins(server, ROWS, "soft"))
        world.owner.execute(BIG)
        world.guard(["guarded.big", "guarded.taken"], "journal")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = {"direct": server.port, "proxy": stack.enter_context(serve_proxy(world.dsn, folder))}
        bouncer = stack.enter_context(_pgbouncer(world))
        if bouncer is not None:
            ports["PgBouncer"] = bouncer
        dsns = {name: world.task_dsn_at(port) for name, port in ports.items()}
        yield from _selects(dsns, folder, options)
        yield from _transfers(world, dsns, options)
        yield _connections(dsns, options)


def writes(server: EmbeddedServer, options: Options) -> Iterator[Result]:
    """One-row writes with an idempotency key, journaled, through the proxy; commits wait for the disk as usual."""
    with ExitStack() as stack:
        world = stack.enter_context(twins(server, ROWS, "soft"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port = stack.enter_context(serve_proxy(world.dsn, folder))
        for clients in (1, 8):
            label = Label(
                "write",
                f"one row, keyed and journaled, {clients} client{'s'[: clients - 1]}",
                "bare UPDATE, direct",
                Goal(2.5),
            )
            keyed = _Writers(world.task_dsn_at(port), clients, _keyed)
            bare = _Writers(world.dsn, clients, _bare)
            try:
                yield compare(label, keyed.slice, bare.slice, options.rounds(7))
            finally:
                keyed.close()
                bare.close()


class _Writers:
    """So many sessions that write at the same time, each row by row."""

    def __init__(self, dsn: str, clients: int, text: Callable[[int], str], each: int = 40) -> None:
        self._sessions = [
            psycopg.connect(dsn, autocommit=True, prepare_threshold=None) for _ in range(clients)
        ]
        self._text = text
        self._each = each
        self._done = 0

    def slice(self) -> float:
        first = self._done
        self._done += self._each * len(self._sessions)
        threads = [
            Thread(target=self._work, args=(conn, first + place * self._each))
            for place, conn in enumerate(self._sessions)
        ]
        return timed(lambda: _together(threads)) / self._each

    def _work(self, conn: psycopg.Connection[object], first: int) -> None:
        for number in range(first, first + self._each):
            cursor = conn.execute(self._text(number).encode())
            if cursor.statusmessage != "UPDATE 1":
                raise RuntimeError(cursor.statusmessage)

    def close(self) -> None:
        for conn in self._sessions:
            conn.close()


def _together(threads: list[Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _keyed(number: int) -> str:
    key = f"{os.getpid()}-{number}"
    return f"UPDATE t SET note = 'changed' WHERE id = {1 + number * 611 % ROWS} /*idempotency_key='{key}'*/"


def _bare(number: int) -> str:
    return f"UPDATE bare.t SET note = 'changed' WHERE id = {1 + number * 611 % ROWS}"


def _selects(dsns: Mapping[str, str], folder: Path, options: Options) -> Iterator[Result]:
    for case, protocol, clients, texts, goal in SELECTS:
        sides: dict[str, Slice] = {
            name: _pgbench(dsn, folder, protocol, clients, texts) for name, dsn in dsns.items()
        }
        found = cycles(sides, options.rounds(12))
        against = "PgBouncer" if "PgBouncer" in dsns else "direct"
        wanted = goal if against == "PgBouncer" else None
        yield result(Label("proxy", f"SELECT, {case}", against, wanted), found, "proxy", against)
        if against == "PgBouncer":
            speed = Goal(0, at_least=True)
            yield _speed(Label("proxy", f"SELECT, {case}", "direct", speed), found)


def _speed(label: Label, found: list[dict[str, float]]) -> Result:
    """Return a ratio of speeds for which there is no goal."""
    made = result(label, found, "proxy", "direct")
    return Result(**{name: getattr(made, name) for name in Result.__slots__} | {"goal": None})


def _pgbench(dsn: str, folder: Path, protocol: str, clients: int, texts: int) -> Slice:
    """
    Return a slice of SELECTs that gives the seconds for one of them.

    The first one, which does not count, takes a second and finds out how many the others do in `_SLICE`: the shorter
    they are, the nearer to each other in time the sides are, and the less other work of the machine tells.
    """
    program = _program("pgbench")
    if program is None:
        return _selecting(dsn, clients, texts, prepare=protocol == "prepared")
    script = folder / f"select-{texts}.sql"
    script.write_text(f"\\set id random(1, {texts})\n{SELECT.format(':id')}\n", encoding="utf-8")
    words = [program, "--no-vacuum", f"--protocol={protocol}", f"--client={clients}"]
    words += ["--jobs=1", f"--file={script}", dsn]
    length = "--time=1"

    def measured() -> float:
        nonlocal length
        done = subprocess.run([*words, length], capture_output=True, text=True, check=False)
        found = _TPS.search(done.stdout)
        if done.returncode or found is None:
            raise RuntimeError(f"pgbench: {done.stderr or done.stdout}")
        if length == "--time=1":
            length = f"--transactions={max(20, round(float(found[1]) * _SLICE / clients))}"
        return 1 / float(found[1])

    return measured


def _selecting(dsn: str, clients: int, texts: int, *, prepare: bool, times: int = 300) -> Slice:
    """Return the same with psycopg, one thread per client."""
    sessions = [
        psycopg.connect(dsn, autocommit=True, prepare_threshold=0 if prepare else None)
        for _ in range(clients)
    ]

    def work(conn: psycopg.Connection[object]) -> None:
        for number in range(times):
            key = 1 + number * 611 % texts
            if prepare:
                conn.execute("SELECT price FROM t WHERE id = %s", [key]).fetchall()
            else:
                conn.execute(SELECT.format(key).encode()).fetchall()

    def measured() -> float:
        threads = [Thread(target=work, args=(conn,)) for conn in sessions]
        return timed(lambda: _together(threads)) / times / clients

    return measured


def _transfers(world: World, dsns: Mapping[str, str], options: Options) -> Iterator[Result]:
    pair = {name: psycopg.connect(dsns[name], autocommit=True) for name in ("direct", "proxy")}
    pair["direct"].execute("SET default_transaction_read_only = off")
    block = b"".join(b"%d\t%s\n" % (n, b"sqlguard" * 500) for n in range(12_500))

    def copied_in(conn: psycopg.Connection[object]) -> float:
        world.owner.execute("TRUNCATE guarded.taken")
        return timed(partial(_copy_in, conn, block))

    for case, goal, work in (
        ("SELECT of 200 MB", 0.85, _selected),
        ("COPY TO of 200 MB", 0.85, _copied_out),
        ("COPY FROM of 50 MB", 0.70, copied_in),
    ):
        if work is copied_in and not _takes_copies(pair["proxy"]):
            continue
        yield compare(
            Label("proxy", case, "direct", Goal(goal, at_least=True)),
            partial(work, pair["proxy"]),
            partial(work, pair["direct"]),
            options.rounds(4),
        )
    for conn in pair.values():
        conn.close()


def _selected(conn: psycopg.Connection[object]) -> float:
    return timed(lambda: conn.pgconn.exec_(b"SELECT id, body FROM big"))


def _copied_out(conn: psycopg.Connection[object]) -> float:
    def run() -> None:
        with conn.cursor().copy("COPY big TO STDOUT") as copy:
            while copy.read():
                pass

    return timed(run)


def _copy_in(conn: psycopg.Connection[object], block: bytes) -> None:
    with conn.cursor().copy("COPY taken (id, body) FROM STDIN") as copy:
        for start in range(0, len(block), 65_536):
            copy.write(block[start : start + 65_536])


def _takes_copies(conn: psycopg.Connection[object]) -> bool:
    """Say whether the policy lets the task COPY … FROM at all."""
    try:
        with conn.cursor().copy("COPY taken (id, body) FROM STDIN"):
            return True
    except psycopg.DatabaseError as fault:
        if (fault.sqlstate or "").startswith("SG"):
            return False
        raise


def _connections(dsns: Mapping[str, str], options: Options) -> Result:
    def side(dsn: str) -> Slice:
        def run() -> None:
            for _ in range(_CONNECTIONS):
                psycopg.connect(dsn).close()

        return lambda: timed(run) / _CONNECTIONS

    label = Label("proxy", "connection set-up", "direct, SCRAM", Goal(2))
    return compare(label, side(dsns["proxy"]), side(dsns["direct"]), options.rounds(6))


@contextmanager
def _pgbouncer(world: World) -> Iterator[int | None]:
    """Run PgBouncer in session mode before the server and yield its port; None where it is not installed."""
    program = _program("pgbouncer")
    if program is None:
        yield None
        return
    port = free_port()
    login = conninfo_to_dict(world.task_dsn)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "users.txt").write_text(f'"{login["user"]}" "{login["password"]}"\n', encoding="utf-8")
        settings = {
            "listen_addr": "127.0.0.1",
            "listen_port": port,
            "unix_socket_dir": "",
            "auth_type": "scram-sha-256",
            "auth_file": folder / "users.txt",
            "pool_mode": "session",
            "default_pool_size": 50,
            "logfile": folder / "log",
        }
        lines = [f"* = host=127.0.0.1 port={world.server.port}", "[pgbouncer]"]
        lines += [f"{key} = {value}" for key, value in settings.items()]
        (folder / "pgbouncer.ini").write_text("[databases]\n" + "\n".join(lines) + "\n", encoding="utf-8")
        # It refuses to run as root.
        nobody = "nobody" if os.geteuid() == 0 else None
        if nobody:
            for path in (folder, *folder.iterdir()):
                shutil.chown(path, nobody)
        process = subprocess.Popen(
            [program, "-q", folder / "pgbouncer.ini"], user=nobody, stderr=subprocess.DEVNULL
        )
        try:
            _wait(world.task_dsn_at(port), process)
            yield port
        finally:
            process.terminate()
            process.wait()


def _wait(dsn: str, process: "subprocess.Popen[bytes]") -> None:
    for _ in range(100):
        try:
            psycopg.connect(dsn, connect_timeout=2).close()
            return
        except psycopg.OperationalError:
            if process.poll() is not None:
                raise
            time.sleep(0.05)
    raise RuntimeError("PgBouncer did not start")


def _program(name: str) -> str | None:
    """Return a program of PostgreSQL's surroundings; Debian keeps some outside the path."""
    beside = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return shutil.which(name) or shutil.which(name, path="/usr/sbin") or (str(beside[-1]) if beside else None)
