"""
Start, address and stop one embedded server.

The one idea: the server is as safe as one that is meant to stay (passwords with SCRAM on every door, loopback
only, a random superuser password) and as short-lived as we are: its parent process (`keeper`) ends it
when this process is gone.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from sqlguard import dsn as urls
from sqlguard.embedded import account as accounts
from sqlguard.embedded.binaries import major_version, require_bindir
from sqlguard.embedded.home import Home, end_leftover
from sqlguard.errors import NotConfigured
from sqlguard.ports import free_port

SUPERUSER = "postgres"
HOST = "127.0.0.1"
_KEEPER = Path(__file__).with_name("keeper.py")
_START_SECONDS = 60
_STOP_SECONDS = 30
#: Another program may take the free port between our look and the server's start.
_PORT_ATTEMPTS = 5


class EmbeddedServer:
    """A running server; made by `start`, ended by `stop` or by leaving the `with` block."""

    def __init__(
        self, home: Home, bindir: Path, version: int, settings: Mapping[str, str], *, persistent: bool
    ) -> None:
        self.bindir = bindir
        self.version = version
        self.port = 0
        self.password = home.password()
        self.socket_directory = home.socket_directory()
        self._home = home
        self._settings = dict(settings)
        self._persistent = persistent
        self._keeper: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(
        cls,
        bindir: Path | None = None,
        data_dir: Path | None = None,
        *,
        port: int | None = None,
        ssl: tuple[Path, Path] | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> Self:
        """
        Start the server of *bindir* on 127.0.0.1 and return when it takes connections.

        Without *data_dir* everything is in a temporary folder that goes when the server stops; with it
        the data stays and is found again by the next start. *ssl* is a
        certificate and its key; *settings* are PostgreSQL's own, such as `{"fsync": "off"}`.
        """
        bindir = require_bindir() if bindir is None else bindir
        version = major_version(bindir)
        if version is None:
            raise NotConfigured(f"there are no working programs of a PostgreSQL server in `{bindir}`")
        account = accounts.choose()
        home = Home.temporary(account) if data_dir is None else Home.at(data_dir, account)
        persistent = data_dir is not None
        try:
            usable = accounts.usable_bindir(bindir, account, home.programs)
            server = cls(home, usable, version, settings or {}, persistent=persistent)
            server._prepare(ssl)
            server._run_on_a_port(port)
        except BaseException:
            home.close(remove=not persistent)
            raise
        return server

    @property
    def data_dir(self) -> Path:
        return self._home.data

    @property
    def log(self) -> str:
        """Return what the server has logged so far."""
        return self._home.log.read_text(encoding="utf-8", errors="replace")

    def dsn(self, dbname: str = "postgres", user: str = SUPERUSER, password: str | None = None) -> str:
        """Return the URL of *dbname* for *user*; for the superuser the password is known."""
        if password is None and user == SUPERUSER:
            password = self.password
        return urls.url(host=HOST, port=self.port, user=user, password=password, dbname=dbname)

    def stop(self) -> None:
        """Shut the server down and remove what is not to stay. Safe to repeat."""
        self._release()
        self._home.close(remove=not self._persistent)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _prepare(self, ssl: tuple[Path, Path] | None) -> None:
        found = self.data_dir / "PG_VERSION"
        if not found.exists():
            self._initialise()
        elif int(found.read_text(encoding="ascii")) != self.version:
            raise NotConfigured(
                f"the data in `{self.data_dir}` is not that of a PostgreSQL {self.version}",
                hint="choose another folder, or the server that made this one",
            )
        if ssl is not None:
            for source, name in zip(ssl, ("server.crt", "server.key"), strict=True):
                made = self._home.write(name, source.read_text(encoding="ascii"))
                self._home.account.give(made)
                self._settings[f"ssl_{'cert' if name.endswith('crt') else 'key'}_file"] = str(made)
            self._settings["ssl"] = "on"

    def _initialise(self) -> None:
        """Make the data folder; it gets its name when it is whole."""
        unfinished = self._home.path / "data.new"
        if unfinished.exists():
            shutil.rmtree(unfinished)
        unfinished.mkdir()
        unfinished.chmod(0o700)
        self._home.account.give(unfinished)
        password = self._home.write("initdb-password", self.password)
        self._home.account.give(password)
        try:
            done = self._initdb(unfinished, password, "C.UTF-8")
            if done.returncode != 0 and b"locale" in done.stderr:
                done = self._initdb(unfinished, password, "C")
        finally:
            password.unlink()
        if done.returncode != 0:
            raise NotConfigured(
                "the embedded PostgreSQL could not be initialised",
                detail=done.stderr.decode(errors="replace"),
            )
        unfinished.rename(self.data_dir)

    def _initdb(self, target: Path, password: Path, ctype: str) -> "subprocess.CompletedProcess[bytes]":
        command = [
            str(self.bindir / "initdb"),
            f"--pgdata={target}",
            f"--username={SUPERUSER}",
            f"--pwfile={password}",
            "--auth-local=scram-sha-256",
            "--auth-host=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C",
            f"--lc-ctype={ctype}",
            *([] if self._syncs() else ["--no-sync"]),
        ]
        return subprocess.run(  # noqa: S603 - the server to be started
            command,
            capture_output=True,
            check=False,
            cwd="/",
            env=_environment(),
            umask=0o077,
            **self._home.account.popen_options(),
        )

    def _syncs(self) -> bool:
        return self._persistent and self._settings.get("fsync") != "off"

    def _run_on_a_port(self, port: int | None) -> None:
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            self.port = port or free_port()
            logged = self._home.log.stat().st_size if self._home.log.exists() else 0
            self._keeper = self._spawn_keeper()
            if self._wait_until_ready():
                return
            self._release()
            lines = self._home.log.read_bytes()[logged:].decode(errors="replace").strip()
            if port is None and "Address already in use" in lines and attempt < _PORT_ATTEMPTS:
                continue
            raise NotConfigured("the embedded PostgreSQL did not start", detail=lines[-2000:])

    def _spawn_keeper(self) -> "subprocess.Popen[bytes]":
        settings = {
            "listen_addresses": HOST,
            "port": str(self.port),
            "unix_socket_directories": str(self.socket_directory or ""),
            **self._settings,
        }
        order = {
            "command": [
                str(self.bindir / "postgres"),
                *("-D", str(self.data_dir)),
                *(part for name, value in settings.items() for part in ("-c", f"{name}={value}")),
            ],
            "log": str(self._home.log),
            "cwd": "/",
            "env": _environment(),
            "account": self._home.account.popen_options(),
            "remove": None if self._persistent else str(self._home.path),
        }
        return subprocess.Popen(  # noqa: S603 - our own script
            [sys.executable, "-I", "-S", str(_KEEPER), json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # A session of its own: Ctrl-C in the terminal is for us, and we end the server in order.
            start_new_session=True,
            cwd="/",
        )

    def _wait_until_ready(self) -> bool:
        keeper = self._running_keeper()
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end and keeper.poll() is None:
            if _is_ready(self.data_dir / "postmaster.pid", self.port):
                return True
            time.sleep(0.01)
        return False

    def _running_keeper(self) -> "subprocess.Popen[bytes]":
        if self._keeper is None:
            raise NotConfigured("the embedded PostgreSQL has been stopped")
        return self._keeper

    def _release(self) -> None:
        """Let go of the life line, and wait until the server has ended."""
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        line: IO[Any] | None = keeper.stdin
        if line is not None:
            line.close()
        try:
            keeper.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            keeper.kill()
            keeper.wait()
        # Only when the keeper itself was killed is there anything left.
        end_leftover(self.data_dir)


def _is_ready(pid_file: Path, port: int) -> bool:
    """Tell whether the server says in its eighth line that it takes connections, on our port."""
    try:
        lines = pid_file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError):
        return False
    return len(lines) > 7 and lines[3] == str(port) and lines[7].strip() == "ready"  # noqa: PLR2004


def _environment() -> dict[str, str]:
    """Return an environment without PG* and LC_* variables; a given TZ saves initdb a long search."""
    kept = ("PATH", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
    return {"TZ": "UTC", **{name: os.environ[name] for name in kept if name in os.environ}}
