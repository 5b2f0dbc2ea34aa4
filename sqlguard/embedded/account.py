"""
Who runs the server: PostgreSQL refuses root, so under root somebody else has to.

The one idea: an account is tried, not reasoned about. Whether it may run the programs depends on the
permissions of every folder above them, on ACLs, mounts and user namespaces; running `postgres --version`
as that account answers all of it at once.
"""

import os
import pwd
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlguard.errors import NotConfigured

#: Not `postgres` first: on a machine with a server of its own that account could read that server's data.
UNPRIVILEGED = ("nobody", "postgres", "daemon")


@dataclass(frozen=True, slots=True)
class Account:
    """The account of the server's processes; *name* is None for the one that runs us."""

    uid: int
    gid: int
    name: str | None = None

    def popen_options(self) -> dict[str, Any]:
        """Return the arguments with which `subprocess` starts a program as this account."""
        if self.name is None:
            return {}
        return {"user": self.uid, "group": self.gid, "extra_groups": []}

    def give(self, path: Path) -> None:
        if self.name is not None:
            os.chown(path, self.uid, self.gid)

    def can_run(self, program: Path, *arguments: str) -> bool:
        try:
            done = subprocess.run(  # noqa: S603 - the server to be started
                [program, *arguments], capture_output=True, check=False, cwd="/", **self.popen_options()
            )
        except (OSError, subprocess.SubprocessError):
            return False
        return done.returncode == 0

    def can_reach(self, folder: Path) -> bool:
        """Tell whether this account may pass through *folder* and everything above it."""
        if self.name is None:
            return True
        return all(self._may_pass(part.stat()) for part in (folder, *folder.parents))

    def _may_pass(self, found: os.stat_result) -> bool:
        if found.st_uid == self.uid:
            return bool(found.st_mode & stat.S_IXUSR)
        if found.st_gid == self.gid:
            return bool(found.st_mode & stat.S_IXGRP)
        return bool(found.st_mode & stat.S_IXOTH)


def choose() -> Account:
    """Return the account for the server: ours, or an unprivileged one when we are root."""
    if os.geteuid() != 0:
        return Account(os.geteuid(), os.getegid())
    for name in UNPRIVILEGED:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        account = Account(entry.pw_uid, entry.pw_gid, name)
        # In a container's user namespace the id may not exist, and then nothing at all can be run.
        if account.can_run(Path("/bin/sh"), "-c", ":"):
            return account
    raise NotConfigured(
        "PostgreSQL can't run as root, and there is no other account to run it",
        hint="run this command as an ordinary user, or create the account `nobody`",
    )


def usable_bindir(bindir: Path, account: Account, spare: Path) -> Path:
    """
    Return a folder from which *account* can run the programs of *bindir*: itself, or a copy under *spare*.

    A virtual environment in a private home is closed to the account, as is one made under umask 077.
    """
    if account.can_run(bindir / "postgres", "--version"):
        return bindir
    shutil.rmtree(spare, ignore_errors=True)
    copied = _copy(bindir, spare)
    if not account.can_run(copied / "postgres", "--version"):
        shutil.rmtree(spare, ignore_errors=True)
        raise NotConfigured(
            f"the account `{account.name}` can run neither the programs in `{bindir}` nor a copy of them",
            hint="set TMPDIR to a folder that this account can reach and run programs from",
        )
    return copied


def _copy(bindir: Path, spare: Path) -> Path:
    """Copy the installation around *bindir*, with the libraries that a wheel keeps beside its package."""
    prefix = bindir.parent
    package = prefix.parent
    # The programs find their libraries by `$ORIGIN/../../../<package>.libs`, so the depth must stay.
    target = spare / package.name / prefix.name
    shutil.copytree(prefix, target, symlinks=True, ignore=shutil.ignore_patterns("include"))
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, spare / libraries.name, symlinks=True)
    for folder, _, files in os.walk(spare):
        Path(folder).chmod(0o755)
        for path in (Path(folder, name) for name in files):
            if not path.is_symlink():
                path.chmod(0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644)
    return target / bindir.name
