"""
Where the suites come from: sources of packages, at pinned versions, from the registries that the tools are set up for.

psycopg and node-postgres do not publish their tests; they need a clone of their repository, given by a variable.
"""

import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

ASYNCPG = "0.31.0"
SQLALCHEMY = "2.1.9"
DJANGO = "5.2.19"
ALEMBIC = "1.20.1"
PGJDBC = "42.5.5"
PSYCOPG = "3.3.4"
PSYCOPG_TAG = "3.3.4"
NODE_POSTGRES_TAG = "pg@8.23.0"


class Missing(Exception):
    """What a suite needs is not here; the message says what."""


def sdist(name: str, version: str, folder: Path) -> Path:
    """Return the unpacked source distribution of *name*."""
    place = folder / f"{name.lower()}-{version}"
    if not place.is_dir():
        words = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
        run([*words, "-d", str(folder), f"{name}=={version}"])
        unpack(folder / f"{name.lower()}-{version}.tar.gz", folder)
    return place


def checkout(variable: str, tag: str, folder: Path) -> Path:
    """Return the files of *tag* of the clone that the environment variable names. Raises Missing."""
    clone = os.environ.get(variable)
    if not clone:
        raise Missing(
            f"set {variable} to a clone of the repository: its tests are not published as a package"
        )
    place = folder / variable.lower()
    if not place.is_dir():
        known = subprocess.run(
            ["git", "-C", clone, "rev-parse", "-q", "--verify", tag], check=False, capture_output=True
        )
        archive = folder / f"{variable}.tar"
        run(["git", "-C", clone, "archive", "-o", str(archive), tag if known.returncode == 0 else "HEAD"])
        place.mkdir()
        unpack(archive, place)
    return place


def postgresql(version: str, folder: Path) -> Path:
    """Return PostgreSQL's own sources, from Debian's source package of that version. Raises Missing."""
    tarball = folder / f"postgresql-{version.split('.', maxsplit=1)[0]}_{version}.orig.tar.bz2"
    if not tarball.is_file():
        _apt_source(folder, version)
    place = folder / f"postgresql-{version}"
    if not place.is_dir():
        unpack(tarball, folder)
    return place


def headers(major: str, folder: Path) -> Path:
    """Return the server's header files, from Debian's package, unpacked beside the system."""
    return debian((f"postgresql-server-dev-{major}", "libpq-dev"), folder / "server-dev")


def debian(packages: Sequence[str], place: Path) -> Path:
    """Return where Debian's *packages* are unpacked, beside the system. Raises Missing."""
    if not place.is_dir():
        with TemporaryDirectory() as there:
            run(["apt-get", "download", "-q", *packages], cwd=Path(there))
            for package in Path(there).glob("*.deb"):
                run(["dpkg", "-x", str(package), str(place)])
    return place


def _apt_source(folder: Path, version: str) -> None:
    """Fetch a source package with lists of our own: the system's need not name sources."""
    lines = [
        path.read_text(encoding="utf-8").replace("Types: deb\n", "Types: deb-src\n")
        for path in Path("/etc/apt/sources.list.d").glob("debian*.sources")
    ]
    if not lines:
        raise Missing("no sources of Debian are set up here")
    lists, state = folder / "apt", folder / "lists"
    lists.mkdir(exist_ok=True)
    (state / "partial").mkdir(parents=True, exist_ok=True)
    (lists / "debian.sources").write_text("\n\n".join(lines), encoding="utf-8")
    options = [
        "-oDir::Etc::sourcelist=/dev/null",
        f"-oDir::Etc::sourceparts={lists}",
        f"-oDir::State::lists={state}",
    ]
    run(["apt-get", *options, "-q", "update"])
    package = f"postgresql-{version.split('.', maxsplit=1)[0]}"
    query = ["dpkg-query", "-W", "-f", "${Version}", package]
    installed = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    if not installed.startswith(version):
        raise Missing(f"{package} {version} is not Debian's")
    run(["apt-get", *options, "-q", "source", "--download-only", f"{package}={installed}"], cwd=folder)


def unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="tar")


def environment(folder: Path, *packages: str) -> Path:
    """Return the Python of a virtual environment with *packages*, made once."""
    python = folder / "bin" / "python"
    if not python.is_file():
        uv = Path(sys.executable).parent / "uv"
        run([str(uv), "venv", "-q", "--python", sys.executable, str(folder)])
        run([str(uv), "pip", "install", "-q", "--python", str(python), *packages])
    return python


def run(words: list[str], cwd: Path | None = None) -> None:
    """Run a tool. Raises Missing with what it says."""
    done = subprocess.run(words, cwd=cwd, check=False, capture_output=True, text=True)
    if done.returncode:
        raise Missing(f"{Path(words[0]).name} failed: {(done.stderr or done.stdout).strip()[-300:]}")
