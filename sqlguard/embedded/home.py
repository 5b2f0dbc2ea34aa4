"""
The folder of one embedded server: its data, socket, password, log, and the lock of whoever runs it.

The one idea: the lock is held by the process that wants the server and falls with it, however it ends. So a
folder whose lock is free belongs to nobody any more, and what still runs in it is left over.
"""

import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from sqlguard.embedded.account import Account
from sqlguard.errors import NotConfigured

PREFIX = "sqlguard-pg-"
#: sun_path holds 104 bytes on the BSDs and 108 on Linux, the closing zero and the file's name included.
_LONGEST_SOCKET_DIRECTORY = 104 - len("/.s.PGSQL.65535") - 1


class Home:
    """A locked folder; `close` gives it up."""

    def __init__(self, path: Path, account: Account, lock: int) -> None:
        self.path = path
        self.account = account
        self._lock: int | None = lock
        self.data = path / "data"
        self.log = path / "server.log"
        self.programs = path / "programs"

    @classmethod
    def temporary(cls, account: Account) -> "Home":
        """Make a new folder, and remove those that killed processes of the same user have left."""
        base = _temporary_base(account)
        sweep(base)
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        _let_through(path, account)
        # Locked before it has its name: a sweeping process never sees the folder with a free lock.
        early = path / "lock.new"
        lock = _open(early)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        early.rename(path / "lock")
        return cls(path, account, lock)

    @classmethod
    def at(cls, path: Path, account: Account) -> "Home":
        """Take the folder *path*, which stays; end what a killed process left running in it."""
        path = path.resolve()
        path.mkdir(parents=True, exist_ok=True)
        _let_through(path, account)
        if not account.can_reach(path):
            raise NotConfigured(
                f"PostgreSQL can't run as root, and the account `{account.name}` can't reach `{path}`",
                hint="choose a folder that every account can reach, for instance under /var/lib",
            )
        lock = _open(path / "lock")
        if not _try_lock(lock):
            os.close(lock)
            raise NotConfigured(
                f"another process runs a PostgreSQL in `{path}`", hint="stop it, or choose another folder"
            )
        home = cls(path, account, lock)
        end_leftover(home.data)
        return home

    def password(self) -> str:
        """Return the superuser's password, made at the first call and kept in a private file."""
        path = self.path / "superuser-password"
        if not path.exists():
            self.write("superuser-password", secrets.token_urlsafe(24))
        return path.read_text(encoding="ascii")

    def write(self, name: str, text: str) -> Path:
        """Write *text* into a file that only its owner can read."""
        path = self.path / name
        with os.fdopen(_open(path), "w", encoding="utf-8") as file:
            file.truncate()
            file.write(text)
        return path

    def socket_directory(self) -> Path | None:
        """Return the private folder for the Unix socket, None where its path would be too long."""
        path = self.path / "socket"
        if len(os.fsencode(path)) > _LONGEST_SOCKET_DIRECTORY:
            return None
        path.mkdir(exist_ok=True)
        path.chmod(0o700)
        self.account.give(path)
        return path

    def close(self, *, remove: bool) -> None:
        if self._lock is None:
            return
        if remove:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = None


def sweep(base: Path) -> None:
    """Remove the temporary folders in *base* that belong to this user and to no living process."""
    for path in base.glob(f"{PREFIX}*"):
        try:
            # Anybody may make folders in /tmp: those of others are neither believed nor touched.
            if path.is_symlink() or path.stat().st_uid != os.geteuid():
                continue
            lock = os.open(path / "lock", os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue
        if _try_lock(lock):
            end_leftover(path / "data")
            shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def end_leftover(data: Path) -> None:
    """End the server that a killed process left running on *data*; the caller must hold the lock."""
    pid_file = data / "postmaster.pid"
    try:
        pid = int(pid_file.read_text(encoding="utf-8").split("\n", 1)[0])
    except (OSError, ValueError):
        return
    _end(pid, data)
    if not _serves(pid, data):
        # PostgreSQL would not start while the number is that of any living process, whoever it is.
        pid_file.unlink(missing_ok=True)


def _end(pid: int, data: Path) -> None:
    for step, patience in ((signal.SIGINT, 15.0), (signal.SIGQUIT, 5.0), (signal.SIGKILL, 5.0)):
        # Asked again before every signal: the number in the file may long be another program's.
        if not _serves(pid, data):
            return
        os.kill(pid, step)
        for _ in _until(patience):
            if not _serves(pid, data):
                return


def _serves(pid: int, data: Path) -> bool:
    """Tell whether the process *pid* is a server that was started on *data*."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return False
        shown = subprocess.run(  # noqa: S603 - a system without /proc
            ["/bin/ps", "-ww", "-o", "args=", "-p", str(pid)], capture_output=True, check=False
        )
        command = shown.stdout
    return os.fsencode(data) in command


def _until(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.02)


def _temporary_base(account: Account) -> Path:
    bases = [Path(tempfile.gettempdir()), Path("/var/tmp"), Path("/tmp"), Path("/dev/shm")]  # noqa: S108
    for base in bases:
        if base.is_dir() and os.access(base, os.W_OK) and account.can_reach(base.resolve()):
            return base.resolve()
    raise NotConfigured(
        f"the account `{account.name}`, which has to run PostgreSQL, can't reach any temporary folder",
        hint="set TMPDIR to a folder that every account can reach",
    )


def _let_through(path: Path, account: Account) -> None:
    # Under root the account has to pass to its data; what is private inside has its own permissions.
    path.chmod(0o700 if account.name is None else 0o711)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
